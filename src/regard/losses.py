"""Losses on attention weights: each a few lines over `regard.Weights`, with gradients in linear memory.

>>> import regard.losses
>>> W = regard.weights(torch.randn(2, 6, 4, requires_grad=True), mask=regard.causal())
>>> regard.losses.entropy_floor(W, 0.5).backward()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from .core import api
from .core.arguments import as_number
from .core.broadcast import check_broadcast
from .core.rows.comparison import joint_batch
from .core.rows.head_reduction import HeadReduction
from .core.rows.key_choice import KeyChoice
from .core.rows.questions import RowQuestions
from .core.scores.kinds import Indexer
from .core.scores.modifiers import need_floats
from .core.shared import called_by_all_ranks
from .core.types import MaskLike
from .core.weights import Weights, need_weights

__all__ = ["alignment", "clip_factors", "distillation", "entropy_floor", "index_weights", "indexer", "qk_clip"]


#: Two of queries, keys and values, whose products are compared.
Relation: TypeAlias = Literal["qq", "qk", "qv", "kq", "kk", "kv", "vq", "vk", "vv"]


@called_by_all_ranks
def entropy_floor(weights: Weights | HeadReduction, floor: float) -> Tensor:
    """The mean over rows of max(0, floor − entropy): a penalty against entropy collapse.

    Args:
        weights: Attention weights, or heads taken together.
        floor: In nats. A row that sees n keys cannot have more than log n.

    Returns:
        A scalar; 0 where every row is above the floor.

    >>> regard.losses.entropy_floor(regard.weights(torch.zeros(2, 4)), 1.0)  # entropy log 2 = 0.6931
    tensor(0.3069)
    """
    matrix = weights._weights if isinstance(weights, HeadReduction) else weights
    need_weights(matrix, "entropy_floor(weights)")
    floor = _need_number(floor, "entropy_floor(floor)")  # type: ignore[assignment]
    lacking = (floor - weights.entropy()).clamp(min=0).sum()
    return weights._over_ranks(lacking, "entropy_floor") / max(1, math.prod(weights.shape[:-1]))


@called_by_all_ranks
def clip_factors(weights: Weights, threshold: float) -> Tensor:
    """The factor for every head that brings its largest score down to a threshold (QK-clip).

    Multiply the head's query and key projections by its square root after an optimizer step, as `qk_clip` does.

    Args:
        weights: Attention weights whose score is bilinear in queries and keys.
        threshold: The largest score allowed, > 0.

    Returns:
        ``(..., h)``, between 0 and 1, without gradient.

    >>> W = regard.weights(torch.eye(2) * 10, score="dot")  # scores up to 100
    >>> regard.losses.clip_factors(W, 50.0)
    tensor(0.5000)
    """
    need_weights(weights, "clip_factors(weights)")
    threshold = _need_positive(threshold, "clip_factors(threshold)")
    rows = weights.max_score().detach()
    largest = rows.amax(-1) if rows.shape[-1] else rows.new_full(rows.shape[:-1], -torch.inf)
    largest = weights._over_ranks(largest, "clip_factors", "max")
    return _factors_of(largest, threshold)


@torch.no_grad()
def qk_clip(query: nn.Linear, key: nn.Linear, max_score: Tensor, threshold: float = 100.0) -> Tensor:
    """Shrink, in place, the rows of W_q and W_k of every head whose largest score exceeds a threshold (QK-clip).

    Both projections are multiplied by the square root of threshold / score; heads that share a key head share its
    factor. `clip_factors` are the same factors, of a matrix.

    Args:
        query: The query projection, ``h · d`` rows.
        key: The key projection, ``g · d`` rows, ``h`` a multiple of ``g``.
        max_score: The largest score of every head ``(h,)``, as in `Watch.layers[name]["max_score"]`.
        threshold: The largest score allowed, > 0.

    Returns:
        The factor of every head's scores, ``(h,)``.

    >>> query, key = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    >>> regard.losses.qk_clip(query, key, torch.tensor([50.0, 200.0]))
    tensor([1.0000, 0.5000])
    """
    threshold = _need_positive(threshold, "qk_clip(threshold)")
    for name, layer in (("query", query), ("key", key)):
        if not isinstance(layer, nn.Linear):
            raise TypeError(
                f"qk_clip({name}) takes an nn.Linear, the projection of a layer; got {type(layer).__name__}."
            )
    if not isinstance(max_score, Tensor) or max_score.ndim != 1 or not len(max_score):
        got = tuple(max_score.shape) if isinstance(max_score, Tensor) else type(max_score).__name__
        raise TypeError(f"qk_clip(max_score) takes a tensor (h,), such as W.max_score().amax((0, 2)); got {got}.")
    heads = len(max_score)
    if query.out_features % heads:
        raise ValueError(
            f"qk_clip needs one score a head; got {heads} scores for a query projection of {query.out_features} rows."
        )
    size = query.out_features // heads
    groups = key.out_features // size
    if groups == 0 or heads % groups:
        raise ValueError(
            f"qk_clip needs key heads of the {size} rows of a query head, and a number of them that divides {heads}; "
            f"got a key projection of {key.out_features} rows."
        )
    factors = _factors_of(max_score, threshold).to(query.weight)
    shared = factors.unflatten(0, (groups, -1)).amin(1)  # a key head serves its worst query head
    for layer, roots in ((query, shared.repeat_interleave(heads // groups).sqrt()), (key, shared.sqrt())):
        rows = roots.repeat_interleave(size)
        layer.weight.mul_(rows.unsqueeze(1))
        if layer.bias is not None:
            layer.bias.mul_(rows)
    return factors


def _factors_of(largest: Tensor, threshold: float) -> Tensor:
    """The factors that bring largest scores down to a threshold; 1 where there is nothing above it, or no number."""
    return torch.where(largest > threshold, threshold / largest.clamp(min=threshold), 1.0)


def _need_number(x: Any, what: str) -> float | Tensor:
    if (number := as_number(x)) is None:
        raise ValueError(f"{what} needs a number; got {x!r}.")
    return number


def _need_positive(x: Any, what: str) -> float:
    number = float(_need_number(x, what))
    if not number > 0:
        raise ValueError(f"{what} needs a number > 0; got {x}.")
    return number


@called_by_all_ranks
def alignment(weights: Weights | HeadReduction, cells: MaskLike) -> Tensor:
    """-log of the weight on given cells, averaged over the rows that see one: guided alignment.

    Args:
        weights: Attention weights, or heads taken together.
        cells: A mask, a bool tensor ``(..., i, j)`` or a function of positions (i, j).

    Returns:
        A scalar.

    >>> W = regard.weights(torch.zeros(2, 4))
    >>> regard.losses.alignment(W, torch.eye(2).bool())  # half of every row is on its cell
    tensor(0.6931)
    """
    if not isinstance(weights, RowQuestions):
        need_weights(weights, "alignment(weights)")
    log_mass = weights.log_mass(cells)
    sees = log_mass.detach() > -torch.inf
    total = weights._over_ranks(torch.where(sees, log_mass, 0).sum(), "alignment")
    return -total / weights._over_ranks(sees.sum(), "alignment").clamp(min=1)


def distillation(
    teacher: Sequence[Tensor],
    student: Sequence[Tensor],
    relations: Sequence[Relation] = ("qk",),
    mask: MaskLike | None = None,
) -> Tensor:
    """KL of a student's attention relations from a teacher's, as MiniLM distils them.

    Args:
        teacher: Tensors (q, k) or (q, k, v), each ``(..., h, i, d)``, without gradient.
        student: The same with other sizes d; as many heads (relation heads: split both models into as many).
        relations: Pairs of letters: ``"qk"`` is attention itself; ``"qq"``, ``"kk"``, ``"vv"`` are scaled dot products
            of one tensor with itself.
        mask: Who sees whom.

    Returns:
        A scalar: the sum over relations of the mean over heads and rows.

    >>> teacher, student = (tuple(torch.randn(4, 6, d) for _ in "qkv") for d in (64, 8))
    >>> regard.losses.distillation(teacher, student, ("qq", "kk", "vv")).shape
    torch.Size([])
    """
    named = isinstance(relations, Sequence) and all(isinstance(pair, str) and len(pair) == 2 for pair in relations)
    if not relations or not named or not {*"".join(relations)} <= {*"qkv"}:
        raise ValueError(f"distillation(relations=) takes pairs of the letters q, k and v; got {relations!r}.")
    needed = max("qkv".index(letter) for pair in relations for letter in pair) + 1
    for name, tensors in (("teacher", teacher), ("student", student)):
        listed = isinstance(tensors, Sequence) and all(isinstance(x, Tensor) for x in tensors)
        if not listed or len(tensors) < needed:
            got = f"{len(tensors)} of them" if listed else type(tensors).__name__
            raise TypeError(
                f"distillation({name}=) takes a list of the tensors {', '.join('qkv'[:needed])}; got {got}. "
                "Of two matrices, such as two recorded layers: teacher.kl(student).mean()."
            )
    total = torch.zeros((), dtype=torch.float32, device=student[0].device)
    for pair in relations:
        first, second = ("qkv".index(letter) for letter in pair)
        pairs = [(tensors[first], tensors[second]) for tensors in (teacher, student)]
        of_teacher, of_student = (api.weights(x, y, mask=mask) for x, y in pairs)
        total = total + _mean(of_teacher.detach().kl(of_student))
    return total


def index_weights(q: Tensor, k: Tensor, w: Tensor, mask: MaskLike | None = None) -> Weights:
    """The weights softmax(I) of a sparse-attention indexer, I_ij = sum_n w_in ReLU(q_in . k_j), as a lazy matrix.

    Args:
        q: Queries of n index heads, ``(..., n, i, d)``.
        k: One key a position, ``(..., j, d)``.
        w: Weights of the index heads, ``(..., i, n)``, scaled as the model does.
        mask: Who sees whom.

    Returns:
        `Weights` ``(..., 1, i, j)``: its `topk` are the keys that the indexer selects. q, k and w get gradients.

    >>> index = regard.losses.index_weights(torch.randn(4, 6, 8), torch.randn(6, 8), torch.rand(6, 4), regard.causal())
    >>> index.shape, index.topk(2).indices.shape
    (torch.Size([1, 6, 6]), torch.Size([1, 6, 2]))
    """
    tensors = all(isinstance(x, Tensor) for x in (q, k, w))
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (q, k, w)]
    if (
        not tensors
        or q.ndim < 3
        or k.ndim < 2
        or not q.shape[-3]
        or w.shape[-2:] != (q.shape[-2], q.shape[-3])
        or k.shape[-1] != q.shape[-1]
    ):
        raise (ValueError if tensors else TypeError)(
            "index_weights(q, k, w) takes q (..., n, i, d), k (..., j, d) and w (..., i, n); "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}."
        )
    for name, x in (("q", q), ("k", k), ("w", w)):
        need_floats(x, f"index_weights({name})")
        if x.device != q.device:
            raise ValueError(f"index_weights: {name} is on {x.device} and q on {q.device}; move one with .to(device).")
    check_broadcast(w.shape[:-2], q.shape[:-3], "index_weights(w)", "the batch axes of q")
    wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), w.dtype)  # no number is rounded
    w = w.expand(*q.shape[:-3], *w.shape[-2:])
    packed = torch.cat([x.to(wide) for x in (q.transpose(-3, -2).flatten(-2), w)], -1)  # ... i n·d + n
    return api.weights(packed.unsqueeze(-3), k.to(wide).unsqueeze(-3), score=Indexer(q.shape[-3]), mask=mask)


@called_by_all_ranks
def indexer(teacher: Weights, index: Weights, topk: int | None = None) -> Tensor:
    """KL of an indexer's distribution from the attention summed over heads: the loss of DeepSeek's sparse attention.

    The heads' weights are added up and divided by their sum over keys (a sink takes its share in each head's softmax
    and is left out here), without an [h, i, j] tensor and without clamped logarithms.

    Args:
        teacher: Attention weights ``(..., h, i, j)``; detached.
        index: The indexer's weights, ``(..., 1, i, j)``: see `index_weights`.
        topk: Compare on the indexer's k largest keys of every row, both renormalised there. Default: on all keys.

    Returns:
        A scalar, the mean over rows.

    >>> teacher = regard.weights(torch.randn(8, 6, 16), mask=regard.causal())
    >>> q, k, w = torch.randn(4, 6, 8, requires_grad=True), torch.randn(6, 8), torch.rand(6, 4)
    >>> index = regard.losses.index_weights(q, k, w, regard.causal())
    >>> regard.losses.indexer(teacher, index).backward()
    >>> q.grad.shape
    torch.Size([4, 6, 8])
    """
    need_weights(teacher, "indexer(teacher)", heads=True)
    need_weights(index, "indexer(index)")
    for matrix in (teacher, index):
        matrix._need_entire("losses.indexer")
    if not index._one_head and index.shape[-3] != 1:
        raise ValueError(
            f"indexer(index) takes one matrix for all heads, (..., 1, i, j), as index_weights makes it; got "
            f"{tuple(index.shape)}."
        )
    summed = teacher.detach().reduce_heads("sum", groups=1)
    if topk is None:
        return _mean(KeyChoice(summed, None).kl(index))
    keys, own = index.detach().topk(topk).indices, index._factors.batch
    batch = joint_batch([teacher._factors.batch, own])
    keys = (
        keys.reshape(*own, 1, *keys.shape[-2:])
        .expand(*batch, 1, *keys.shape[-2:])
        .reshape(math.prod(batch), 1, *keys.shape[-2:])
    )
    return _mean(KeyChoice(summed, keys).kl(KeyChoice(index, keys)))  # type: ignore[arg-type]  # of no public kind


def _mean(rows: Tensor) -> Tensor:
    """The mean; 0 where there are no rows."""
    return rows.sum() / max(1, rows.numel())
