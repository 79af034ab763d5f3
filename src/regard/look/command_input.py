"""The input of `regard look` and `regard walk`: a sentence, a text file, a pipe or a recording, and the model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .console import file_errors, progress, shell_quote
from .token_text import printable

if TYPE_CHECKING:
    from ..recorder import Recording
    from .loading import LoadedModel

__all__ = ["Input", "cut_note", "cut_of", "read_input", "text_of"]


@dataclass
class Input:
    """A recording, with the text and the model that it came from."""

    recording: Recording
    name: str  # of the model or of the file
    text: str | None = None
    model: LoadedModel | None = None
    cut: tuple[int, int] | None = None  # tokens that are left of a text that was cut, and tokens that it has

    @property
    def notes(self) -> list[str]:
        own = [self.model.note] if self.model is not None and self.model.note else []
        return [*own, *cut_note(self.cut)]


def cut_note(cut: tuple[int, int] | None) -> list[str]:
    """A note that the text was cut; no note if it was not."""
    return [f"The first {cut[0]:,} of {cut[1]:,} tokens are shown, the rest is cut."] if cut else []


def cut_of(args: argparse.Namespace, model: LoadedModel, text: str) -> tuple[int, int] | None:
    """Tokens left and tokens in all, if the text has to be cut."""
    if not args.cut:
        return None
    left, total = model.cut_length(text)
    return (left, total) if left < total else None


def read_input(args: argparse.Namespace) -> Input:
    """Load the recording that the arguments name, or run the model on their text."""
    text, recording = text_of(args)
    if recording is not None:
        return Input(recording, args.text)
    from . import loading

    with progress("opening the model"):
        model = loading.as_loaded(args.model)
    with progress(f"looking at {len(text):,} letters" if len(text) > 1000 else "looking"):
        recording = model.look_at(text, decoder_text=args.decoder_text, cut=args.cut)
        return Input(recording, model.name, text, model, cut_of(args, model, text))


def text_of(args: argparse.Namespace) -> tuple[str, Recording | None]:
    """The text of the arguments, read from the file or the pipe that they name; or a recording."""
    name = args.text
    if name == "-":
        text = _decode(sys.stdin.buffer.read(), "what was piped in")
        args.text = " ".join(text.split())  # for hints: a pipe can be read only once
        return text, None
    path = Path(name)
    if not name.strip() or not _exists(path):
        if path.suffix in (".regard", ".txt", ".md", ".html") and not any(letter.isspace() for letter in name):
            raise FileNotFoundError(f"there is no file {printable(name)}.")
        return name, None
    if path.is_dir():
        raise IsADirectoryError(f"{printable(name)} is a folder; give a sentence, a text file or a .regard file.")
    if path.suffix == ".regard":
        from ..recorder import load

        if args.model or args.decoder_text:
            raise ValueError("a recording is looked at without a model: leave out --model and --decoder-text.")
        with file_errors(name), progress("reading the recording"):
            return "", load(path)
    with file_errors(str(path)):
        data = path.read_bytes()
    if data[:9].lower() == b"<!doctype":
        name = printable(str(path))
        raise ValueError(f"{name} is a page: open it in a browser, or with regard serve {shell_quote(name)}.")
    return _decode(data, printable(str(path))), None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for the name of a file, or a null byte: a text
        return False


def _decode(data: bytes, source: str) -> str:
    from ..learn.tokenizer import decoded

    text = decoded(data, source)
    if "\0" in text:
        raise ValueError(f"{source} is not a text: there is a null byte at {text.index(chr(0))}.")
    return text
