"""Random attention programs: what each recording holds is what the program computed, or the program is named."""

import collections

import pytest
import torch

from support.attention_programs import Program, judge
from support.toy_models import Calls, recorded

#: As many heads as sequences, in memory of either order: nothing says which is which.
FINE = {"RIGHT", "NAMED", "RIGHT, NAMED", "TWINS"}


def judged(seeds):
    results = collections.defaultdict(list)
    for seed in seeds:
        verdict, details = judge(program := Program(seed))
        results[verdict].append((seed, details, program.choices))
    assert {verdict: cases[:3] for verdict, cases in results.items() if verdict not in {*FINE, "INVALID"}} == {}
    return {verdict: len(cases) for verdict, cases in results.items()}


def test_two_hundred_programs():
    counts = judged(range(200))
    assert counts["RIGHT"] > 80
    assert counts.get("INVALID", 0) < 10


@pytest.mark.slow
def test_five_thousand_programs():
    judged(range(1000, 6000))


@pytest.mark.parametrize("order", ["ijbh", "ihbj", "jbhi", "hbij"])
@pytest.mark.parametrize("softmax", ["method", "exp over sum"])
def test_any_order_of_scores_by_einsum(order, softmax):
    fixed = {"batch": 2, "heads": 3, "axes": "4", "scores: way": "einsum", "scores: einsum gives": order}
    fixed |= {"values: way": "einsum", "values: einsum gives": "bihe", "changes": 0, "steps after": 0}
    fixed |= {"softmax": softmax, "softmax of": "all", "names its heads": True, "mode": "plain"}
    for seed in range(8):
        assert judge(Program(seed, **fixed))[0] == "RIGHT"


# Softmaxes beside products, which are no attention over keys.


def linear_attention(x):
    """A softmax over features meets a scaled state, whose sizes fit a part of the state before."""
    for _ in range(2):
        x = x + x.softmax(-1) @ (x.softmax(1).mT @ x / x.shape[1])
    return x


def capsules(x):
    """Routing by agreement: what softmax runs over is no axis that the sum removes."""
    u, b = x.unflatten(-1, (2, 4)), torch.zeros(*x.shape[:2], 2)
    for _ in range(2):
        v = (b.softmax(-1)[..., None] * u).sum(1)
        b = b + (u * v[:, None]).sum(-1)
    return v


@pytest.mark.parametrize("length", [4, 5, 8, 16])
@pytest.mark.parametrize("function", [linear_attention, capsules])
def test_no_weights_are_recorded(function, length):
    seen = recorded(Calls(function), torch.randn(2, length, 8))
    assert len(seen) == 0
    assert all("linear attention" in reason for _, reason in seen.refused)
