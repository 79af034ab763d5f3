"""`weights` and `attend`: the only place where users' inputs are checked, and broadcast to one another.

Every error says what must hold, what it got and what to do. Behind these two functions nothing is checked again.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import engines
from ..engines.replay import is_constant
from .block import MatrixBlock
from .broadcast import MatrixShape
from .masks.kinds import Mask, as_mask
from .problem import Factors
from .pytree import flatten
from .scores.kinds import Score, as_score
from .tensor_kinds import is_plain, readable, refuse_jit_trace, refuse_meta
from .torch_state import as_size, in_functorch, in_plain_eager, is_tracing, is_zero_tensor, outside_of_graphs
from .types import Align, EngineName, MaskLike, ScoreLike
from .weights import Weights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed import Shards

__all__ = ["attend", "check_tensors", "normalize_inputs", "try_sdpa", "weights"]


def weights(
    q: Tensor,
    k: Tensor | None = None,
    *,
    score: ScoreLike = "scaled_dot",
    mask: MaskLike | None = None,
    align: Align | None = None,
    engine: EngineName = "auto",
    mesh: DeviceMesh | ProcessGroup | Shards | None = None,
) -> Weights:
    """Attention weights softmax(score(q, k)) as a lazy matrix: nothing of size i × j is stored.

    Args:
        q: Queries ``(..., h, i, d)``, ``(h, i, d)`` for heads without a batch, or ``(i, d)`` for one head.
        k: Keys ``(..., g, j, d)`` with h a multiple of g (grouped-query attention). Default: `q`.
        score: ``"scaled_dot"``, ``"dot"``, ``"cosine"``, a `Score`, or a function ``f(q, k) -> (..., i, j)``.
        mask: A `Mask`, a bool tensor that broadcasts to ``(..., h, i, j)`` (True: visible), or a function
            ``f(i, j) -> bool`` of positions.
        align: How positions correspond if i != j: ``"start"`` (query 0 stands at key 0) or ``"end"`` (the last query
            stands at the last key, as with a cache). Required where the mask or the score depends on positions.
        engine: ``"auto"`` picks the fastest that serves; ``"triton"``, ``"blockwise"``, or ``"reference"``, which is
            plain PyTorch in quadratic memory.
        mesh: A `DeviceMesh` of one axis, or `regard.distributed.Shards`: q and k are then this rank's part of a
            sequence that is split over the mesh, and positions are global. DTensors need none.

    Returns:
        `Weights` ``(..., h, i, j)``; ``(i, j)`` where q and k are 2-D.

    Raises:
        ValueError: Shapes, devices or dtypes do not fit, or `align` is missing.
        TypeError: An argument is of the wrong kind.

    >>> W = regard.weights(torch.randn(2, 8, 5, 64), mask=regard.causal())
    >>> W.shape
    torch.Size([2, 8, 5, 5])
    >>> W.entropy().shape
    torch.Size([2, 8, 5])
    """
    if mesh is not None or _is_dtensor(q):
        return _over_ranks(q, k, score, mask, align, engine, mesh)
    k = q if k is None else k
    key = _checks_key(q, k, score, mask, align, engine)
    if key is not None and (checked := CHECKED.get(key)) is not None:
        factors = Factors(q, k, checked.score, checked.mask, checked.offset)
        return Weights(factors, engine, flat=(checked.spec, [q, k]))
    q, k = check_tensors(q=q, k=k)
    factors = normalize_inputs(q, k, score, mask, align)
    W = Weights(factors, _engine(engine), one_head=q.ndim == 2 and k.ndim == 2)
    if key is not None and factors.q is q and factors.k is k and len(W._leaves) == 2 and is_constant(W._spec):
        if len(CHECKED) >= MAX_CHECKED:
            CHECKED.clear()
        CHECKED[key] = Checked(factors.score, factors.mask, factors.offset, W._spec)
    return W


class Checked(NamedTuple):
    """Score, mask and offset after the checks: nodes without tensors."""

    score: Score
    mask: Mask | None
    offset: int | None
    spec: Any


#: By shapes, types and constants of the arguments: the checks take as long as a short question on a GPU.
CHECKED: dict[Hashable, Checked] = {}
MAX_CHECKED = 1024


def _checks_key(q: Any, k: Any, score: Any, mask: Any, align: Any, engine: Any) -> Hashable | None:
    """All that the checks of two plain tensors depend on; None where they depend on more."""
    if not (in_plain_eager() and is_plain(q) and is_plain(k)) or torch.is_autocast_enabled(q.device.type):
        return None
    if not isinstance(score, str | Score) or not isinstance(mask, Mask | None):
        return None
    key = q.shape, k.shape, q.dtype, k.dtype, q.device, k.device, score, mask, align, engine
    try:
        hash(key)
    except TypeError:
        return None
    return key


def attend(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    score: ScoreLike = "scaled_dot",
    mask: MaskLike | None = None,
    align: Align | None = None,
    engine: EngineName = "auto",
    mesh: DeviceMesh | ProcessGroup | Shards | None = None,
) -> Tensor:
    """The output of attention, weights(q, k) @ v.

    With ``engine="auto"`` PyTorch's own fused attention is called where it gives the same result as fast.

    Args:
        q: Queries ``(..., h, i, d)``, ``(h, i, d)`` or ``(i, d)``.
        k: Keys ``(..., g, j, d)``. Default: `q`.
        v: Values ``(..., g, j, e)``. Default: `k`, so that ``attend(x)`` is self-attention of x.
        score: As for `weights`.
        mask: As for `weights`.
        align: As for `weights`.
        engine: As for `weights`.
        mesh: As for `weights`.

    Returns:
        ``(..., h, i, e)`` in the dtype of v; ``(i, e)`` where all are 2-D.

    Raises:
        ValueError: Shapes, devices or dtypes do not fit, or `align` is missing.
        TypeError: An argument is of the wrong kind.

    >>> q, k, v = torch.randn(8, 5, 64), torch.randn(2, 7, 64), torch.randn(2, 7, 32)
    >>> regard.attend(q, k, v, mask=regard.causal(), align="end").shape
    torch.Size([8, 5, 32])
    """
    if mesh is not None or _is_dtensor(q):
        return _over_ranks(q, k, score, mask, align, engine, mesh) @ _first_of(v, k, q)
    k = q if k is None else k
    v = k if v is None else v
    _check_align(align)
    if engine == "auto" and (y := try_sdpa(q, k, v, score, mask)) is not None:
        return y
    q, k, v = check_tensors(q=q, k=k, v=v)
    one_head = q.ndim == 2 and k.ndim == 2
    W = Weights(normalize_inputs(q, k, score, mask, align), _engine(engine), one_head=one_head)
    W._remembers = False
    return W.see(values=v).y


@outside_of_graphs
def _over_ranks(q: Any, k: Any, score: Any, mask: Any, align: Any, engine: Any, mesh: Any) -> Weights:
    """The matrix of a sequence that is split over ranks."""
    distributed = import_module("regard.distributed")  # by name: it is above this module
    make = distributed.dtensor_weights if _is_dtensor(q) else distributed.shard_weights
    return make(q, q if k is None else k, score=score, mask=mask, align=align, engine=engine, mesh=mesh)


def _is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor. Its module is not imported for that: code that makes one has imported it."""
    if type(x) in (Tensor, Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _first_of(*tensors: Tensor | None) -> Any:
    return next(t for t in tensors if t is not None)


#: Multiplications up to which PyTorch's attention is faster, for grouped heads and for bool masks.
SMALL = 2**28


def try_sdpa(q: Any, k: Any, v: Any, score: Any, mask: Any, dropout: float = 0.0) -> Tensor | None:
    """PyTorch's fused attention, where it computes the same and is as fast; else None. It can drop weights."""
    refuse_jit_trace()
    if isinstance(score, str):
        plain = score in ("scaled_dot", "dot")
        scale = 1.0 if score == "dot" else None
    else:
        plain = isinstance(score, Score) and len(score.modifiers) == 0 and score.sink_logits is None
        scale = score.product_scale(q.shape[-1]) if plain and isinstance(q, Tensor) and q.ndim else None
        plain = scale is not None
    if not plain or not all(map(_is_dense, (q, k, v))):
        return None
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device or 0 in q.shape or 0 in k.shape:
        return None
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        return None
    small = q.device.type == "cpu" and q.numel() * k.shape[-2] <= SMALL
    grouped = q.shape[-3] != k.shape[-3]
    if grouped and (q.ndim != 4 or q.shape[1] % k.shape[1] or not (small or _has_fused_gqa(q))):
        return None
    if _is_chunk(q, k):
        return None
    flags = None
    # With as many keys as queries causal means one thing, and every key is seen by some row.
    causal = isinstance(mask, Mask) and mask.band() == (None, 0)
    if causal and q.shape[-2] != k.shape[-2]:  # a branch: under torch.compile lengths may be SymInts
        causal = False
    if q.device.type == "cuda" and isinstance(mask, Mask) and mask.rows_alike:
        return None if grouped else _sdpa_of_real_keys(q, k, v, mask, scale, dropout)
    if mask is not None and not causal and (not small or (flags := _dense_bool_mask(q, k, mask)) is None):
        return None
    attention = torch.nn.functional.scaled_dot_product_attention
    y = attention(q, k, v, attn_mask=flags, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped)
    # SDPA lets nan or inf of a hidden key into the output, as nan: then our engines compute it.
    return y if flags is None or bool(y.detach().sum().isfinite()) else None


def _sdpa_of_real_keys(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, dropout: float = 0.0
) -> Tensor | None:  # fmt: skip
    """PyTorch's attention under padding, without a wait for the GPU and without Triton, whose import takes seconds.

    Padding becomes zeros, so that nothing of it reaches the output. None where gradients or long rows are for our
    kernels, which drop no weights.
    """
    ours = torch.is_grad_enabled() or q.numel() * k.shape[-2] > SMALL
    if is_tracing() or in_functorch() or (ours and not dropout):
        return None
    visible = _visible_cells(q, k, mask)
    k, v = (x.masked_fill(~visible.mT, 0) for x in (k, v))
    blind = ~visible.any(-1, keepdim=True)  # rows without a key see zeros: PyTorch's gradients of none would be NaN
    seen = visible | blind
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout, scale=scale)
    return y.masked_fill(blind, 0)


def _is_dense(x: Any) -> bool:
    """Whether PyTorch's attention takes x: a strided tensor with heads, of 16 bits or more."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        return False
    if x.ndim < 3 or not x.is_floating_point() or x.dtype.itemsize == 1:
        return False
    return is_tracing() or not is_zero_tensor(x)  # PyTorch's attention reads the memory that such zeros do not have


def _has_fused_gqa(q: Tensor) -> bool:
    """Whether PyTorch has a kernel in which heads share keys; in others it repeats them in memory."""
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)


def _is_chunk(q: Tensor, k: Tensor) -> bool:
    """Whether a few rows read many keys on a GPU, over which PyTorch's default kernel takes long: it splits none."""
    if is_tracing() or q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    rows, keys, size = q.shape[-2], k.shape[-2], q.shape[-1]
    return rows <= 64 and keys >= 2048 and (rows > 1 or size > 128)


def _dense_bool_mask(q: Tensor, k: Tensor, mask: Any) -> Tensor | None:
    """The mask as a bool tensor for PyTorch's attention, where that treats it as we do; else None."""
    if is_tracing() or in_functorch() or q.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return None
    if not isinstance(mask, Tensor) and not (isinstance(mask, Mask) and mask.rows_alike):
        return None
    # A hidden key of −inf may leave the output finite, but not the gradients.
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad) and not bool(k.detach().sum().isfinite()):
        return None
    return _visible_cells(q, k, as_mask(mask))


def _visible_cells(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Where the mask lets a query see a key, broadcasting to the matrix."""
    full = (*q.shape[:-2], q.shape[-2], k.shape[-2])
    mask = mask.broadcast_to(MatrixShape(full, 0, q.device))
    cells = mask.visible(MatrixBlock(slice(0, full[-2]), slice(0, full[-1]), 0, q.device))
    return cells.reshape(cells.shape[max(0, cells.ndim - q.ndim) :])  # q without a batch takes a mask without one


def normalize_inputs(q: Tensor, k: Tensor, score: Any, mask: Any, align: Any) -> Factors:
    """Queries, keys, score and mask, checked and broadcast to one another."""
    score = as_score(score)
    mask = None if mask is None else as_mask(mask)
    q = q.unsqueeze(0) if q.ndim == 2 else q
    k = k.unsqueeze(0) if k.ndim == 2 else k
    batch = _shared_batch(q, k)
    score.check_sizes(q, k)
    _check_heads(q, k)
    h, i, j = q.shape[-3], q.shape[-2], k.shape[-2]
    offset = _offset(i, j, align, score, mask)
    if q.shape[:-3] != batch:
        q = q.expand(*batch, h, i, -1)
    if k.shape[:-3] != batch:
        k = k.expand(*batch, *k.shape[-3:])
    matrix = MatrixShape((*batch, h, i, j), 0 if offset is None else offset, q.device)
    factors = Factors(q, k, score.broadcast_to(matrix), None if mask is None else mask.broadcast_to(matrix), offset)
    _check_score_device(score, q)
    if in_plain_eager():
        score.check_functions(q, k)
    return factors


# Checks.


def check_tensors(**tensors: Any) -> list[Tensor]:
    """Tensors of one device and type, each with at least two axes; raises with the name of the one that differs."""
    eager = in_plain_eager()
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(x).__name__}. Use torch.as_tensor({name}).")
        if not (eager and is_plain(x)):
            tensors[name] = readable(x, name)
        if not x.is_floating_point():
            raise TypeError(
                f"{name} must be a floating-point tensor; got dtype {x.dtype}. "
                "Embed tokens first, or convert with .float()."
            )
        if x.ndim < 2:
            raise ValueError(
                f"{name} must be (length, size), (heads, length, size) or (..., heads, length, size); "
                f"got shape {tuple(x.shape)}."
            )
    first, *others = tensors.items()
    for name, x in others:
        if x.device != first[1].device:
            raise ValueError(f"{first[0]} is on {first[1].device} and {name} on {x.device}; move one with .to(device).")
    refuse_meta(first[1], first[0])
    kind = first[1].device.type
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        return [x if x.dtype == torch.float64 else x.to(low) for x in tensors.values()]
    for name, x in others:
        if x.dtype != first[1].dtype:
            raise ValueError(f"{first[0]} is {first[1].dtype} and {name} {x.dtype}; convert one with .to(dtype).")
    return list(tensors.values())


def _engine(name: EngineName) -> EngineName:
    engines.get_engine(name)
    return name


def _shared_batch(q: Tensor, k: Tensor) -> torch.Size:
    if q.shape[:-3] == k.shape[:-3]:
        return q.shape[:-3]
    try:
        return as_size(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3]))
    except RuntimeError:
        raise ValueError(
            f"batch axes of q {tuple(q.shape[:-3])} and k {tuple(k.shape[:-3])} do not broadcast; "
            f"shapes are q {tuple(q.shape)} and k {tuple(k.shape)}."
        ) from None


def _check_heads(q: Tensor, k: Tensor) -> None:
    h, g = q.shape[-3], k.shape[-3]
    if g == 0 or h % g:
        hint = "If the layout is (batch, length, heads, size), pass q.transpose(1, 2) and k.transpose(1, 2)."
        raise ValueError(f"q has {h} heads and k has {g}; heads of q must be a multiple of heads of k. {hint}")


def _check_score_device(score: Score, q: Tensor) -> None:
    """Raise ValueError unless the tensors of a score are where q is. One number may be on a CPU, as PyTorch has it."""
    for t in flatten(score)[1]:
        if t.device != q.device and (t.ndim or t.is_meta):
            raise ValueError(
                f"a tensor {tuple(t.shape)} of the score {type(score).__name__} is on {t.device} and q on {q.device}; "
                "move one with .to(device)."
            )


def _check_align(align: Any) -> None:
    if align not in (None, "start", "end"):
        raise ValueError(
            'align must be "start" (query 0 stands at key 0) or "end" (the last query stands at the last key); '
            f"got {align!r}."
        )


def _offset(i: int, j: int, align: Any, score: Score, mask: Mask | None) -> int | None:
    """The key position of query 0; None where lengths differ and it is not needed."""
    _check_align(align)
    if align == "end":
        return j - i
    if align == "start" or i == j:
        return 0
    needs = [f"the mask {mask!r}"] if mask is not None and mask.positional else []
    needs += [f".{type(modifier).__name__.lower()}(...)" for modifier in score.modifiers if modifier.positional]
    if needs:
        raise ValueError(
            f"{needs[0]} depends on positions, and q has {i} and k {j} of them: say how they correspond with "
            'align="start" (query 0 stands at key 0) or align="end" (the last query stands at the last key, '
            "as with a cache)."
        )
    return None
