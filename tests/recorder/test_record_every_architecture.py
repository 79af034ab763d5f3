"""Every architecture of transformers that can be made small and runs: recorded right, or refused by name.

Two judges: the definition of `F.scaled_dot_product_attention` for the calls that the model makes, and the weights that
the same model reports in a run with eager attention. Configurations are shrunk by the names of their fields, so new
architectures join by themselves. Those that need more than that (sizes that must fit one another) are left out and
counted.
"""

import contextlib
import copy
import signal
import warnings
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F

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
    "maskformer-swin": "hidden states", "t5gemma2": "self- and cross-attention apart, which run as one",
    **dict.fromkeys(("sam", "sam2", "sam2_vision_model", "sam_hq", "sam3_tracker"), "outputs of attention, or batch and heads in one axis"),
}  # fmt: skip

KINDS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


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


def reporting(model, inputs):
    """The same model with eager attention, if it runs and reports weights; else None."""
    try:
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"
        eager = transformers.AutoModel.from_config(config).eval()
        eager.load_state_dict(model.state_dict())
        with torch.no_grad():
            return eager if weights_of(eager(**inputs, output_attentions=True)) else None
    except Exception:
        return None


def weights_of(out):
    return [w for kind in KINDS for w in (out.get(kind) or ()) if isinstance(w, torch.Tensor)]


@contextlib.contextmanager
def spied_sdpa():
    """The weights of every call of `F.scaled_dot_product_attention`, by its definition in float64."""
    own, weights = F.scaled_dot_product_attention, []

    def spy(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **more):
        keys = k.double().repeat_interleave(q.shape[-3] // k.shape[-3], -3) if q.ndim > 3 else k.double()
        scores = q.double() @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights.append(scores.softmax(-1).nan_to_num(0).float())
        return own(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, **more)

    F.scaled_dot_product_attention = spy
    try:
        yield weights
    finally:
        F.scaled_dot_product_attention = own


def unmatched(weights, layers):
    """The shapes of weights that no layer has. Some models report a layer twice."""
    dense = [layer.weights.dense() for layer in layers]
    return [
        tuple(w.shape) for w in weights if not any(_same_cells(d, w) and _equal(d.reshape(w.shape), w) for d in dense)
    ]


def verdict(name):
    """Answers "wrong" and "differs" are faults; what raises inside `record` fails the test."""
    ready = prepared(name)
    if ready is None:
        return "left out"
    model, inputs, plain = ready
    with torch.no_grad(), spied_sdpa() as ran, regard.record(model) as seen:
        out = model(**inputs)[0]
    with torch.no_grad():
        again = model(**inputs)[0]
    if isinstance(plain, torch.Tensor) and torch.equal(plain.nan_to_num(), again.nan_to_num()):  # some draw lots
        assert torch.equal(plain.nan_to_num(), out.nan_to_num()), f"{name}: recording changed its output"
    layers = [layer for one in seen.passes for layer in one.layers]
    if unmatched(ran, [layer for layer in layers if layer.saved.w is None]) and not seen.refused:
        return "wrong"
    eager = reporting(model, inputs)
    if eager is None:
        return "reports none"
    with torch.no_grad(), regard.record(eager) as seen:
        report = weights_of(eager(**inputs, output_attentions=True))
    if not unmatched(report, [layer for one in seen.passes for layer in one.layers]):
        return "equal"
    return "refused" if seen.refused else "differs"


def _same_cells(ours, theirs):
    return ours.numel() == theirs.numel() and ours.shape[-2:] == theirs.shape[-2:]


def _equal(ours, theirs):
    some = ours.sum(-1, keepdim=True) > 0
    return float((ours - torch.where(some, theirs.float(), 0)).abs().max()) < 1e-4


def _too_long(*_):
    raise TimeoutError


@pytest.mark.slow
def test_every_architecture_that_reports_weights():
    transformers.logging.set_verbosity_error()
    verdicts = defaultdict(list)
    signal.signal(signal.SIGPROF, _too_long)
    for name in sorted(transformers.CONFIG_MAPPING.keys()):
        signal.setitimer(signal.ITIMER_PROF, 40)  # of CPU time: other work beside it does not count
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                verdicts[verdict(name)].append(name)
        except TimeoutError:
            verdicts["left out"].append(name)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    print({kind: len(names) for kind, names in verdicts.items()}, "refused:", verdicts["refused"])
    assert verdicts["wrong"] == []
    assert set(verdicts["differs"]) <= set(OTHERWISE)
    assert len(verdicts["equal"]) >= 230
    assert len(verdicts["refused"]) <= 30
