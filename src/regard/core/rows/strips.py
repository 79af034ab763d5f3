"""Complete rows, a strip at a time: `walk_strips` is behind every question that needs more than an online softmax.

A question is a plain function of the log-weights of a strip, of one matrix or of several matrices side by side
(`Question.of_strip`), and the results of strips are merged as the states of key blocks are: by sum, maximum or
log-sum-exp. The backward computes every strip again and lets autograd differentiate it there. Memory is a few strips,
and the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..block import MatrixBlock
from ..masks.intervals import KeyIntervals
from ..pytree import flatten, unflatten
from ..torch_state import in_functorch, without_autocast
from .sources import Part, RowSource, Strip, WeightStrip

__all__ = [
    "DenseForm",
    "Merge",
    "OfParts",
    "Question",
    "add_grads",
    "add_strips",
    "joint_shape",
    "need_first_order",
    "unowned",
    "walk_strips",
    "walk_tiles",
]

#: How many weights a strip may hold, all matrices together: a part of the cache of a CPU core; enough to fill a GPU.
STRIP_NUMBERS = 2**19
STRIP_NUMBERS_GPU = 2**26
#: The same for weights that a kernel writes, of which nothing else is made for a strip but what a question takes.
TILE_NUMBERS = 2**24
#: Rows of a strip that a head gets before heads are walked one by one, and rows that a mask's strip may have.
FEWEST_ROWS, TALLEST_MASKED = 64, 256

Merge = Literal["sum", "max", "lse"]
#: Whether outputs are of rows or tiles, where they are the merge of those of parts of each row's keys, weighed by all
#: keys; None where they take complete rows.
OfParts = Literal["rows", "tiles"] | None
#: Logarithms are those of scores, and hold where a weight underflows.
DenseForm = Literal["weights", "log-weights", "scores"]


class Question(Protocol):
    """A statistic of complete rows, as a node of a pytree: tensors in it get gradients."""

    @property
    def name(self) -> str:
        """The name that users know it by, for errors."""

    @property
    def row_fields(self) -> tuple[str, ...]:
        """Fields whose tensors (b, h, i, ...) have a row for each row of the matrix: a rank has those of its own."""

    @property
    def merges(self) -> tuple[Merge, ...]:
        """How the results of two strips for the same place become one, for each output."""

    @property
    def counts_sink(self) -> bool:
        """Whether a sink's share is one more column of the dense weights."""

    @property
    def dense_form(self) -> DenseForm:
        """The form of the matrices that `of_dense` takes."""

    @property
    def of_parts(self) -> OfParts:
        """Whether outputs are of rows or tiles, if parts of the keys answer it one by one."""

    def totals(self, shape: tuple[int, int, int, int], like: Tensor) -> list[Tensor]:
        """The results before any strip; shape is (b, h, i, j) of all sources broadcast."""

    def of_strip(self, strips: list[Strip], part: Part) -> list[tuple[Tensor, tuple[Any, ...]]]:
        """For each output the value of a strip, and the index of the total that it belongs to."""

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        """The textbook: outputs from dense matrices (b, h, i, j); where a sink counts, its share is the last column."""


def walk_strips(sources: Sequence[RowSource], question: Question) -> tuple[Tensor, ...]:
    """The outputs of a question to one or several matrices of equal lengths, with gradients in linear memory."""
    dtype = sources[0].like.dtype
    sources = [source.with_exact_distances() for source in sources]
    spec, tensors = flatten((tuple(sources), question))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        if in_functorch():
            raise NotImplementedError(
                "torch.func cannot follow a walk over strips, which has a backward of its own. "
                'engine="reference" is plain PyTorch, in quadratic memory; or use torch.autograd.grad.'
            )
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in _WalkNode.apply(spec, *tensors))
    return without_autocast(tensors[0], lambda: tuple(_forward(list(sources), question)[0]))


def _forward(sources: list[RowSource], question: Question) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs, and for each output that is a maximum the number of the strip that holds it."""
    like = sources[0].like
    if in_functorch():  # inside torch.vmap what is added to in place must have the batch of any tensor
        for x in flatten((tuple(sources), question))[1]:
            like = like + x.reshape(-1)[:0].to(like.dtype)
    totals = question.totals(joint_shape(sources), like)
    owners = unowned(question, totals)
    add_strips(sources, question, totals, owners)
    return totals, owners


def unowned(question: Question, totals: list[Tensor]) -> list[Tensor | None]:
    """For each total that is a maximum the number of the strip that holds it: none yet."""
    return [
        x.new_full(x.shape, -1, dtype=torch.int32) if merge == "max" else None
        for x, merge in zip(totals, question.merges, strict=True)
    ]


def _same_place(part: Part) -> Part:
    return part


def add_strips(
    sources: list[RowSource], question: Question, totals: list[Tensor], owners: list[Tensor | None],
    place: Callable[[Part], Part] = _same_place, first: int = 0,
) -> int:  # fmt: skip
    """Merge the values of all strips into the totals, in place.

    Args:
        sources: The matrices, or the same rectangle of all of them.
        question: What is to be answered.
        totals: Those of the question.
        owners: As of `unowned`.
        place: Where a part of the sources lies for the question, if they are a rectangle of its matrices.
        first: The number of the first strip.

    Returns:
        The number after that of the last strip.
    """
    n = first - 1
    for n, (part, visible) in enumerate(_parts(sources), first):
        strips = [source.cut(part).strip(part, v) for source, v in zip(sources, visible, strict=True)]
        _add_strip(question, question.of_strip(strips, place(part)), totals, owners, n)
    return n + 1


def _add_strip(
    question: Question, values: list[tuple[Tensor, tuple[Any, ...]]], totals: list[Tensor],
    owners: list[Tensor | None], n: int,
) -> None:  # fmt: skip
    """Merge the values of strip n into the totals."""
    for (value, where), total, owner, merge in zip(values, totals, owners, question.merges, strict=True):
        so_far = total[where]
        if owner is not None:
            larger = (value > so_far) | value.isnan()
            owner[where] = owner[where].masked_fill(larger, n)
            total[where] = torch.where(larger, value, so_far)
        else:
            total[where] = torch.logaddexp(so_far, value) if merge == "lse" else so_far + value


def walk_tiles(source: RowSource, question: Question, tiles: Callable[[slice, slice], Tensor]) -> list[Tensor]:
    """The outputs of a question to a matrix whose weights `tiles(rows, keys)` computes, of all its heads at once."""
    b, h, i, j = source.shape
    totals = question.totals(source.shape, source.like)
    owners = unowned(question, totals)
    height = max(1, TILE_NUMBERS // max(1, b * h * j))
    for n, start in enumerate(range(0, i, height)):
        rows, keys = slice(start, min(i, start + height)), slice(0, j)
        part = Part(slice(0, b), slice(0, h), MatrixBlock(rows, keys, source.offset, source.like.device))
        _add_strip(question, question.of_strip([WeightStrip(tiles(rows, keys))], part), totals, owners, n)
    return totals


def _backward(
    sources: list[RowSource], question: Question, outputs: list[Tensor], owners: list[Tensor | None],
    grads: list[Tensor | None], needs: list[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of all tensors of (sources, question) that need one."""
    if all(g is None for g in grads):
        return [None] * len(needs)
    spec, tensors = flatten((tuple(sources), question))
    zeros = [torch.zeros_like(t, dtype=_grad_dtype(t)) if n else t.new_zeros(()).expand(t.shape)
             for t, n in zip(tensors, needs, strict=True)]  # fmt: skip
    add_grads(sources, question, outputs, owners, grads, needs, unflatten(spec, zeros))
    return [z.to(t.dtype) if n else None for z, t, n in zip(zeros, tensors, needs, strict=True)]


def add_grads(
    sources: list[RowSource], question: Question, outputs: list[Tensor], owners: list[Tensor | None],
    grads: list[Tensor | None], needs: list[bool], totals: tuple[tuple[RowSource, ...], Question],
    place: Callable[[Part], Part] = _same_place, first: int = 0,
) -> int:  # fmt: skip
    """Add the gradients of all strips into `totals`, a tree like (sources, question); otherwise as `add_strips`."""
    grads_of_sources, grads_of_question = totals
    n = first - 1
    for n, (part, visible) in enumerate(_parts(sources), first):
        local_spec, local = flatten((tuple(source.cut(part) for source in sources), question))
        grads_of_part = flatten((tuple(source.cut(part) for source in grads_of_sources), grads_of_question))[1]
        wanted = [t.detach().to(_grad_dtype(t)) for t, need in zip(local, needs, strict=True) if need]
        places: list[tuple[Any, ...]] = []

        def values_of(*floats: Tensor, part: Part = part, visible: Any = visible, local: Any = (local_spec, local),
                      places: list[tuple[Any, ...]] = places) -> tuple[Tensor, ...]:  # fmt: skip
            rest = iter(floats)
            tree = unflatten(local[0], [next(rest) if need else t for t, need in zip(local[1], needs, strict=True)])
            strips = [source.strip(part, v) for source, v in zip(tree[0], visible, strict=True)]
            values = tree[1].of_strip(strips, place(part))
            places.extend(where for _, where in values)
            return tuple(value for (value, _), g in zip(values, grads, strict=True) if g is not None)

        # torch.func.vjp: inside an operator of a compiled graph torch.autograd records nothing.
        values, vjp = torch.func.vjp(values_of, *wanted)[:2]
        with_grad = [(g, where, x, owner, merge) for g, where, x, owner, merge in
                   zip(grads, places, outputs, owners, question.merges, strict=True) if g is not None]  # fmt: skip
        seeds = tuple(
            _seed(value, g[where], x[where], owner if owner is None else owner[where] == n, merge)
            for value, (g, where, x, owner, merge) in zip(values, with_grad, strict=True)
        )
        for g, z in zip(vjp(seeds), [z for z, need in zip(grads_of_part, needs, strict=True) if need], strict=True):
            z += g
    return n + 1


def _grad_dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _seed(value: Tensor, g: Tensor, output: Tensor, of_this_strip: Tensor | None, merge: Merge) -> Tensor:
    """The gradient of a strip's value, from that of the merged output. Of a maximum: where this strip holds it."""
    if of_this_strip is not None:
        return g.masked_fill(~of_this_strip, 0).to(value.dtype)
    if merge == "lse":
        share = (value.detach() - torch.where(output == -torch.inf, 0, output)).exp()
        return g * share
    return g.expand(value.shape).to(value.dtype)


def need_first_order() -> None:
    """Raise NotImplementedError where a backward is itself recorded by autograd."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "regard computes first derivatives; got create_graph=True, which asks for a second one. "
            'engine="reference" differentiates any number of times, in quadratic memory.'
        )


class _WalkNode(torch.autograd.Function):
    """The autograd node of a walk."""

    @staticmethod
    def forward(ctx: Any, spec: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        sources, question = unflatten(spec, list(tensors))
        outputs, owners = without_autocast(tensors[0], lambda: _forward(list(sources), question))
        ctx.spec, ctx.count = spec, len(tensors)
        ctx.has_owner = [owner is not None for owner in owners]
        ctx.save_for_backward(*tensors, *outputs, *(owner for owner in owners if owner is not None))
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        need_first_order()
        saved = ctx.saved_tensors
        tensors, outputs = list(saved[: ctx.count]), list(saved[ctx.count : ctx.count + len(grads)])
        of_maxima = iter(saved[ctx.count + len(grads) :])
        owners = [next(of_maxima) if has else None for has in ctx.has_owner]
        needs = list(ctx.needs_input_grad[1:])
        sources, question = unflatten(ctx.spec, tensors)
        return None, *without_autocast(
            tensors[0], lambda: _backward(list(sources), question, outputs, owners, list(grads), needs)
        )


# Which strips there are.


def joint_shape(sources: Sequence[RowSource]) -> tuple[int, int, int, int]:
    """(b, h, i, j) of all sources broadcast."""
    b, h, i, j = torch.broadcast_shapes(*(source.shape for source in sources))
    return b, h, i, j


def _parts(sources: list[RowSource]) -> Iterator[tuple[Part, list[Tensor | None]]]:
    """Strips that cover every visible cell once, each with the visible cells of every source."""
    b, h, rows, keys = joint_shape(sources)
    if 0 in (b, h, rows):
        return
    like, offset = sources[0].like, sources[0].offset
    budget = STRIP_NUMBERS_GPU if like.device.type == "cuda" else STRIP_NUMBERS
    hull = _hull([source.key_intervals() for source in sources], keys)
    per_cell = sum(source.numbers_per_cell for source in sources)
    per_row = max(1, _widest(hull, FEWEST_ROWS, keys)) * per_cell
    heads_at_once = h if h * per_row * FEWEST_ROWS <= budget else 1
    batch_at_once = b if b * heads_at_once * per_row * FEWEST_ROWS <= budget else 1
    budget //= batch_at_once * heads_at_once * per_cell
    height = max(1, min(rows, budget * per_cell // per_row))
    if hull is not None:
        height = min(height, TALLEST_MASKED)
        while height > 1 and height * _widest(hull, height, keys) > budget:  # a taller strip sees more keys
            height //= 2
    for start, first, end in _key_ranges(hull, rows, keys, height):
        block = MatrixBlock(slice(start, min(rows, start + height)), slice(first, end), offset, like.device)
        visible = [source.visible(block) for source in sources]
        for s in range(0, b, batch_at_once):
            for n in range(0, h, heads_at_once):
                yield Part(slice(s, s + batch_at_once), slice(n, n + heads_at_once), block), visible


def _hull(intervals: list[KeyIntervals | None], keys: int) -> tuple[Tensor, Tensor] | None:
    """First and end of the keys that each row sees in any of the matrices; None where one of them shows all."""
    hulls = []
    for x in intervals:
        if x is None:
            return None
        filled = x.lo < x.hi
        hulls.append((torch.where(filled, x.lo, keys).amin((0, 1)), torch.where(filled, x.hi, 0).amax((0, 1))))
    lo, hi = torch.stack([a for a, _ in hulls]).amin(0), torch.stack([z for _, z in hulls]).amax(0)
    return lo.cpu(), hi.cpu()


def _widest(hull: tuple[Tensor, Tensor] | None, height: int, keys: int) -> int:
    """The most keys that strips of some rows see."""
    if hull is None:
        return keys
    pad = -len(hull[0]) % height
    lo, hi = (
        torch.nn.functional.pad(x, (0, pad), value=n).view(-1, height) for x, n in zip(hull, (keys, 0), strict=True)
    )
    return int((hi.amax(1) - lo.amin(1)).amax())


def _key_ranges(
    hull: tuple[Tensor, Tensor] | None, rows: int, keys: int, height: int
) -> list[tuple[int, int, int]]:  # fmt: skip
    """For each strip its first row, and the range of keys that holds all that its rows see in any of the matrices."""
    starts = range(0, rows, height)
    if hull is None:
        return [(start, 0, keys) for start in starts]
    first, end = [int(x.min()) for x in hull[0].split(height)], [int(x.max()) for x in hull[1].split(height)]
    return [(start, min(a, z), z) for start, a, z in zip(starts, first, end, strict=True)]
