"""The agreement of all ranks before they exchange anything, and the error that names the rank that differs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.tensor_kinds import readable
from .transport import RankError, Ranks

__all__ = ["agree", "backward_call", "checked_together", "describe", "needed_by_any"]

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
    own = {"call": what, **own}
    if error is not None:
        own = {"call": what, "_error": f"{type(error).__name__}: {error}"}
    records = [json.loads(text) for text in ranks.gather_text(json.dumps(own, separators=(",", ":")))]
    for rank, record in enumerate(records):
        if "_error" in record:
            raise RankError(
                f"rank {rank} of {ranks.size} cannot take part in {record['call']}: {record['_error']}", (rank,)
            )
    differing = [rank for rank, record in enumerate(records) if _shared(record) != _shared(records[0])]
    if differing:
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
        raise RankError(
            f"all ranks must have the same {name} in {what}; rank {rank} of {ranks.size} has {one!r} and rank {other} "
            f"{two!r}.",
            (rank,),
        )
    return records


def checked_together(ranks: Ranks, what: str, check: Callable[[], X]) -> X:
    """The answer of a check on this rank; what it raises is an error of all ranks, at their next agreement."""
    try:
        return check()
    except RankError:  # of a check inside this one
        raise
    except Exception as error:
        with ranks.together(what):
            agree(ranks, what, {}, error)
        raise


def backward_call(ranks: Ranks, what: str) -> str:
    """The name of the backward pass of a call that is being made: its number tells it from that of an equal call."""
    return f"the backward pass of {what} (number {ranks.next_node()})"


def needed_by_any(records: list[dict[str, Any]]) -> list[bool]:
    """Which tensors get a gradient: of parameters that ranks share, those that any rank wants, since all add theirs."""
    return [any(of_ranks) for of_ranks in zip(*(record["_needs"] for record in records), strict=True)]


def _shared(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name[0] != "_"}


def describe(node: Any) -> str:
    """A text that tells two masks or scores apart, their tensors and functions included."""
    if isinstance(node, Tensor):
        node = readable(node, "a tensor of score or mask")
        return f"{str(node.dtype).removeprefix('torch.')}{list(node.shape)} with checksum {_checksum(node):016x}"
    if isinstance(node, (tuple, list)):
        return f"({', '.join(map(describe, node))})"
    if hasattr(node, "parts"):
        inside = ", ".join(describe(getattr(node, name)) for name in node.parts)
        return f"{type(node).__name__.lower()}({inside})"
    if callable(node):
        return f"{getattr(node, '__qualname__', type(node).__name__)} with checksum {_checksum_of_code(node):08x}"
    return repr(node)


def _checksum(t: Tensor) -> int:
    """A number that depends on every byte of a tensor and on its place."""
    flat = t.detach().contiguous().view(-1).view(torch.uint8).cpu()
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    place = torch.arange(1, words.numel() + 1, device="cpu")
    # Products wrap around; an odd factor loses no bit.
    mixed = (words ^ (words >> 29)) * (place * 2654435761 * 2 + 1)
    return int(mixed.sum()) & (2**64 - 1)


def _checksum_of_code(function: Any) -> int:
    code = getattr(function, "__code__", None)
    return (
        0
        if code is None
        else zlib.crc32(code.co_code + repr([c for c in code.co_consts if not hasattr(c, "co_code")]).encode())
    )
