"""Every architecture of transformers that can be made small and runs: recorded right, or refused by name.

Two judges: the definition of `F.scaled_dot_product_attention` for the calls that the model makes, and the weights that
the same model reports in a run with eager attention.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import regard

transformers = pytest.importorskip("transformers")
from support import architectures  # noqa: E402

#: Architectures whose report is not the weights that ran, and what it is instead.
OTHERWISE = {
    "cpmant": "without the rows of its prompt", "sam_vision_model": "batch and heads in one axis",
    "sam_hq_vision_model": "batch and heads in one axis", "squeezebert": "scores before softmax",
    "prophetnet": "scores before softmax", "vit_mae": "its mask is drawn anew in every pass", "wavlm": "the mean over heads",
    "maskformer-swin": "hidden states", "t5gemma2": "self- and cross-attention apart, which run as one",
    **dict.fromkeys(("sam", "sam2", "sam2_vision_model", "sam_hq", "sam3_tracker"), "outputs of attention, or batch and heads in one axis"),
}  # fmt: skip

KINDS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def reporting(model, inputs):
    """The same model with eager attention, if it runs and reports weights; else None."""
    try:
        eager = architectures.with_attention(model, "eager")
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
    ready = architectures.prepared(name)
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


@pytest.mark.slow
def test_every_architecture_that_reports_weights():
    transformers.logging.set_verbosity_error()
    verdicts = architectures.verdicts(verdict)
    print({kind: len(names) for kind, names in verdicts.items()}, "refused:", verdicts["refused"])
    assert verdicts["wrong"] == []
    assert set(verdicts["differs"]) <= set(OTHERWISE)
    assert len(verdicts["equal"]) >= 230
    assert len(verdicts["refused"]) <= 30
