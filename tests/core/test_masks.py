"""The law of masks: `visible` says who sees whom, `intervals` says the same as ranges of keys, and hidden keys cost nothing."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.core.api import normalize_inputs
from regard.core.block import MatrixBlock
from regard.core.masks import intervals as intervals_module
from regard.core.masks.kinds import Documents, Geometry, KeyIntervals, Mask, as_mask, causal, documents, padding, window
from regard.core.masks.lowering import IntervalMask
from regard.core.problem import Problem
from regard.engines import blockwise
from support.judge import MASKS, SCORES, MaskCase, Sizes, Truth, draw, named

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def cached_on_the_cpu() -> Iterator[None]:
    """Lowered masks are cached on GPUs; here on the CPU too, so that every test sees what GPUs get."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals_module, "CACHING_DEVICES", ("cpu",))
        yield


def problem(mask: object, b: int = 1, i: int = 7, j: int = 11, h: int = 1, offset: int = 0) -> Problem:
    """The mask laid over a matrix of that size, query 0 at `offset`."""
    align = "start" if offset == 0 else "end"
    assert offset in (0, j - i)
    factors = normalize_inputs(torch.zeros(b, h, i, 2), torch.zeros(b, 1, j, 2), "dot", mask, align)
    lowered = factors.problem()
    broadcast = dataclasses.replace(lowered, mask=factors.mask)
    if factors.mask is not None and i * j < 2**16:
        assert torch.equal(cells(lowered), cells(broadcast)), "as intervals it is another mask"
    return broadcast


def cells(of: Problem) -> Tensor:
    """All that is visible, (b, h, i, j)."""
    b, h, i, j = of.shape
    visible = of.mask.visible(of.block(slice(0, i), slice(0, j)))
    return visible.expand(b, h, i, j)


def intervals(of: Problem) -> KeyIntervals:
    return of.mask.intervals(of.geometry())


def inside(spans: KeyIntervals, b: int, keys: int) -> Tensor:
    """The cells that lie in an interval, (b, i, j)."""
    j = torch.arange(keys)
    within = (spans.lo.unsqueeze(-1) <= j) & (j < spans.hi.unsqueeze(-1))  # b r i j
    return within.any(1).expand(b, -1, -1)


# What each mask shows.


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("case", MASKS[1:], ids=lambda case: case.name)
def test_each_mask_shows_what_its_formula_says(case: MaskCase, offset: int) -> None:
    n = Sizes()
    it = problem(case.make(n), n.b, n.i, n.j, n.h, offset)
    i, j = torch.arange(n.i)[:, None] + offset, torch.arange(n.j)[None]
    assert torch.equal(cells(it), case.visible(n, i, j).expand(n.b, n.h, n.i, n.j))


def test_operators_work_cell_by_cell_with_tensors_and_functions_too() -> None:
    a, b = torch.rand(7, 7) < 0.5, torch.rand(7, 7) < 0.5

    def odd(i: Tensor, j: Tensor) -> Tensor:
        return (i + j) % 2 == 1

    grid = odd(torch.arange(7)[:, None], torch.arange(7)[None])
    tril = torch.ones(7, 7).tril().bool()
    for mask, want in (
        (causal() & a, tril & a), (a & causal(), tril & a), (causal() | b, tril | b), (b | causal(), tril | b), (~causal(), ~tril),
        (causal() & odd, tril & grid), (odd | causal(), tril | grid), (~(as_mask(a) | b), ~(a | b)), (~as_mask(odd) & causal(), ~grid & tril),
    ):  # fmt: skip
        assert torch.equal(cells(problem(mask, i=7, j=7))[0, 0], want), repr(mask)


# Intervals.

lengths = st.integers(0, 9)
simple = st.one_of(
    st.just(causal()),
    st.builds(window, st.integers(0, 4), st.integers(0, 4)),
    st.lists(st.integers(0, 6), min_size=2, max_size=2).map(padding),
    st.integers(0, 6).map(lambda n: padding([n])),
    st.lists(st.integers(0, 2), min_size=6, max_size=6).map(documents),
    st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=2, max_size=2).map(documents),
    st.lists(st.integers(0, 2), min_size=6, max_size=6).map(lambda ids: documents(sorted(ids))),
    st.just(as_mask(lambda i, j: (i + j) % 3 != 0)),
)
combined = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        inner.map(lambda a: ~a),
    ),
    max_leaves=5,
)


@given(combined, st.integers(1, 8), st.booleans())
def test_intervals_hold_all_that_is_visible_and_nothing_else_where_they_say_so(
    mask: Mask, i: int, at_end: bool
) -> None:
    it = problem(mask, b=2, i=i, j=6, offset=6 - i if at_end else 0)
    visible, spans = cells(it)[:, 0], intervals(it)
    within = inside(spans, 2, 6)
    assert not (visible & ~within).any()
    if spans.exact:
        assert torch.equal(visible, within)
    assert ((spans.lo >= 0) & (spans.hi <= 6) & (spans.lo <= spans.hi)).all()
    # In order and apart, so that no key is counted twice and the gaps between them are gaps.
    assert (spans.hi[:, :-1] <= spans.lo[:, 1:]).all()


@given(combined, st.integers(1, 8), st.booleans())
def test_which_keys_some_row_sees_is_known_exactly(mask: Mask, i: int, at_end: bool) -> None:
    it = problem(mask, b=2, i=i, j=6, offset=6 - i if at_end else 0)
    seen = it.visible_keys()
    want = cells(it).any(2)
    assert torch.equal(torch.ones_like(want) if seen is None else seen.expand(want.shape), want)


def structured() -> list[Mask]:
    plain = [causal(), window(2, 1), padding([3, 5]), documents([0, 0, 1, 1, 1, 2])]
    return [
        *plain,
        ~plain[1],
        plain[0] & plain[2],
        plain[1] | padding([1]),
        ~(plain[0] | plain[3]),
        plain[3] & plain[0] & ~plain[1],
    ]


@pytest.mark.parametrize(
    "mask", [*structured(), causal() & (lambda i, j: j != 3), padding([2]) | padding([5])], ids=repr
)
@pytest.mark.parametrize("i", [6, 8])
def test_keys_that_no_row_sees_are_missed_by_no_combination(mask: Mask, i: int) -> None:
    test_which_keys_some_row_sees_is_known_exactly.hypothesis.inner_test(mask, i, False)


@pytest.mark.parametrize("mask", structured(), ids=repr)
def test_intervals_of_structured_masks_are_the_whole_truth(mask: Mask) -> None:
    assert intervals(problem(mask, b=2, i=6, j=6)).exact


def test_intervals_of_documents_out_of_order_are_not_called_exact() -> None:
    assert not intervals(problem(documents([0, 1, 0, 1]), i=4, j=4)).exact
    assert intervals(problem(documents([1, 1, 0, 0]), i=4, j=4)).exact


@given(st.lists(st.integers(0, 6), min_size=0, max_size=3), st.lists(st.integers(0, 6), min_size=0, max_size=3))
def test_the_complement_of_the_complement_is_the_same_set(starts: list[int], sizes: list[int]) -> None:
    mask: Mask = window(0, 0)
    for start, size in zip(starts, sizes, strict=False):
        mask = mask | (padding([min(6, start + size)]) & ~padding([start]))
    it = problem(mask, i=6, j=6)
    spans = intervals(it)
    assert torch.equal(inside(spans.complement(6).complement(6), 1, 6), inside(spans, 1, 6))
    assert torch.equal(inside(spans.complement(6), 1, 6), ~inside(spans, 1, 6))


# Drawings.


def test_a_large_mask_is_printed_as_its_corner() -> None:
    small, large = regard.padding(torch.tensor([3])), regard.padding(torch.tensor([4000, 7]))
    assert str(small) == small.draw()
    *rows, note = str(large).splitlines()
    assert len(rows) == 32
    assert rows[0] == " ".join("■" * 32)
    assert "first 32 rows and columns" in note
    assert len(large.draw(40, 50).splitlines()) == 40  # as much as was asked for


def test_masks_that_are_not_laid_over_a_matrix_yet_are_drawn() -> None:
    assert str(documents([0, 1], [0, 1, 1])).splitlines() == ["■ · ·", "· ■ ■"]
    assert str(documents(torch.tensor([[0, 0, 1], [1, 1, 1]]))).splitlines() == ["■ ■ ·", "■ ■ ·", "· · ■"]
    assert str(padding([100]) & documents([0, 1, 1])).splitlines() == ["■ · ·", "· ■ ■", "· ■ ■"]
    assert str(documents(torch.tensor([], dtype=torch.long))) == ""
    assert str(padding(torch.tensor([], dtype=torch.long))) == ""


# Alignment.


def test_align_says_which_corner_a_causal_mask_starts_in() -> None:
    assert causal().draw(3, 5, align="start").splitlines() == ["■ · · · ·", "■ ■ · · ·", "■ ■ ■ · ·"]
    assert causal().draw(3, 5, align="end").splitlines() == ["■ ■ ■ · ·", "■ ■ ■ ■ ·", "■ ■ ■ ■ ■"]
    assert causal().draw(4, 2, align="end").splitlines() == ["· ·", "· ·", "■ ·", "■ ■"]
    q, k = draw(3, 2), draw(5, 2)
    start = regard.weights(q, k, mask=causal(), align="start").dense() > 0
    end = regard.weights(q, k, mask=causal(), align="end").dense() > 0
    assert torch.equal(start, torch.ones(3, 5).tril().bool())
    assert torch.equal(end, torch.ones(3, 5).tril(2).bool())


def test_padding_and_tensors_need_no_align() -> None:
    q, k = draw(3, 2), draw(5, 2)
    for mask in (padding([4]), torch.rand(3, 5) < 0.9, documents([0, 1, 1], [0, 0, 1, 1, 1])):
        assert regard.weights(q[None, None], k[None, None], mask=mask).dense().shape == (1, 1, 3, 5)


def test_documents_may_number_queries_and_keys_apart() -> None:
    W = regard.weights(draw(3, 2), draw(5, 2), mask=documents([0, 7, 1], [0, 0, 1, 1, 0]))
    assert (W.dense() > 0).tolist() == [
        [True, True, False, False, True],
        [False] * 5,
        [False, False, True, True, False],
    ]


def test_a_query_outside_the_keys_belongs_to_no_document() -> None:
    W = regard.weights(draw(4, 2), draw(2, 2), mask=documents([3, 3]), align="end")
    assert (W.dense() > 0).tolist() == [[False, False], [False, False], [True, True], [True, True]]


# Drawing.


@pytest.mark.parametrize(
    ("mask", "drawing"),
    [
        (window(1, 0), "■ · · ·\n■ ■ · ·\n· ■ ■ ·\n· · ■ ■"),
        (~causal(), "· ■ ■ ■\n· · ■ ■\n· · · ■\n· · · ·"),
        (padding([2]), "■ ■ · ·\n■ ■ · ·\n■ ■ · ·\n■ ■ · ·"),
        (as_mask(lambda i, j: i == j), "■ · · ·\n· ■ · ·\n· · ■ ·\n· · · ■"),
        (documents([0, 1, 1, 0]), "■ · · ■\n· ■ ■ ·\n· ■ ■ ·\n■ · · ■"),
        (causal() & window(0, 9), "■ · · ·\n· ■ · ·\n· · ■ ·\n· · · ■"),
    ],
)
def test_a_mask_draws_itself(mask: Mask, drawing: str) -> None:
    assert mask.draw(4, 4) == drawing


def test_print_takes_the_size_from_the_mask_where_it_tells() -> None:
    assert str(documents([0, 0, 1])) == "■ ■ ·\n■ ■ ·\n· · ■"
    assert str(as_mask(torch.tensor([[True, False, True]]))) == "■ · ■"
    assert len(str(causal()).splitlines()) == 8
    assert len(str(causal() & documents([0, 0, 1])).splitlines()) == 3


def test_a_mask_says_in_words_what_it_is() -> None:
    assert repr(causal() & ~window(2, 1)) == "(causal() & ~window(2, 1))"
    assert repr(causal() | padding([3])) == "(causal() | padding())"


# What nobody sees costs nothing.


def visited(of: Problem) -> Tensor:
    """How often the engine's walk comes to each cell, (i, j), and that `whole` tiles are wholly visible."""
    _b, _h, i, j = of.shape
    count = torch.zeros(i, j, dtype=torch.int64)
    shown = cells(of)
    for rows, tiles in blockwise.tiled(of):
        for cols, full in tiles:
            count[rows, cols] += 1
            if full:
                assert shown[:, :, rows, cols].all()
    return count


@given(combined, st.integers(1, 8), st.booleans(), st.integers(1, 4), st.integers(1, 4))
def test_every_visible_cell_is_visited_once(mask: Mask, i: int, at_end: bool, height: int, width: int) -> None:
    it = problem(mask, b=2, i=i, j=6, offset=6 - i if at_end else 0)
    usual = blockwise._tile_size
    blockwise._tile_size = lambda _: (height, width)
    try:
        count = visited(it)
    finally:
        blockwise._tile_size = usual
    assert (count <= 1).all()
    assert not (cells(it).any(0).any(0) & (count == 0)).any()


def cost(mask: Mask, t: int) -> int:
    """Cells of the tiles that are visited."""
    it = problem(mask, i=t, j=t)
    return sum(
        (rows.stop - rows.start) * (cols.stop - cols.start) for rows, tiles in blockwise.tiled(it) for cols, _ in tiles
    )


def test_a_window_of_256_over_65536_costs_a_window() -> None:
    t = 65_536
    # A block of up to 256 rows reaches 256 keys back from its first row: at most twice the window it needs, and its diagonal.
    assert cost(window(256, 0), t) <= t * (256 + 256)
    assert cost(window(256, 0), t) >= t * 256 - 256 * 257 // 2


def test_a_window_and_first_keys_cost_a_window_and_first_keys() -> None:
    t = 16_384
    assert cost(window(256, 0) | padding([4]), t) <= t * (256 + 256 + 4 + 64)


def test_documents_cost_the_sum_of_their_squares() -> None:
    t, each = 16_384, 1024
    assert cost(documents(torch.arange(t) // each), t) <= 1.5 * t * each


def test_causal_costs_half_a_square_and_what_lies_on_the_diagonal() -> None:
    t = 8192
    assert cost(causal(), t) <= t * t // 2 + t * 512


def test_the_cost_of_a_window_grows_with_the_length_not_its_square() -> None:
    # Twice as many blocks of rows; the first and the last one see less than the others.
    assert cost(window(100, 100), 20_480) <= 2.05 * cost(window(100, 100), 10_240)


@pytest.mark.parametrize("where", ["front", "middle", "end"])
def test_cutting_tiles_does_not_change_what_a_window_says(where: str) -> None:
    t = {"front": 257, "middle": 700, "end": 513}[where]
    q, k, v = (
        draw(1, 1, t, 3, dtype=torch.float32),
        draw(1, 1, t, 3, dtype=torch.float32),
        draw(1, 1, t, 2, dtype=torch.float32),
    )
    W = regard.weights(q, k, mask=window(37, 5))
    n = Sizes(1, 1, 1, t, t, 3, 3, 2)
    case = MaskCase("", lambda n: None, lambda n, i, j: (i - j <= 37) & (j - i <= 5))
    truth = Truth.of(named(SCORES, "scaled_dot"), case, n, q, k, [])
    # float32 over at most 43 keys of scores below ten: sixty units of roundoff.
    for got, want in (
        (W @ v, truth.y(v)),
        (W.lse(), truth.lse),
        (W.entropy(), truth.entropy()),
        (W.received(), truth.received()),
    ):
        torch.testing.assert_close(got.double(), want, rtol=64 * 2**-24, atol=64 * 2**-24)


def test_a_geometry_cuts_intervals_to_the_keys_there_are() -> None:
    spans = Geometry(3, 4, 0, CPU).interval(torch.tensor([-2, 1, 9]), torch.tensor([2, 9, 12]))
    assert spans.lo[0, 0].tolist() == [0, 1, 4]
    assert spans.hi[0, 0].tolist() == [2, 4, 4]


def test_a_block_of_a_mask_is_that_block_of_the_whole() -> None:
    mask = as_mask(torch.rand(2, 1, 7, 11) < 0.5) & causal() | documents(torch.randint(0, 3, (2, 11)))
    it = problem(mask, b=2, offset=4)
    all_cells = cells(it)
    rows, cols = torch.tensor([5, 0, 2]), slice(3, 9)
    part = it.mask.visible(MatrixBlock(rows, cols, 4, CPU)).expand(2, 1, 3, 6)
    assert torch.equal(part, all_cells[:, :, rows][..., cols])


# What is found out about a mask is kept with it.


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Geometry]:
    """Every time that the intervals of documents are made."""
    queries: list[Geometry] = []
    spans = Documents.intervals

    def counted(self: Documents, geometry: Geometry) -> KeyIntervals:
        queries.append(geometry)
        return spans(self, geometry)

    monkeypatch.setattr(Documents, "intervals", counted)
    return queries


def test_layers_that_share_a_mask_share_its_intervals(looked_at: list[Geometry]) -> None:
    mask = documents([0, 0, 1, 1, 1])
    for _ in range(3):
        q, k, v = (torch.randn(2, 5, 4, requires_grad=True) for _ in range(3))
        hidden = torch.tensor([[0, 0, 1, 1, 1]]) != torch.tensor([[0], [0], [1], [1], [1]])
        truth = (q @ k.mT / 2).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        torch.testing.assert_close(regard.weights(q, k, mask=mask, engine="blockwise") @ v, truth)
        (regard.weights(q, k, mask=mask) @ v).sum().backward()
    assert len(looked_at) == 1
    for _ in range(3):  # a layer that adds a mask of its own
        regard.weights(torch.randn(2, 5, 4), mask=causal() & mask).lse()
    assert len(looked_at) == 2
    regard.weights(torch.randn(2, 5, 4), mask=documents([0, 0, 1, 1, 1])).lse()
    assert len(looked_at) == 3


@pytest.mark.parametrize("mode", ["plain", "inference"])
def test_a_mask_whose_tensors_change_in_place_is_looked_at_anew(mode: str) -> None:
    with torch.inference_mode(mode == "inference"):
        lengths, ids = torch.tensor([2]), torch.tensor([0, 0, 1, 1])
        masks = padding(lengths), documents(ids)
        q = torch.randn(1, 1, 4, 3)
        for _ in range(2):
            assert [int((regard.weights(q, mask=mask)[0, 0, 0] > 0).sum()) for mask in masks] == [2, 2]
        lengths.fill_(3)
        ids[2] = 0
        assert [int((regard.weights(q, mask=mask)[0, 0, 0] > 0).sum()) for mask in masks] == [3, 3]


def test_a_mask_first_seen_in_inference_serves_training_too(looked_at: list[Geometry]) -> None:
    mask, q = documents([0, 0, 1]), torch.randn(1, 3, 2)
    with torch.inference_mode():
        before = regard.weights(q, mask=mask).entropy()
    after = regard.weights(q.requires_grad_(), mask=mask).entropy()
    after.sum().backward()
    assert torch.equal(before, after.detach())
    assert len(looked_at) == 1


def test_the_ends_of_lengths_are_those_they_have_now() -> None:
    lengths = torch.tensor([4, 4])
    mask = padding(lengths)
    regard.weights(torch.randn(2, 1, 4, 2), mask=mask)
    lengths.fill_(3)
    regard.weights(torch.randn(2, 1, 3, 2), mask=mask)
    lengths.fill_(7)
    with pytest.raises(ValueError, match=r"between 0 and the 4 keys there are; got 7 … 7"):
        regard.weights(torch.randn(2, 1, 4, 2), mask=mask)


def test_an_array_that_changes_does_not_change_a_mask() -> None:
    lengths = torch.tensor([2]).numpy()
    mask = padding(lengths)
    lengths[:] = 4
    assert int((regard.weights(torch.randn(1, 1, 4, 3), mask=mask)[0, 0, 0] > 0).sum()) == 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_what_was_found_out_is_not_copied(copied) -> None:
    mask = causal() & documents([0, 0, 1, 1])
    regard.weights(torch.randn(1, 4, 2), mask=mask).lse()
    assert "cache" in vars(mask.right)
    other = copied(mask)
    assert "cache" not in vars(copied(mask.right))
    assert other.draw() == mask.draw()


def test_a_few_rows_know_which_keys_they_see() -> None:
    """A key that others see must not reach their gradients, not even as the nan of 0 · nan."""
    ids = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    full = normalize_inputs(torch.zeros(2, 1, 6, 4), torch.zeros(2, 1, 6, 4), "dot", documents(ids), None).problem()
    assert full.visible_keys() is None
    assert full.narrow(1, 2).visible_keys().int().tolist() == [[[1, 1, 1, 0, 0, 0]], [[0, 1, 1, 1, 1, 1]]]
    q, k = (torch.randn(2, 1, 6, 4, dtype=torch.float64) for _ in range(2))
    k[0, :, 4] = torch.nan
    q.requires_grad_()
    regard.weights(q, k, mask=documents(ids), engine="blockwise")[..., 1, :].square().sum().backward()
    assert q.grad.isfinite().all()


def test_documents_without_a_batch_or_on_no_device() -> None:
    apart = documents(torch.zeros(1, 3).long(), torch.zeros(0, 3).long())
    assert regard.weights(torch.randn(0, 1, 3, 4), mask=apart).lse().shape == (0, 1, 3)
    with torch.device("meta"):
        assert documents([0, 0, 1]).size() == (3, 3)


def test_what_is_kept_dies_with_its_mask() -> None:
    gc.collect()
    gc.disable()
    try:
        mask = documents([0, 0, 1, 0])  # not in one run each: no intervals tell it
        runs = documents([0, 0, 1, 1])
        for one in (mask, runs, causal() & runs):
            regard.weights(torch.randn(1, 4, 2), mask=one).lse()
        ends = [weakref.ref(mask), weakref.ref(runs), weakref.ref(runs.ids)]
        del mask, runs, one
        assert [end() for end in ends] == [None, None, None]
    finally:
        gc.enable()


def test_masks_of_tensors_reach_the_engines_as_intervals() -> None:
    def lowered(mask: object) -> Mask | None:
        return normalize_inputs(torch.zeros(2, 1, 6, 2), torch.zeros(2, 1, 6, 2), "dot", mask, None).problem().mask

    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    for mask in (documents(ids), padding([4, 6]), causal() & padding([4, 6]), ~documents(ids) | padding([1, 2])):
        assert isinstance(lowered(mask), IntervalMask)
    assert lowered(documents(ids)).keys_seen is None
    assert lowered(padding([4, 6])).keys_seen[:, 0, 0].sum(-1).tolist() == [4, 6]
    for mask in (causal(), causal() & padding([4, 6]) & (torch.rand(6, 6) < 0.5), documents([0, 1, 0, 1, 2, 2])):
        assert not isinstance(lowered(mask), IntervalMask)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["padding", "documents", "both and a window", "several intervals", "out of order"])
def test_a_compiled_graph_writes_the_intervals_out_itself(kind: str, dynamic: bool) -> None:
    ids = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3, [0] * 10 + [3] * 2])
    mask = {
        "padding": padding([7, 12]),
        "documents": documents(ids) & causal(),
        "both and a window": documents(ids) & padding([7, 12]) & window(3, 1),
        "several intervals": ~documents(ids) | padding([1, 2]),
        "out of order": documents([0, 1, 0, 1, 0, 1, 2, 2, 2, 0, 0, 0]),
    }[kind]

    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(2):
            q = regard.weights(q, k, mask=mask).see("entropy", values=v).y
        return q.square().sum()

    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 2, 12, 4, requires_grad=True) for _ in range(3))
    compiled = torch.compile(layers, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for mine, right in zip(*(torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (compiled, layers)), strict=True):
        torch.testing.assert_close(mine, right)
