"""Tiny random models of many transformers architectures: (name, model, inputs). No network, no pretrained weights."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37,
        "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
DECODER = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "max_position_embeddings": 64,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37, "image_size": 16,
          "patch_size": 4}  # fmt: skip


def ids(batch=2, length=11, seed=0, vocab=99):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (batch, length), generator=numbers)


def padded(left=False):
    """Two sequences, the second shorter by three."""
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, : 3 if left else None] = 0 if left else 1
    if not left:
        mask[1, -3:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def image(size=16):
    return {"pixel_values": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))}


def seq2seq():
    return {**padded(), "decoder_input_ids": ids(2, 7, seed=2)}


def text(model, config, inputs=padded, **more):
    return model, config, {**TEXT, **more}, inputs


def decoder(model, config, inputs=padded, **more):
    return model, config, {**DECODER, **more}, inputs


def two(model, config, inputs=seq2seq, **more):
    return model, config, {**SEQ2SEQ, **more}, inputs


def sees(model, config, inputs=image, **more):
    return model, config, {**VISION, **more}, inputs


_T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_GPT2 = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: name → (model class, config class, config, inputs)
ZOO = {
    "bert": text("BertModel", "BertConfig"),
    "roberta": text("RobertaModel", "RobertaConfig"),
    "xlm-roberta": text("XLMRobertaModel", "XLMRobertaConfig"),
    "electra": text("ElectraModel", "ElectraConfig", embedding_size=32),
    "albert": text("AlbertModel", "AlbertConfig", embedding_size=16),
    "camembert": text("CamembertModel", "CamembertConfig"),
    "distilbert": ("DistilBertModel", "DistilBertConfig", {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37,
                   "max_position_embeddings": 64}, padded),
    "mpnet": text("MPNetModel", "MPNetConfig"),
    "deberta-v2": text("DebertaV2Model", "DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "ernie": text("ErnieModel", "ErnieConfig"),
    "megatron-bert": text("MegatronBertModel", "MegatronBertConfig"),
    "modernbert": text("ModernBertModel", "ModernBertConfig", cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2,
                       local_attention=4, global_attn_every_n_layers=2),
    "layoutlm": text("LayoutLMModel", "LayoutLMConfig"),
    "gpt2": ("GPT2Model", "GPT2Config", _GPT2, padded),
    "gpt-neo": ("GPTNeoModel", "GPTNeoConfig", {"vocab_size": 99, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4,
                "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}, padded),
    "gpt-neox": text("GPTNeoXModel", "GPTNeoXConfig"),
    "gptj": ("GPTJModel", "GPTJConfig", {**_GPT2, "rotary_dim": 4}, padded),
    "opt": ("OPTModel", "OPTConfig", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "ffn_dim": 37, "max_position_embeddings": 64, "word_embed_proj_dim": 32}, padded),
    "bloom": ("BloomModel", "BloomConfig", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}, padded),
    "llama": decoder("LlamaModel", "LlamaConfig"),
    "mistral, window 4": decoder("MistralModel", "MistralConfig", sliding_window=4),
    "mixtral": decoder("MixtralModel", "MixtralConfig", num_local_experts=4, intermediate_size=32),
    "qwen2": decoder("Qwen2Model", "Qwen2Config"),
    "qwen3": decoder("Qwen3Model", "Qwen3Config", head_dim=8),
    "gemma": decoder("GemmaModel", "GemmaConfig", head_dim=8),
    "gemma2, soft cap, window": decoder("Gemma2Model", "Gemma2Config", head_dim=8, sliding_window=4, attn_logit_softcapping=2.0,
                                        query_pre_attn_scalar=8),
    "gemma3, window": decoder("Gemma3TextModel", "Gemma3TextConfig", head_dim=8, sliding_window=4),
    "gpt-oss, sinks": decoder("GptOssModel", "GptOssConfig", head_dim=8, sliding_window=4, num_local_experts=4, intermediate_size=32),
    "deepseek-v3, MLA": decoder("DeepseekV3Model", "DeepseekV3Config", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
                                qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, n_shared_experts=1,
                                num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1),
    "phi3": decoder("Phi3Model", "Phi3Config"),
    "phi": decoder("PhiModel", "PhiConfig"),
    "falcon": ("FalconModel", "FalconConfig", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}, padded),
    "cohere": decoder("CohereModel", "CohereConfig"),
    "olmo2": decoder("Olmo2Model", "Olmo2Config"),
    "stablelm": decoder("StableLmModel", "StableLmConfig"),
    "starcoder2": decoder("Starcoder2Model", "Starcoder2Config"),
    "granite": decoder("GraniteModel", "GraniteConfig"),
    "smollm3": decoder("SmolLM3Model", "SmolLM3Config"),
    "t5, bias": ("T5Model", "T5Config", _T5, seq2seq),
    "mt5": ("MT5Model", "MT5Config", _T5, seq2seq),
    "umt5": ("UMT5Model", "UMT5Config", _T5, seq2seq),
    "bart": two("BartModel", "BartConfig"),
    "mbart": two("MBartModel", "MBartConfig"),
    "marian": two("MarianModel", "MarianConfig"),
    "pegasus": two("PegasusModel", "PegasusConfig"),
    "blenderbot": two("BlenderbotModel", "BlenderbotConfig"),
    "m2m100": two("M2M100Model", "M2M100Config"),
    "whisper": two("WhisperModel", "WhisperConfig", lambda: {"input_features": torch.randn(2, 8, 24), "decoder_input_ids": ids(2, 7)},
                   num_mel_bins=8, max_source_positions=12, max_target_positions=20),
    "wav2vec2": text("Wav2Vec2Model", "Wav2Vec2Config", lambda: {"input_values": torch.randn(2, 400)}, conv_dim=(8, 8), conv_stride=(5, 4),
                     conv_kernel=(10, 3), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2),
    "hubert": text("HubertModel", "HubertConfig", lambda: {"input_values": torch.randn(2, 400)}, conv_dim=(8, 8), conv_stride=(5, 4),
                   conv_kernel=(10, 3), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2),
    "vit": sees("ViTModel", "ViTConfig"),
    "deit": sees("DeiTModel", "DeiTConfig"),
    "beit, bias": sees("BeitModel", "BeitConfig", use_relative_position_bias=True),
    "dinov2": sees("Dinov2Model", "Dinov2Config"),
    "siglip vision": sees("SiglipVisionModel", "SiglipVisionConfig"),
    "clip vision": sees("CLIPVisionModel", "CLIPVisionConfig"),
    "clip text": text("CLIPTextModel", "CLIPTextConfig", eos_token_id=2, bos_token_id=1),
    "swin": ("SwinModel", "SwinConfig", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2],
             "window_size": 4}, lambda: image(32)),
    "yolos": sees("YolosModel", "YolosConfig", image_size=[16, 16], num_detection_tokens=3),
    "detr": ("DetrModel", "DetrConfig", {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "num_queries": 5, "use_timm_backbone": False,
             "use_pretrained_backbone": False, "backbone": None,
             "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1],
                                 "layer_type": "basic", "out_features": ["stage4"]}}, lambda: image(64)),
    "perceiver": ("PerceiverModel", "PerceiverConfig", {"num_latents": 5, "d_latents": 16, "d_model": 32, "num_blocks": 1,
                  "num_self_attends_per_block": 2, "num_self_attention_heads": 2, "num_cross_attention_heads": 2},
                  lambda: {"inputs": torch.randn(2, 9, 32)}),
}  # fmt: skip


def takes_any_attention(name):
    """Whether the model calls the attention that its configuration names: T5 of transformers 5.0 has only its own."""
    return getattr(transformers, ZOO[name][0])._supports_sdpa


def build(name, attention=None):
    """One model of the zoo, in eval mode, and inputs for it."""
    model_class, config_class, config, inputs = ZOO[name]
    torch.manual_seed(0)
    configuration = getattr(transformers, config_class)(**config)
    if attention is not None:
        configuration._attn_implementation = attention
    model = getattr(transformers, model_class)(configuration).eval()
    torch.manual_seed(1)
    return model, inputs()
