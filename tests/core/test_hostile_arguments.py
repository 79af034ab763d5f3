"""Arguments that were answered wrongly in silence, or by an error of PyTorch's or Python's own, each with its remedy."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import chains, kv, losses, nn, patterns
from regard.distributed.checksums import describe

q, v = torch.randn(2, 4, 5, 8), torch.randn(5, 3)
W = regard.weights(q, mask=regard.causal())
R = W.reduce_heads()
p = torch.tensor(2.0, requires_grad=True)


class Scorer:
    def __init__(self) -> None:
        self.p = p

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        return self.p * (q @ k.mT)


class Hidden(torch.nn.Module):
    """A module with a parameter that it does not list."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [torch.nn.Parameter(torch.ones(1))]

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.others[0] * (q @ k.mT)


def times_p(q: Tensor, k: Tensor) -> Tensor:
    return p * (q @ k.mT)


HIDDEN: dict[str, Callable[..., Tensor]] = {
    "another function": lambda q, k: times_p(q, k),
    "functools.partial": functools.partial(lambda p, q, k: p * (q @ k.mT), p),
    "an object": Scorer(),
    "a method": Scorer().__call__,
    "a default": lambda q, k, p=p: p * (q @ k.mT),
    "a list": (lambda few: lambda q, k: few[0] * (q @ k.mT))([p]),
    "a list of a module": Hidden(),
}


@pytest.mark.parametrize("function", HIDDEN.values(), ids=HIDDEN)
def test_no_function_loses_the_gradient_of_a_tensor_that_it_reaches(function: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=r"captures .* needs gradients.*Pass such tensors on"):
        regard.attend(q, score=function)
    with torch.no_grad():  # where there is none to lose
        assert regard.attend(q, score=function).shape == q.shape


def test_no_modifier_loses_the_gradient_of_a_tensor_that_it_reaches() -> None:
    score = regard.Dot().modify(functools.partial(lambda p, s, i, j: s * p, p))
    with pytest.raises(ValueError, match="modify: the function captures"):
        regard.weights(q, score=score)


def test_an_attribute_is_not_taken_for_a_global_tensor_of_its_name() -> None:
    class Numbers:
        p = 3.0

    score = regard.Similarity(lambda q, k: Numbers.p * (q @ k.mT))
    torch.testing.assert_close(regard.attend(q, score=score), regard.attend(q, score=regard.ScaledDot(3.0)))


def test_one_parameter_needs_no_tuple() -> None:
    y = regard.attend(q, score=regard.Similarity(lambda q, k, p: p * (q @ k.mT), p))
    (slope,) = torch.autograd.grad(y.sum(), p)
    assert slope.isfinite()
    assert slope != 0


def test_a_similarity_must_not_change_queries_in_place() -> None:
    before = q.clone()
    with pytest.raises(ValueError, match="must not change q or k in place"):
        regard.attend(q, score=lambda q, k: q.mul_(2) @ k.mT)
    assert torch.equal(q, before)


def test_a_check_of_a_function_draws_no_random_number() -> None:
    torch.manual_seed(0)
    regard.weights(q, score=lambda q, k: q @ k.mT + torch.rand(()))
    after = torch.rand(())
    torch.manual_seed(0)
    assert torch.rand(()) == after


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "align of attend": (lambda: regard.attend(q, align="middle"), ValueError, "align must be"),
    "== a number": (lambda: W == 0.5, TypeError, "== takes numbers"),
    "!= a tensor": (lambda: W.dense() != W, TypeError, "!= takes numbers"),
    "a tensor == W": (lambda: W.dense() == W, TypeError, "== takes numbers"),
    "> a number": (lambda: W > 0.5, TypeError, "> takes numbers"),
    "a number - W": (lambda: 1 - W, TypeError, "- takes numbers"),
    "a tensor * W": (lambda: W.dense() * W, TypeError, r"\* takes numbers"),
    "heads together == a number": (lambda: R == 1, TypeError, "== takes numbers"),
    "heads together in a list": (lambda: list(R), TypeError, "R.row"),
    "a mask and another": (lambda: regard.causal() and regard.window(1, 1), TypeError, "&"),
    "whole numbers for queries": (lambda: W.to(torch.int32), TypeError, "floating-point"),
    "half a head": (lambda: W.reduce_heads(heads=[0.5]), IndexError, "numbers of some of 4 heads"),
    "flags of heads": (lambda: W.reduce_heads(heads=[True, False]), IndexError, "numbers of some of 4 heads"),
    "one head": (lambda: W.reduce_heads(heads=3), IndexError, "a list of numbers"),
    "groups of half a head": (lambda: W.reduce_heads(groups=2.0), ValueError, "must divide the 4 heads"),
    "groups by name": (lambda: W.reduce_heads(groups="q"), ValueError, "or be 'kv'"),
    "a list of weights": (lambda: W.reduce_heads(weights=[1.0, 2, 3, 4]), TypeError, "torch.tensor"),
    "rows without columns": (lambda: R[3], IndexError, r"rows and columns.*got 3"),
    "values in a list": (lambda: R @ [1, 2], TypeError, "floating-point tensor"),
    "values of other sequences": (lambda: R @ torch.ones(3, 1, 5, 2), ValueError, "does not broadcast"),
    "values without heads": (lambda: W @ torch.ones(2, 0, 5, 2), ValueError, "0 heads"),
    "flags as positions": (lambda: W.gather(torch.ones(5, 5, dtype=torch.bool)), TypeError, "recall"),
    "positions of other sequences": (lambda: W.gather(torch.ones(3, 4, 5, 2).long()), ValueError, "does not broadcast"),
    "half an offset": (lambda: W.offset_mass(1.5), ValueError, "whole number"),
    "a share by name": (lambda: W.cover("half", 1, 1), ValueError, "between 0 and 1"),
    "one size of a block": (lambda: W.recall(torch.ones(3, 3).bool(), block=2), ValueError, "two sizes"),
    "descending uint8 edges": (lambda: W.distance_histogram(torch.tensor([3, 1], dtype=torch.uint8)), ValueError, "ascending"),
    "edges of words": (lambda: W.distance_histogram(["near", "far"]), ValueError, "ascending"),
    "tokens of tokens": (lambda: W.induction_mass([[1]] * 5), TypeError, r"one token a key.*got \[\[1\], \[1\]"),
    "a segment's number": (lambda: W.segment_mass(torch.tensor([10**10, 0, 0, 0, 0])), ValueError, "without gaps"),
    "an axis that is not there": (lambda: W.size(9), IndexError, "one of the 4 axes"),
    "a generator of tokens": (lambda: W.label(word for word in "abcde"), TypeError, "list of strings"),
    "a mask of five axes": (lambda: regard.attend(q, mask=lambda i, j: (j <= i)[None, None, None]), ValueError, "broadcast to"),
    "a mask of another size": (lambda: regard.attend(q, mask=lambda i, j: torch.ones(3, 3).bool()), ValueError, "block by block"),
    "scores that are flags": (lambda: regard.attend(q, score=lambda q, k: q @ k.mT > 0), ValueError, "floating point"),
    "modified scores in whole numbers": (
        lambda: regard.attend(q, score=regard.Dot().modify(lambda s, i, j: s.long())), ValueError, "floating point",
    ),
    "a soft cap beyond float32": (lambda: regard.Dot().softcap(1e39), ValueError, "finite"),
    "a scale beyond float32": (lambda: regard.ScaledDot(1e39), ValueError, "finite"),
    "a learned scale": (lambda: regard.ScaledDot(torch.tensor(2.0)), ValueError, "multiplies q"),
    "a sigma whose square is 0": (lambda: regard.Gaussian(1e-200), ValueError, "1e-18"),
    "lengths of words": (lambda: regard.padding("ab"), TypeError, "whole numbers"),
    "an answer of petabytes": (lambda: W.pool(10**9, 10**9), MemoryError, "this answer would take"),
    "tiles of petabytes by max": (lambda: R.pool(10**9, 10**9, by="max"), MemoryError, "this answer would take"),
    "ten billion largest keys": (lambda: W.topk(10**10), MemoryError, "this answer would take"),
    "a floor that is a flag": (lambda: losses.entropy_floor(W, True), ValueError, "needs a number; got True"),
    "relations of numbers": (lambda: losses.distillation((q, q), (q, q), (1,)), ValueError, r"pairs of the letters.*got \(1,\)"),
    "no index head": (lambda: losses.index_weights(q[0][:0], q[0, 0], torch.ones(5, 0)), ValueError, r"got \(0, 5, 8\)"),
    "whole numbers in an index": (lambda: losses.index_weights(q[0].long(), q[0, 0], torch.ones(5, 4)), TypeError, r"index_weights\(q\)"),
    "keys that are kept by flags": (lambda: kv.keep(torch.ones(2, 5).bool(), 1), TypeError, "got torch.bool"),
    "scores of no layer": (lambda: kv.evict(SimpleNamespace(layers=[]), None, 1), TypeError, "a list of scores.*NoneType"),
    "head weights of nan": (
        lambda: chains.rollout([W], torch.eye(5), head_weights=[torch.full((4,), torch.nan)]), ValueError, "finite numbers",
    ),
    "relevance for heads that are not there": (
        lambda: chains.gradient_relevance(W[0], q[0], q[0], torch.ones(3, 5, 5)), ValueError, r"gradient_relevance\(x\)",
    ),
    "relevance of sequences that are not there": (
        lambda: chains.gradient_relevance(W[0], torch.ones(7, 4, 5, 8), q[0], torch.eye(5)), ValueError, r"gradient_relevance\(dy\)",
    ),
    "relevance of complex numbers": (
        lambda: chains.gradient_relevance(W, q + 0j, q, torch.eye(5)), TypeError, r"gradient_relevance\(dy\).*complex64",
    ),
    "a head that is not named": (lambda: patterns.classify(W).share(0, 9), IndexError, "one of 4 heads.*got 9"),
    "a flag for a number of heads": (lambda: nn.SelfAttention(8, heads=True), TypeError, "heads must be a whole number"),
    "ids in a list": (lambda: nn.LanguageModel(9, dim=8, layers=1, heads=1)([[1, 2]]), TypeError, "ids must be a tensor"),
    "a projection elsewhere": (
        lambda: regard.attend(q, score=regard.Bilinear(torch.ones(8, 8, device="meta"))), ValueError, r"\(8, 8\) of the score Bilinear is on meta",
    ),
    "a parameter elsewhere": (
        lambda: regard.attend(q, score=regard.Similarity(lambda q, k, p: q @ k.mT * p, torch.ones(1, device="meta"))),
        ValueError, "of the score Similarity is on meta",
    ),
    "one id": (lambda: regard.documents(3), ValueError, "one id a position"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_by_name(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert re.search(text, str(caught.value.args[0]))


#: Tensors whose numbers say what is asked.
SAYING: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "gather": (W.gather, torch.zeros(5, 1).long()),
    "segment_mass": (W.segment_mass, torch.zeros(5).long()),
    "segments in a list": (lambda x: W.segment_mass([x]), torch.zeros(5).long()),
    "mass": (W.mass, torch.ones(5).bool()),
    "induction_mass": (W.induction_mass, torch.zeros(5).long()),
    "distance_histogram": (W.distance_histogram, torch.tensor([1, 2])),
    "blocks": (lambda x: W.recall(x, block=(5, 5)), torch.ones(1, 1).bool()),
    "weights of heads": (lambda x: W.reduce_heads(weights=x), torch.ones(4)),
    "an index": (lambda x: W[..., x, 0], torch.ones(1).long()),
    "padding": (lambda x: regard.padding(x), torch.ones(2).long()),
    "documents": (lambda x: regard.documents(x), torch.ones(5).long()),
    "kv.keep": (lambda x: kv.keep(x, 1), torch.ones(2, 5)),
    "kv.update": (lambda x: kv.update(x, W), torch.ones(2, 4, 4)),
    "weights of a rollout": (lambda x: chains.rollout([W], torch.eye(5), head_weights=[x]), torch.ones(4)),
    "norms of a rollout": (lambda x: chains.rollout([W], torch.eye(5), value_norms=[x]), torch.ones(4, 5)),
    "rows of a rollout": (lambda x: chains.rollout_rows([W], x), torch.ones(1).long()),
}


@pytest.mark.parametrize("call", SAYING)
def test_numbers_that_are_not_in_memory_are_refused_by_name(call: str) -> None:
    ask, x = SAYING[call]
    ask(x)
    with pytest.raises(TypeError, match=r"must be a dense tensor.*torch.sparse_coo"):
        ask(x.to_sparse())
    with pytest.raises((NotImplementedError, ValueError), match=r"is on (the )?meta"):
        ask(x.to("meta"))


def test_a_matrix_is_equal_to_itself_alone() -> None:
    same = W
    assert same == W
    assert regard.weights(q) != W
    assert W != "a word"
    assert W in [W]
    assert len({W, W, R}) == 2


def test_real_numbers_of_numpy_and_of_tensors_are_numbers() -> None:
    half = 0.5
    for number in (np.float32(half), torch.tensor(half)):
        assert torch.equal(W.cover(number, 2, 2), W.cover(half, 2, 2))
        assert losses.entropy_floor(W, number) == losses.entropy_floor(W, half)
        assert torch.equal(losses.clip_factors(W, number), losses.clip_factors(W, half))
        assert torch.equal(chains.rollout([W], torch.eye(5), residual=number), chains.rollout([W], torch.eye(5)))
        assert patterns.classify(W, threshold=number).names == patterns.classify(W, threshold=half).names


def test_a_key_that_no_query_is_there_to_see_gets_no_gradient_of_nan() -> None:
    q, k = torch.randn(2, 0, 3), torch.full((2, 5, 3), torch.nan, requires_grad=True)
    W = regard.weights(q, k, score="cosine", mask=regard.causal(), align="end")
    W.received().sum().backward()
    assert k.grad is None or not k.grad.any()


def test_tokens_in_a_list_may_be_tensors() -> None:
    ids = torch.tensor([1, 2, 1, 2, 1])
    assert torch.equal(W.induction_mass(list(ids)), W.induction_mass(ids))


def test_layers_and_scores_may_come_one_by_one() -> None:
    assert torch.equal(chains.rollout(iter([W, W]), torch.eye(5)), chains.rollout([W, W], torch.eye(5)))  # type: ignore[arg-type]
    layer = SimpleNamespace(keys=torch.ones(1, 2, 5, 4), values=torch.ones(1, 2, 5, 4))
    (stay,) = kv.evict(SimpleNamespace(layers=[layer]), iter([torch.arange(10.0).reshape(1, 2, 5)]), 2)  # type: ignore[arg-type]
    assert stay is not None
    assert stay.tolist() == [[[3, 4], [3, 4]]]


def test_numbers_of_numpy_and_of_tensors_are_numbers() -> None:
    torch.testing.assert_close(W.topk(np.int64(2)).values, W.topk(2).values)
    torch.testing.assert_close(W.topk(torch.tensor(2)).values, W.topk(2).values)
    torch.testing.assert_close(W.pool(np.int64(2), np.int32(3)), W.pool(2, 3))
    torch.testing.assert_close(W.reduce_heads(heads=np.array([0, 2])).entropy(), W.reduce_heads(heads=[0, 2]).entropy())
    assert repr(regard.window(np.int64(2), 0)) == "window(2, 0)"
    assert repr(regard.ScaledDot(np.float32(0.5))) == repr(regard.ScaledDot(0.5))
    torch.testing.assert_close(W.gather(torch.ones(5, 1, dtype=torch.uint8)), W.gather(torch.ones(5, 1).long()))


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_window_wider_than_positions_shows_all(engine: Any) -> None:
    for side in (2**31, 2**63, 2**100):
        mask = regard.window(side, side)
        y = regard.weights(q, mask=mask, engine=engine).see(values=v).y
        torch.testing.assert_close(y, regard.weights(q, engine="reference").see(values=v).y)
        assert torch.equal(W.offset_mass(side), torch.zeros(2, 4, 5))


def test_a_sum_of_heads_has_the_entropy_of_its_numbers() -> None:
    q = torch.randn(6, 9, 8)
    summed = regard.weights(q).reduce_heads("sum")
    w = regard.weights(q.double(), engine="reference").reduce_heads("sum").dense()
    torch.testing.assert_close(summed.entropy().double(), -(w * w.log()).sum(-1), atol=1e-5, rtol=1e-5)


def test_matrices_without_keys_compare_where_one_has_a_sink() -> None:
    for engine in ("auto", "reference"):
        score = regard.Dot().sink(torch.zeros(1))
        a, b = (regard.weights(torch.randn(3, 2), torch.zeros(0, 2), score=s, engine=engine) for s in (score, "dot"))
        assert torch.equal(a.kl(a), torch.zeros(3))
        assert a.total_variation(b).shape == (3,)


def test_empty_lists_are_documents_and_lengths_of_nothing() -> None:
    assert regard.attend(torch.randn(0, 2), mask=regard.documents([])).shape == (0, 2)
    assert regard.attend(torch.randn(0, 2, 3, 4), mask=regard.padding([])).shape == (0, 2, 3, 4)
    every_third = regard.padding([]) | torch.eye(3).bool() | regard.window(0, 0)
    for mask in (every_third, regard.padding([]) & every_third):
        assert regard.weights(torch.randn(0, 2, 3, 4), mask=mask).entropy().shape == (0, 2, 3)


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "kl": lambda W: W.kl(regard.weights(q * 2)),
    "js": lambda W: W.js(regard.weights(q * 2)),
    "heads": lambda W: W.reduce_heads().entropy(),
    "heads and another": lambda W: W.reduce_heads().kl(regard.weights(q[:, :1])),
    "tiles": lambda W: W.pool(2, 2, by="max"),
    "statistics": lambda W: torch.cat([W.entropy(), W.received(), W.topk(2).values.flatten(-2)], -1),
    "output": lambda W: W @ v,
    "gradient of kl": lambda W: torch.autograd.grad(W.kl(regard.weights(q * 2)).sum(), W._leaves[0])[0],
    "gradient of heads": lambda W: torch.autograd.grad(
        regard.weights(q).reduce_heads().kl(regard.weights(W._leaves[0][:, :1])).sum(), W._leaves[0]
    )[0],
    "gradient of statistics": lambda W: torch.autograd.grad(W.pool(2, 2).square().sum(), W._leaves[0])[0],
}


@pytest.mark.parametrize("answer", SETTINGS.values(), ids=SETTINGS)
def test_defaults_of_pytorch_do_not_reach_kernels(answer: Callable[[Any], Tensor]) -> None:
    def answered() -> Tensor:
        return answer(regard.weights(q.clone().requires_grad_()))

    want = answered()
    try:
        torch.set_default_dtype(torch.float64)
        wide = answered()
    finally:
        torch.set_default_dtype(torch.float32)
    assert wide.dtype == want.dtype
    torch.testing.assert_close(wide, want)
    with torch.device("meta"):
        elsewhere = answered()
    assert elsewhere.device == want.device
    torch.testing.assert_close(elsewhere, want)


def test_a_default_device_does_not_reach_the_checksums_of_ranks() -> None:
    want = describe(v)
    with torch.device("meta"):
        assert describe(v) == want


def test_tensors_say_their_device() -> None:
    """A default device of PyTorch would be that of memory whose address a kernel takes, or that is compared with a CPU's."""
    factories = {"zeros", "ones", "empty", "full", "arange", "tensor"}
    unplaced = []
    folders = [Path(regard.__file__).parent / name for name in ("core", "engines", "distributed", "corpora")]
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            named = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
            if named and call.func.attr in factories and "device" not in {word.arg for word in call.keywords}:
                unplaced.append(f"{file.name}:{call.lineno}")
    assert not unplaced
