"""The questions that a page asks about a long head, of a server or of the kernel of a notebook, and their answers.

A question is a path and texts by name; an answer is a block of bytes: the length of a header, the header in JSON, and
arrays behind it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ..page.format import raw_bytes
from .guard import RefusedError
from .looks import Look
from .pyramid import CellBy, Pyramid

__all__ = ["ANSWERS", "Fields", "one"]

#: Texts by name, as a query has them.
Fields = dict[str, list[str]]
#: Has the first levels of a head computed.
RequestFirst = Callable[[Pyramid], None]

#: Tiles of one question, and words a side of a window that can be read.
TILES, WINDOW = 16, 300


def _tiles(look: Look, fields: Fields, request_first: RequestFirst) -> bytes:
    pyramid, by = _pyramid(look, fields), one(fields, "by")
    if by not in ("max", "mean"):
        raise RefusedError(400, "by must be max or mean.")
    tiles = [_naturals(text, 3) for text in fields.get("tile", [])]
    if not 0 < len(tiles) <= TILES:
        raise RefusedError(400, f"a question must be for 1 to {TILES} tiles.")
    try:
        arrays = [pyramid.tile(z, x, y, cast(CellBy, by)) for z, x, y in tiles]
    except IndexError as error:
        raise RefusedError(404, str(error)) from None
    done = None
    if any(array is None for array in arrays):
        request_first(pyramid)
        done = look.progress.done
    return _block({"done": done}, arrays)


def _row(look: Look, fields: Fields, request_first: RequestFirst) -> bytes:
    pyramid, (i,) = _pyramid(look, fields), _naturals(one(fields, "row"), 1)
    if i >= pyramid.i:
        raise RefusedError(404, "there is no such row.")
    return _block({}, [pyramid.row(i)])


def _window(look: Look, fields: Fields, request_first: RequestFirst) -> bytes:
    pyramid = _pyramid(look, fields)
    rows, cols = (slice(*_naturals(one(fields, name), 2)) for name in ("rows", "cols"))
    for span, end in ((rows, pyramid.i), (cols, pyramid.j)):
        if not (span.start < span.stop <= end and span.stop - span.start <= WINDOW):
            raise RefusedError(404, "there is no such window.")
    place, head = _naturals(one(fields, "head"), 2)
    scale, q, k = look.vectors(place, head, rows, cols) or (None, None, None)
    return _block({"scale": scale, "d": None if q is None else q.shape[-1]}, [pyramid.block(rows, cols), q, k])


#: The function that answers each path.
ANSWERS: dict[str, Callable[[Look, Fields, RequestFirst], bytes]] = {
    "/tiles": _tiles, "/row": _row, "/window": _window
}  # fmt: skip


def one(fields: Fields, name: str) -> str:
    """The text of this name, of which there must be one."""
    values = fields.get(name, [])
    if len(values) != 1:
        raise RefusedError(400, f"the question must have one {name}.")
    return values[0]


def _pyramid(look: Look, fields: Fields) -> Pyramid:
    place, head = _naturals(one(fields, "head"), 2)
    try:
        return look.pyramid(place, head)
    except IndexError as error:
        raise RefusedError(404, str(error)) from None


def _naturals(text: str, count: int) -> list[int]:
    """Numbers with dots between them."""
    if not re.fullmatch(rf"[0-9]{{1,9}}(\.[0-9]{{1,9}}){{{count - 1}}}", text):
        raise RefusedError(400, f"places must be {count} numbers with dots between them.")
    return [int(part) for part in text.split(".")]


def _block(header: dict[str, Any], arrays: list[Tensor | None]) -> bytes:
    """A header in JSON and arrays behind it, each at a multiple of four bytes; null for one that is not there yet."""
    parts: list[bytes] = []
    places: list[list[Any] | None] = []
    at = 0
    for array in arrays:
        if array is None:
            places.append(None)
            continue
        raw = raw_bytes(array.cpu())
        raw += b"\0" * (-len(raw) % 4)
        places.append(["f2" if array.dtype == torch.float16 else "f4", at, array.numel()])
        parts.append(raw)
        at += len(raw)
    text = json.dumps({**header, "arrays": places}, allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    return b"".join([struct.pack("<I", len(text)), text, *parts])
