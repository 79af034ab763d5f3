"""Faults of one rank: each ends on every rank within the timeout, with one error that names the rank and the cause."""

from __future__ import annotations

import functools
import gc
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import regard
from regard.distributed.checksums import describe
from support import rank_faults
from support.rank_faults import CULPRIT, TIMEOUT, WORLD

#: In the middle of a request: the fault, the cause that the others are told, and what the culprit itself raises.
IN_THE_MIDDLE = [
    ("dies", "closed the connection: a process died or left early", None),
    ("leaves early", "closed the connection: a process died or left early", None),
    ("hangs", f"sent nothing for {TIMEOUT:g} s: a process hangs", None),
    ("is stopped", f"sent nothing for {TIMEOUT:g} s: a process hangs", None),
    ("is interrupted", "KeyboardInterrupt", "KeyboardInterrupt"),
    ("raises", "ArithmeticError: this key is too far away", "RankError"),
    ("has too little memory", "can't allocate memory", "RankError"),
]


@pytest.mark.parametrize(("fault", "cause", "own"), IN_THE_MIDDLE)
def test_a_fault_in_the_middle_ends_on_every_rank(fault, cause, own) -> None:
    outcomes, exits = rank_faults.outcomes(fault)
    others = [outcomes[rank] for rank in range(WORLD) if rank != CULPRIT]
    for outcome in others:
        assert outcome is not None, f"a rank was left: {outcomes}"
        assert outcome.error == "RankError", outcomes
        assert f"rank {CULPRIT} of {WORLD}" in outcome.text, outcomes
        assert cause in outcome.text, outcomes
        assert outcome.seconds < TIMEOUT + 30, outcomes  # the group itself waits for 60 s
    assert others[0].text == others[1].text
    assert (outcomes[CULPRIT] and outcomes[CULPRIT].error) == own, outcomes
    assert all(code == 0 for rank, code in enumerate(exits) if rank != CULPRIT), exits


def test_a_mistake_is_told_where_it_was_made_and_to_ranks_that_come_too_late_to_hear_of_it() -> None:
    outcomes, exits = rank_faults.outcomes("takes a head that is not there")
    assert len({outcome and (outcome.error, outcome.text) for outcome in outcomes}) == 1, outcomes
    assert outcomes[0].error == "RankError", outcomes
    assert outcomes[0].text.startswith(f"rank {CULPRIT} of {WORLD} failed in this request: IndexError: index 9"), (
        outcomes
    )
    assert exits == [0] * WORLD


def test_a_closed_store_is_said_on_every_rank() -> None:
    outcomes, exits = rank_faults.outcomes("has a closed store")
    assert len({outcome and outcome.text for outcome in outcomes}) == 1, outcomes
    assert outcomes[0].error == "RankError", outcomes
    assert "its store is closed" in outcomes[0].text, outcomes
    assert outcomes[0].seconds < TIMEOUT
    assert exits == [0] * WORLD


#: Before the first exchange: how rank 1 differs, and what all ranks are told.
DISAGREEMENTS = [
    ("nan", "rank 1 of 3 cannot take part in weights(): ValueError: q is nan at position 6"),
    ("nan in values", "rank 1 of 3 cannot take part in this request: ValueError: v is nan at position 5"),
    ("another seed", "all ranks must have the same score in weights(); rank 1 of 3 has"),
    ("another version", "all ranks must have the same version in weights(); rank 1 of 3 has '0.0.9'"),
    ("another mask", "all ranks must have the same mask in weights(); rank 1 of 3 has 'window(2, 0)' and rank 0 'causal()'. Pass that of all rows and keys, alike on every rank."),
    ("another function", "all ranks must have the same mask in weights(); rank 1 of 3 has"),
    ("a wrong dtype", "all ranks must have the same dtype in weights(); rank 1 of 3 has 'torch.float64'"),
    ("fewer heads", "all ranks must have the same shape of q without its length in weights(); rank 1 of 3 has [1, 4]"),
    ("a gap", "ValueError: Shards(rows) of all ranks must be 0, 1, 2, ... without gaps, each once; position 5 is on no rank"),
    ("another request", "all ranks must have the same values in this request; rank 1 of 3 has 'none' and rank 0 'float32"),
    ("another statistic", "all ranks must have the same results in this request; rank 1 of 3 has ['entropy'] and rank 0 ['received']"),
    ("values of another type", "all ranks must have the same values in this request; rank 1 of 3 has 'float64, batch and heads [1, 2], size 5' and rank 0 'float32"),
    ("values of another size", "all ranks must have the same values in this request; rank 1 of 3 has 'float32, batch and heads [1, 2], size 3' and rank 0 'float32"),
    ("no values", "rank 1 of 3 cannot take part in this request: ValueError: see() needs at least one statistic"),
    ("the reference engine", 'engine="reference" holds all weights and has no ranks'),
    ("no tensor", "rank 1 of 3 cannot take part in weights(): TypeError: q must be a tensor; got list"),
    ("requires a gradient", "all ranks must have the same requires_grad in weights(); rank 1 of 3 has [True, True]"),
    ("positions that do not fit", "ValueError: Shards(rows) has 3 positions and q 4"),
    ("positions that are not whole", "TypeError: Shards(rows) must be whole numbers, or ranges of them; got 4.0"),
    ("a device without numbers", "rank 1 of 3 cannot take part in weights(): NotImplementedError: q is on the meta device"),
    ("a mask of its own rows", "all ranks must have the same mask in weights(); rank 1 of 3 has"),
    ("fewer values", "rank 1 of 3 cannot take part in this request: ValueError: values of shape (2, 3, 5) do not fit"),
    ("no number of keys", "rank 1 of 3 cannot take part in this request: ValueError: topk(k) needs a whole number of at least 1"),
    ("an unknown statistic", "rank 1 of 3 cannot take part in this request: ValueError: unknown statistic 'lsee'"),
    ("a row that is not there", "rank 1 of 3 cannot take part in this request: IndexError: index 99 is out of range"),
    ("a score that is not there", "rank 1 of 3 cannot take part in this request: IndexError: index 99 is out of range"),
    ("another head", "all ranks must have the same batch and heads in this request; rank 1 of 3 has 'all[1]'"),
    ("another row", "all ranks must have the same indexed rows in this request; rank"),
]  # fmt: skip


@pytest.mark.parametrize(("difference", "text"), DISAGREEMENTS)
def test_ranks_that_disagree_are_told_before_anything_is_exchanged(ranks, difference, text) -> None:
    errors = ranks.run(WORLD, "support.rank_cases.disagree", difference)
    assert len(set(errors)) == 1, errors
    assert text in errors[0], errors


class Buffered(torch.nn.Module):
    """A similarity with a number that is no parameter."""

    def __init__(self, n: float) -> None:
        super().__init__()
        self.register_buffer("n", torch.tensor(n))

    def forward(self, q, k):
        return q @ k.mT * self.n


def scaled(factor: float, shift: int = 0):
    """A function of positions that reads numbers from around it."""
    return lambda i, j, n=shift: factor * (i - j) < n


class Reach:
    """A mask's rule as an object: in an attribute, in a method, and called itself."""

    def __init__(self, n: int) -> None:
        self.n, self.origin = n, object()

    def __call__(self, i, j):
        return i - j < self.n

    def mask(self, i, j):
        return i - j < self.n


def reading(value):
    """A function that reads a number of an object from around it, by its attribute `n`."""
    return lambda i, j: i - j < value.n


def indexing(value):
    """A function that reads a value from around it."""
    return lambda i, j: i - j < value[0]


def calling(helper):
    """A function that calls another one from around it."""
    return lambda i, j: i - j < helper(j)


#: Pairs that differ in one bit, one captured number, one method or one constant inside.
DIFFERENT = {
    "a bit": (torch.zeros(9, dtype=torch.int64), -torch.eye(9, dtype=torch.int64)[3]),
    "a sign": (torch.zeros(3), -torch.zeros(3)),
    "the order": (torch.arange(9), torch.arange(9).flip(0)),
    "a captured number": (scaled(1.0), scaled(2.0)),
    "a default": (scaled(1.0), scaled(1.0, 1)),
    "a method": (lambda s, i, j: s.relu(), lambda s, i, j: s.exp()),
    "a constant inside": (lambda q, k: [(lambda x: x + 1)(x) for x in q], lambda q, k: [(lambda x: x + 2)(x) for x in q]),
    "a partial": (functools.partial(torch.add, alpha=1), functools.partial(torch.add, alpha=2)),
    "a partial of a function": (functools.partial(scaled, 1), functools.partial(calling, 1)),
    "an array": (indexing(np.arange(3)), indexing(np.arange(1, 4))),
    "a dtype": (indexing([torch.float32]), indexing([torch.float64])),
    "a set": (indexing({"a", "b", 3}), indexing({"a", "b", 4})),
    "an attribute": (reading(Reach(1)), reading(Reach(2))),
    "an attribute of a class": (reading(type("Reach", (), {"n": 1})), reading(type("Reach", (), {"n": 2}))),
    "an object's method": (Reach(1).mask, Reach(2).mask),
    "an object that is called": (Reach(1), Reach(2)),
    "a helper": (calling(lambda j: j + 1), calling(lambda j: j + 2)),
    "a helper's object": (calling(Reach(1).mask), calling(Reach(2).mask)),
    "a module's buffer": (Buffered(1.0), Buffered(2.0)),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_checksums_tell_tensors_and_functions_apart(what) -> None:
    one, two = DIFFERENT[what]
    assert describe(one).partition("checksum")[2] != describe(two).partition("checksum")[2]
    again = one.clone() if isinstance(one, torch.Tensor) else one
    assert describe(one) == describe(again)


def test_checksums_of_equal_functions_are_equal() -> None:
    assert describe(scaled(1.0, 2)) == describe(scaled(1.0, 2))
    assert describe(Reach(1).mask) == describe(Reach(1).mask), "an attribute that the code does not read counts"
    assert describe(indexing({"a", "b"})) == describe(indexing({"b", "a"}))
    assert describe(calling(calling)) == describe(calling(calling))


def test_functions_that_refer_to_themselves_have_a_checksum() -> None:
    def again(i, j):
        return j <= i if isinstance(i, int) else again(int(i), j)

    box = Reach(1)
    box.n = [box, again, {"itself": box}]
    assert describe(again) == describe(again)
    assert describe(reading(box)) == describe(reading(box))


def test_groups_are_served_whose_backends_are_named_by_device(ranks) -> None:
    for far in ranks.run(ranks.size, "support.rank_cases.named_backends"):
        assert max(far) < 1e-6, far


def test_ranks_that_share_a_gpu_are_told_to_use_gloo(ranks) -> None:
    errors = ranks.run(ranks.size, "support.rank_cases.shared_gpu")
    assert len(set(errors)) == 1, errors
    assert "NCCL needs a GPU for each rank, and two ranks use the same one; call torch.cuda.set_device" in errors[0]


def test_a_matrix_says_that_its_group_was_destroyed(ranks) -> None:
    for texts in ranks.run(ranks.size, "support.rank_cases.after_its_group"):
        assert len(texts) == 4, texts
        assert all(text.startswith("the process group of this matrix was destroyed; call init") for text in texts), (
            texts
        )


def test_a_group_that_is_destroyed_is_freed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    assert regard.weights(torch.randn(3, 2), mesh=group()).lse().shape == (3,)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None, "its threads would end while Python does"


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match="mesh= needs a process group"):
        regard.weights(torch.eye(2), mesh=object())
