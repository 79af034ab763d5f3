"""The law of statistics: every one equals the same request asked of the dense matrix, on every engine.

The dense matrix is the judge's, in float64, by formulas that share no code with the library.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math

import pytest
import torch

import regard
from regard import Weights
from regard.core.block import MatrixBlock
from regard.core.problem import Problem
from regard.engines import numba
from support.judge import (
    MASKS,
    SCORES,
    MaskCase,
    ScoreCase,
    Sizes,
    Truth,
    draw,
    library_answers,
    library_answers_at_once,
    named,
)

# float64 against float64: sums of about ten terms of size ten, and exp near one. A few hundred units of roundoff.
TIGHT = {"rtol": 2**10 * 2**-53, "atol": 2**10 * 2**-53}


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    if what.endswith("index"):
        assert torch.equal(got, want), what
    else:
        torch.testing.assert_close(got, want, **TIGHT, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("mask", MASKS, ids=lambda case: case.name)
@pytest.mark.parametrize("score", SCORES, ids=lambda case: case.name)
@pytest.mark.parametrize("align", ["start", "end"])
def test_every_statistic_is_what_the_dense_matrix_tells(
    score: ScoreCase, mask: MaskCase, align: str, engine: str
) -> None:
    n = score.sizes()
    q, k, v, u, parameters = draw(*n.q), draw(*n.k), draw(*n.v), draw(*n.u), score.parameters(n)
    W = regard.weights(q, k, score=score.make(*parameters), mask=mask.make(n), align=align, engine=engine)
    truth = Truth.of(score, mask, n, q, k, parameters, n.j - n.i if align == "end" else 0)
    want = truth.answers(v, u)
    for name, got in library_answers(W, v, u).items():
        close(got, want[name], name)
    again = regard.weights(q, k, score=score.make(*parameters), mask=mask.make(n), align=align, engine=engine)
    for name, got in library_answers_at_once(again, v).items():
        close(got, want[name], f"see: {name}")


def plain(n: Sizes | None = None, mask: str = "causal and padding", **kwargs) -> tuple[Weights, Truth]:
    """Weights of a scaled dot product under one mask, and the truth about them."""
    n = n or Sizes()
    q, k = draw(*n.q), draw(*n.k)
    case, score = named(MASKS, mask), named(SCORES, "scaled_dot")
    W = regard.weights(q, k, mask=case.make(n), align="end", **kwargs)
    return W, Truth.of(score, case, n, q, k, [], n.j - n.i)


# Identities.


@pytest.mark.parametrize("mask", MASKS, ids=lambda case: case.name)
def test_what_is_received_adds_up_to_the_rows_that_see_something(mask: MaskCase, engine: str) -> None:
    W, truth = plain(mask=mask.name, engine=engine)
    rows = truth.visible.any(-1).sum(-1).double()
    torch.testing.assert_close(W.received().sum(-1), rows, **TIGHT)
    torch.testing.assert_close(W.pool(3, 5).sum((-2, -1)), rows, **TIGHT)
    torch.testing.assert_close(W.mass(slice(None)).sum(-1), rows, **TIGHT)


@pytest.mark.parametrize("mask", MASKS, ids=lambda case: case.name)
def test_entropy_lies_between_zero_and_the_log_of_the_visible_keys(mask: MaskCase, engine: str) -> None:
    W, truth = plain(mask=mask.name, engine=engine)
    most = truth.visible.sum(-1).clamp(min=1).double().log()
    entropy = W.entropy()
    assert (entropy >= 0).all()
    assert (entropy <= most + 2**-50).all()


def test_entropy_of_equal_scores_is_the_log_of_their_number(engine: str) -> None:
    W = regard.weights(torch.zeros(7, 3, dtype=torch.float64), mask=regard.causal(), engine=engine)
    torch.testing.assert_close(W.entropy(), torch.arange(1, 8, dtype=torch.float64).log(), **TIGHT)


def test_entropy_of_one_key_is_zero_to_the_last_digit(engine: str) -> None:
    W = regard.weights(draw(5, 3), mask=regard.window(0, 0), engine=engine)
    assert torch.equal(W.entropy(), torch.zeros(5, dtype=torch.float64))


def test_entropy_keeps_its_digits_where_a_row_collapses(engine: str) -> None:
    # Scores of 1000 and 1000 − 20: the textbook form lse − Σ w s would lose the answer, 21 e^−20, altogether.
    x = torch.tensor([[1000.0], [980.0]], dtype=torch.float64)
    W = regard.weights(torch.ones(1, 1, dtype=torch.float64), x, score="dot", align="start", engine=engine)
    w = 1 / (1 + math.exp(20.0))
    want = -w * math.log(w) - (1 - w) * math.log1p(-w)
    assert abs(W.entropy().item() - want) <= 1e-7 * want


@pytest.mark.parametrize("mask", MASKS, ids=lambda case: case.name)
def test_the_peak_is_exp_of_max_minus_lse_and_the_first_of_the_top(mask: MaskCase, engine: str) -> None:
    W, truth = plain(mask=mask.name, engine=engine)
    some = truth.visible.any(-1)
    peak, topk = W.peak(), W.topk(4)
    torch.testing.assert_close(peak.values[some], (W.max_score() - W.lse())[some].exp(), **TIGHT)
    assert torch.equal(peak.values, topk.values[..., 0])
    assert torch.equal(peak.indices, topk.indices[..., 0])
    assert (peak.indices[~some] == -1).all()
    assert (peak.values[~some] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("score", ["dot", lambda q, k: q * k.mT], ids=["dot", "function"])
def test_among_equals_the_lower_index_comes_first(engine: str, dtype: torch.dtype, score: object) -> None:
    k = torch.tensor([1.0, -0.0, 0.0, 2.0, 1.0, 2.0, 0.0, 1.0, 2.0], dtype=dtype)[:, None]
    W = regard.weights(torch.ones(5, 1, dtype=dtype), k, score=score, align="start", engine=engine)
    assert W.topk(9).indices.tolist() == [[3, 5, 8, 0, 4, 7, 1, 2, 6]] * 5
    assert W.topk(7).indices.tolist() == [[3, 5, 8, 0, 4, 7, 1]] * 5
    assert W.topk(2).indices.tolist() == [[3, 5]] * 5
    assert W.peak().indices.tolist() == [3] * 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_negative_scores_sort_as_positive_ones_do(engine: str, dtype: torch.dtype) -> None:
    s = torch.tensor([-1.0, -30.0, 2.0, -0.5, 0.0, -1.0, -2.5, 0.25], dtype=dtype)
    W = regard.weights(torch.ones(1, 1, dtype=dtype), s[:, None], score="dot", align="start", engine=engine)
    assert W.topk(8).indices.tolist() == [[2, 7, 4, 3, 0, 5, 6, 1]]


def test_where_fewer_keys_are_visible_the_top_is_padded(engine: str) -> None:
    W = regard.weights(draw(3, 2), mask=regard.causal(), engine=engine)
    topk = W.topk(5)
    assert (topk.indices >= 0).sum(-1).tolist() == [1, 2, 3]
    assert torch.equal(topk.indices == -1, topk.values == 0)
    assert topk.values.shape == (3, 5)
    torch.testing.assert_close(topk.values.sum(-1), torch.ones(3, dtype=torch.float64), **TIGHT)


def test_linear_statistics_are_attention_with_other_values(engine: str) -> None:
    W, _ = plain(engine=engine)
    n = W.shape[-1]
    chosen = torch.tensor([float(j in (1, 4, 9)) for j in range(n)], dtype=torch.float64)
    torch.testing.assert_close(W.mass([1, 4, 9]), W @ chosen, **TIGHT)
    torch.testing.assert_close(W.received(), W.mT @ torch.ones(W.shape[-2], dtype=torch.float64), **TIGHT)


def test_basic_self_attention_has_entropy_lse_less_x_dot_y(engine: str) -> None:
    x = draw(11, 3)
    W = regard.weights(x, score="dot", engine=engine)
    torch.testing.assert_close(W.entropy(), W.lse() - (x * (W @ x)).sum(-1), **TIGHT)


# Pool.


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (2, 3), (7, 11), (5, 2), (13, 17), (1, 11)])
@pytest.mark.parametrize(
    ("i", "j"), [(slice(None), slice(None)), (slice(2, 6), slice(3, 11)), (slice(-3, None), slice(None, -2)), (slice(4, 4), slice(0, 5))]
)  # fmt: skip
def test_pool_sums_each_tile_of_the_asked_part(rows: int, cols: int, i: slice, j: slice, engine: str) -> None:
    W, truth = plain(engine=engine)
    close(W.pool(rows, cols, i=i, j=j), truth.pool(rows, cols, i, j), "pool")


def count_products(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> list[int]:
    """Multiplications of every product of queries and keys, from here on."""
    counts: list[int] = []
    if not compiled:
        monkeypatch.setattr(numba, "enabled", False)
        bare_scores = Problem.bare_scores

        def counted(self: Problem, block: MatrixBlock) -> torch.Tensor:
            s = bare_scores(self, block)
            counts.append(s.numel() * self.q.shape[-1])
            return s

        monkeypatch.setattr(Problem, "bare_scores", counted)
        return counts
    if (runtime := numba.load()) is None:
        pytest.skip("no compiled tiles on this machine")
    monkeypatch.setattr(numba, "enabled", True)
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)
    sgemm = prototype(runtime.gemm[4])

    def counted_gemm(*arguments: int) -> None:
        counts.append(math.prod(ctypes.c_int.from_address(at).value for at in arguments[2:5]))
        sgemm(*arguments)

    callback = prototype(counted_gemm)
    counting = dataclasses.replace(runtime, gemm={4: ctypes.cast(callback, ctypes.c_void_p).value})
    monkeypatch.setattr(numba, "load", lambda alive=callback: counting)
    return counts


@pytest.mark.parametrize("mask", [None, regard.causal()], ids=repr)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain tiles", "compiled tiles"])
def test_a_part_of_the_pooled_map_costs_its_rows_and_with_a_norm_its_tiles(
    compiled: bool, mask: regard.Mask | None, tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles(32, 64)
    counts = count_products(monkeypatch, compiled)
    h, n, d, part = 2, 512, 4, {"i": slice(300, 340), "j": slice(192, 256)}
    q, k = torch.randn(h, n, d), torch.randn(h, n, d)
    W = regard.weights(q, k, mask=mask, engine="blockwise")
    truth = regard.weights(q.double(), k.double(), mask=mask, engine="reference")
    torch.testing.assert_close(W.pool(5, 7, **part).double(), truth.pool(5, 7, **part), rtol=1e-5, atol=1e-6)
    assert sum(counts) <= h * d * (40 * n + 64 * 64)  # all keys of 40 rows for their norm, then the tiles of the part
    W.received()
    counts.clear()
    torch.testing.assert_close(W.pool(4, 6, **part).double(), truth.pool(4, 6, **part), rtol=1e-5, atol=1e-6)
    assert sum(counts) == h * d * 64 * 64  # rows 288 to 352, keys 192 to 256


@pytest.mark.parametrize("compiled", [False, True], ids=["plain tiles", "compiled tiles"])
def test_a_column_with_a_norm_costs_the_tiles_that_it_touches(
    compiled: bool, tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles(32, 64)
    counts = count_products(monkeypatch, compiled)
    h, n, d = 2, 512, 4
    W = regard.weights(torch.randn(h, n, d), torch.randn(h, n, d), engine="blockwise")
    W.lse()
    counts.clear()
    column = W.column(100)
    assert sum(counts) == h * d * n * 64  # keys 64 to 128 of every row, as the norm has multiplied them
    cell = W[:, 300, 100]
    assert sum(counts) == h * d * (n * 64 + 32 * 64)
    assert torch.equal(cell, column[:, 300])


def test_a_part_of_the_pooled_map_has_the_gradient_of_the_dense_weights(engine: str) -> None:
    q, k = draw(2, 9, 3, grad=True), draw(2, 11, 3, grad=True)
    W = regard.weights(q, k, mask=regard.causal(), align="end", engine=engine)
    w = W.dense()[:, 3:7, 2:10].unflatten(-1, (4, 2)).unflatten(-3, (2, 2)).sum((-3, -1))
    seed = torch.randn(2, 2, 4, dtype=torch.float64)
    got = torch.autograd.grad((W.pool(2, 4, i=slice(3, 7), j=slice(2, 10)) * seed).sum(), (q, k))
    for ours, theirs in zip(got, torch.autograd.grad((w * seed).sum(), (q, k)), strict=True):
        torch.testing.assert_close(ours, theirs, **TIGHT)


def test_tiles_cover_floor_of_r_n_over_rows() -> None:
    W = regard.weights(torch.zeros(1, 7, 2), mask=None, score="dot")  # 7 × 7 weights of 1/7
    rows = W.pool(3, 1)[0, :, 0]
    assert rows.round().tolist() == [2, 2, 3]  # tiles 0–1, 2–3, 4–6


# Mass.


@pytest.mark.parametrize(
    ("keys", "positions"),
    [
        (3, [3]), (-1, [10]), (slice(2, 9, 3), [2, 5, 8]), ([4, 0, -2], [4, 0, 9]), (slice(None), list(range(11))),
        (slice(5, 5), []), (torch.tensor([1, 6]), [1, 6]), (torch.arange(11) % 4 == 1, [1, 5, 9]), (range(0, 4), [0, 1, 2, 3]),
        ([3, 3], [3]),
    ],
    ids=str,
)  # fmt: skip
def test_mass_takes_keys_as_an_index_would(keys, positions: list[int], engine: str) -> None:
    W, truth = plain(engine=engine)
    close(W.mass(keys), truth.mass(positions), "mass")


def test_mass_takes_words() -> None:
    W = regard.weights(draw(4, 3)).label(["the", "cat", "sat", "the"])
    w = W.dense()
    close(W.mass("cat"), w[:, 1], "mass")
    close(W.mass(["cat", W.at("the", 2)]), w[:, 1] + w[:, 3], "mass")


# Reach.


def test_reach_counts_positions_from_where_the_query_stands(engine: str) -> None:
    q, k = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(5, 3, dtype=torch.float64)
    start = regard.weights(q, k, align="start", engine=engine).mean_distance()
    end = regard.weights(q, k, align="end", engine=engine).mean_distance()
    torch.testing.assert_close(start, torch.tensor([10 / 5, 7 / 5], dtype=torch.float64), **TIGHT)
    torch.testing.assert_close(end, torch.tensor([7 / 5, 10 / 5], dtype=torch.float64), **TIGHT)


# Sinks.


def test_with_a_sink_rows_sum_to_one_less_its_share(engine: str) -> None:
    n = Sizes()
    q, k, logits = draw(*n.q), draw(*n.k), draw(n.h)
    W = regard.weights(q, k, score=regard.ScaledDot().sink(logits), align="end", engine=engine)
    share = (logits[:, None] - W.lse()).exp()
    torch.testing.assert_close(W.mass(slice(None)), 1 - share, **TIGHT)
    torch.testing.assert_close(W.dense().sum(-1), 1 - share, **TIGHT)
    torch.testing.assert_close(W.received().sum(-1), (1 - share).sum(-1), **TIGHT)
    assert (W.entropy() <= math.log(n.j + 1) + 2**-50).all()


def test_a_sink_that_takes_nearly_all_leaves_nearly_nothing(engine: str) -> None:
    W = regard.weights(draw(2, 4, 3), score=regard.Cosine().sink(torch.full((2,), 60.0)), engine=engine)
    assert (W.dense() < 1e-20).all()
    assert (W.entropy() < 1e-22).all()
    assert (W.max_score() < 60).all()


# Weights that somebody else wrote out.


@pytest.mark.parametrize("shape", [(7, 7), (2, 5, 7), (3, 2, 5, 7)])
def test_given_weights_answer_as_computed_ones_do(shape: tuple[int, ...]) -> None:
    *outer, i, j = shape
    w = draw(*shape).softmax(-1)
    W = Weights.from_dense(w)
    v, u = draw(*outer, j, 3), draw(*outer, i, 3)
    assert W.shape == shape
    close(W @ v, w @ v, "y")
    close(W.mT @ u, w.mT @ u, "z")
    close(W.received(), w.sum(-2), "received")
    close(W.entropy(), -(w * w.log()).sum(-1), "entropy")
    close(W.pool(1, 1).reshape(w.shape[:-2]), w.sum((-2, -1)), "pool")
    close(W.mass([0, 3]), w[..., 0] + w[..., 3], "mass")
    close(W.dense(), w, "dense")
    close(W[..., 2, 1:4], w[..., 2, 1:4], "block")
    value, index = w.topk(3)
    assert torch.equal(W.topk(3).indices, index)
    close(W.topk(3).values, value, "top")
    close(W.peak().values, value[..., 0], "peak")
    if i == j:
        far = (torch.arange(i)[:, None] - torch.arange(j)).abs()
        close(W.mean_distance(), (w * far).sum(-1), "mean_distance")


def test_given_weights_may_hold_zeros() -> None:
    w = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    W = Weights.from_dense(w)
    assert torch.equal(W.entropy(), torch.zeros(2, dtype=torch.float64))
    assert W.topk(2).indices.tolist() == [[1, -1], [-1, -1]]
    assert W.peak().values.tolist() == [1, 0]


# Types.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_statistics_are_float32_or_float64_and_the_output_has_the_type_of_v(dtype: torch.dtype, engine: str) -> None:
    n = Sizes()
    q, k, v = (draw(*shape, dtype=dtype) for shape in (n.q, n.k, n.v))
    W = regard.weights(q, k, align="end", engine=engine)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, value in library_answers(W, v, draw(*n.u, dtype=dtype)).items():
        want = dtype if name in ("y", "z") else torch.int64 if name.endswith("index") else wide
        assert value.dtype == want, name
    assert W.dtype == wide


def test_statistics_of_long_rows_in_float32_agree_with_float64_tile_by_tile() -> None:
    # 777 keys are more than one tile, and divide by no tile size; 300 rows as well.
    q, k, v = draw(1, 2, 300, 17), draw(1, 1, 777, 17), draw(1, 1, 777, 5)
    mask = regard.window(301, 7) | regard.padding([13])
    exact = library_answers(
        regard.weights(q, k, mask=mask, align="end"), v, draw(1, 2, 300, 5) * 0, tiles=(7, 9), top=20
    )
    single = library_answers(
        regard.weights(q.float(), k.float(), mask=mask, align="end"),
        v.float(),
        torch.zeros(1, 2, 300, 5),
        tiles=(7, 9),
        top=20,
    )
    for name in ("lse", "entropy", "mean_distance", "received", "pool", "y", "mass"):
        torch.testing.assert_close(
            single[name].double(), exact[name].double(), rtol=3e-5, atol=3e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(("rows", "keys"), [(40000, 3), (3, 40000)])
@pytest.mark.parametrize("how", ["reference", "blockwise", "plain"])
def test_tiles_of_a_long_matrix_are_added_up_as_exactly_as_by_plain_pytorch(
    how: str, rows: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba, "enabled", how != "plain")
    q, k = draw(1, rows, 8, dtype=torch.float32), draw(1, keys, 8, dtype=torch.float32)
    W = regard.weights(q, k, engine="reference" if how == "reference" else "blockwise")
    want = regard.Weights.from_dense(W.dense().double()).pool(2, 3)
    # One running sum would be off by the root of the number of its terms: 100 to 200 units here.
    assert ((W.pool(2, 3) / want - 1).abs() <= 16 * 2**-24).all()
