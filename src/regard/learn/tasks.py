"""The two things that are learned: what data they take, what model they make, what their loss is.

Imports `data`, `text`, `settings` and `regard.nn`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..nn import LanguageModel, Translator
from . import tokenizer as texts
from .data import Pairs, Windows
from .settings import LMSettings, Settings, TranslateSettings

__all__ = ["LMTask", "Task", "TranslateTask", "build"]


class Task(Protocol):
    """What the loop must know of what is learned."""

    kind: str
    settings: Any
    tokenizer: Any
    digest: str
    #: Whether all batches have one form, so that a step can be replayed.
    steady: bool

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """The data of one step."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """What is made small."""

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        """How many tokens a batch teaches."""

    def validate(self, model: nn.Module) -> float:
        """The mean loss a token over all data kept for validation."""


def build(kind: str, settings: Any, vocabulary: int) -> nn.Module:
    """The model that settings describe."""
    shape = {
        "dim": settings.dim, "heads": settings.heads, "layers": settings.layers, "hidden": settings.hidden,
        "dropout": settings.dropout, "positions": settings.positions, "norm": "rms", "bias": False,
        "activation": "swiglu",
    }  # fmt: skip
    if kind == "lm":
        return LanguageModel(vocabulary, context=settings.context, **shape)
    return Translator(vocabulary, **shape)


class LMTask:
    """Guess the next token of a text."""

    kind = "lm"
    steady = True

    def __init__(
        self, path: Any, settings: LMSettings, tokenizer: Any, device: torch.device, digest: str | None = None
    ) -> None:
        text = texts.read(path)
        self.settings, self.digest = settings, texts.digest(text)
        _need_same(digest, self.digest, path)
        if tokenizer is None:
            made = settings.tokens == "characters"
            tokenizer = texts.characters(text) if made else texts.bpe(text, settings.vocabulary)
        self.tokenizer = tokenizer
        ids = torch.tensor(texts.ids_of(tokenizer, text))
        cut = int(len(ids) * (1 - settings.validation))
        parts = {"training": ids[:cut], "validation": ids[cut:]}
        for name, part in parts.items():
            least = settings.context + 1 if name == "training" else 2
            if len(part) < least:
                raise ValueError(
                    f"{path} has {len(ids)} tokens, {len(part)} of them for {name}, and --context {settings.context} "
                    f"needs {least}: take more text or a smaller --context."
                )
        self.train, self.valid = (
            Windows(part.to(device), settings.context, settings.batch, settings.seed) for part in parts.values()
        )

    def batch(self, step: int) -> tuple[Tensor, ...]:
        return self.train.at(step)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        return batch[0].numel()

    def validate(self, model: nn.Module) -> float:
        losses = [(self.loss(model, (x, y)), y.numel()) for x, y in self.valid.all(64)]
        return float(sum(loss.double() * count for loss, count in losses)) / sum(count for _, count in losses)


class TranslateTask:
    """Write a sentence in another language."""

    kind = "translate"
    steady = False

    def __init__(
        self, files: tuple[Any, Any], held: tuple[Any, Any] | None, settings: TranslateSettings, tokenizer: Any,
        device: torch.device, digest: str | None = None,
    ) -> None:  # fmt: skip
        train, valid = _pairs(*files), None if held is None else _pairs(*held)
        self.settings = settings
        self.digest = texts.digest(*("\n".join(side) for part in (train, valid) if part for side in part))
        _need_same(digest, self.digest, *files)
        if valid is None:
            train, valid = _parted(train, files)
        self.tokenizer = tokenizer or texts.pairs_bpe([*train[0], *train[1]], settings.vocabulary)
        names = (texts.PAD, texts.START, texts.END)
        marks: Any = tuple(self.tokenizer.token_to_id(name) for name in names)
        short = _short(self._encoded(train), settings.longest)
        if not short[0]:
            raise ValueError(f"no pair has at most --longest {settings.longest} tokens on each side.")
        self.train = Pairs(*short, marks, settings.batch, settings.seed, device)
        self.valid = Pairs(*self._encoded(valid), marks, settings.batch, settings.seed, device)

    def _encoded(self, pairs: tuple[list[str], list[str]]) -> tuple[list[list[int]], list[list[int]]]:
        source, target = ([line.ids for line in self.tokenizer.encode_batch(side)] for side in pairs)
        return source, target

    def batch(self, step: int) -> tuple[Tensor, ...]:
        return self.train.at(step)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        smoothing = self.settings.smoothing if model.training else 0.0
        return self._summed(model, batch, smoothing) / (batch[2] != Translator.PAD).sum()

    def _summed(self, model: nn.Module, batch: tuple[Tensor, ...], smoothing: float) -> Tensor:
        source, before, after = batch
        logits = model(source, before).flatten(0, 1).float()
        return nn.functional.cross_entropy(
            logits, after.flatten(), ignore_index=Translator.PAD, label_smoothing=smoothing, reduction="sum"
        )

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        return batch[0].numel() + batch[1].numel()

    def validate(self, model: nn.Module) -> float:
        batches = list(self.valid.all(64))
        total = sum(self._summed(model, batch, 0.0).double() for batch in batches)
        return float(total) / float(sum((batch[2] != Translator.PAD).sum() for batch in batches))


def _pairs(source: Any, target: Any) -> tuple[list[str], list[str]]:
    """The lines of two files, pair by pair; pairs with an empty side are left out."""
    sides = [texts.lines_of(texts.read(path)) for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{source} has {len(sides[0])} lines and {target} has {len(sides[1])}: line n of one must be "
            "the translation of line n of the other."
        )
    whole = [(a.strip(), b.strip()) for a, b in zip(*sides, strict=True) if a.strip() and b.strip()]
    return [a for a, _ in whole], [b for _, b in whole]


def _parted(pairs: tuple[list[str], list[str]], files: tuple[Any, Any]) -> Any:
    """The last pairs, a twentieth and at most a thousand, kept for validation."""
    count = len(pairs[0])
    if count < 2:
        raise ValueError(
            f"{files[0]} and {files[1]} have {count} pair{'s' * (count != 1)} of lines that are not empty; "
            "at least 2 are needed, one of them for validation. Pass --validation EN DE or more data."
        )
    kept = min(1000, max(1, count // 20))
    train, valid = ([side[at] for side in pairs] for at in (slice(None, -kept), slice(-kept, None)))
    return tuple(train), tuple(valid)


def _short(pairs: tuple[list[list[int]], list[list[int]]], longest: int) -> tuple[list[list[int]], list[list[int]]]:
    kept = [(a, b) for a, b in zip(*pairs, strict=True) if len(a) < longest and len(b) < longest]
    return [a for a, _ in kept], [b for _, b in kept]


def _need_same(wanted: str | None, came: str, *files: Any) -> None:
    if wanted is not None and wanted != came:
        raise ValueError(
            f"the data is not what the run began with: {' and '.join(map(str, files))} changed, or other files were "
            "given. Resume with the same files, or begin another run with another --out."
        )


def make(
    kind: str, files: tuple[Path, ...], held: Any, settings: Settings, tokenizer: Any, device: Any,
    digest: str | None = None,
) -> Task:  # fmt: skip
    """The task of a kind; `digest` is that of the data a resumed run began with."""
    if kind == "lm":
        assert isinstance(settings, LMSettings)
        return LMTask(files[0], settings, tokenizer, device, digest)
    assert isinstance(settings, TranslateSettings)
    return TranslateTask((files[0], files[1]), held, settings, tokenizer, device, digest)
