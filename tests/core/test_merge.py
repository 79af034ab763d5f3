"""The law of the merge: the state of two disjoint sets of keys is the merge of their states.

Merging is associative and commutative, no keys change nothing, and any cut of the keys, in any order, gives the
whole. Every number a state carries is held to it, rows that see nothing included.
"""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.core.block import MatrixBlock
from regard.core.online_softmax import State
from regard.core.stats import Request, lse_of
from support.judge import Truth, draw

B, H, I, E = 2, 3, 5, 7
EVERYTHING = (
    "y",
    "lse",
    "norm",
    "max_score",
    "argmax",
    "entropy",
    "mean_distance",
    "mass",
    "topk_scores",
    "topk_indices",
)

# A sum of n terms in another order differs by at most about n·u relative to the sum of magnitudes, which exp and the
# rescaling multiply by a few: 64 keys and scores below 2^6 stay under 2^12 u.
TIGHT = {"rtol": 2**12 * 2**-53, "atol": 2**12 * 2**-53}


def question(keys: int, top: int = 3) -> Request:
    chosen = (torch.arange(keys) % 2).double()
    return Request(EVERYTHING, topk=top, v=draw(B, H, keys, E), keys=chosen)


def scores(keys: int, kind: str) -> Tensor:
    s = draw(B, H, I, keys, times=3)
    if kind == "ties":
        s = s.round()
    if kind == "large":
        s = s * 300
    if kind == "holes":
        s = s.masked_fill(torch.rand(s.shape) < 0.5, -torch.inf)
    if kind == "holes" and keys:
        s[:, :, 1] = -torch.inf
    return s


def state_of(s: Tensor, request: Request, start: int, stop: int) -> State:
    block = MatrixBlock(slice(0, I), slice(start, stop), 0, s.device)
    return State.of_block(s[..., start:stop], block, request)


def assert_same(a: State, b: State) -> None:
    """Equal as states: exactly where something is chosen, up to rounding where something is summed."""
    for name in ("m", "argmax", "topk_scores", "topk_indices"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for name in ("l", "t", "y", "mean_distance", "mass"):
        x, y = getattr(a, name), getattr(b, name)
        # What is summed is at most l in magnitude times 1, s − m, |v| and the distance.
        slack = TIGHT["atol"] * (1 + y.abs().max()) if y.numel() else 0
        assert ((x - y).abs() <= slack).all(), name


kinds = st.sampled_from(["plain", "ties", "large", "holes"])
cuts = st.lists(st.integers(0, 24), min_size=2, max_size=6).map(sorted)


@given(kinds, st.integers(0, 9), st.integers(0, 9))
def test_merge_is_commutative(kind: str, n: int, m: int) -> None:
    s, request = scores(n + m, kind), question(n + m)
    a, b = state_of(s, request, 0, n), state_of(s, request, n, n + m)
    assert_same(a.merge(b), b.merge(a))


@given(kinds, st.integers(0, 7), st.integers(0, 7), st.integers(0, 7))
def test_merge_is_associative(kind: str, n: int, m: int, r: int) -> None:
    s, request = scores(n + m + r, kind), question(n + m + r)
    a, b, c = state_of(s, request, 0, n), state_of(s, request, n, n + m), state_of(s, request, n + m, n + m + r)
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)))


@given(kinds, st.integers(0, 9))
def test_no_keys_are_the_identity_of_merge(kind: str, n: int) -> None:
    s, request = scores(n, kind), question(n)
    state, nothing = state_of(s, request, 0, n), State.empty((B, H, I), request, s)
    assert_same(state.merge(nothing), state)
    assert_same(nothing.merge(state), state)


def test_merging_nothing_with_nothing_gives_nothing_and_no_nan() -> None:
    request = question(0)
    nothing = State.empty((B, H, I), request, draw(1))
    both = nothing.merge(nothing)
    assert_same(both, nothing)
    answers = both.finish(request)
    assert (lse_of(answers["norm"]) == -torch.inf).all()
    for name in ("y", "entropy", "mean_distance", "mass"):
        assert torch.equal(answers[name], torch.zeros_like(answers[name])), name
    assert (answers["topk_indices"] == -1).all()
    assert (answers["argmax"] == -1).all()


@given(kinds, cuts, st.randoms(use_true_random=False))
def test_any_cut_of_the_keys_in_any_order_gives_the_whole(kind: str, at: list[int], shuffle) -> None:
    keys = at[-1]
    s, request = scores(keys, kind), question(keys)
    edges = [0, *at]
    parts = [state_of(s, request, a, b) for a, b in itertools.pairwise(edges)]
    shuffle.shuffle(parts)
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert_same(merged, state_of(s, request, 0, keys))


@given(kinds, cuts)
def test_what_a_cut_finds_is_what_the_dense_matrix_tells(kind: str, at: list[int]) -> None:
    keys = at[-1]
    s, request = scores(keys, kind), question(keys)
    merged = State.empty((B, H, I), request, s)
    for a, b in zip([0, *at], at, strict=False):
        merged = merged.merge(state_of(s, request, a, b))
    answers = merged.finish(request)
    truth = Truth(s, s > -torch.inf)
    _weights, topk_scores, topk_indices = truth.top(3)
    want = {
        "y": truth.y(request.v), "lse": truth.lse, "entropy": truth.entropy(), "mean_distance": truth.mean_distance(),
        "mass": truth.mass(list(range(1, keys, 2))), "max_score": truth.top(1)[1].squeeze(-1),
    }  # fmt: skip
    for name, value in want.items():
        torch.testing.assert_close(answers[name], value, **TIGHT, msg=lambda m, name=name: f"{name}: {m}")
    assert torch.equal(answers["topk_scores"], topk_scores)
    assert torch.equal(answers["topk_indices"], topk_indices)
    assert torch.equal(answers["argmax"], topk_indices[..., 0])


@given(kinds, st.integers(0, 9))
def test_a_sink_is_one_more_key_that_gives_nothing(kind: str, n: int) -> None:
    s, request, logits = scores(n, kind), question(n), draw(H)
    answers = state_of(s, request, 0, n).finish(request, logits[None, :, None, None])
    truth = Truth(s, s > -torch.inf, sink=logits)
    for name, value in {"y": truth.y(request.v), "lse": truth.lse, "entropy": truth.entropy()}.items():
        torch.testing.assert_close(answers[name], value, **TIGHT)
    # The sink takes weight but is no key: it is never the maximum.
    assert torch.equal(answers["max_score"], truth.top(1)[1].squeeze(-1))
    assert torch.equal(answers["topk_indices"], truth.top(3)[2])


def test_the_entropy_survives_a_new_maximum_far_above_the_old_one() -> None:
    s = torch.tensor([0.0, -1.0, 1000.0, 999.0], dtype=torch.float64).expand(B, H, I, 4)
    request = question(4)
    answers = state_of(s, request, 0, 2).merge(state_of(s, request, 2, 4)).finish(request)
    torch.testing.assert_close(answers["entropy"], Truth(s, s > -torch.inf).entropy(), **TIGHT)


def test_the_checker_of_this_file_can_fail() -> None:
    s, request = scores(6, "plain"), question(6)
    state, part = state_of(s, request, 0, 6), state_of(s, request, 0, 5)
    try:
        assert_same(state, part)
    except AssertionError:
        return
    raise RuntimeError("a state without its last key passed for the whole")
