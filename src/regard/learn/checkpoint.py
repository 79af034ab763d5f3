"""What a run leaves on the disk, and how it is opened again. Nothing in it is ever executed.

    settings.json       the kind of model, all settings, what data it was trained on
    tokenizer.json      by the `tokenizers` library
    model.safetensors   the best weights so far, by validation loss
    last.safetensors    all that is needed to go on: weights, their average, AdamW's two moments, the step
    history.json        the numbers shown while training

Every file is written under another name, synced, and renamed: whoever is killed, or runs out of disk, leaves the old
file or the new one. There is no state of random numbers to save: they follow from the seed and the step.
Imports `settings`, `tasks`, `text`, `generate`; and writing from the recorder's file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..recorder.file import left_behind, write
from . import tokenizer as texts
from .generate import Beam, beam_search
from .settings import Settings, from_json
from .tasks import build

__all__ = [
    "Trained",
    "alone",
    "history",
    "is_checkpoint",
    "open_model",
    "read_json",
    "read_settings",
    "read_tensors",
    "save",
    "save_json",
    "sweep",
]

FORMAT = "regard model 1"

SETTINGS, TOKENIZER, MODEL, LAST, HISTORY = (
    "settings.json", "tokenizer.json", "model.safetensors", "last.safetensors", "history.json",
)  # fmt: skip
FILES = SETTINGS, TOKENIZER, MODEL, LAST, HISTORY


# Writing and reading.


def safetensors() -> Any:
    """The library that writes and reads tensors; asked for before a run begins, not when it first saves."""
    try:
        return import_module("safetensors.torch"), import_module("safetensors")
    except ImportError:
        raise ImportError("checkpoints are kept by safetensors: pip install 'regard[learn]'.") from None


def save(path: Path, tensors: dict[str, Tensor], told: dict[str, str] | None = None) -> None:
    """Tensors into a file, all of them or none."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    # One entry: the library writes several in an order of chance, and the same run is to give the same bytes.
    _written(path, safetensors()[0].save(plain, {"regard": json.dumps(told or {}, sort_keys=True)}))


def save_json(path: Path, value: Any) -> None:
    """JSON into a file, all of it or nothing."""
    _written(path, json.dumps(value, indent=1, ensure_ascii=False).encode())


def _written(path: Path, data: bytes) -> None:
    def chunks() -> Iterator[bytes]:
        yield data

    try:
        write(path, chunks())
    except OSError as wrong:
        why = "the disk is full" if wrong.errno in (errno.ENOSPC, errno.EDQUOT) else wrong.strerror
        stands = "; the file of before stands as it was" if path.exists() else ""
        then = "then go on with --resume" if (path.parent / SETTINGS).exists() else "and start again"
        raise OSError(
            f"{path} ({len(data):,} bytes) could not be written: {why}{stands}. Make room, {then}."
        ) from None  # fmt: skip


def sweep(folder: Path) -> None:
    """Remove what a run that was killed while it wrote has left half written."""
    for name in FILES:
        for part in left_behind(folder / name):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One run at a time in a folder. The system lets go of it, however a run ends."""
    try:
        import fcntl
    except ImportError:  # Windows has none
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"{folder} is in use by a run that goes on: stop that one, or choose another --out.") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as wrong:
        raise ValueError(f"{path} is damaged: {wrong}") from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a file, and what was told with them."""
    library = safetensors()[1]
    try:
        with library.safe_open(str(path), "pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
            return tensors, json.loads(told["regard"]) if "regard" in told else told
    except library.SafetensorError as wrong:
        raise ValueError(f"{path} is damaged: {wrong}") from None


# Opening what was trained.


def is_checkpoint(path: Any) -> bool:
    """Whether a folder holds a model trained by `regard learn`."""
    try:
        return json.loads((Path(path) / SETTINGS).read_text())["format"].startswith("regard model")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


@dataclass
class Trained:
    """A model trained by `regard learn`, with its tokenizer, ready to be run and looked into."""

    model: Any
    kind: str  # "lm" or "translate"
    settings: Any
    tokenizer: Any

    @property
    def context(self) -> int | None:
        """How many tokens a language model looks back; None for a translator."""
        return self.settings.context if self.kind == "lm" else None

    @property
    def device(self) -> torch.device:
        return self.model.words.table.weight.device

    def ids(self, text: str) -> Tensor:
        """The numbers of a text's tokens, (1, t); those of a translator's source end with <end>."""
        numbers = texts.ids_of(self.tokenizer, text)
        if self.kind == "translate":
            numbers = [*numbers, self.tokenizer.token_to_id(texts.END)]
        if not numbers:
            raise ValueError("there is no text: at least one token is needed.")
        return torch.tensor([numbers], device=self.device)

    def beginning(self) -> Tensor:
        """What to go on from where nothing is given, (1, 1): a new line, or the first token where there is none."""
        return torch.tensor([[self.tokenizer.token_to_id("\n") or 0]], device=self.device)

    def tokens(self, text: str) -> list[str]:
        """The tokens of a text, as many as `ids` has."""
        return self._words(self.ids(text)[0].tolist())

    def _words(self, numbers: list[int]) -> list[str]:
        return [self.tokenizer.id_to_token(number) for number in numbers]

    @torch.no_grad()
    def translate(self, text: str, beam: Beam | None = None) -> str:
        """The sentence in the other language, by beam search."""
        return self.translate_all([text], beam)[0]

    @torch.no_grad()
    def translate_all(self, lines: list[str], beam: Beam | None = None, batch: int = 64) -> list[str]:
        """Many sentences; an empty line stays empty."""
        self.need("translate")
        full = [n for n, line in enumerate(lines) if line.strip()]
        encoded = {n: self.ids(lines[n])[0].tolist() for n in full}
        room = self.model.max_positions
        if room is not None and (over := next((n for n in full if len(encoded[n]) > room), None)) is not None:
            raise ValueError(
                f"line {over + 1} has {len(encoded[over])} tokens, and this model has learned {room} positions: "
                "shorten it, or train with --positions rotary or sinusoidal."
            )
        order = sorted(full, key=lambda n: len(encoded[n]))
        written = [""] * len(lines)
        start, end = (self.tokenizer.token_to_id(name) for name in (texts.START, texts.END))
        for at in range(0, len(order), batch):
            chosen = order[at : at + batch]
            longest = max(len(encoded[n]) for n in chosen)
            pad = self.model.PAD
            source = torch.tensor([encoded[n] + [pad] * (longest - len(encoded[n])) for n in chosen])
            found = beam_search(self.model, source.to(self.device), start, end, beam or Beam())
            for n, numbers in zip(chosen, found, strict=True):
                written[n] = self.tokenizer.decode(numbers)
        return written

    @torch.no_grad()
    def run(self, text: str) -> Any:
        """Run the model once, to be overheard: the tokens, or (source, target) of a translator with its translation."""
        ids = self.ids(text)
        if self.kind == "lm":
            context = self.context or ids.shape[1]
            if ids.shape[1] > context:
                raise ValueError(f"{ids.shape[1]} tokens came, and this model looks back {context}: take less text.")
            self.model(ids)
            return self._words(ids[0].tolist())
        from ..recorder.hooks import tap

        with tap.suspended():  # what is to be seen is the one pass over the whole, not the search for it
            start, end = (self.tokenizer.token_to_id(name) for name in (texts.START, texts.END))
            found = beam_search(self.model, ids, start, end, Beam())[0]
        target = [start, *found]
        self.model(ids, torch.tensor([target], device=ids.device))
        return self._words(ids[0].tolist()), self._words(target)

    def need(self, kind: str) -> None:
        """That it is a model of this kind."""
        if self.kind != kind:
            what = {"lm": "a language model", "translate": "a translator"}
            raise ValueError(f"this folder holds {what[self.kind]}, and {what[kind]} is needed.")


def open_model(path: Any, device: str | torch.device = "cpu") -> Trained:
    """Open a folder that `regard learn` made; the model is in eval mode."""
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{path} is no folder; a model trained by `regard learn … --out {path}` is one.")
    if not is_checkpoint(folder):
        raise ValueError(f"{path} holds no model trained by `regard learn`: {SETTINGS} is missing or foreign.")
    if not (folder / MODEL).exists():
        raise ValueError(f"{path} holds a run that has saved no model yet; go on with --resume.")
    kind, settings = read_settings(folder)
    tokenizer = texts.load(folder / TOKENIZER)
    model = build(kind, settings, tokenizer.get_vocab_size())
    tensors, _ = read_tensors(folder / MODEL)
    _fill(model, tensors, folder / MODEL)
    return Trained(model.to(device).eval(), kind, settings, tokenizer)


def history(path: Any) -> list[tuple[int, dict[str, float]]]:
    """Entropy and largest score of every head while a model was trained, as `regard.watch` tells them: for a `View`."""
    return [
        (
            row["step"],
            {
                f"{layer}/{what}/{n}": v
                for layer, of in row["heads"].items()
                for what in of
                for n, v in enumerate(of[what])
            },
        )
        for row in read_json(Path(path) / HISTORY)
        if "heads" in row
    ]


def read_settings(folder: Path) -> tuple[str, Settings]:
    """The kind of a run and its settings."""
    told = read_json(folder / SETTINGS)
    if told["format"] != FORMAT:
        raise ValueError(f"{folder / SETTINGS} is of format {told['format']!r}; this version reads {FORMAT!r}.")
    if missing := [name for name in ("kind", "settings", "data") if name not in told]:
        raise ValueError(f"{folder / SETTINGS} is damaged: it must tell {', '.join(map(repr, missing))} too.")
    try:
        return told["kind"], from_json(told["kind"], told["settings"])
    except ValueError as wrong:
        raise ValueError(f"{folder / SETTINGS}: {wrong}") from None


def _fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    came = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != came:
        differ = sorted(name for name in wanted.keys() | came.keys() if wanted.get(name) != came.get(name))
        raise ValueError(f"{path} does not fit its settings: {', '.join(differ[:3])} differ.")
    model.load_state_dict(tensors)
