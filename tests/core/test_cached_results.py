"""The result cache: how many passes over the keys a few questions take, and which results of a pass serve later ones."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import regard
from regard.engines import blockwise, numba

Ask = Callable[[regard.Weights], object]


class Passes(list[str]):
    """The passes that were made: "rows" or "columns" each."""

    def of(self, ask: Callable[[], object]) -> list[str]:
        self.clear()
        ask()
        return list(self)


@pytest.fixture(params=["compiled", "plain"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled" and numba.load() is None:
        pytest.skip("numba is not installed")
    monkeypatch.setattr(numba, "enabled", request.param == "compiled")
    return request.param


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    counter = Passes()

    def counted(function: Callable[..., object], kind: str) -> Callable[..., object]:
        def run(*args: object) -> object:
            counter.append(kind)
            return function(*args)

        return run

    for module in (blockwise, numba):
        monkeypatch.setattr(module, "forward", counted(module.forward, "rows"))
        monkeypatch.setattr(module, "column_pass", counted(module.column_pass, "columns"))
    return counter


def draw(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, requires_grad=grad)


def weights(grad: bool = False, **options: object) -> tuple[regard.Weights, Tensor, tuple[Tensor, Tensor]]:
    q, k, v = draw(2, 3, 7, 4, grad=grad), draw(2, 3, 9, 4, grad=grad), draw(2, 3, 9, 5, grad=grad)
    return regard.weights(q, k, mask=regard.causal(), align="end", **options), v, (q, k)


def natural(W: regard.Weights, v: Tensor) -> list[Tensor]:
    return [W @ v, W.lse(), W.max_score(), W.entropy()]


@pytest.mark.parametrize("grad", [False, True], ids=["numbers", "gradients"])
def test_four_questions_are_one_pass_and_columns_one_more(passes: Passes, tiles: str, grad: bool) -> None:
    W, v, _ = weights(grad)
    # In plain PyTorch an entropy is one more walk over every tile, so it is computed when it is asked for.
    assert passes.of(lambda: natural(W, v)) == ["rows"] * (1 if tiles == "compiled" else 2)
    assert passes.of(W.received) == ["columns"]
    assert passes.of(lambda: W.pool(2, 2)) == ["columns"]
    assert passes.of(lambda: (W.received(), W.lse(), W.max_score(), W.entropy())) == []


def test_rows_and_columns_asked_together_are_one_pass_on_compiled_tiles(passes: Passes, tiles: str) -> None:
    every = ["rows"] if tiles == "compiled" else ["rows", "columns"]
    assert passes.of(lambda: weights()[0].see("entropy", "received", topk=2, pool=(2, 2))) == every
    assert passes.of(lambda: weights()[0].received()) == every
    assert passes.of(lambda: weights()[0].mT @ draw(2, 3, 7, 2)) == every


@pytest.mark.parametrize(
    "first",
    [lambda W: W.lse(), lambda W: W.max_score(), lambda W: W.received(), lambda W: W.topk(2), lambda W: W.mass(1)],
)
def test_any_pass_tells_what_it_has(passes: Passes, tiles: str, first: Ask) -> None:
    W, _, _ = weights()
    first(W)
    assert passes.of(lambda: (W.lse(), W.max_score())) == []
    assert passes.of(W.entropy) == ([] if tiles == "compiled" else ["rows"])
    assert passes.of(lambda: W.mT @ draw(2, 3, 7, 2)) == ["columns"]


def test_remembered_numbers_are_the_ones_of_a_question_alone(tiles: str) -> None:
    sink = regard.ScaledDot().sink(draw(3))
    for options in ({}, {"score": sink}):
        W, v, (q, k) = weights(**options)
        for name, remembered in zip(("lse", "max_score", "entropy"), natural(W, v)[1:], strict=True):
            alone = getattr(regard.weights(q, k, mask=regard.causal(), align="end", **options), name)()
            torch.testing.assert_close(remembered, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["lse", "max_score", "entropy", "received"])
def test_a_remembered_number_has_a_gradient_of_its_own(tiles: str, name: str) -> None:
    W, v, (q, k) = weights(grad=True)
    y = W @ v
    answer = getattr(W, name)()
    truth = getattr(regard.weights(q, k, mask=regard.causal(), align="end", engine="reference"), name)()
    wanted = torch.autograd.grad(truth.square().sum(), (q, k))
    grads = torch.autograd.grad(answer.square().sum(), (q, k))
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(y.sum(), v)[0].shape == v.shape  # the first node is left alone


def test_a_detached_matrix_remembers_what_was_asked_before(passes: Passes, tiles: str) -> None:
    W, _, (q, _) = weights(grad=True)
    lse = W.lse()
    D = W.detach()
    assert passes.of(D.lse) == []
    assert torch.equal(D.lse(), lse)
    assert not D.lse().requires_grad
    with torch.no_grad():
        q.mul_(2)
    assert passes.of(D.lse) == ["rows"]
    assert not torch.equal(D.lse(), lse)


def test_a_change_in_place_takes_a_pass(passes: Passes, tiles: str) -> None:
    W, v, (q, _) = weights()
    before = natural(W, v)[1]
    q.mul_(2)
    assert passes.of(W.lse) == ["rows"]
    assert not torch.equal(W.lse(), before)


def test_values_of_a_larger_batch_are_not_remembered(passes: Passes, tiles: str) -> None:
    q, v = draw(1, 3, 7, 4), draw(5, 3, 7, 2)
    W = regard.weights(q)
    W @ v
    assert passes.of(W.lse) == ["rows"]
    assert W.lse().shape == (1, 3, 7)


def test_values_that_were_let_go_are_let_go(tiles: str) -> None:
    W, v, _ = weights()
    y = W @ v
    gone = weakref.ref(v), weakref.ref(y)
    del v, y
    gc.collect()
    assert [x() for x in gone] == [None, None]
    sizes = {tuple(x.shape) for x, _ in W._cache._results.values()}
    assert sizes <= {(2, 3, 7), (2, 3, 7, 2)}  # numbers of rows alone


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_begin_without_memory(passes: Passes, copied: Callable[[regard.Weights], regard.Weights]) -> None:
    """A copied tensor counts its changes anew: q, changed once since the pass, would look like q before it."""
    W, v, (q, _) = weights()
    natural(W, v)
    q.mul_(2)
    other = copied(W)
    assert passes.of(other.lse) == ["rows"]
    torch.testing.assert_close(other.lse(), W.lse())
    labelled = W.label(list("abcdefg"), list("abcdefghi"))
    assert passes.of(labelled.lse) == []


def test_inference_mode_remembers_nothing_that_cannot_be_checked(passes: Passes, tiles: str) -> None:
    with torch.inference_mode():
        W, v, (q, _) = weights()
        natural(W, v)
        q.mul_(2)
        assert passes.of(W.lse) == ["rows"]


def test_compiled_code_gives_the_same_and_leaves_the_memory_alone() -> None:
    q, v = draw(2, 7, 4), draw(2, 7, 4)

    def ask(q: Tensor, v: Tensor) -> list[Tensor]:
        return natural(regard.weights(q, mask=regard.causal()), v)

    for answer, wanted in zip(torch.compile(ask, backend="eager")(q, v), ask(q, v), strict=True):
        torch.testing.assert_close(answer, wanted, rtol=1e-5, atol=1e-5)
