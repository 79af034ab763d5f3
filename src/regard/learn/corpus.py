"""Texts that are larger than memory: read piece by piece, turned into token ids once, and mapped from a file.

A piece ends at a single space between two words. There every tokenizer of `learn` begins a new token, so the ids of the
pieces are those of the whole text.
"""

from __future__ import annotations

import codecs
import hashlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._io import atomic_write, why_unwritten
from . import tokenizer as texts

__all__ = [
    "IN_MEMORY_BYTES", "TOKENS", "VALIDATION_TOKENS", "checksum", "is_large", "map_tokens", "text_pieces",
    "write_tokens",
]  # fmt: skip

#: The file of token ids in the folder of a run.
TOKENS = "tokens.bin"
#: Larger texts are mapped from a file of token ids.
IN_MEMORY_BYTES = 1 << 25
#: Bytes that are read at a time; BPE takes about eighty times as many for them.
PIECE_BYTES = 1 << 20
#: The most tokens that a mapped text sets aside for validation.
VALIDATION_TOKENS = 1 << 20


def is_large(path: Any) -> bool:
    """Whether a text is mapped; a missing file is reported when it is read."""
    file = Path(path)
    return file.is_file() and file.stat().st_size > IN_MEMORY_BYTES


def text_pieces(path: Any) -> Iterator[str]:
    """The text of a file in pieces, as `_io.read_text` reads it: UTF-8, no byte order mark, ``\\n`` at line ends.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is empty or not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, offset, empty = "", 0, True
    with open(path, "rb") as file:
        while data := file.read(PIECE_BYTES):
            pending = len(decoder.getstate()[0])
            try:
                rest += decoder.decode(data)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset - pending + error.start) from None
            offset += len(data)
            if cut := _last_word_start(rest):
                piece, rest = rest[:cut].replace("\r\n", "\n"), rest[cut:]
                empty = empty and not piece.strip()
                yield piece
    try:
        rest += decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise _not_utf8(path, offset - len(decoder.getstate()[0])) from None
    if empty and not rest.strip():
        raise ValueError(f"{path} is empty; a text to learn from is needed.")
    yield rest.replace("\r\n", "\n")


def _not_utf8(path: Any, byte: int) -> ValueError:
    return ValueError(f"{path} is not UTF-8 text: byte {byte} cannot be read. Convert it first.")


def _last_word_start(text: str) -> int:
    """Position of the last single space between two words; 0 if there is none."""
    cut = text.rfind(" ", 0, -1)
    while cut > 0 and (text[cut - 1].isspace() or text[cut + 1].isspace()):
        cut = text.rfind(" ", 0, cut)
    return max(cut, 0)


def _dtype(vocabulary: int) -> torch.dtype:
    """The smallest type that holds all ids."""
    types = (torch.uint8, torch.int16, torch.int32)
    return next(dtype for dtype in types if vocabulary - 1 <= torch.iinfo(dtype).max)


def write_tokens(path: Path, pieces: Iterable[str], tokenizer: Any) -> None:
    """Write the token ids of a text, one after the other."""
    code = {torch.uint8: "B", torch.int16: "h", torch.int32: "i"}[_dtype(tokenizer.get_vocab_size())]
    try:
        atomic_write(path, (array(code, texts.encode(tokenizer, piece)).tobytes() for piece in pieces))
    except OSError as error:
        reason, remedy = why_unwritten(error)
        raise OSError(f"{path} could not be written: {reason}. {remedy}, then start again.") from None


def map_tokens(path: Path, vocabulary: int) -> Tensor:
    """The token ids of a file, mapped: pages are read when they are used, and leave memory with the tensor."""
    dtype = _dtype(vocabulary)
    count = path.stat().st_size // dtype.itemsize
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype)


def checksum(path: Path) -> str:
    """SHA-256 of a file, read piece by piece."""
    if not path.is_file():
        raise ValueError(f"{path} is missing or no regular file.")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
