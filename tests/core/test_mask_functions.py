"""The law of masks that are functions: their cells are evaluated once for a question, and become what kernels read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard.core.block import MatrixBlock
from regard.core.masks import lowering
from regard.core.masks.intervals import Geometry
from regard.core.masks.kinds import Causal, Dense, Mask, as_mask
from regard.core.masks.lowering import IntervalMask, lower_cells
from regard.engines import numba

CPU = torch.device("cpu")
DOCUMENT = torch.tensor([0, 0, 1, 1, 1, 2, 0, 3, 3, 3, 3, 5, 5])

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal": lambda i, j: j <= i,
    "prefix": lambda i, j: (j <= i) | (j < 4),
    "window and sink": lambda i, j: (j < 2) | ((j <= i) & (i - j < 3)),
    "documents": lambda i, j: DOCUMENT[i.clamp(0, 12)] == DOCUMENT[j],
    "keys alone": lambda i, j: (j != 4) & (j < 9),
    "queries alone": lambda i, j: i % 3 != 1,
    "nothing": lambda i, j: (i < -99) & (j < 0),
    "everything": lambda i, j: (i > -99) & (j >= 0),
    "stripes": lambda i, j: (i * 3 + j) % 2 == 0,
}


def cells(mask: Mask, geometry: Geometry) -> Tensor:
    shown = mask.visible(MatrixBlock(slice(0, geometry.rows), slice(0, geometry.keys), geometry.offset, CPU))
    return shown.expand(*[1] * (4 - shown.ndim), *shown.shape[:-2], geometry.rows, geometry.keys)


@pytest.mark.parametrize("strip_cells", [1, 40, 2**20])
@pytest.mark.parametrize(
    ("rows", "keys", "offset"), [(13, 13, 0), (5, 13, 8), (9, 4, 0), (1, 13, 12), (3, 0, 0), (0, 3, 0)]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_cells_are_shown(monkeypatch, name: str, rows: int, keys: int, offset: int, strip_cells: int) -> None:
    monkeypatch.setattr(lowering, "STRIP_CELLS", strip_cells)
    geometry = Geometry(rows, keys, offset, CPU)
    for mask in (
        as_mask(FUNCTIONS[name]),
        ~as_mask(FUNCTIONS[name]),
        regard.window(4, 1) & FUNCTIONS[name],
        regard.causal() | FUNCTIONS[name],
        regard.padding(torch.tensor([3, 0]).clamp(max=keys)) & FUNCTIONS[name],
    ):
        lowered = lower_cells(mask, geometry)
        want = cells(mask, geometry)
        assert torch.equal(cells(lowered, geometry).expand(want.shape), want), mask
        if isinstance(lowered, IntervalMask):
            intervals = lowered.intervals(geometry)
            within = [(j >= intervals.lo) & (j < intervals.hi) for j in range(keys)]
            counted = torch.stack(within, -1).sum(1) if keys else want[:, 0].int()  # disjoint: no cell counts twice
            assert torch.equal(counted.expand(len(want), rows, keys), want[:, 0].int().expand(-1, rows, keys))
            assert bool((intervals.hi[:, :-1] <= intervals.lo[:, 1:]).all())


def test_few_intervals_or_few_cells_are_what_kernels_read() -> None:
    geometry = Geometry(64, 64, 0, CPU)
    few, many = as_mask(FUNCTIONS["window and sink"]), as_mask(FUNCTIONS["stripes"])
    assert isinstance(lower_cells(few, geometry), IntervalMask)
    assert isinstance(lower_cells(many, geometry), Dense)
    large = Geometry(5000, 5000, 0, CPU)
    assert lower_cells(many, large) is many  # 25 million flags
    structured = regard.causal() & regard.padding([3])
    assert lower_cells(structured, geometry) is structured


def test_a_window_beside_a_function_bounds_what_is_evaluated() -> None:
    evaluated = 0

    def past(i: Tensor, j: Tensor) -> Tensor:
        nonlocal evaluated
        evaluated += i.numel() * j.numel()
        return j <= i

    W = regard.weights(torch.zeros(20_000, 1), mask=regard.window(30, 0) & past)
    assert W.lse()[-1] == pytest.approx(torch.tensor(31.0).log().item(), rel=1e-5)
    assert evaluated < 20_000 * 1000


def test_a_cell_evaluates_its_row() -> None:
    evaluated = 0

    def past(i: Tensor, j: Tensor) -> Tensor:
        nonlocal evaluated
        evaluated += i.numel() * j.numel()
        return j <= i

    W = regard.weights(torch.randn(2000, 4), mask=past)
    W.lse()
    assert evaluated <= 2000 * 2000
    evaluated = 0
    assert W[1500, 3] == pytest.approx(W.row(1500)[3].item(), rel=1e-6)
    assert evaluated <= 10 * 2000


@pytest.mark.skipif(numba.load() is None, reason="needs the compiled tiles")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_tiles_serve_functions(name: str) -> None:
    W = regard.weights(torch.randn(2, 13, 4), mask=FUNCTIONS[name])
    assert "compiled" in W.explain("entropy", "received", topk=2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_answers_and_gradients_are_those_of_the_same_cells_as_a_tensor(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 13, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    grid = FUNCTIONS[name](torch.arange(13)[:, None], torch.arange(13)[None]).expand(13, 13)
    results = []
    for mask, engine in ((FUNCTIONS[name], "auto"), (grid, "reference")):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        W = regard.weights(leaves[0], leaves[1], mask=mask, engine=engine)
        seen = W.see("entropy", "received", "mean_distance", values=leaves[2], pool=(4, 4))
        loss = (
            seen.y.sin().sum() + (seen.entropy * seen.mean_distance).sum() + seen.received.sin().sum() + seen.pool.sum()
        )
        results.append([*torch.autograd.grad(loss, leaves), seen.y, W.kl(W.detach()), W.topk(3).values, W[:, 3:5, 2:9]])
    for ours, truth in zip(*results, strict=True):
        assert torch.allclose(ours, truth, rtol=1e-9, atol=1e-12)


class Odd(Mask):
    def visible(self, block: MatrixBlock) -> Tensor:
        return (block.i + block.j) % 2 == 0


class CausalButFirst(Causal):
    def visible(self, block: MatrixBlock) -> Tensor:
        return (block.j <= block.i) & (block.j > 0)


@pytest.mark.parametrize("mask", [Odd(), CausalButFirst(), regard.window(3, 3) & Odd(), ~CausalButFirst()], ids=repr)
def test_a_mask_of_ones_own_needs_visible_alone(mask: Mask) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 33, 4, generator=generator, dtype=torch.float64)
    grid = cells(mask, Geometry(33, 33, 0, CPU))[0, 0]
    W, truth = regard.weights(q, mask=mask), regard.weights(q, mask=grid, engine="reference")
    for name in ("lse", "entropy", "received"):
        assert torch.allclose(getattr(W, name)(), getattr(truth, name)(), rtol=1e-9, atol=1e-12), name
    assert torch.allclose(W.dense(), truth.dense(), rtol=1e-9, atol=1e-12)
    assert torch.allclose(W @ q, truth @ q, rtol=1e-9, atol=1e-12)


class Reach(Mask):
    """A band whose width is another one in every head."""

    def __init__(self, widths: Tensor) -> None:
        self.widths = widths.reshape(-1, 1, 1)

    def visible(self, block: MatrixBlock) -> Tensor:
        return (block.i - block.j).abs() < self.widths


WIDTHS, LENGTHS = torch.tensor([1, 3, 4, 6]), torch.tensor([2, 5, 1, 3, 6, 4]).reshape(6, 1, 1, 1)

OF_HEADS_AND_SEQUENCES = {
    "heads": lambda i, j: (i - j).abs() < WIDTHS[:, None, None],
    "sequences": lambda i, j: j < LENGTHS,
    "both": lambda i, j: (j < LENGTHS) & ((i - j).abs() < WIDTHS[:, None, None]),
    "beside others": regard.causal() & ~(regard.window(1, 0) & (lambda i, j: j < LENGTHS)),
    "ones own": Reach(WIDTHS),
}


@pytest.mark.parametrize(
    "index",
    [(1,), (slice(1, 2),), (1, 2, 3), (1, [2, 0], slice(1, 3)), (..., [3, 1], slice(None), slice(None))],
    ids=str,
)
@pytest.mark.parametrize("name", OF_HEADS_AND_SEQUENCES)
def test_cells_follow_a_selection_of_heads_and_sequences(name: str, index: tuple) -> None:
    q = torch.randn(2, 3, 4, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    W = regard.weights(q, mask=OF_HEADS_AND_SEQUENCES[name])
    chosen, dense = W[index], W.dense()[index]
    assert torch.allclose(chosen.dense(), dense, rtol=1e-12, atol=1e-15)
    assert torch.allclose(chosen.received(), dense.sum(-2), rtol=1e-12, atol=1e-15)
    part = chosen.rows(slice(2, 5))
    assert torch.allclose(part.recall(regard.causal()), (part.dense() * dense.new_ones(6, 6).tril()[2:5]).sum(-1))
    assert torch.allclose(chosen[..., 2:5, :], part.dense(), rtol=1e-12, atol=1e-15)
    if chosen.ndim > 2:
        first, mean = W[index][..., :1, :, :], chosen.reduce_heads("mean", heads=[0])
        assert torch.allclose(first.dense().squeeze(-3), mean.dense(), rtol=1e-12, atol=1e-15)


def test_cells_of_sequences_serve_values_of_a_larger_batch() -> None:
    q, v = torch.randn(6, 4, 6, 5), torch.randn(2, 6, 4, 6, 3)
    W = regard.weights(q, mask=OF_HEADS_AND_SEQUENCES["both"])
    assert torch.allclose(W @ v, W.dense() @ v, atol=1e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("mask", [Reach(WIDTHS), regard.causal() & Reach(WIDTHS), CausalButFirst()], ids=repr)
def test_a_mask_of_ones_own_is_copied_with_its_attributes(mask: Mask, copied: Callable[..., regard.Weights]) -> None:
    W = regard.weights(torch.randn(4, 6, 5), mask=mask)
    assert torch.equal(copied(W).dense(), W.dense())
    assert torch.equal(copied(W[1]).dense(), W[1].dense())
