"""Every architecture of transformers that can be made small, runs, and reports weights: the recording equals the report.

Configurations are shrunk by the names of their fields, so new architectures join by themselves. Those that need more
than that (parts with configurations of their own, sizes that must fit one another) are left out and counted.
"""

import copy
import signal
import warnings
from collections import defaultdict

import pytest
import torch

import regard

transformers = pytest.importorskip("transformers")
from support import zoo  # noqa: E402, F401  it sets HF_HUB_OFFLINE

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

#: Architectures whose report is not the weights that ran, and what it is instead.
OTHERWISE = {
    "cpmant": "without the rows of its prompt", "sam_vision_model": "batch and heads in one axis",
    "sam_hq_vision_model": "batch and heads in one axis", "squeezebert": "scores before softmax",
    "prophetnet": "scores before softmax", "vit_mae": "its mask is drawn anew in every pass", "wavlm": "the mean over heads",
}  # fmt: skip

KINDS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def small(config_class):
    config = config_class()
    names = set(vars(config))
    if any(name.endswith("_config") for name in names):
        return None
    plain = {n: v for n, v in SMALL.items() if n in names and not isinstance(getattr(config, n), list | tuple)}
    return config_class(**plain)


def inputs_for(model):
    config, main = model.config, model.main_input_name
    made = {
        "input_ids": lambda: torch.randint(3, 90, (2, 9)),
        "pixel_values": lambda: torch.randn(2, getattr(config, "num_channels", 3) or 3, 32, 32),
        "input_values": lambda: torch.randn(2, 2000),
    }
    inputs = {main: made[main]()}
    return {**inputs, "decoder_input_ids": torch.randint(3, 90, (2, 7))} if config.is_encoder_decoder else inputs


def prepared(name):
    """A small model and inputs it runs on, or None."""
    try:
        config = small(transformers.CONFIG_MAPPING[name])
        if config is None:
            return None
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config).eval()
        if sum(p.numel() for p in model.parameters()) > 3e7:
            return None
        inputs = inputs_for(model)
        with torch.no_grad():
            return model, inputs, model(**inputs)[0]
    except Exception:  # it needs more than smaller numbers
        return None


def reported(model, inputs):
    try:
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"
        eager = transformers.AutoModel.from_config(config).eval()
        eager.load_state_dict(model.state_dict())
        with torch.no_grad():
            out = eager(**inputs, output_attentions=True)
    except Exception:
        return []
    return [w for kind in KINDS for w in (out.get(kind) or ()) if isinstance(w, torch.Tensor)]


def verdict(name):
    made = prepared(name)
    if made is None:
        return "left out"
    model, inputs, plain = made
    with torch.no_grad(), regard.record(model) as seen:
        out = model(**inputs)[0]
    with torch.no_grad():
        again = model(**inputs)[0]
    if isinstance(plain, torch.Tensor) and torch.equal(plain.nan_to_num(), again.nan_to_num()):  # some draw lots
        assert torch.equal(plain.nan_to_num(), out.nan_to_num()), f"{name}: recording changed its output"
    told = reported(model, inputs)
    if not told:
        return "reports none"
    found = [layer.weights.dense() for layer in seen.layers]
    for w in told:
        match = next((n for n, d in enumerate(found) if d.shape == w.shape and _equal(d, w)), None)
        if match is None:
            return "refused" if seen.refused else "differs"
        found.pop(match)
    return "equal"


def _equal(ours, theirs):
    some = ours.sum(-1, keepdim=True) > 0
    return float((ours - torch.where(some, theirs.float(), 0)).abs().max()) < 1e-4


def _too_long(*_):
    raise TimeoutError


@pytest.mark.slow
def test_every_architecture_that_reports_weights():
    transformers.logging.set_verbosity_error()
    found = defaultdict(list)
    signal.signal(signal.SIGALRM, _too_long)
    for name in sorted(transformers.CONFIG_MAPPING.keys()):
        signal.alarm(40)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[verdict(name)].append(name)
        except TimeoutError:
            found["left out"].append(name)
        finally:
            signal.alarm(0)
    print({kind: len(names) for kind, names in found.items()}, "refused:", found["refused"])
    assert set(found["differs"]) <= set(OTHERWISE)
    assert len(found["equal"]) >= 180
    assert len(found["refused"]) <= 12
