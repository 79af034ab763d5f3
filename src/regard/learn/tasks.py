"""What can be learned: the data, the model and the loss of a language model and of a translator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .._io import read_text
from ..nn import LanguageModel, Translator
from . import tokenizer as texts
from .data import SentencePairs, TextWindows
from .settings import LMSettings, Settings, TranslateSettings

__all__ = ["LMTask", "Task", "TranslateTask", "build", "make_task"]


class Task(Protocol):
    """What the training loop needs of a task."""

    kind: str
    settings: Any
    tokenizer: Any
    digest: str
    #: Whether all batches have one shape, so that a step can be captured as a CUDA graph.
    static_shapes: bool

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """The batch of a step."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Training loss, a scalar."""

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        """Number of tokens of a batch, for the speed."""

    def validate(self, model: nn.Module) -> float:
        """Mean loss per token over the validation data."""


def build(kind: str, settings: Any, vocabulary: int) -> nn.Module:
    """A new model with these settings."""
    shape = {
        "dim": settings.dim, "heads": settings.heads, "layers": settings.layers, "hidden": settings.hidden,
        "dropout": settings.dropout, "positions": settings.positions, "norm": "rms", "bias": False,
        "activation": "swiglu",
    }  # fmt: skip
    if kind == "lm":
        return LanguageModel(vocabulary, context=settings.context, **shape)
    return Translator(vocabulary, **shape)


class LMTask:
    """Predict the next token of a text."""

    kind = "lm"
    static_shapes = True

    def __init__(
        self, path: Any, settings: LMSettings, tokenizer: Any, device: torch.device, digest: str | None = None
    ) -> None:
        text = read_text(path)
        self.settings, self.digest = settings, texts.digest(text)
        _check_digest(digest, self.digest, path)
        if tokenizer is None:
            by_character = settings.tokens == "characters"
            tokenizer = texts.characters(text) if by_character else texts.bpe(text, settings.vocabulary)
        self.tokenizer = tokenizer
        ids = torch.tensor(texts.encode(tokenizer, text))
        split = int(len(ids) * (1 - settings.validation))
        parts = {"training": ids[:split], "validation": ids[split:]}
        for name, part in parts.items():
            least = settings.context + 1 if name == "training" else 2
            if len(part) < least:
                raise ValueError(
                    f"{path} has {len(ids)} tokens, {len(part)} of them for {name}, and --context {settings.context} "
                    f"needs {least}: use more text or a smaller --context."
                )
        self.train, self.valid = (
            TextWindows(part.to(device), settings.context, settings.batch, settings.seed) for part in parts.values()
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
    """Translate sentence by sentence."""

    kind = "translate"
    static_shapes = False

    def __init__(
        self, files: tuple[Any, Any], validation: tuple[Any, Any] | None, settings: TranslateSettings, tokenizer: Any,
        device: torch.device, digest: str | None = None,
    ) -> None:  # fmt: skip
        train, valid = _pairs(*files), None if validation is None else _pairs(*validation)
        self.settings = settings
        self.digest = texts.digest(*("\n".join(side) for part in (train, valid) if part for side in part))
        _check_digest(digest, self.digest, *files)
        if valid is None:
            train, valid = _split_validation(train, files)
        self.tokenizer = tokenizer or texts.pairs_bpe([*train[0], *train[1]], settings.vocabulary)
        names = (texts.PAD, texts.START, texts.END)
        marks: Any = tuple(self.tokenizer.token_to_id(name) for name in names)
        short = _short(self._encoded(train), settings.max_length)
        if not short[0]:
            raise ValueError(f"no pair has at most --max-length {settings.max_length} tokens on each side.")
        self.train = SentencePairs(*short, marks, settings.batch, settings.seed, device)
        self.valid = SentencePairs(*self._encoded(valid), marks, settings.batch, settings.seed, device)

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
    """The lines of two files, without pairs that have an empty side."""
    sides = [texts.lines_of(read_text(path)) for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{source} has {len(sides[0])} lines and {target} has {len(sides[1])}: line n of one must be "
            "the translation of line n of the other."
        )
    pairs = [(a.strip(), b.strip()) for a, b in zip(*sides, strict=True) if a.strip() and b.strip()]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _split_validation(pairs: tuple[list[str], list[str]], files: tuple[Any, Any]) -> Any:
    """Split off the last pairs for validation: a twentieth, at most a thousand."""
    count = len(pairs[0])
    if count < 2:
        raise ValueError(
            f"{files[0]} and {files[1]} have {count} pair{'s' * (count != 1)} of lines that are not empty; "
            "at least 2 are needed, one of them for validation. Pass --validation EN DE or more data."
        )
    held_out = min(1000, max(1, count // 20))
    parts = (slice(None, -held_out), slice(-held_out, None))
    train, valid = ([side[part] for side in pairs] for part in parts)
    return tuple(train), tuple(valid)


def _short(pairs: tuple[list[list[int]], list[list[int]]], max_length: int) -> tuple[list[list[int]], list[list[int]]]:
    short = [(a, b) for a, b in zip(*pairs, strict=True) if len(a) < max_length and len(b) < max_length]
    return [a for a, _ in short], [b for _, b in short]


def _check_digest(expected: str | None, digest: str, *files: Any) -> None:
    if expected is not None and expected != digest:
        raise ValueError(
            f"the data must be that of the first run: {' and '.join(map(str, files))} changed, or these are other "
            "files. Resume with the same files, or start another run with another --out."
        )


def make_task(
    kind: str, files: tuple[Path, ...], validation: Any, settings: Settings, tokenizer: Any, device: Any,
    digest: str | None = None,
) -> Task:  # fmt: skip
    """The task of a kind. `digest`: of the data of the run that is resumed."""
    if kind == "lm":
        assert isinstance(settings, LMSettings)
        return LMTask(files[0], settings, tokenizer, device, digest)
    assert isinstance(settings, TranslateSettings)
    return TranslateTask((files[0], files[1]), validation, settings, tokenizer, device, digest)
