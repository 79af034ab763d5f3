"""The law of brackets: W[...] is dense()[...], computed exactly there, and words may stand for numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import Weights
from support.judge import SCORES, ScoreCase, Sizes, draw, named

TIGHT = {"rtol": 2**10 * 2**-53, "atol": 2**10 * 2**-53}
N = Sizes(b=2, h=6, g=3, i=5, j=7, d=3, c=3)


def make(engine: str = "auto", score: str = "all modifiers and a sink") -> tuple[Weights, Tensor]:
    case = named(SCORES, score)
    n = N._replace(c=N.d + 2) if case.sizes_differ else N
    q, k = draw(*n.q), draw(*n.k)
    W = regard.weights(
        q,
        k,
        score=case.make(*case.parameters(n)),
        mask=regard.causal() | regard.padding([2]),
        align="end",
        engine=engine,
    )
    return W, W.dense()


KEYS = {
    "a cell": (1, 4, 2, 3), "from the end": (-1, -2, -3, -4), "a row": (0, 5, 3), "rows": (0, 5, slice(1, 4)), "a step": (0, 5, slice(None, None, 2), slice(1, None, 3)),
    "a column": (..., 6), "an ellipsis in the middle": (1, ..., 3), "a list of rows": (..., [3, 0, 3], slice(None)), "a list of columns": (..., [6, -1, 0]),
    "a list of heads and a cell": (0, [5, 1], 2, 2), "a list of sequences": ([1, 0, 1], slice(None), 2), "a tensor of rows": (..., torch.tensor([1, 4]), slice(0, 3)),
    "a range of columns": (..., range(1, 6, 2)), "no rows": (..., slice(3, 3), slice(None)), "an empty list": (..., [], slice(None)), "every axis a slice": (slice(1, 2), slice(0, 6, 5), slice(-2, None), slice(0, 99)),
    "past the end": (..., slice(2, 99), 0), "heads and rows": (slice(None), slice(2, 4), 1), "one row of all": (slice(None), slice(None), 0), "a step over rows": (..., slice(0, 5, 3), 1),
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
def test_brackets_give_what_the_dense_matrix_has_there(key: tuple, engine: str) -> None:
    W, dense = make(engine)
    at = tuple(list(item) if isinstance(item, range) else item for item in key)
    got = W[key]
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, dense[at], **TIGHT)


OUTER = {
    "a sequence": 1, "a head": (0, 4), "heads of all": (slice(None), 2), "a slice of heads": (slice(None), slice(1, 6, 2)), "a list of heads": (1, [5, 0, 5]),
    "the last": (-1, -1), "an ellipsis": (1, ...), "everything": ..., "slices": (slice(1, None), slice(0, 3)), "no heads": (0, slice(2, 2)), "a list of sequences": [1, 1, 0],
}  # fmt: skip


@pytest.mark.parametrize("key", OUTER.values(), ids=OUTER.keys())
@pytest.mark.parametrize(
    "score", ["all modifiers and a sink", "additive a head", "bilinear a head", "bias", "bias a key"]
)
def test_sequences_and_heads_alone_give_weights(key: object, score: str, engine: str) -> None:
    W, dense = make(engine, score)
    part, want = W[key], dense[key]
    assert isinstance(part, Weights)
    assert part.shape == want.shape
    torch.testing.assert_close(part.dense(), want, **TIGHT)
    torch.testing.assert_close(part.received(), want.sum(-2), **TIGHT)
    if want.numel():
        v = draw(N.j, 2)
        torch.testing.assert_close(part @ v, want @ v, **TIGHT)


def test_a_chosen_query_head_looks_at_its_own_group_of_keys(engine: str) -> None:
    q, k = draw(1, 6, 5, 3), draw(1, 3, 7, 3)
    W = regard.weights(q, k, engine=engine)
    for h in range(6):
        want = (q[0, h] @ k[0, h // 2].mT / 3**0.5).softmax(-1)
        torch.testing.assert_close(W[0, h].dense(), want, **TIGHT)
        torch.testing.assert_close(W[:, [h]].dense()[0, 0], want, **TIGHT)
    torch.testing.assert_close(W[0, [4, 1]][1].dense(), W[0, 1].dense(), **TIGHT)


picks = st.one_of(
    st.integers(-5, 4),
    st.slices(5).filter(lambda s: s.step is None or s.step > 0),
    st.lists(st.integers(-5, 4), max_size=4),
)


@given(picks, st.one_of(st.integers(-5, 4), st.slices(5).filter(lambda s: s.step is None or s.step > 0)))
def test_any_two_picks_give_what_torch_gives(rows: object, cols: object) -> None:
    W = regard.weights(draw(5, 2), draw(5, 2), mask=regard.causal())
    if rows == cols == slice(None):
        assert isinstance(W[rows, cols], Weights)
        return
    dense = W.dense()
    want = dense[rows][:, cols] if isinstance(rows, list | slice) else dense[rows, cols]
    torch.testing.assert_close(W[rows, cols], want, **TIGHT)


@pytest.mark.parametrize("case", SCORES, ids=lambda case: case.name)
def test_a_head_of_a_head_is_that_head(case: ScoreCase) -> None:
    n = case.sizes()
    W = regard.weights(draw(*n.q), draw(*n.k), score=case.make(*case.parameters(n)), align="end")
    torch.testing.assert_close(W[1][3].dense(), W.dense()[1, 3], **TIGHT)
    torch.testing.assert_close(W[:, 3][1].lse(), W.lse()[1, 3], **TIGHT)


def test_row_column_and_iteration(engine: str) -> None:
    W, dense = make(engine)
    torch.testing.assert_close(W.row(-1), dense[..., -1, :], **TIGHT)
    torch.testing.assert_close(W.column(2), dense[..., 2], **TIGHT)
    parts = list(W)
    assert len(parts) == 2
    torch.testing.assert_close(parts[1].dense(), dense[1], **TIGHT)
    rows = list(regard.weights(draw(3, 2), engine=engine))
    assert [row.shape for row in rows] == [(3,)] * 3


def test_blocks_agree_whether_the_row_sums_are_remembered_or_not() -> None:
    q, k = draw(*N.q), draw(*N.k)
    fresh, knows = (regard.weights(q, k, mask=regard.causal(), align="end") for _ in range(2))
    knows.entropy(), knows.received()
    for key in KEYS.values():
        torch.testing.assert_close(fresh[key], knows[key], **TIGHT)


# Only what is asked for is computed.


class Largest(TorchDispatchMode):
    """Watches every operation and keeps the bytes of the largest result, and of all results together."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else [out]:
            if isinstance(x, Tensor) and x.is_contiguous():
                self.most, self.total = max(self.most, x.nbytes), self.total + x.nbytes
        return out


@pytest.mark.parametrize("key", [(5, 3), (700, slice(0, 4)), ([1, 500], slice(None)), (slice(10, 13), 5)], ids=str)
def test_only_the_rows_that_are_asked_for_are_computed(key: tuple) -> None:
    t = 1024
    x = draw(t, 8)
    W = regard.weights(x)
    with Largest() as watch:
        W[key]
    # Three rows of t scores at most, and copies of q or k; not a t-th of the matrix would be t · t.
    assert watch.most <= 8 * t * x.itemsize
    assert watch.total < t * t * x.itemsize // 4


def test_a_column_needs_no_more_than_a_pass_for_row_sums_and_then_its_tiles(tiles) -> None:
    t = 512
    tiles(16, 64)
    x = draw(t, 8)
    W = regard.weights(x)
    assert W.lse().shape == (t,)  # remembered from here on
    with Largest() as watch:
        W.column(3)
        W[:, [1, 2]]
    assert watch.most <= 8 * t * x.itemsize


def test_a_function_is_called_on_the_asked_row_only() -> None:
    cells: list[int] = []

    def watch(q: Tensor, k: Tensor) -> Tensor:
        cells.append(q.shape[-2] * k.shape[-2])
        return q @ k.mT

    W = regard.weights(draw(100, 3), score=watch)
    cells.clear()  # the one cell that tells whether the function captures a gradient
    W[7, 3]
    assert sum(cells) <= 2 * 100  # one row for its sum, and the tile of it that holds the cell


# Words.

SENTENCE = ["the", "cat", "walks", "on", "the", "street"]


def labelled() -> tuple[Weights, Tensor]:
    W = regard.weights(draw(6, 3)).label(SENTENCE)
    return W, W.dense()


def test_words_name_rows_and_columns() -> None:
    W, dense = labelled()
    torch.testing.assert_close(W["cat", "walks"], dense[1, 2], **TIGHT)
    torch.testing.assert_close(W["cat"], dense[1], **TIGHT)
    torch.testing.assert_close(W[:, "cat"], dense[:, 1], **TIGHT)
    torch.testing.assert_close(W[..., "cat"], dense[:, 1], **TIGHT)
    torch.testing.assert_close(W["cat", 2:4], dense[1, 2:4], **TIGHT)
    torch.testing.assert_close(W[3, "cat"], dense[3, 1], **TIGHT)
    torch.testing.assert_close(W[["cat", "on", 5], "walks"], dense[[1, 3, 5], 2], **TIGHT)
    torch.testing.assert_close(W.row("street"), dense[5], **TIGHT)
    torch.testing.assert_close(W.column("street"), dense[:, 5], **TIGHT)


def test_a_word_that_occurs_twice_is_named_by_its_occurrence() -> None:
    W, dense = labelled()
    torch.testing.assert_close(W[W.at("the", 2), "cat"], dense[4, 1], **TIGHT)
    torch.testing.assert_close(W["cat", W.at("the", 1)], dense[1, 0], **TIGHT)
    torch.testing.assert_close(W.row(W.at("the", 2)), dense[4], **TIGHT)
    torch.testing.assert_close(W[W.at("cat", 1)], dense[1], **TIGHT)


def test_words_address_the_last_two_axes_also_of_heads_and_batches() -> None:
    q = draw(2, 3, 6, 4)
    W = regard.weights(q).label(SENTENCE)
    dense = W.dense()
    torch.testing.assert_close(W["cat", "walks"], dense[..., 1, 2], **TIGHT)
    torch.testing.assert_close(W["cat"], dense[..., 1, :], **TIGHT)
    torch.testing.assert_close(W[1, "cat"], dense[1, :, 1], **TIGHT)
    torch.testing.assert_close(W[1, 2, "cat"], dense[1, 2, 1], **TIGHT)
    torch.testing.assert_close(W[1, 2, 0, "cat"], dense[1, 2, 0, 1], **TIGHT)
    torch.testing.assert_close(W[1, 2, "cat", "walks"], dense[1, 2, 1, 2], **TIGHT)
    torch.testing.assert_close(W[1, "cat", "walks"], dense[1, :, 1, 2], **TIGHT)
    torch.testing.assert_close(W[1, 2]["cat", "walks"], dense[1, 2, 1, 2], **TIGHT)
    torch.testing.assert_close(W[..., "cat", "walks"], dense[..., 1, 2], **TIGHT)
    torch.testing.assert_close(W[..., "cat"], dense[..., 1], **TIGHT)
    assert W[1, 2].tokens == (tuple(SENTENCE), tuple(SENTENCE))


def test_rows_and_columns_may_have_words_of_their_own() -> None:
    W = regard.weights(draw(2, 3), draw(3, 3)).label(["die", "Katze"], ["the", "cat", "sat"])
    torch.testing.assert_close(W["Katze", "cat"], W.dense()[1, 1], **TIGHT)
    assert W.tokens == (("die", "Katze"), ("the", "cat", "sat"))


def test_label_returns_a_new_object_that_knows_what_the_old_one_found() -> None:
    W = regard.weights(draw(6, 3))
    lse = W.lse()
    named_ones = W.label(SENTENCE)
    assert W.tokens == (None, None)
    assert torch.equal(named_ones.lse(), lse)
    calls = []
    spy = regard.weights(draw(6, 3), score=lambda q, k: calls.append(1) or q @ k.mT)
    spy.entropy()
    count = len(calls)
    spy.label(SENTENCE).entropy()
    assert len(calls) == count


def test_a_word_may_be_any_string() -> None:
    words = ["", " ", "…", "</script>", "0", "the"]
    W = regard.weights(draw(6, 3)).label(words)
    for n, word in enumerate(words):
        torch.testing.assert_close(W[word, 0], W.dense()[n, 0], **TIGHT)


def test_at_is_a_value() -> None:
    W, _ = labelled()
    assert W.at("the", 2) == W.at("the", 2)
    assert W.at("the", 2) != W.at("the", 1)


# What it is.


def test_shape_dtype_device_and_repr_say_what_it_is() -> None:
    W = regard.weights(
        draw(2, 6, 5, 3, dtype=torch.float32), draw(2, 3, 7, 3, dtype=torch.float32), mask=regard.causal(), align="end"
    )
    assert (W.shape, W.ndim, W.dtype, W.device) == ((2, 6, 5, 7), 4, torch.float32, torch.device("cpu"))
    text = repr(W)
    for part in ("2×6×5×7", "ScaledDot()", "causal()", "torch.float32", "cpu", "not stored"):
        assert part in text
    assert regard.weights(draw(5, 3)).shape == (5, 5)
    assert regard.weights(draw(3, 5, 3)).shape == (3, 5, 5)
    assert W.mT.shape == (2, 6, 7, 5)
    assert W.mT.mT is W


def test_to_moves_factors_and_keeps_whole_numbers_whole() -> None:
    x = draw(1, 1, 5, 3)
    W = regard.weights(
        x, score=regard.Dot().bias(draw(5, 5)), mask=regard.padding([4]) & (torch.rand(5, 5) < 0.9)
    ).label(list("abcde"))
    single = W.to(torch.float32)
    assert single.dtype == torch.float32
    assert single.tokens == W.tokens
    torch.testing.assert_close(single.dense().double(), W.dense(), rtol=1e-5, atol=1e-6)
    assert W.to("cpu").dtype == torch.float64


def test_matmul_takes_vectors_matrices_and_heads(engine: str) -> None:
    W, dense = make(engine)
    i, j = dense.shape[-2:]
    torch.testing.assert_close(W @ draw(j).fill_(2.0), dense.sum(-1) * 2, **TIGHT)
    for shape in ((j, 4), (1, j, 4), (3, j, 4), (6, j, 4), (2, 6, j, 4), (2, 1, 1, j, 4)):
        v = draw(*shape)
        full = v if v.ndim < 3 else v.repeat_interleave(6 // v.shape[-3], -3)
        torch.testing.assert_close(W @ v, dense @ full, **TIGHT)
    for shape in ((i, 4), (1, i, 4), (6, i, 4), (2, 6, i, 4)):
        u = draw(*shape)
        torch.testing.assert_close(W.mT @ u, dense.mT @ u, **TIGHT)
        torch.testing.assert_close(W.T @ u, dense.mT @ u, **TIGHT)
        torch.testing.assert_close(u.mT @ W, u.mT @ dense, **TIGHT)
    u = draw(i)
    torch.testing.assert_close(W.mT @ u, dense.mT @ u, **TIGHT)
    torch.testing.assert_close(u @ W, u @ dense, **TIGHT)


def test_see_answers_under_its_names_and_says_what_was_not_asked() -> None:
    W = regard.weights(draw(5, 3))
    seen = W.see("entropy", "lse", topk=2, pool=(2, 2))
    assert set(vars(seen)) == {"entropy", "lse", "topk", "pool"}
    with pytest.raises(AttributeError, match="'received' was not requested"):
        seen.received  # noqa: B018
    assert "entropy" in repr(seen)


class _Key:
    def __getitem__(self, key: object) -> object:
        return key


S = _Key()


@pytest.mark.parametrize("key", [S[..., 0:5, :3], S[..., 0:5, :], S[..., :, 0:3], S[..., ::1, :]])
def test_a_slice_with_ends_gives_a_tensor_also_where_it_takes_all(key: object) -> None:
    for i, j in ((5, 3), (7, 4)):
        W = regard.weights(torch.randn(2, i, 4), torch.randn(2, j, 4))
        torch.testing.assert_close(W[key], W.dense()[key])


def test_only_colons_and_ellipses_leave_rows_and_columns_alone() -> None:
    W = regard.weights(torch.randn(2, 3, 5, 4))
    for key in (S[0], S[..., :, :], S[:, 1], S[0:2, 0:3], S[...], S[[0, 1], :, :]):
        assert isinstance(W[key], regard.Weights)
