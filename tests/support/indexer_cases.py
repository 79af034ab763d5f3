"""Teachers and indexers for the kernels of `losses.indexer`, and a judge: in Triton's interpreter and on a GPU alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import regard
from regard.core.rows.key_choice import KeyChoice
from regard.engines.triton import indexer_pass
from regard.losses import index_weights

ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}


def some_cells(i: int, j: int, heads: int = 1) -> Tensor:
    cells = torch.rand(heads, i, j, generator=torch.Generator().manual_seed(3)) < 0.7
    cells[:, i // 2] = False  # a row with no key
    return cells


@dataclass(frozen=True)
class IndexerCase:
    """Sizes of both matrices, who sees whom in each, the teacher's score, and how large the scores of the index are."""

    heads: tuple[int, int] = (4, 2)  # of queries and of keys
    d: int = 16
    index_heads: int = 3
    index_d: int = 8
    batch: int = 1
    lengths: tuple[int, int] = (40, 40)
    mask: Any = None
    index_mask: Any = "same"
    score: str = "scaled_dot"
    times: float = 1.0
    measure: str = "kl"
    divided: bool = True
    mean: bool = False

    def leaves(self) -> list[Tensor]:
        """The teacher's queries and keys; queries, keys and weights of the index."""
        (h, g), (i, j), n, b = self.heads, self.lengths, self.index_heads, self.batch
        shapes = ((b, h, i, self.d), (b, g, j, self.d), (b, n, i, self.index_d), (b, j, self.index_d), (b, i, n))
        leaves = [torch.randn(shape) for shape in shapes]
        leaves[2] *= self.times
        return leaves

    def rows(self, leaves: list[Tensor]) -> Tensor:
        """The measure of every row."""
        q, k, *index = leaves

        def of(mask: Any) -> Any:
            return mask.to(q.device) if isinstance(mask, Tensor) else mask

        h = self.heads[0]
        scores = {  # of numbers that every type holds
            "scaled_dot": lambda: regard.ScaledDot(),
            "softcap": lambda: regard.ScaledDot().softcap(2.0),
            "alibi": lambda: regard.ScaledDot().alibi((torch.arange(h) + 1).to(q) / 4).sink(torch.zeros(h).to(q)),
            "bias": lambda: regard.ScaledDot().bias((torch.arange(k.shape[2]) % 5).to(q) / 4),
        }
        shares = torch.linspace(0, 2, h, device=q.device) if self.mean else None
        teacher = regard.weights(q, k, score=scores[self.score](), mask=of(self.mask))
        heads = teacher.detach().reduce_heads("mean" if self.mean else "sum", weights=shares, groups=1)
        student = index_weights(*index, of(self.mask if isinstance(self.index_mask, str) else self.index_mask))
        matrix = KeyChoice(heads, None) if self.divided else heads
        return getattr(matrix, self.measure)(student)


CASES = {
    "no mask": IndexerCase(),
    "causal, groups": IndexerCase(mask=regard.causal(), batch=2, lengths=(70, 70), index_d=16),
    "window": IndexerCase(mask=regard.window(20, 3), lengths=(77, 77), score="softcap"),
    "several intervals": IndexerCase(mask=~regard.window(2, 2), lengths=(50, 50), score="bias", index_heads=1),
    "a tensor": IndexerCase(mask=some_cells(41, 41), lengths=(41, 41), batch=2),
    "a tensor for each head": IndexerCase(mask=some_cells(33, 33, 4), index_mask=None, lengths=(33, 33)),
    "documents": IndexerCase(mask=regard.documents(torch.arange(64)[None] // 23), lengths=(64, 64), score="alibi"),
    "the index sees more": IndexerCase(mask=regard.window(9, 0), index_mask=regard.causal()),
    "forbidden keys": IndexerCase(mask=regard.causal(), index_mask=regard.window(12, 0)),
    "more keys than rows": IndexerCase(lengths=(20, 45), batch=2),
    "one row": IndexerCase(lengths=(1, 1), mask=regard.causal()),
    "huge scores": IndexerCase(mask=regard.causal(), times=1000.0),
    "cross-entropy": IndexerCase(mask=regard.causal(), measure="cross_entropy"),
    "cross-entropy of a mean": IndexerCase(mask=regard.causal(), measure="cross_entropy", divided=False, mean=True),
    "kl of a mean": IndexerCase(divided=False, mean=True),
    "many index heads": IndexerCase(mask=regard.causal(), index_heads=9, index_d=24, heads=(6, 1), d=40),
}


def compared(case: IndexerCase, leaves: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The measure of every row and gradients of the index for a fixed seed."""
    leaves = [x.detach().requires_grad_(n > 1) for n, x in enumerate(leaves)]
    rows = case.rows(leaves)
    seed = torch.linspace(-1, 2, rows.numel(), dtype=rows.dtype, device=rows.device).reshape(rows.shape)
    return rows.detach(), torch.autograd.grad(rows, leaves[2:], seed / rows.numel())


def judged(case: IndexerCase, dtype: torch.dtype, device: str = "cpu", times: int = 1) -> None:
    """Compare rows and gradients by kernels with float64 by strips; `times`: the call is repeated, to be replayed."""
    leaves = [x.to(device, dtype) for x in case.leaves()]
    want, exact = compared(case, [x.double() for x in leaves])
    finite = want.isfinite()
    # Roundings of a score count as much as it is large, tensor cores in three TF32 products.
    size = max(1.0, float(_largest_score(leaves)))
    for turn in range(times):
        calls: list[str] = []
        got, grads = _watched(case, leaves, calls)
        assert turn or calls == ["forward_pass", "backward"], f"by kernels: {calls}"  # later turns may be replayed
        assert torch.equal(got.isfinite(), finite), f"infinite rows: {got[~finite]} for {want[~finite]}"
        assert not got.isnan().any(), f"{int(got.isnan().sum())} nan"
        off = (got.double() - want)[finite].abs() - 2e-6 * want[finite].abs()
        assert off.numel() == 0 or off.max() <= 2e-6 * size, f"rows are off by {float(off.max()):.3g} of {size:.3g}"
        for name, g, e in zip(("q", "k", "w"), grads, exact, strict=True):
            assert g.dtype == dtype
            assert not g.isnan().any(), f"d{name}: {int(g.isnan().sum())} nan"
            e = e.double()
            # dI is rounded to the inputs' type before its product, and the sum of the products after it. A score that is off by a
            # rounding of its size makes a weight, and dI with it, wrong by that share.
            bound = 2 * ROUNDOFF[dtype] + size * 2.0**-24
            error = float((g.double() - e).norm() / e.norm().clamp(min=1e-30))
            assert error <= bound, f"d{name} is off by {error:.3g}, allowed {bound:.3g}"
            worst = float((g.double() - e).abs().max() / e.abs().max().clamp(min=1e-30))
            assert worst <= 2 * bound, (
                f"a cell of d{name} is off by {worst:.3g} of the largest, allowed {2 * bound:.3g}"
            )


def _largest_score(leaves: list[Tensor]) -> Tensor:
    _, _, q, k, w = (x.double() for x in leaves)
    return (w.mT.unsqueeze(-1) * (q @ k.unsqueeze(1).mT).clamp(min=0)).sum(1).abs().max()


def _watched(case: IndexerCase, leaves: list[Tensor], calls: list[str]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The answers, and which functions of the pass gave them."""
    functions = {name: getattr(indexer_pass, name) for name in ("forward_pass", "backward")}

    def watch(name: str) -> Any:
        def called(*args: Any) -> Any:
            calls.append(name)
            return functions[name](*args)

        return called

    try:
        for name in functions:
            setattr(indexer_pass, name, watch(name))
        return compared(case, leaves)
    finally:
        for name, function in functions.items():
            setattr(indexer_pass, name, function)
