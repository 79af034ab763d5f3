"""The agreement of all ranks before they exchange anything, and the error that names the rank that differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.torch_state import in_functorch, is_tracing
from .transport import RankError, Ranks, ends_recomputation

__all__ = ["agree", "backward_call", "checked_together", "needed_by_any", "refuse_graphs", "saved_tensors"]

X = TypeVar("X")


def agree(ranks: Ranks, what: str, own: dict[str, Any], error: Exception | None = None) -> list[dict[str, Any]]:
    """Every rank's record, in the order of the ranks.

    Args:
        ranks: Those that must agree.
        what: The call: the same on every rank, and part of the error.
        own: This rank's record. Names that begin with ``_`` may differ between ranks.
        error: What is wrong on this rank already.

    Raises:
        RankError: A rank has an error, or its record differs from that of rank 0; the same on every rank.
    """
    records = _records(ranks, what, own, error)
    _compare(ranks, what, records)
    return records


def checked_together(ranks: Ranks, what: str, check: Callable[[], X], call: str | None = None) -> X:
    """The answer of a check on this rank; what it raises is an error of all ranks, at their next agreement.

    Args:
        ranks: Those that make the same call.
        what: What it is called in errors.
        check: May be a call inside another one, whose error is then that of the outer one.
        call: The text of this call, which all ranks must have alike.

    Raises:
        Exception: What the check raises, where it is the same on every rank.
        RankError: One rank has an error, or another one; the same on every rank.
    """
    with ranks.calling(call) as outermost:
        try:
            return check()
        except RankError:
            raise
        except Exception as error:
            if outermost and not ends_recomputation(error):
                with ranks.together(what, cause=error):
                    records = _records(ranks, what, {}, error)
                    if any(record != records[0] for record in records):
                        _compare(ranks, what, records)
            raise


def _records(ranks: Ranks, what: str, own: dict[str, Any], error: Exception | None) -> list[dict[str, Any]]:
    own = {"call": what, **own, "arguments": ranks.call}
    if error is not None:
        own = {"call": what, "_error": f"{type(error).__name__}: {error}"}
    return [json.loads(text) for text in ranks.gather_text(json.dumps(own, separators=(",", ":")))]


def _compare(ranks: Ranks, what: str, records: list[dict[str, Any]]) -> None:
    """Raise RankError where records have an error or differ."""
    for rank, record in enumerate(records):
        if "_error" in record:
            raise RankError(
                f"rank {rank} of {ranks.size} cannot take part in {record['call']}: {record['_error']}", (rank,)
            )
    differing = [rank for rank, record in enumerate(records) if _shared(record) != _shared(records[0])]
    if not differing:
        return
    # Where most ranks differ from rank 0, rank 0 is the odd one.
    rank = 0 if len(differing) > ranks.size // 2 and ranks.size > 2 else differing[0]
    other = differing[0] if rank == 0 else 0
    name = next(n for n in {**records[rank], **records[other]} if n[0] != "_"
                and records[rank].get(n) != records[other].get(n))  # fmt: skip
    one, two = records[rank].get(name), records[other].get(name)
    if name == "call":
        raise RankError(
            f"all ranks must make the same calls in the same order; rank {rank} of {ranks.size} is at {one} and "
            f"rank {other} at {two}.",
            (rank,),
        )
    hint = " Pass that of all rows and keys, alike on every rank." if name in ("score", "mask") else ""
    raise RankError(
        f"all ranks must have the same {name} in {what}; rank {rank} of {ranks.size} has {one!r} and rank {other} "
        f"{two!r}.{hint}",
        (rank,),
    )


def backward_call(ranks: Ranks, what: str) -> str:
    """The name of the backward pass of a call that is being made: its number tells it from that of an equal call."""
    return f"the backward pass of {what} (number {ranks.next_node()})"


def saved_tensors(ranks: Ranks, ctx: Any) -> list[Tensor]:
    """The tensors of an autograd node whose backward pass begins; what PyTorch raises is an error of all ranks."""

    def saved() -> list[Tensor]:
        if torch.is_grad_enabled():
            raise NotImplementedError("regard computes first derivatives over ranks; got create_graph=True.")
        return list(ctx.saved_tensors)

    return checked_together(ranks, ctx.call, saved)


def refuse_graphs() -> None:
    """Raise NotImplementedError where results become part of a graph, which has no exchange."""
    if is_tracing() or in_functorch():
        raise NotImplementedError(
            "torch.export, make_fx and torch.func cannot follow an exchange between ranks; call regard outside of them."
        )


def needed_by_any(records: list[dict[str, Any]]) -> list[bool]:
    """Which tensors get a gradient: of shared parameters those that any rank asks for, since all add up theirs."""
    return [any(of_ranks) for of_ranks in zip(*(record["_needs"] for record in records), strict=True)]


def _shared(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name[0] != "_"}
