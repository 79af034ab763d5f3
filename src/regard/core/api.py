"""The front door: everything a user passes is checked here, once, and laid over one another.

`weights` and `attend` turn what came into `Factors`, or say what must hold, what came and what to do. Behind the
door nothing is checked again. Imports `matrix` and what is below it.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import engines
from .block import MatrixBlock
from .intervals import cached_on_mask
from .masks import And, Causal, Dense, Documents, Mask, Not, Padding, as_mask
from .problem import Factors
from .pytree import flatten
from .scores import Additive, Alibi, Bias, Bilinear, Dot, ScaledDot, Score, as_score
from .torch_state import host_sync_forbidden, is_tracing
from .weights import Weights

__all__ = ["attend", "weights"]


def weights(
    q: Tensor,
    k: Tensor | None = None,
    *,
    score: Any = "scaled_dot",
    mask: Any = None,
    align: str | None = None,
    engine: str = "auto",
) -> Weights:
    """The attention weights softmax(score(q, k)) as an object that is never stored.

    q is (..., h, i, d) and k (..., g, j, d) with h a multiple of g, as in `scaled_dot_product_attention`; (h, i, d) is
    heads without a batch, (i, d) one head. k=None means k = q. `align` says how positions correspond when the lengths
    differ: "start" (query 0 stands at key 0) or "end" (the last query stands at the last key, as with a cache).

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> W = weights(x, score="dot")
    >>> W[0, 2].item() == W[2, 0].item()
    False
    """
    k = q if k is None else k
    q, k = _check_tensors(q=q, k=k)
    return Weights(normalize_inputs(q, k, score, mask, align), _engine(engine), one_head=q.ndim == 2 and k.ndim == 2)


def attend(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    score: Any = "scaled_dot",
    mask: Any = None,
    align: str | None = None,
    engine: str = "auto",
) -> Tensor:
    """Attention's output alone: weights(q, k) @ v. v=None means v = k, so attend(x) is self-attention of x.

    Where PyTorch's own fused attention gives the same answer, that is called.
    """
    k = q if k is None else k
    v = k if v is None else v
    if engine == "auto" and (y := _try_sdpa(q, k, v, score, mask)) is not None:
        return y
    q, k, v = _check_tensors(q=q, k=k, v=v)
    return (
        Weights(normalize_inputs(q, k, score, mask, align), _engine(engine), one_head=q.ndim == 2 and k.ndim == 2)
        .see(values=v)
        .y
    )


#: Multiplications up to which PyTorch's attention is the faster one for heads that share keys and for masks of flags.
SMALL = 2**28


def _try_sdpa(q: Any, k: Any, v: Any, score: Any, mask: Any) -> Tensor | None:
    """PyTorch's fused attention, where it computes the same and is as fast; None where it does not."""
    if isinstance(score, str):
        plain = score in ("scaled_dot", "dot")
        scale = 1.0 if score == "dot" else None
    else:
        plain = type(score) in (Dot, ScaledDot) and len(score.modifiers) == 0 and score.sink_logits is None
        scale = 1.0 if type(score) is Dot else getattr(score, "scale", None)
    if not plain or not all(isinstance(x, Tensor) and x.ndim >= 3 and x.is_floating_point() for x in (q, k, v)):
        return None
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device or 0 in q.shape or 0 in k.shape:
        return None
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        return None
    small = q.device.type == "cpu" and q.numel() * k.shape[-2] <= SMALL
    grouped = q.shape[-3] != k.shape[-3]
    if grouped and (not small or q.ndim != 4 or q.shape[1] % k.shape[1]):
        return None
    flags = None
    # With as many keys as queries causal means one thing, and every key is seen by some row.
    causal = False
    if type(mask) is Causal and q.shape[-2] == k.shape[-2]:  # decided here: while compiling, lengths may be symbols
        causal = True
    if mask is not None and not causal and (not small or (flags := _dense_bool_mask(q, k, mask)) is None):
        return None
    attention = torch.nn.functional.scaled_dot_product_attention
    y = attention(q, k, v, attn_mask=flags, is_causal=causal, scale=scale, enable_gqa=grouped)
    # There nan or inf at a hidden key is not hidden: it makes the output nan, and we compute it ourselves.
    return y if flags is None or bool(y.detach().sum().isfinite()) else None


def _dense_bool_mask(q: Tensor, k: Tensor, mask: Any) -> Tensor | None:
    """A mask as flags for PyTorch's attention, where it treats them as we do."""
    if is_tracing() or q.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return None
    if not isinstance(mask, Tensor) and type(mask) is not Padding:
        return None
    mask = as_mask(mask)
    full = (*q.shape[:-2], q.shape[-2], k.shape[-2])
    laid = _broadcast_mask(mask, full, 0, q.device)
    # A hidden key of −inf may leave the output finite, but not the gradients.
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad) and not bool(k.detach().sum().isfinite()):
        return None
    return laid.visible(MatrixBlock(slice(0, full[-2]), slice(0, full[-1]), 0, q.device))


def normalize_inputs(q: Tensor, k: Tensor, score: Any, mask: Any, align: Any) -> Factors:
    """Queries, keys, score and mask laid over one another; every misfit is an error here."""
    score = as_score(score)
    mask = None if mask is None else as_mask(mask)
    q = q.unsqueeze(0) if q.ndim == 2 else q
    k = k.unsqueeze(0) if k.ndim == 2 else k
    batch = _shared_batch(q, k)
    _check_sizes(q, k, score)
    h, i, j = q.shape[-3], q.shape[-2], k.shape[-2]
    offset = _offset(i, j, align, score, mask)
    q, k = (x if x.shape[:-3] == batch else x.expand(*batch, *x.shape[-3:]) for x in (q, k))
    full = (*batch, h, i, j)
    score = _broadcast_score(score, full, q.device)
    return Factors(
        q,
        k,
        score,
        None if mask is None else _broadcast_mask(mask, full, 0 if offset is None else offset, q.device),
        offset,
    )


# Checks.


def _check_tensors(**named: Any) -> list[Tensor]:
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; {type(x).__name__} came. Use torch.as_tensor({name}).")
        if not x.is_floating_point():
            raise TypeError(
                f"{name} must be a floating-point tensor; dtype {x.dtype} came. "
                "Embed tokens first, or convert with .float()."
            )
        if x.ndim < 2:
            raise ValueError(
                f"{name} must be (length, size), (heads, length, size) or (..., heads, length, size); "
                f"shape {tuple(x.shape)} came."
            )
    first, *others = named.items()
    for name, x in others:
        if x.device != first[1].device:
            raise ValueError(f"{first[0]} is on {first[1].device} and {name} on {x.device}; move one with .to(device).")
    kind = first[1].device.type
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        return [x if x.dtype == torch.float64 else x.to(low) for x in named.values()]
    for name, x in others:
        if x.dtype != first[1].dtype:
            raise ValueError(f"{first[0]} is {first[1].dtype} and {name} {x.dtype}; convert one with .to(dtype).")
    return list(named.values())


def _engine(name: Any) -> str:
    if name not in engines.ENGINES:
        raise ValueError(f"unknown engine {name!r}; the engines are {', '.join(map(repr, engines.ENGINES))}.")
    return name


def _shared_batch(q: Tensor, k: Tensor) -> torch.Size:
    if q.shape[:-3] == k.shape[:-3]:
        return q.shape[:-3]
    try:
        return torch.Size(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3]))
    except RuntimeError:
        raise ValueError(
            f"batch axes of q {tuple(q.shape[:-3])} and k {tuple(k.shape[:-3])} do not broadcast; "
            f"shapes are q {tuple(q.shape)} and k {tuple(k.shape)}."
        ) from None


def _check_sizes(q: Tensor, k: Tensor, score: Score) -> None:
    d, other = q.shape[-1], k.shape[-1]
    if isinstance(score, (Bilinear, Additive)):
        _check_projections(d, other, q.shape[-3], score)
    elif d != other and not score.sizes_may_differ:
        hint = " It looks as if k is transposed: pass k.mT." if k.shape[-2] == d else ""
        raise ValueError(
            f"q has size {d} and k has size {other} on the last axis; "
            f"a {type(score).__name__} score needs them equal.{hint}"
        )
    h, g = q.shape[-3], k.shape[-3]
    if g == 0 or h % g:
        hint = "If the layout is (batch, length, heads, size), pass q.transpose(1, 2) and k.transpose(1, 2)."
        raise ValueError(f"q has {h} heads and k has {g}; heads of q must be a multiple of heads of k. {hint}")


def _check_projections(d: int, other: int, h: int, score: Bilinear | Additive) -> None:
    if isinstance(score, Bilinear):
        wanted: list[tuple[str, Tensor, tuple[int, ...]]] = [("weight", score.weight, (d, other))]
    else:
        a = score.v.shape[-1]
        wanted = [
            ("query_weight", score.query_weight, (d, a)),
            ("key_weight", score.key_weight, (other, a)),
            ("v", score.v, (a,)),
        ]
    for name, tensor, shape in wanted:
        extra = tensor.shape[: -len(shape)]
        if tuple(tensor.shape[-len(shape) :]) != shape or len(extra) > 1 or (extra and extra[0] not in (1, h)):
            raise ValueError(
                f"{type(score).__name__}({name}) must be {shape} or {(h, *shape)} for q of size {d} with {h} heads "
                f"and k of size {other}; {tuple(tensor.shape)} came."
            )


def _offset(i: int, j: int, align: Any, score: Score, mask: Mask | None) -> int | None:
    """Where query 0 stands among the keys."""
    if align not in (None, "start", "end"):
        raise ValueError(
            'align must be "start" (query 0 stands at key 0) or "end" (the last query stands at the last key); '
            f"{align!r} came."
        )
    if align == "end":
        return j - i
    if align == "start" or i == j:
        return 0
    needs = [f"the mask {mask!r}"] if mask is not None and mask.positional else []
    needs += [f".{type(step).__name__.lower()}(...)" for step in score.modifiers if step.positional]
    if needs:
        raise ValueError(
            f"{needs[0]} depends on positions, and q has {i} and k {j} of them: say how they correspond with "
            'align="start" (query 0 stands at key 0) or align="end" (the last query stands at the last key, '
            "as with a cache)."
        )
    return None


# Laying over: every tensor gets the axes (*batch|1, h|1, x, y).


def _broadcast_score(score: Score, full: tuple[int, ...], device: torch.device) -> Score:
    n = len(full) - 3
    score = dataclasses.replace(
        score, modifiers=tuple(_broadcast_modifier(step, full, device) for step in score.modifiers)
    )
    if score.sink_logits is not None:
        score = dataclasses.replace(score, sink_logits=_per_head(score.sink_logits, full, "sink(logits)", device))
    if isinstance(score, Bilinear):
        return dataclasses.replace(score, weight=_with_leading_axes(score.weight, n))
    if isinstance(score, Additive):
        return dataclasses.replace(
            score,
            query_weight=_with_leading_axes(score.query_weight, n),
            key_weight=_with_leading_axes(score.key_weight, n),
            v=_with_leading_axes(score.v.unsqueeze(-2), n),
        )
    return score


def _broadcast_modifier(step: Any, full: tuple[int, ...], device: torch.device) -> Any:
    if isinstance(step, Bias):
        return Bias(_broadcast_to_scores(step.tensor, full, "bias(tensor)", device))
    if isinstance(step, Alibi):
        return Alibi(_per_head(step.slopes, full, "alibi(slopes)", device))
    return step


def _broadcast_mask(mask: Mask, full: tuple[int, ...], offset: int, device: torch.device) -> Mask:
    if isinstance(mask, And):
        return type(mask)(
            _broadcast_mask(mask.left, full, offset, device), _broadcast_mask(mask.right, full, offset, device)
        )
    if isinstance(mask, Not):
        return Not(_broadcast_mask(mask.of, full, offset, device))
    if isinstance(mask, Dense):
        return Dense(_broadcast_to_scores(mask.cells, full, "mask", device))
    given = flatten(mask)[1]
    if isinstance(mask, Padding):
        return cached_on_mask(mask, full, given, device, partial(_broadcast_padding, mask, full, device))
    if isinstance(mask, Documents):
        return cached_on_mask(
            mask, (full, offset), given, device, partial(_broadcast_documents, mask, full, offset, device)
        )
    return mask


def _broadcast_padding(mask: Padding, full: tuple[int, ...], device: torch.device) -> Padding:
    *batch, _, _, j = full
    lengths = mask.lengths.to(device)
    _check_broadcast(lengths.shape, batch, "padding(lengths)", "one length a sequence")
    if not is_tracing() and not host_sync_forbidden(device) and lengths.numel():
        least, most = mask.ends
        if least < 0 or most > j:
            raise ValueError(f"padding(lengths) must lie between 0 and the {j} keys there are; {least} … {most} came.")
    return Padding(_with_leading_axes(lengths[..., None, None, None], len(batch)))


def _broadcast_documents(mask: Documents, full: tuple[int, ...], offset: int, device: torch.device) -> Documents:
    *batch, _, i, j = full
    ids = mask.ids.to(device)
    keys = ids if mask.key_ids is None else mask.key_ids.to(device)
    counted = [("documents(ids)", ids, j)]
    if mask.key_ids is not None:
        counted = [("documents(ids)", ids, i), ("documents(key_ids)", keys, j)]
    for what, given, n in counted:
        if given.ndim < 1 or given.shape[-1] != n:
            raise ValueError(
                f"{what} needs one id a position, {n} on the last axis; shape {tuple(given.shape)} came. "
                "Queries numbered apart: documents(ids, key_ids)."
            )
        _check_broadcast(given.shape[:-1], batch, what, "one row of ids a sequence")
    if mask.key_ids is None:
        # Query row r stands at key position r + offset; a position outside the keys belongs to no document.
        at = torch.arange(i, device=device) + offset
        inside = (at >= 0) & (at < j)
        ids = torch.where(inside, ids[..., at.clamp(0, max(j - 1, 0))] if j else 0, torch.iinfo(torch.int64).min)
    n, own = len(batch), mask.key_ids is None
    return Documents(
        _with_leading_axes(ids[..., None, :, None], n),
        _with_leading_axes(keys[..., None, None, :], n),
        mask.contiguous,
        own,
    )


def _broadcast_to_scores(tensor: Tensor, full: tuple[int, ...], what: str, device: torch.device) -> Tensor:
    if tensor.device != device:
        raise ValueError(f"{what} is on {tensor.device} and q on {device}; move one with .to(device).")
    _check_broadcast(tensor.shape, full, what, "(..., h, i, j)")
    return _with_leading_axes(tensor, len(full) - 3)


def _per_head(tensor: Tensor, full: tuple[int, ...], what: str, device: torch.device) -> Tensor:
    if tensor.device != device:
        raise ValueError(f"{what} is on {tensor.device} and q on {device}; move one with .to(device).")
    _check_broadcast(tensor.shape, full[:-2], what, "one number a head")
    return _with_leading_axes(tensor[..., None, None], len(full) - 3)


def _check_broadcast(shape: Any, onto: Any, what: str, axes: str) -> None:
    shape, onto = tuple(shape), tuple(onto)
    pairs = zip(reversed(shape), reversed(onto), strict=False)
    fits = len(shape) <= len(onto) and all(a == 1 or a == b for a, b in pairs)  # a symbol is in no tuple
    if not fits:
        raise ValueError(f"{what} of shape {shape} does not broadcast to {onto}: {axes} is needed.")


def _with_leading_axes(tensor: Tensor, batch_axes: int) -> Tensor:
    """With leading axes of size one up to (*batch, h, x, y)."""
    return tensor.reshape(*[1] * (batch_axes + 3 - tensor.ndim), *tensor.shape)
