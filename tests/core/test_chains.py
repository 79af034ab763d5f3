"""Products over layers and weights times gradients, as the same products of dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import regard
from regard import chains


def layers(count: int = 3, heads: int = 2) -> list[regard.Weights]:
    q = torch.randn(count, 2, heads, 6, 4).double()
    return [regard.weights(x, 2 * x, mask=regard.causal()) for x in q]


def product(
    stack: list[regard.Weights], residual: float, shares: list[Tensor] | None = None, norms: list[Tensor] | None = None
) -> Tensor:
    """The dense matrix A_L ... A_1, (b, t, t)."""
    total = torch.eye(6).double().expand(2, 6, 6)
    for n, W in enumerate(stack):
        share = torch.full((W.shape[-3],), 1 / W.shape[-3]).double() if shares is None else shares[n] / shares[n].sum()
        w = W.dense() if norms is None else W.dense() * norms[n][..., None, :]
        mean = torch.einsum("h,bhij->bij", share, w)
        if norms is not None:
            mean = mean / mean.sum(-1, keepdim=True)
        total = (residual * torch.eye(6).double() + (1 - residual) * mean) @ total
    return total


@pytest.mark.parametrize("residual", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_rollout_is_the_product_of_dense_matrices(residual: float, weighted: bool) -> None:
    stack = layers()
    shares = [torch.rand(2).double() for _ in stack] if weighted else None
    x, want = torch.randn(2, 6, 3).double(), product(stack, residual, shares)
    torch.testing.assert_close(chains.rollout(stack, x, residual=residual, head_weights=shares), want @ x)
    rows = chains.rollout_rows(stack, [0, -1, 3], residual=residual, head_weights=shares)
    torch.testing.assert_close(rows, want[:, [0, 5, 3]])


@pytest.mark.parametrize("weighted", [False, True])
def test_a_rollout_by_value_norms_counts_what_weights_add(weighted: bool) -> None:
    stack, norms = layers(), [torch.rand(2, 2, 6).double() + 0.1 for _ in range(3)]
    shares = [torch.rand(2).double() for _ in stack] if weighted else None
    x, want = torch.randn(2, 6, 3).double(), product(stack, 0.3, shares, norms)
    options = {"residual": 0.3, "head_weights": shares, "value_norms": norms}
    torch.testing.assert_close(chains.rollout(stack, x, **options), want @ x)
    torch.testing.assert_close(chains.rollout_rows(stack, [0, 4], **options), want[:, [0, 4]])
    torch.testing.assert_close(want.sum(-1), torch.ones(2, 6).double())


def test_value_norms_may_be_those_of_shared_key_heads() -> None:
    stack = [regard.weights(torch.randn(2, 4, 6, 3).double(), torch.randn(2, 2, 6, 3).double()) for _ in "ab"]
    norms = [torch.rand(2, 2, 6).double() for _ in stack]
    want = product(stack, 0.5, None, [x.repeat_interleave(2, 1) for x in norms])
    torch.testing.assert_close(chains.rollout_rows(stack, [1, 4], value_norms=norms), want[:, [1, 4]])
    torch.testing.assert_close(chains.rollout(stack, torch.eye(6).double(), value_norms=norms), want)


def test_a_row_whose_values_have_no_length_looks_at_nothing_but_itself() -> None:
    stack, norms = layers(1), [torch.zeros(2, 2, 6).double()]
    assert torch.equal(
        chains.rollout_rows(stack, [3], value_norms=norms), 0.5 * torch.eye(6).double()[3].expand(2, 1, 6)
    )


def test_rows_of_a_rollout_cost_rows_in_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, passes = regard.weights(torch.randn(2, 6, 4)), []
    transposed = regard.Weights.mT.fget
    monkeypatch.setattr(regard.Weights, "mT", property(lambda W: (passes.append(W), transposed(W))[1]))
    torch.testing.assert_close(chains.rollout_rows([layer], [1, -2]), chains.rollout([layer], torch.eye(6))[[1, -2]])
    assert len(passes) == 0
    chains.rollout_rows([layer] * 3, [1])
    assert len(passes) == 2
    assert chains.rollout_rows([layer] * 2, []).shape == (0, 6)


def test_a_rollout_differentiates() -> None:
    q, x = torch.randn(2, 5, 3).double().requires_grad_(), torch.randn(5, 2).double().requires_grad_()
    assert gradcheck(lambda q, x: chains.rollout([regard.weights(q), regard.weights(2 * q)], x), (q, x), fast_mode=True)


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("engine", ["one strip", "strips of a row", "reference"])
def test_weights_times_gradients_are_those_of_autograd(
    positive: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "strips of a row":
        monkeypatch.setattr("regard.core.rows.strips.STRIP_NUMBERS", 1)
    q, k = torch.randn(2, 4, 6, 3).double(), torch.randn(2, 2, 7, 3).double()
    v, x, dy = torch.randn(2, 2, 7, 5).double(), torch.randn(2, 7, 3).double(), torch.randn(2, 4, 6, 5).double()
    W = regard.weights(q, k, engine="reference" if engine == "reference" else "auto")
    w = W.dense().requires_grad_()
    (w @ v.repeat_interleave(2, 1)).backward(dy)
    cells = w.detach() * w.grad
    want = (cells.clamp(min=0) if positive else cells) @ x[:, None]
    torch.testing.assert_close(chains.gradient_relevance(W, dy, v, x, positive=positive), want)
    torch.testing.assert_close(
        chains.gradient_relevance(W[0, 1], dy[0, 1], v[0, 0], x[0], positive=positive), want[0, 1]
    )


def test_errors_say_what_must_hold() -> None:
    stack = layers()
    with pytest.raises(ValueError, match="at least one layer; got none"):
        chains.rollout([], torch.eye(6))
    with pytest.raises(ValueError, match="share between 0 and 1; got 2"):
        chains.rollout(stack, torch.eye(6).double(), residual=2)
    with pytest.raises(ValueError, match=r"layer 1 of a rollout must be \(..., h, t, t\)"):
        chains.rollout_rows([stack[0], regard.weights(torch.randn(2, 2, 5, 4))], [0])
    with pytest.raises(ValueError, match="value_norms takes a tensor for each of 3 layers; got 1"):
        chains.rollout(stack, torch.eye(6).double(), value_norms=[torch.ones(2, 6)])
    with pytest.raises(ValueError, match=r"dy \(..., 2, 6, e\), v \(..., heads, 6, e\)"):
        chains.gradient_relevance(stack[0], torch.randn(2, 2, 5, 3), torch.randn(2, 2, 6, 3), torch.eye(6))
    x, W = torch.eye(6).double(), stack[0]
    for ask, message in (
        (lambda: chains.rollout(W, x), r"a list of Weights, one a layer; got one Weights. Of one layer: \[W\]"),
        (lambda: chains.rollout([W.dense()], x), r"layer 0 of a rollout takes a Weights, .*; got Tensor"),
        (lambda: chains.rollout(stack, x[0]), r"\(..., 6, e\), a row for each position; got \(6,\)"),
        (lambda: chains.rollout(stack, x, residual="a"), "between 0 and 1; got 'a'"),
        (lambda: chains.rollout(stack, x, head_weights=[torch.zeros(2)] * 3), "2 finite numbers whose sum is not 0"),
        (lambda: chains.rollout(stack, x, head_weights=[torch.rand(3)] * 3), "head_weights of layer 0: a tensor of 2"),
        (lambda: chains.rollout(stack, x, value_norms=[torch.rand(3, 6)] * 3), r"\(..., 2, 6\), .*; got \(3, 6\)"),
        (lambda: chains.rollout_rows(stack, [6]), r"positions below 6; got \[6\]"),
        (lambda: chains.rollout_rows(stack, 3), "positions below 6; got 3"),
        (lambda: chains.gradient_relevance(W, torch.rand(3, 6, 4), torch.rand(2, 6, 4), x), r"got \(3, 6, 4\)"),
        (lambda: chains.gradient_relevance(W, None, None, None), "got NoneType, NoneType and NoneType"),
    ):
        with pytest.raises((ValueError, TypeError, IndexError), match=message):
            ask()
