"""Keys on their way between ranks: who sends which piece to whom and when, and sums that go back to the owners.

In step s rank r sends to rank r + s and receives from rank r − s (modulo their number), one piece at a time; the next
piece travels while this one is computed with. A rank receives only the keys that its rows can see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .shards import Piece, Split
from .transport import Pending, Ranks

__all__ = ["GATHERED_BYTES", "Plan", "Wants", "visit_keys"]

#: Bytes up to which `exchange="auto"` gathers: below, messages cost more than memory.
GATHERED_BYTES = 2**20

#: For every rank, for every piece of every rank: the keys (first, end) that it needs.
Wants = list[list[list[tuple[int, int]]]]

#: Called with the global positions of some keys and their tensors; returns what goes back to the keys' owner.
Visit = Callable[[range, list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Plan:
    """Who has which rows and keys, and how keys travel."""

    ranks: Ranks
    rows: Split
    keys: Split
    pieces: list[list[Piece]]
    gather: bool
    number: int  # of the matrix in its process group: the same on every rank that makes the same calls


@dataclass(frozen=True)
class _Transfer:
    """Keys of one piece for one rank: global positions, and their place among the owner's keys."""

    peer: int
    keys: range
    at: slice


def visit_keys(plan: Plan, wants: Wants, own: list[Tensor], visit: Visit, totals: list[Tensor]) -> None:
    """Call `visit` once for each piece of keys that this rank's rows see, the own keys first.

    Args:
        plan: How keys travel.
        wants: What each rank needs.
        own: Tensors of this rank's keys, keys on axis 2.
        visit: Computes with one piece; what it returns for a piece of another rank is sent back to it.
        totals: One tensor for each that `visit` returns, over this rank's keys on axis 2: the sum over all ranks is
            added to it, in the order of the steps.
    """
    ranks = plan.ranks
    rounds = _rounds(plan, wants)
    posted_at_once = len(rounds) if plan.gather else 1
    # The first piece travels while the own keys are visited. Not where it is the only one: a rank that fails with its
    # own keys would have sent all that others need, and they would not fail with it.
    send_before_own = not plan.gather and max(map(len, plan.pieces)) > 1
    posted = deque(_post_keys(ranks, own, *pair) for pair in rounds[:posted_at_once]) if send_before_own else deque()
    for n, piece in enumerate(plan.pieces[ranks.rank]):
        if (transfer := _transfer(piece, wants[ranks.rank][ranks.rank][n], ranks.rank)) is not None:
            parts = visit(transfer.keys, [t[:, :, transfer.at] for t in own])
            _add(totals, transfer.at, parts)
    posted = posted or deque(_post_keys(ranks, own, *pair) for pair in rounds[:posted_at_once])
    returning: tuple[Pending, slice, list[Tensor]] | None = None
    for n, (outgoing, incoming) in enumerate(rounds):
        pending, blocks = posted.popleft()
        ranks.wait(pending)
        if n + posted_at_once < len(rounds):
            posted.append(_post_keys(ranks, own, *rounds[n + posted_at_once]))
        parts = visit(incoming.keys, blocks) if incoming is not None else []
        del blocks  # before the sums of this piece travel, the piece is freed
        if totals:
            back = _post_sums(ranks, totals, outgoing, incoming, parts)
            _finish(ranks, totals, returning)
            returning = back
    _finish(ranks, totals, returning)


def _rounds(plan: Plan, wants: Wants) -> list[tuple[_Transfer | None, _Transfer | None]]:
    """This rank's sends and receives, in the order that all ranks follow.

    A round in which this rank does neither stays: keys are sent one round ahead of sums, so that leaving one out on one
    rank alone would change the order of its messages.
    """
    me, size = plan.ranks.rank, plan.ranks.size
    most = max(map(len, plan.pieces))
    rounds = []
    for step in range(1, size):
        receiver, sender = (me + step) % size, (me - step) % size
        for n in range(most):
            outgoing = incoming = None
            if n < len(plan.pieces[me]):
                outgoing = _transfer(plan.pieces[me][n], wants[receiver][me][n], receiver)
            if n < len(plan.pieces[sender]):
                incoming = _transfer(plan.pieces[sender][n], wants[me][sender][n], sender)
            rounds.append((outgoing, incoming))
    return rounds


def _transfer(piece: Piece, want: tuple[int, int], peer: int) -> _Transfer | None:
    first, end = want
    if first >= end:
        return None
    at = piece.at + first - piece.start
    return _Transfer(peer, range(first, end), slice(at, at + end - first))


def _post_keys(
    ranks: Ranks, own: list[Tensor], outgoing: _Transfer | None, incoming: _Transfer | None
) -> tuple[Pending, list[Tensor]]:
    sends = [] if outgoing is None else [(outgoing.peer, t[:, :, outgoing.at]) for t in own]
    blocks = [] if incoming is None else [_empty(t, len(incoming.keys)) for t in own]
    receives = [] if incoming is None else [(incoming.peer, block) for block in blocks]
    return ranks.post(sends, receives), blocks


def _post_sums(
    ranks: Ranks, totals: list[Tensor], outgoing: _Transfer | None, incoming: _Transfer | None, parts: list[Tensor]
) -> tuple[Pending, slice, list[Tensor]]:
    """Sums go the other way: to the rank whose keys these were, from the rank that got keys of this one."""
    sends = [] if incoming is None else [(incoming.peer, part) for part in parts]
    blocks = [] if outgoing is None else [_empty(t, len(outgoing.keys)) for t in totals]
    receives = [] if outgoing is None else [(outgoing.peer, block) for block in blocks]
    return ranks.post(sends, receives), slice(0) if outgoing is None else outgoing.at, blocks


def _finish(ranks: Ranks, totals: list[Tensor], returning: tuple[Pending, slice, list[Tensor]] | None) -> None:
    if returning is not None:
        pending, at, blocks = returning
        ranks.wait(pending)
        _add(totals, at, blocks)


def _add(totals: list[Tensor], at: slice, parts: list[Tensor]) -> None:
    # A rank that received no keys of this one returns nothing.
    for total, part in zip(totals, parts, strict=False):
        total[:, :, at] += part


def _empty(like: Tensor, keys: int) -> Tensor:
    return like.new_empty(*like.shape[:2], keys, *like.shape[3:])
