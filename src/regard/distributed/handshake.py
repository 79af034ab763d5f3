"""The agreement of all ranks before they exchange anything, and the error that names the rank that differs."""

from __future__ import annotations

import dis
import functools
import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.tensor_kinds import readable
from .transport import RankError, Ranks

__all__ = ["agree", "backward_call", "checked_together", "describe", "needed_by_any", "saved_tensors"]

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
            if outermost:
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


def needed_by_any(records: list[dict[str, Any]]) -> list[bool]:
    """Which tensors get a gradient: of shared parameters those that any rank asks for, since all add up theirs."""
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
    # Products wrap around; neither an odd factor nor a word's own upper bits, moved down without its sign, lose a bit.
    mixed = (words ^ ((words >> 29) & (2**35 - 1))) * (place * 2654435761 * 2 + 1)
    return int(mixed.sum()) & (2**64 - 1)


def _checksum_of_code(function: Any) -> int:
    """Of what a Python function does: its code, and the numbers and tensors that it takes from around it."""
    if isinstance(function, functools.partial):
        return zlib.crc32(_plain_values([function.args, function.keywords]), _checksum_of_code(function.func))
    function = getattr(function, "__func__", function)
    if (code := getattr(function, "__code__", None)) is None:
        return 0
    captured = [_content(cell) for cell in function.__closure__ or ()]
    named = [function.__globals__.get(name) for name in _global_names(code)]
    defaults = [function.__defaults__, function.__kwdefaults__]
    return zlib.crc32(_plain_values([captured, named, defaults]), _checksum_of_bytecode(code))


def _checksum_of_bytecode(code: Any) -> int:
    checksum = zlib.crc32(repr((code.co_names, code.co_freevars)).encode(), zlib.crc32(code.co_code))
    for constant in code.co_consts:
        inner = hasattr(constant, "co_code")
        checksum = zlib.crc32(
            str(_checksum_of_bytecode(constant)).encode() if inner else _plain_values(constant), checksum
        )
    return checksum


def _global_names(code: Any) -> list[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    inner = [name for constant in code.co_consts if hasattr(constant, "co_code") for name in _global_names(constant)]
    return sorted({*names, *inner})


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _plain_values(value: Any) -> bytes:
    """Numbers, texts and tensors of a value; of other objects the type alone."""
    if isinstance(value, (list, tuple)):
        return b"[" + b",".join(map(_plain_values, value)) + b"]"
    if isinstance(value, dict):
        return _plain_values([item for pair in value.items() for item in pair])
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        return describe(value).encode()
    plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes, slice, range))
    return (repr(value) if plain else type(value).__name__).encode()
