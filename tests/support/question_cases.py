"""Random questions about complete rows, heads and two matrices, against formulas on dense weights in float64.

A case draws two matrices of one shape: scores, masks, modifiers, heads, batch axes, types, strides, sizes of scores and
keys that nobody sees. Every answer and its gradients are compared with `Rows`, the textbook, which shares no code with
the library. What roundoff may do is measured, not guessed: the textbook in float32 beside that in float64 says how far
scores and logarithms of weights of these very tensors are off, and answers may be a few times as far.

`python tests/support/question_cases.py FIRST COUNT` runs many and prints those that fail.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
from regard.core.rows import strips
from regard.engines import blockwise, numba
from regard.engines.numba import comparison, head_rows, tile_pool

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.judge import MASKS, SCORES, Sizes, Truth, draw

LENGTHS = (1, 2, 3, 5, 7, 11, 13, 16)
ULP = {torch.float64: 2.0**-52, torch.float32: 2.0**-23}


@dataclass
class Rows:
    """Weights (b, h, i, j) and their logarithms, 0 where hidden; a sink's share is (b, h, i)."""

    w: Tensor
    log_w: Tensor
    sees: Tensor
    offset: int
    s: Tensor | None = None
    sink: Tensor | None = None
    log_sink: Tensor | None = None

    @staticmethod
    def of(truth: Truth) -> Rows:
        lse = torch.where(truth.lse == -math.inf, 0, truth.lse)
        log_w = torch.where(truth.visible, truth.s - lse.unsqueeze(-1), 0)
        sink = truth.sink_share
        log_sink = None if sink is None else torch.where(sink > 0, sink, 1).log()
        return Rows(truth.w, log_w, truth.visible, truth.offset, truth.s, sink, log_sink)

    def outcomes(self, sink: bool) -> tuple[Tensor, Tensor, Tensor]:
        """p, log p and which are possible; with a sink's share as one more column."""
        if not sink:
            return self.w, self.log_w, self.sees
        zero = self.w.new_zeros(self.w.shape[:-1])
        share, log = (zero, zero) if self.sink is None else (self.sink, self.log_sink)
        there = torch.full_like(zero, self.sink is not None, dtype=torch.bool)
        pairs = ((self.w, share), (self.log_w, log), (self.sees, there))
        return tuple(torch.cat([a, b.unsqueeze(-1)], -1) for a, b in pairs)  # type: ignore[return-value]

    def heads(self, by: str, groups: int, shares: Tensor) -> Rows:
        """Adjacent heads together, in so many groups; `shares` (h,) are factors of a sum."""

        def joined(w: Tensor, log: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            w, log, there = (x.unflatten(1, (groups, -1)) for x in (w, log, there))
            if by == "max":
                low = torch.where(there, log, -math.inf).amax(2)
                sees = there.any(2)
                return w.amax(2), torch.where(sees, low, 0), sees
            factor = shares.to(w.dtype).reshape(1, groups, -1, *[1] * (w.ndim - 3))
            there = there & (factor > 0)
            sees = there.any(2)
            logs = torch.where(there, log + torch.where(factor > 0, factor, 1).log(), -math.inf)
            lse = torch.where(sees.unsqueeze(2), logs, 0).logsumexp(2)
            return (w * factor).sum(2), torch.where(sees, lse, 0), sees

        w, log_w, sees = joined(self.w, self.log_w, self.sees)
        if self.sink is None:
            return Rows(w, log_w, sees, self.offset)
        sink, log_sink, _ = joined(self.sink, self.log_sink, torch.ones_like(self.sink, dtype=torch.bool))
        return Rows(w, log_w, sees, self.offset, None, sink, log_sink)

    def part(self, rows: slice) -> Rows:
        cut = [
            None if x is None else x[:, :, rows]
            for x in (self.w, self.log_w, self.sees, self.s, self.sink, self.log_sink)
        ]
        return Rows(cut[0], cut[1], cut[2], self.offset + rows.start, *cut[3:])  # type: ignore[arg-type]

    @property
    def at(self) -> Tensor:
        return torch.arange(self.w.shape[-2])[:, None] + self.offset

    @property
    def distance(self) -> Tensor:
        return (self.at - torch.arange(self.w.shape[-1])).abs()


# Two matrices.


def _pair(a: Rows, b: Rows) -> list[tuple[Tensor, Tensor, Tensor]]:
    sink = a.sink is not None or b.sink is not None
    return [x.outcomes(sink) for x in (a, b)]


def _terms(a: Rows, b: Rows, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    (p, log_p, in_p), (_, log_q, in_q) = _pair(a, b)
    rows = torch.where(in_p & in_q, p * of(log_p, log_q), 0).sum(-1)
    return rows.masked_fill((in_p & ~in_q).any(-1), math.inf)


def _js(a: Rows, b: Rows) -> Tensor:
    (p, log_p, in_p), (q, log_q, in_q) = _pair(a, b)
    both, log2 = in_p & in_q, math.log(2)
    middle = torch.where(both, torch.logaddexp(log_p, log_q), torch.where(in_p, log_p, log_q)) - log2
    of_p, of_q = torch.where(in_p, p * (log_p - middle), 0), torch.where(in_q, q * (log_q - middle), 0)
    return (of_p.sum(-1) + of_q.sum(-1)) / 2


def _weights(a: Rows, b: Rows) -> tuple[Tensor, Tensor]:
    (p, _, _), (q, _, _) = _pair(a, b)
    return p, q


MEASURES: dict[str, Callable[[Rows, Rows], Tensor]] = {
    "kl": lambda a, b: _terms(a, b, lambda x, y: x - y),
    "cross_entropy": lambda a, b: _terms(a, b, lambda x, y: -y),
    "js": _js,
    "overlap": lambda a, b: torch.minimum(*_weights(a, b)).sum(-1),
    "total_variation": lambda a, b: (_weights(a, b)[0] - _weights(a, b)[1]).abs().sum(-1) / 2,
}


# One matrix: (ask, formula, sharp): `sharp` has a kink, whose gradient roundoff may move to another cell.

Ask = Callable[[Any], Tensor]
Formula = Callable[[Rows], Tensor]


@dataclass
class Question:
    name: str
    ask: Ask
    formula: Formula
    sharp: bool = False


def _tile(x: Rows, r: slice, c: slice, by: str) -> Tensor:
    cells = (x.s if by == "lse" else x.w)[..., r, c].flatten(-2)  # type: ignore[index]
    if not cells.shape[-1]:
        return cells.new_full(cells.shape[:-1], -math.inf if by == "lse" else 0)
    if by == "lse":
        there = (cells > -math.inf).any(-1)
        return torch.where(there, torch.where(there.unsqueeze(-1), cells, 0).logsumexp(-1), -math.inf)
    return {"sum": cells.sum, "mean": cells.mean, "max": cells.amax}[by](-1)


def _tiles(x: Rows, rows: list[slice], cols: list[slice], by: str) -> Tensor:
    return torch.stack([torch.stack([_tile(x, r, c, by) for c in cols], -1) for r in rows], -2)


def _blocks(size: int, n: int) -> list[slice]:
    return [slice(r, min(n, r + size)) for r in range(0, n, size)]


def _cut(count: int, start: int, stop: int) -> list[slice]:
    return [slice(start + r * (stop - start) // count, start + (r + 1) * (stop - start) // count) for r in range(count)]


def _gathered(x: Rows, keys: Tensor) -> Tensor:
    keys = keys.expand(*x.w.shape[:3], -1)
    return torch.where(keys >= 0, x.w.gather(-1, keys.clamp(min=0)), 0)


def _log_mass(x: Rows, cells: Tensor) -> Tensor:
    there = x.sees & cells
    sees = there.any(-1)
    logs = torch.where(there, x.log_w, -math.inf)
    return torch.where(sees, torch.where(sees.unsqueeze(-1), logs, 0).logsumexp(-1), -math.inf)


def _induction(tokens: list[int], at: Tensor) -> Tensor:
    earlier = [[n + 1 for n in range(row) if tokens[n] == tokens[row]] for row in at.flatten().tolist()]
    return torch.tensor([rows[-1] if rows else -1 for rows in earlier])[:, None]


def _entropy(x: Rows) -> Tensor:
    p, log_p, _ = x.outcomes(x.sink is not None)
    return -(p * log_p).sum(-1)


def questions(chance: random.Random, i: int, j: int, offset: int, together: bool, precomputed: bool) -> list[Question]:
    """What can be item of one matrix, with arguments drawn."""
    seed = torch.Generator().manual_seed(chance.randrange(2**31))
    cells = torch.rand(i, j, generator=seed) < 0.5
    keys = torch.randint(-1, j, (i, 3), generator=seed)
    r, c = chance.randint(1, i), chance.randint(1, j)
    tiles = chance.randint(1, i + 1), chance.randint(1, j + 1)
    window = slice(chance.randrange(i), i), slice(chance.randrange(j), j)
    ids = torch.randint(-1, 3, (j,), generator=seed)
    ids[0] = 2
    spans = [slice(0, chance.randint(0, j)), [chance.randrange(j)], (torch.arange(j) % 2 == 0)]
    flags = torch.stack([torch.arange(j) < spans[0].stop, torch.arange(j) == spans[1][0], spans[2]])
    row_ids = torch.randint(-1, 2, (i,), generator=seed)
    row_ids[-1] = 1
    edges = sorted(chance.sample(range(i + j), 2)) if i + j > 1 else [0, 1]
    blocks = torch.rand(-(-i // r), -(-j // c), generator=seed) < 0.5
    tokens = [chance.randrange(3) for _ in range(max(j, i + offset))]
    before = chance.randint(-3, 3)
    back, w0 = chance.randint(0, 3), chance.randint(0, 3)
    bys = ["sum", "mean", "max"] + ["lse"] * (not together and not precomputed)
    by = chance.choice(bys)
    values = torch.randn(j, 2, generator=seed, dtype=torch.float64)

    def spread(x: Tensor) -> Tensor:
        return x.repeat_interleave(r, 0).repeat_interleave(c, 1)[:i, :j]

    def segments(x: Rows, rows: Tensor) -> Tensor:
        mass = torch.stack([(x.w * f).sum(-1) for f in flags], -1)
        return torch.stack([mass[:, :, f].sum(-2) / max(1, int(f.sum())) for f in rows], -2)

    listed = [
        Question(f"pool{tiles} by {by}", lambda W: W.pool(*tiles, by=by), lambda x: _tiles(x, _cut(tiles[0], 0, i), _cut(tiles[1], 0, j), by), by == "max"),
        Question(
            f"pool in {window} by {by}", lambda W: W.pool(2, 2, *window, by=by),
            lambda x: _tiles(x, _cut(2, window[0].start, i), _cut(2, window[1].start, j), by), by == "max",
        ),
        Question(f"blocks{r, c} by {by}", lambda W: W.pool_blocks(r, c, by=by), lambda x: _tiles(x, _blocks(r, i), _blocks(c, j), by), by == "max"),
        Question("rows × blocks", lambda W: W.pool_blocks(1, c), lambda x: _tiles(x, _blocks(1, i), _blocks(c, j), "sum")),
        Question("recall", lambda W: W.recall(cells), lambda x: (x.w * cells).sum(-1)),
        Question(
            "recall of a mask", lambda W: W.recall(regard.window(back, w0) & cells),
            lambda x: (x.w * (cells & (x.at - torch.arange(j) <= back) & (torch.arange(j) - x.at <= w0))).sum(-1),
        ),
        Question("recall of blocks", lambda W: W.recall(blocks, block=(r, c)), lambda x: (x.w * spread(blocks)).sum(-1)),
        Question("log_mass", lambda W: W.log_mass(cells), lambda x: _log_mass(x, cells)),
        Question("log_mass of a function", lambda W: W.log_mass(lambda a, b: (a + b) % 3 == 0), lambda x: _log_mass(x, (x.at + torch.arange(j)) % 3 == 0)),
        Question("segments by id", lambda W: W.segment_mass(ids), lambda x: torch.stack([(x.w * (ids == n)).sum(-1) for n in range(3)], -1)),
        Question("segments", lambda W: W.segment_mass(spans), lambda x: torch.stack([(x.w * f).sum(-1) for f in flags], -1)),
        Question(
            "segments of rows", lambda W: W.segment_mass(spans, rows=row_ids, by="mean"),
            lambda x: segments(x, torch.stack([row_ids == n for n in range(2)])),
        ),
        Question("gather", lambda W: W.gather(keys), lambda x: _gathered(x, keys)),
        Question(
            f"offset {before}", lambda W: W.offset_mass(before),
            lambda x: _gathered(x, torch.where((x.at - before >= 0) & (x.at - before < j), x.at - before, -1)).squeeze(-1),
        ),
        Question("variance", lambda W: W.distance_variance(), lambda x: (x.w * (x.distance - (x.w * x.distance).sum(-1, keepdim=True)) ** 2).sum(-1)),
        Question(
            f"histogram {edges}", lambda W: W.distance_histogram([0, *edges[edges[0] == 0 :]]),
            lambda x: torch.stack([
                (x.w * ((x.distance >= a) & (x.distance < z))).sum(-1)
                for a, z in zip([0, *edges[edges[0] == 0 :]], edges[edges[0] == 0 :], strict=False)
            ], -1),
        ),
        Question("@ values", lambda W: W @ values.to(W.dtype), lambda x: x.w @ values.to(x.w.dtype)),
        Question("received", lambda W: W.received(), lambda x: x.w.sum(-2)),
        Question("mass", lambda W: W.mass(spans[2]), lambda x: (x.w * spans[2]).sum(-1)),
        Question("entropy", lambda W: W.entropy(), _entropy),
        Question("topk", lambda W: W.topk(min(3, j)).values, lambda x: x.w.topk(min(3, j)).values, True),
        Question("row", lambda W: W.row(i - 1), lambda x: x.w[..., -1, :]),
        Question("column", lambda W: W.column(j // 2), lambda x: x.w[..., j // 2]),
        Question("cells", lambda W: W[..., i // 2 :, : j // 2 + 1] if not together else W[i // 2 :, : j // 2 + 1], lambda x: x.w[..., i // 2 :, : j // 2 + 1]),
        Question("dense", lambda W: W.dense(), lambda x: x.w),
        Question(
            "some rows", lambda W: W.rows(slice(i // 2, i)).segment_mass(spans), lambda x: segments(x.part(slice(i // 2, i)), torch.eye(i - i // 2).bool()),
        ),
        Question("log_mass of some rows", lambda W: W.rows(slice(i // 2, i)).log_mass(regard.window(back, w0)),
            lambda x: _log_mass(y := x.part(slice(i // 2, i)), (y.at - torch.arange(j) <= back) & (torch.arange(j) - y.at <= w0))),
    ]  # fmt: skip
    if offset >= 0 and offset + i <= j:
        listed.append(
            Question(
                "induction",
                lambda W: W.induction_mass(tokens[:j]),
                lambda x: _gathered(x, _induction(tokens, x.at)).squeeze(-1),
            )
        )
    return listed


@dataclass
class Comparison:
    """A question to the matrices of a case: what the library answers and the formula, of leaves by side."""

    name: str
    ask: Callable[[dict[Side, list[Tensor]], str], Tensor]
    formula: Callable[[dict[Side, list[Tensor]]], Tensor]
    one_head: bool
    sharp: bool
    slack: float = 1.0  # terms that are added up in every cell
    size: float = 1.0  # of the largest term


# Two matrices that share their lengths and nothing else.


class Side:
    """One matrix: leaves in float64 that its type holds exactly, and how the library and the textbook see them."""

    def __init__(self, chance: random.Random, n: Sizes, dtype: torch.dtype, batch: str, one_head: bool) -> None:
        self.n, self.dtype, self.batch, self.one_head = n, dtype, batch, one_head
        self.parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.align = chance.choice(("start", "end"))
        self.offset = n.j - n.i if self.align == "end" else 0
        self.strided, self.poison = chance.random() < 0.3, chance.random() < 0.3
        self.scale = chance.choice((1.0,) * 6 + (30.0, 1000.0))
        batched = batch == "none"
        self.mask = chance.choice(
            [m for m in MASKS if not (batched and ("padding" in m.name or "documents" in m.name or "first" in m.name))]
        )
        self.kind = chance.choice(("score",) * 8 + ("indexer", "precomputed"))
        if self.kind == "indexer" and (n.h > 1 or n.g > 1):
            self.kind = "score"
        self.score = chance.choice(SCORES)
        if one_head and "head" in self.score.name:
            self.score = SCORES[0]
        self.n = n = n._replace(c=n.d + 2 if self.score.sizes_differ and self.kind == "score" else n.d)
        parameters: list[Tensor] = []
        if self.kind == "precomputed":
            s = draw(n.b, n.h, n.i, n.j).masked_fill(~self._visible(), -math.inf)
            x = [torch.nan_to_num(s.softmax(-1))]
        elif self.kind == "indexer":
            x = [draw(n.b, 3, n.i, n.d), draw(n.b, n.j, n.d), draw(n.b, n.i, 3)]
        else:
            x = [draw(*n.q, times=self.scale), draw(*n.k)]
            parameters = self.score.parameters(n)
        self.leaves = [t.to(dtype).double() for t in x] + [t.to(self.parameter_dtype).double() for t in parameters]
        self.count = len(x)

    def __str__(self) -> str:
        what = self.score.name if self.kind == "score" else self.kind
        flags = ("strided " if self.strided else "") + ("poison " if self.poison else "")
        return f"[{what} | {self.mask.name} | {self.dtype} | {self.n} | {self.align} | ×{self.scale:g} | batch {self.batch} | one head {self.one_head} | {flags}]"

    def _visible(self) -> Tensor:
        i, j = torch.arange(self.n.i)[:, None] + self.offset, torch.arange(self.n.j)[None]
        return self.mask.visible(self.n, i, j)

    def _axes(self, x: Tensor, heads: bool = True) -> Tensor:
        """(b, h, x, y) with the batch axes of this case."""
        x = x.unsqueeze(0) if self.batch == "two" else x[0] if self.batch == "none" else x
        return x.squeeze(-3) if self.one_head and heads else x

    def library(self, leaves: list[Tensor], engine: str) -> regard.Weights:
        x = [t.to(self.dtype) for t in leaves[: self.count]]
        parameters = [t.to(self.parameter_dtype) for t in leaves[self.count :]]
        if self.kind == "precomputed":
            return regard.Weights.from_dense(self._axes(x[0]))
        mask = self.mask.make(self.n)
        if isinstance(mask, Tensor) and mask.ndim == 4:
            mask = self._axes(mask)
        elif self.one_head and isinstance(mask, Tensor) and mask.ndim > 2:
            mask = mask.squeeze(-3)
        if self.kind == "indexer":
            packed = torch.cat([x[0].transpose(-3, -2).flatten(-2), x[2]], -1).unsqueeze(1)
            q, k, score = packed, x[1].unsqueeze(1), regard.core.scores.kinds.Indexer(3)
        else:
            q, k = x
            parameters = [self._axes(p) if p.ndim == 4 else p for p in parameters]
            score = self.score.make(*parameters)
        if self.strided:
            q, k = q.mT.contiguous().mT, k.transpose(1, 2).contiguous().transpose(1, 2)
        if self.poison:
            seen = self._visible().expand(self.n.b, self.n.h, -1, -1)
            nobody = ~seen.unflatten(1, (self.n.g, -1)).any((2, 3))
            k = torch.where(nobody.unsqueeze(-1), math.nan, k)
        return regard.weights(self._axes(q), self._axes(k), score=score, mask=mask, align=self.align, engine=engine)

    def truth(self, leaves: list[Tensor], dtype: torch.dtype = torch.float64) -> Rows:
        n = self.n
        x = [t.to(dtype) for t in leaves]
        if self.kind == "precomputed":
            sees = x[0] > 0
            return Rows(x[0], torch.where(sees, x[0], 1).log(), sees, self.offset)
        if self.kind == "indexer":
            products = torch.einsum("bnid,bjd->bnij", x[0], x[1]).relu()
            s = torch.einsum("bin,bnij->bij", x[2], products).unsqueeze(1)
            return Rows.of(Truth(s, self._visible(), None, self.offset))
        q, k, *parameters = x
        return Rows.of(Truth.of(self.score, self.mask, n, q, k, parameters, self.offset, dtype))

    def off(self) -> float:
        """How far plain PyTorch in float32 is off in scores and in logarithms of weights."""
        exact, plain = self.truth(self.leaves), self.truth(self.leaves, torch.float32)
        there = exact.sees
        logs = [(exact.log_w, plain.log_w)] + ([] if exact.s is None else [(exact.s, plain.s)])
        if exact.log_sink is not None:
            logs.append((exact.log_sink, plain.log_sink))
        errors = [
            float((a - b)[there].abs().max())
            if a.shape == there.shape and there.any()
            else float((a - b).abs().nan_to_num(0, 0).max())
            for a, b in logs
        ]
        size = float(exact.log_w.abs().max()) + (
            float(exact.s[there].abs().max()) if exact.s is not None and there.any() else 0
        )
        return max(errors) + 2.0**-23 * (4 + size + math.sqrt(self.n.j))


class Case:
    """Two sides, and everything item of them."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        self.chance = chance = random.Random(number)
        self.number = number
        g, b = chance.choice((1, 1, 2)), chance.choice((1, 2))
        h = g * chance.choice((1, 2, 3))
        i, j, d = chance.choice(LENGTHS), chance.choice(LENGTHS), chance.choice((1, 3, 4, 8))
        batch = chance.choice(("one", "two", "none") if b == 1 else ("one", "two"))
        n = Sizes(b=b, h=h, g=g, i=i, j=j, d=d, c=d, e=2)
        other = n if chance.random() < 0.7 else n._replace(h=1, g=1)
        if chance.random() < 0.3 and n.h % 2 == 0:
            other = n._replace(g=n.h)
        one_head = [batch == "none" and x.h == 1 and chance.random() < 0.5 for x in (n, other)]
        narrow = (torch.float32, torch.float32, torch.float16, torch.bfloat16)
        dtypes = [torch.float64] * 2 if chance.random() < 0.45 else [chance.choice(narrow) for _ in "ab"]
        self.sides = [
            Side(chance, m._replace(d=m.d), t, batch, o) for m, t, o in zip((n, other), dtypes, one_head, strict=True)
        ]
        self.dtype = torch.float64 if dtypes[0] == torch.float64 else torch.float32
        self.engine = chance.choice(("auto", "auto", "auto", "blockwise", "reference"))
        self.tile = chance.choice((None, (3, 4), (5, 24), (2, 7)))
        self.strip = chance.choice((None, 1, 40))
        self.compiled = chance.random() < 0.8
        self.n, self.batch = n, batch

    def __str__(self) -> str:
        return f"case {self.number}: {self.engine}, tile {self.tile}, strip {self.strip}, compiled {self.compiled}\n  {self.sides[0]}\n  {self.sides[1]}"

    def shape(self, want: Tensor, one_head: bool) -> tuple[int, ...]:
        """The shape of an answer whose formula is `want` (b, h, ...)."""
        head = () if one_head else want.shape[1:2]
        outer = {"none": (), "one": want.shape[:1], "two": (1, *want.shape[:1])}[self.batch]
        return (*outer, *head, *want.shape[2:])

    def failures(self, step: int = 1) -> Iterator[str]:
        """What is wrong, of every `step`th question."""
        with _walks(self.tile, self.strip, self.compiled):
            for item in list(self._questions())[self.number % step :: step]:
                try:
                    fault = self._compare(item)
                except Exception as error:
                    fault = f"{type(error).__name__}: {error}"
                if fault:
                    yield f"{item.name}: {fault}"

    def _questions(self) -> Iterator[Comparison]:
        a, b = self.sides
        for side in self.sides:
            yield from self._of_one(side, f"{side.score.name}: ", side.library, side.truth, side.one_head)
            if not side.one_head:
                name, matrix, rows, one_head = self._together(side)
                yield from self._of_one(side, name, matrix, rows, one_head, together=True)
        for name, formula in MEASURES.items():
            kink = name in ("overlap", "total_variation")
            yield Comparison(
                name, lambda L, e, name=name: getattr(a.library(L[a], e), name)(b.library(L[b], e)),
                lambda L, f=formula: f(a.truth(L[a]), b.truth(L[b])), a.one_head and b.one_head, kink,
            )  # fmt: skip
            if a.one_head:
                continue
            reduced, matrix, rows, one_head = self._together(a)
            kink |= reduced.startswith("max")
            if (n := rows(a.leaves).w.shape[1]) not in (1, b.n.h) and b.n.h != 1:
                continue
            one_head &= b.one_head
            yield Comparison(
                f"{reduced}{name}, {n}", lambda L, e, m=matrix, name=name: getattr(m(L[a], e), name)(b.library(L[b], e)),
                lambda L, f=formula, r=rows: f(r(L[a]), b.truth(L[b])), one_head, kink, a.n.h,
            )  # fmt: skip
            yield Comparison(
                f"{name} to {reduced}{n}", lambda L, e, m=matrix, name=name: getattr(b.library(L[b], e), name)(m(L[a], e)),
                lambda L, f=formula, r=rows: f(b.truth(L[b]), r(L[a])), one_head, kink, a.n.h,
            )  # fmt: skip

    def _of_one(
        self, side: Side, name: str, matrix: Any, rows: Any, one_head: bool, together: bool = False
    ) -> Iterator[Comparison]:
        precomputed = side.kind == "precomputed"
        for q in questions(self.chance, self.n.i, self.n.j, side.offset, together, precomputed):
            if precomputed and self.n.i != self.n.j and _positional(q.name):
                continue
            if together and q.name == "cells" and not one_head:
                continue
            yield Comparison(
                name + q.name, lambda L, e, q=q: q.ask(matrix(L[side], e)), lambda L, q=q: q.formula(rows(L[side])),
                one_head, q.sharp or name.startswith("max"), side.n.h if together else 1,
                max(self.n.i, self.n.j) ** 2 if q.name == "variance" else 1,
            )  # fmt: skip

    def _together(self, side: Side) -> tuple[str, Any, Any, bool]:
        """Heads together: their name, the library's matrix, the textbook's, and whether it has no head axis."""
        by, options, groups, numbers, shares = self._reduction(side)
        return (
            f"{by} {options} ",
            lambda leaves, engine: side.library(leaves, engine).reduce_heads(by, **options),
            lambda leaves: _reduced(side.truth(leaves), by, groups, numbers, shares),
            "groups" not in options,
        )

    def _reduction(self, side: Side) -> tuple[str, dict[str, Any], int, list[int], Tensor]:
        """Options of reduce_heads, and what they mean: groups, heads and factors."""
        chance, h = self.chance, side.n.h
        by, options = chance.choice(("mean", "sum", "max")), {}
        numbers, groups = list(range(h)), 1
        if chance.random() < 0.3:
            numbers = [chance.randrange(h) for _ in range(chance.randint(1, h))]
            options["heads"] = [x - h * (chance.random() < 0.3) for x in numbers]
        elif chance.random() < 0.5:
            groups = chance.choice([x for x in range(1, h + 1) if h % x == 0])
            options["groups"] = groups
            if side.kind == "score" and chance.random() < 0.5:
                options["groups"], groups = "kv", side.n.g
        shares = torch.ones(len(numbers)).double()
        if by != "max" and chance.random() < 0.5:
            shares = torch.tensor([chance.choice((0.5, 1.0, 2.0)) for _ in numbers]).double()
            if len(numbers) // groups > 1 and chance.random() < 0.3:
                shares[0] = 0
            options["weights"] = shares
        if by == "mean":
            shares = (
                shares.unflatten(0, (groups, -1)) / shares.unflatten(0, (groups, -1)).sum(-1, keepdim=True)
            ).flatten()
        return by, options, groups, numbers, shares

    def _compare(self, item: Comparison) -> str | None:
        ask, formula, one_head, sharp = item.ask, item.formula, item.one_head, item.sharp
        ours = {s: [x.clone().requires_grad_() for x in s.leaves] for s in self.sides}
        theirs = {s: [x.clone().requires_grad_() for x in s.leaves] for s in self.sides}
        with torch.inference_mode() if self.number % 3 else torch.no_grad():
            alone = ask({s: s.leaves for s in self.sides}, self.engine)
        got, want = ask(ours, self.engine), formula(theirs)
        if got.dtype != self.dtype:
            return f"dtype {got.dtype}"
        if tuple(got.shape) != self.shape(want, one_head):
            return f"shape {tuple(got.shape)}, wanted {self.shape(want, one_head)}"
        r = max(s.off() for s in self.sides) * item.slack * (1 if self.dtype == torch.float32 else 2.0**-29)
        got, alone, flat = got.double().reshape(want.shape), alone.double().reshape(want.shape), want.detach()
        finite = flat.isfinite()
        scale = max(float(item.size), float(flat[finite].abs().max()) if finite.any() else 0.0)
        for what, x in (("with gradients", got), ("without", alone)):
            if not torch.equal(x[~finite], flat[~finite]):
                return f"{what}: {x[~finite]} where {flat[~finite]}"
            if not bool(x[finite].isfinite().all()):
                return f"{what}: not finite"
            if finite.any() and (error := float((x - flat)[finite].detach().abs().max())) > 8 * r * scale:
                return f"{what}: off by {error:.3g}, {error / (r * scale):.3g} of what roundoff does"
        if not want.requires_grad:
            return None
        if sharp and (self.dtype == torch.float32 or any(s.kind == "precomputed" for s in self.sides)):
            return None
        seed = torch.where(
            finite, torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), 0
        )
        every = lambda x: [t for s in self.sides for t in x[s]]  # noqa: E731
        every_leaf = every({s: s.leaves for s in self.sides})
        grads = torch.autograd.grad(got, every(ours), seed, allow_unused=True, retain_graph=True)
        again = torch.autograd.grad(got, every(ours), seed, allow_unused=True)
        exact = torch.autograd.grad(want, every(theirs), seed, allow_unused=True)
        size = max([1.0] + [float(x.detach().abs().max()) for x in every(ours)])
        for n, (g, g2, e) in enumerate(zip(grads, again, exact, strict=True)):
            e = torch.zeros_like(every(ours)[n]) if e is None else e
            if g is None:
                if float(e.abs().max()) > 1e-12:
                    return f"gradient {n} is missing"
                continue
            if not torch.allclose(g, g2, rtol=1e-4, atol=1e-6 * size * scale):
                return f"gradient {n} is another one the second time"
            if not g.isfinite().all():
                return f"gradient {n} is not finite"
            # A 16-bit leaf rounds its gradient.
            narrow = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
            own = max(narrow.get(s.dtype, 0.0) for s in self.sides)
            allowed = 32 * r * scale * size * self.n.i * self.n.j + own * float(e.abs().max()) + (6e-5 if own else 0)
            # At a weight of 0 that exists already, logarithms have no slope.
            leaf = every(ours)[n].detach()
            smooth = (
                leaf > 0
                if any(s.kind == "precomputed" and s.leaves[0] is every_leaf[n] for s in self.sides)
                else leaf == leaf
            )
            if (error := float((g - e)[smooth].abs().max()) if smooth.any() else 0.0) > allowed:
                return f"gradient {n} is off by {error:.3g} of {float(e.abs().max()):.3g}; allowed {allowed:.3g}"
        return None


def _reduced(x: Rows, by: str, groups: int, numbers: list[int], shares: Tensor) -> Rows:
    chosen = [None if t is None else t[:, numbers] for t in (x.w, x.log_w, x.sees, x.s, x.sink, x.log_sink)]
    return Rows(chosen[0], chosen[1], chosen[2].expand_as(chosen[0]), x.offset, *chosen[3:]).heads(by, groups, shares)  # type: ignore[arg-type,union-attr]


def _positional(name: str) -> bool:
    return name.startswith(("offset", "variance", "histogram", "induction", "recall of a mask", "log_mass of"))


@contextmanager
def _walks(tile: tuple[int, int] | None, strip: int | None, compiled: bool) -> Iterator[None]:
    """Engines that walk in small tiles and strips; without compiled kernels as under REGARD_COMPILED=0."""
    modules = (blockwise, numba, head_rows, tile_pool)
    own = [(m, m._tile_size) for m in modules]
    enabled, numba.enabled = numba.enabled, numba.enabled and compiled
    numbers, blocks = strips.STRIP_NUMBERS, (comparison.BLOCK_I, comparison.BLOCK_J)
    try:
        if tile is not None:
            for m in modules:
                m._tile_size = lambda problem: tile
            comparison.BLOCK_I, comparison.BLOCK_J = tile
        strips.STRIP_NUMBERS = strip or numbers
        yield
    finally:
        strips.STRIP_NUMBERS, numba.enabled = numbers, enabled
        comparison.BLOCK_I, comparison.BLOCK_J = blocks
        for m, tile_size in own:
            m._tile_size = tile_size


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    for number in range(first, first + count):
        case = Case(number)
        if faults := list(case.failures()):
            print(case, *faults, sep="\n    ", flush=True)
    print(f"cases {first} to {first + count - 1} done")
