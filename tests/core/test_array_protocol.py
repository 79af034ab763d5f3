"""The law of the array protocol: a matrix is used as arrays are, and what would store it says so."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.core.indexing import At
from regard.core.result_cache import format_bytes
from support.judge import draw


def matrix(grad: bool = False, mask: regard.Mask | None = None) -> regard.Weights:
    return regard.weights(draw(2, 4, 5, 3, dtype=torch.float32, grad=grad), mask=mask)


def words() -> regard.Weights:
    return regard.weights(draw(4, 3, dtype=torch.float32)).label(["the", "cat", "the", "a:2"])


# NumPy and friends.


@pytest.mark.parametrize("grad", [False, True])
def test_numpy_takes_the_dense_weights(grad: bool) -> None:
    W = matrix(grad)
    want = W.dense().detach().numpy()
    for got in (np.asarray(W), np.array(W), W.numpy(), np.from_dlpack(W), torch.as_tensor(W).numpy()):
        assert np.array_equal(got, want)
    assert np.asarray(W, dtype=np.float64).dtype == np.float64
    assert np.array_equal(np.asarray(W[0, 0]), want[0, 0])
    with pytest.raises(ValueError, match="copy=False cannot"):
        np.array(W, copy=False)


def test_numpy_of_half_precision_inputs_is_float32() -> None:
    assert np.asarray(matrix().bfloat16()).dtype == np.float32


def test_an_array_of_positions_is_an_index() -> None:
    W = matrix()
    assert torch.equal(W[..., np.array([3, 0, 3]), :], W[..., [3, 0, 3], :])
    assert torch.equal(W[0, 0, :, np.array([2])], W[0, 0, :, [2]])
    with pytest.raises(IndexError, match=r"torch\.bool.*nonzero"):
        W[..., np.array([True] * 5), :]


def test_a_head_is_an_image() -> None:
    figure = pytest.importorskip("matplotlib.figure")
    image = figure.Figure().subplots().imshow(matrix()[0, 0])
    assert image.get_array().shape == (5, 5)


def test_what_would_not_fit_is_refused_with_its_bytes_and_what_to_ask_instead() -> None:
    q = torch.zeros(1, 1, 1).expand(64, 10_000_000, 1)  # 8 bytes of memory, and weights of 25.6 PB
    W = regard.weights(q)
    need = format_bytes(64 * 10**14 * 4)
    for ask in (lambda: np.asarray(W), W.numpy, W.dense, W.scores.dense, lambda: torch.as_tensor(W)):
        with pytest.raises(MemoryError, match=rf"{re.escape(need)} and .* are free.*W\.row\(i\)"):
            ask()


# Sizes and truth.


def test_sizes_are_those_of_a_tensor() -> None:
    W = matrix()
    assert len(W) == 2
    assert len(W[0, 0]) == 5
    assert W.size() == W.shape == (2, 4, 5, 5)
    assert (W.size(0), W.size(-1), W.ndim) == (2, 5, 4)


def test_truth_is_ambiguous_as_that_of_an_array() -> None:
    for x in (matrix(), matrix().scores):
        with pytest.raises(ValueError, match="2×4×5×5 numbers is ambiguous"):
            bool(x)


@pytest.mark.parametrize("name", ["sum", "argmax", "max", "log", "tolist", "flatten", "t", "numel"])
def test_other_attributes_of_a_tensor_name_the_way_to_them(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'.*use W\.(dense\(\)\.{name}|\w+)"):
        getattr(matrix(), name)


def test_the_mean_is_that_of_heads_or_of_rows() -> None:
    with pytest.raises(AttributeError, match=r"use W\.reduce_heads\(\"mean\"\).* or W\.received\(\) / i"):
        matrix().mean  # noqa: B018


@pytest.mark.parametrize("name", ["mean", "max", "sort"])
def test_scores_are_not_pointed_to_statistics_of_weights(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"use W\.scores\.dense\(\)\.{name}, in quadratic memory"):
        getattr(matrix().scores, name)


def test_any_other_attribute_is_simply_missing() -> None:
    with pytest.raises(AttributeError, match=r"object has no attribute 'entrophy'$"):
        matrix().entrophy  # noqa: B018
    assert not hasattr(matrix(), "__wrapped__")


# Casts.


@pytest.mark.parametrize(("name", "inner", "outer"), [
    ("half", torch.float16, torch.float32), ("bfloat16", torch.bfloat16, torch.float32),
    ("float", torch.float32, torch.float32), ("double", torch.float64, torch.float64),
])  # fmt: skip
def test_casts_are_those_of_queries_and_keys(name: str, inner: torch.dtype, outer: torch.dtype) -> None:
    q, lengths = draw(2, 4, 5, 3, dtype=torch.float32), torch.tensor([3, 5])
    W = getattr(regard.weights(q, mask=regard.padding(lengths)), name)()
    assert W.dtype == outer
    want = regard.weights(q.to(inner), mask=regard.padding(lengths)).dense()
    assert torch.equal(W.dense(), want)
    assert torch.equal(W.cpu().dense(), want)
    # 2⁻¹¹ of 60,000 is 29: float16 keeps 11 bits of it.
    assert torch.equal(
        getattr(regard.weights(q * 1000), name)().scores[0, 0, 0, 0],
        regard.weights((q * 1000).to(inner)).scores[0, 0, 0, 0],
    )


# PyTorch's functions.


def test_products_of_torch_are_those_of_the_matrix() -> None:
    W, v, u = matrix(), draw(2, 4, 5, 6, dtype=torch.float32), draw(2, 4, 3, 5, dtype=torch.float32)
    w = W.dense()
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(torch.matmul(W, v), w @ v, **close)
    torch.testing.assert_close(torch.matmul(W, other=v), w @ v, **close)
    torch.testing.assert_close(torch.matmul(u, W), u @ w, **close)
    torch.testing.assert_close(u @ W, u @ w, **close)
    torch.testing.assert_close(u.matmul(W), u @ w, **close)
    torch.testing.assert_close(torch.matmul(W.mT, v), w.mT @ v, **close)
    torch.testing.assert_close(torch.mm(W[0, 0], v[0, 0]), w[0, 0] @ v[0, 0], **close)
    torch.testing.assert_close(torch.bmm(W[0], v[0]), w[0] @ v[0], **close)
    torch.testing.assert_close(torch.mv(W[0, 0], v[0, 0, :, 0]), w[0, 0] @ v[0, 0, :, 0], **close)


@pytest.mark.parametrize("call", [
    lambda W: torch.exp(W), lambda W: torch.add(W, 1), lambda W: torch.stack([W, W]), lambda W: torch.matmul(W.scores, W.dense()),
    lambda W: torch.matmul(W.dense(), W.mT), lambda W: torch.nn.functional.softmax(W, -1), lambda W: torch.cumsum(W, -1),
])  # fmt: skip
def test_any_other_function_of_torch_is_refused_with_the_way_to_it(call) -> None:
    with pytest.raises(TypeError, match=r"takes tensors, and a lazy matrix stores none.*\.dense\(\)"):
        call(matrix())


def test_compiled_products_are_right_or_refused() -> None:
    q, v = draw(2, 3, 5, 5, dtype=torch.float32), draw(2, 3, 5, 5, dtype=torch.float32)  # v @ W fits as well
    torch._dynamo.reset()

    def served(q: Tensor, v: Tensor) -> Tensor:
        W = regard.weights(q)
        return (
            torch.matmul(W, v)
            + torch.matmul(v, W)
            + torch.matmul(W.mT, v)
            + W.scores.dense().amax() * len(W) * W.size(-1)
        )

    torch.testing.assert_close(
        torch.compile(served, fullgraph=True, backend="eager")(q, v), served(q, v), rtol=1e-5, atol=1e-4
    )
    for product in (lambda q, v: regard.weights(q) @ v, lambda q, v: v @ regard.weights(q)):
        torch._dynamo.reset()
        # Dynamo of 2.6 tells that an exception was raised, and not which.
        with pytest.raises(Exception, match=r"write torch\.matmul\(W, v\)|Observed exception"):
            torch.compile(product, fullgraph=True, backend="eager")(q, v)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(product, backend="eager")(q, v), product(q, v), rtol=1e-5, atol=1e-5)


# Words.


def test_words_are_asked_for_with_in() -> None:
    W = words()
    assert "cat" in W
    assert "dog" not in W
    assert "the:2" in W
    assert "the:3" not in W
    assert "a:2" in W
    assert At("the", 2) in W
    assert "cat" not in matrix()
    with pytest.raises(TypeError, match=r"`in` asks for a token.*got float"):
        0.5 in W  # noqa: B015


def test_the_second_of_equal_words_is_the_word_and_its_number() -> None:
    W = words()
    assert torch.equal(W["the:2"], W[2])
    assert torch.equal(W.row("the:1"), W[0])
    assert torch.equal(W.column("the:2"), W[:, 2])
    assert W["cat", "the:2"] == W[1, 2]
    assert torch.equal(W.mass(["the:1", "the:2"]), W.mass([0, 2]))
    assert torch.equal(W["a:2"], W[3])  # a token that looks like one
    assert torch.equal(W["a:2:1"], W[3])
    for word, text in (("the", "'the:1' is the first, 'the:2' the last"), ("the:3", "occurs 2 times; got occurrence 3"),
                       ("the:0", "got occurrence 0"), ("dog:1", "no token 'dog'"), (":1", "no token ':1'")):  # fmt: skip
        with pytest.raises(KeyError, match=text):
            W[word]


# Scores.


MASKS = {"none": None, "causal": regard.causal(), "window": regard.window(1, 0), "first hidden": ~regard.padding([2])}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", ["scaled_dot", regard.Dot().softcap(3.0).alibi(torch.tensor([0.1, 0.2, 0.3, 0.4])), regard.Gaussian(2.0), "cosine"], ids=repr)  # fmt: skip
def test_scores_are_those_whose_softmax_the_weights_are(score, mask: str) -> None:
    q, k = draw(2, 4, 5, 3), draw(2, 2, 5, 3)
    W = regard.weights(q, k, score=score, mask=MASKS[mask])
    s = W.scores.dense()
    plain = regard.weights(q, k, score=score, engine="reference").scores.dense()
    visible = W.dense() > 0
    tight = {"rtol": 1e-12, "atol": 1e-12}
    assert torch.equal(s == -torch.inf, ~visible)
    torch.testing.assert_close(s[visible], plain[visible], **tight)
    some = visible.any(-1)
    torch.testing.assert_close(s.logsumexp(-1)[some], W.lse()[some], **tight)
    torch.testing.assert_close(s.softmax(-1)[some], W.dense()[some], **tight)
    torch.testing.assert_close(s.amax(-1), W.max_score(), **tight)
    torch.testing.assert_close(W.scores[0, 1, 2:4, 1], s[0, 1, 2:4, 1], **tight)
    torch.testing.assert_close(W.scores[1].row(2), s[1, :, 2], **tight)
    torch.testing.assert_close(W.scores.column(0), s[..., 0], **tight)
    assert np.array_equal(np.asarray(W.scores), s.numpy())


def test_scores_have_gradients_and_tokens() -> None:
    q = draw(4, 3, grad=True)
    W = regard.weights(q, score="dot").label(["the", "cat", "the", "mat"])
    (got,) = torch.autograd.grad(W.scores["cat", "the:2"], q)
    want = torch.zeros_like(q)
    want[1], want[2] = q[2].detach(), q[1].detach()
    torch.testing.assert_close(got, want)
    assert "cat" in W.scores
    assert W.scores.half().shape == (4, 4)


def test_scores_leave_a_sink_out_and_are_not_those_of_dense_weights() -> None:
    q = draw(4, 3)
    scores = regard.weights(q, score=regard.Dot().sink(torch.ones(1).double())).scores.dense()
    torch.testing.assert_close(scores, q @ q.mT, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match=r"from_dense have no scores"):
        regard.Weights.from_dense(torch.eye(3)).scores  # noqa: B018


# Copies.


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "deepcopy", "pickle"]
)
def test_everything_can_be_copied_and_pickled(again) -> None:
    W = words()
    W.entropy()
    assert torch.equal(again(W)["the:2"], W["the:2"])
    assert torch.equal(again(W).entropy(), W.entropy())
    assert torch.equal(again(W.scores).dense(), W.scores.dense())
    assert torch.equal(again(W.mT) @ torch.ones(4), W.received())
    seen = W.see("entropy", topk=2)
    assert torch.equal(again(seen).entropy, seen.entropy)
    assert torch.equal(again(seen).topk.indices, seen.topk.indices)
    assert repr(again(seen)) == repr(seen)
    mask = (regard.causal() & ~regard.padding([1])) | regard.documents([0, 0, 1, 1])
    assert again(mask).draw(4, 4) == mask.draw(4, 4)
    score = regard.ScaledDot(0.5).bias(torch.ones(4, 4)).softcap(3.0).sink(torch.ones(1))
    assert repr(again(score)) == repr(score)
    layer = regard.nn.SelfAttention(8, 2)
    assert [name for name, _ in again(layer).named_parameters()] == [name for name, _ in layer.named_parameters()]
    assert W.at("the", 2) == again(W.at("the", 2))
    view = W.show("cat")
    assert again(view).html() == view.html()


# Masks.


def test_one_flag_a_key_of_every_sequence_is_pointed_to_its_axes() -> None:
    q = draw(3, 2, 5, 4, dtype=torch.float32)
    keys = torch.arange(5) < torch.tensor([5, 3, 2])[:, None]
    for ask in (
        lambda: regard.weights(q, mask=keys),
        lambda: regard.attend(q, mask=keys),
        lambda: regard.attend(q, mask=regard.causal() & keys),
    ):
        with pytest.raises(
            ValueError,
            match=r"\(3, 5\) has one flag a key of every sequence.*mask\[:, None, None, :\], or padding\(lengths\)",
        ):
            ask()
    with pytest.raises(ValueError, match=r"one flag a query and key of every sequence.*mask\[:, None\]\."):
        regard.weights(q, mask=keys[:, None, :].expand(3, 5, 5))
    assert torch.equal(
        regard.weights(q, mask=keys[:, None, None, :]).dense(),
        regard.weights(q, mask=regard.padding([5, 3, 2])).dense(),
    )
    assert regard.weights(q, mask=torch.ones(5, 5, dtype=torch.bool)).shape == (3, 2, 5, 5)


def test_padding_on_the_left_is_the_complement_of_padding() -> None:
    q = draw(2, 1, 4, 3)
    W = regard.weights(q, mask=regard.causal() & ~regard.padding([1, 3]))
    assert (W.dense()[0, 0, :, :1] == 0).all()
    assert (W.dense()[1, 0, :, :3] == 0).all()
    want = regard.weights(q[:1, :, 1:], mask=regard.causal()).dense()
    torch.testing.assert_close(W.dense()[:1, :, 1:, 1:], want)
