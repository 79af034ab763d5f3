"""Every architecture of transformers that can be made small and runs.

Configurations are shrunk by the names of their fields, so new architectures join by themselves. Those that need more
than that (sizes that must fit one another) are left out.
"""

from __future__ import annotations

import copy
import signal
import warnings
from collections import defaultdict

import torch
import transformers

from support import zoo  # noqa: F401  it sets HF_HUB_OFFLINE

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "hidden_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "image_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "patch_size", "sliding_window", "qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "num_mel_bins"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16), **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("n_group", "topk_group", "bos_token_id"), 1), **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "eos_token_id"), 2),
    "num_decoder_layers": 2, "vocab_size": 99, "pad_token_id": 0,
}  # fmt: skip


def small(config):
    """The configuration with small numbers, its parts (vision, text, decoder) too."""
    parts = {n: small(v) for n, v in vars(config).items() if isinstance(v, transformers.PretrainedConfig)}
    plain = {n: v for n, v in SMALL.items() if hasattr(config, n) and not isinstance(getattr(config, n), list | tuple)}
    try:
        return type(config)(**plain, **parts)
    except Exception:  # some take the parts as dictionaries
        return type(config)(**plain, **{n: part.to_dict() for n, part in parts.items()})


def inputs_for(model):
    config, main = model.config, model.main_input_name
    tensors = {
        "input_ids": lambda: torch.randint(3, 90, (2, 9)),
        "pixel_values": lambda: torch.randn(2, getattr(config, "num_channels", 3) or 3, 32, 32),
        "input_values": lambda: torch.randn(2, 2000),
    }
    inputs = {main: tensors[main]()}
    return {**inputs, "decoder_input_ids": torch.randint(3, 90, (2, 7))} if config.is_encoder_decoder else inputs


def prepared(name):
    """A small model and inputs it runs on, or None."""
    try:
        config = small(transformers.CONFIG_MAPPING[name]())
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config).eval()
        if sum(p.numel() for p in model.parameters()) > 3e7:
            return None
        inputs = inputs_for(model)
        with torch.no_grad():
            return model, inputs, model(**inputs)[0]
    except Exception:  # it needs more than smaller numbers
        return None


def with_attention(model, name):
    """The same model with another implementation of attention."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = name
    other = transformers.AutoModel.from_config(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def verdicts(verdict):
    """The architectures by what `verdict` says of them; 40 seconds of CPU time each, else they are left out."""
    result = defaultdict(list)
    signal.signal(signal.SIGPROF, _too_long)
    for name in sorted(transformers.CONFIG_MAPPING.keys()):
        signal.setitimer(signal.ITIMER_PROF, 40)  # of CPU time: other work beside it does not count
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result[verdict(name)].append(name)
        except TimeoutError:
            result["left out"].append(name)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return result


def _too_long(*_):
    raise TimeoutError
