"""The tasks of `regard learn`: the data, the model and the loss of a language model and of a translator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .._io import read_text
from ..nn import LanguageModel, Translator
from . import corpus
from . import tokenizer as texts
from .data import SentencePairs, TextWindows
from .settings import LMSettings, Settings, TranslateSettings

__all__ = ["LMTask", "Saved", "Task", "TranslateTask", "build", "make_task", "split_batch"]


@dataclass(frozen=True)
class Saved:
    """The tokenizer and the digests of the data of a run that is resumed.

    Attributes:
        tokenizer: Its tokenizer; a new run that begins from a pretrained model has one, too.
        digest: Digest of its texts; None for a new run.
        tokens: SHA-256 of its file of token ids; None where the text fits into memory.
    """

    tokenizer: Any = None
    digest: str | None = None
    tokens: str | None = None


class Task(Protocol):
    """A task as the training loop sees it."""

    kind: str
    settings: Any
    tokenizer: Any
    digest: str
    #: SHA-256 of the file of token ids, where there is one.
    tokens_digest: str | None
    #: Whether all batches have one shape, so that a step can be captured as a CUDA graph.
    static_shapes: bool

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """The batch of a step."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Training loss, a scalar."""

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        """Number of tokens of a batch, for the speed."""

    def targets(self, batch: tuple[Tensor, ...]) -> int | Tensor:
        """Number of tokens that the loss of a batch is the mean of."""

    def examples(self) -> list[dict[str, str]]:
        """Texts of the validation data for a report: of a translator the source and its reference, else a prompt."""

    def validate(self, model: nn.Module) -> float:
        """Mean loss per token over the validation data."""


def split_batch(task: Task, batch: tuple[Tensor, ...], parts: int) -> list[tuple[tuple[Tensor, ...], Any]]:
    """The batch in parts of some sequences each, and each part's share of the targets.

    The sum of share × loss over the parts is the loss of the batch, so their gradients add up to its gradient.
    """
    if parts == 1:
        return [(batch, 1.0)]
    chunks = zip(*(tensor.chunk(parts) for tensor in batch), strict=True)
    return [(chunk, task.targets(chunk) / task.targets(batch)) for chunk in chunks]


def build(kind: str, settings: Any, vocabulary: int) -> nn.Module:
    """A new model with these settings."""
    shape = {
        "dim": settings.dim, "heads": settings.heads, "layers": settings.layers, "hidden": settings.hidden,
        "dropout": settings.dropout, "attention_dropout": settings.attention_dropout,
        "hidden_dropout": settings.hidden_dropout, "positions": settings.positions,
    }  # fmt: skip
    if kind == "lm" and settings.architecture == "gpt2":
        return LanguageModel(vocabulary, context=settings.context, embedding_scale=1.0, activation="gelu_tanh", **shape)
    shape |= {"norm": "rms", "bias": False, "activation": "swiglu"}
    if kind == "lm":
        return LanguageModel(vocabulary, context=settings.context, **shape)
    return Translator(vocabulary, **shape)


#: Length of a report's prompt, and number of its sentence pairs.
PROMPT_TOKENS, EXAMPLE_PAIRS = 48, 5


class LMTask:
    """Predict the next token of a text."""

    kind = "lm"
    static_shapes = True
    tokens_digest: str | None = None

    def __init__(self, path: Any, settings: LMSettings, saved: Saved, device: torch.device, folder: Path) -> None:
        self.settings, self.tokenizer = settings, saved.tokenizer
        mapped = corpus.is_large(path) if saved.digest is None else saved.tokens is not None
        read = self._mapped(path, saved, folder) if mapped else self._in_memory(path, saved, device)
        count = len(read())
        split = int(count * (1 - settings.validation))
        if mapped:  # all of it is read at every validation
            split = max(split, count - corpus.VALIDATION_TOKENS)
        parts = {"training": slice(0, split), "validation": slice(split, count)}
        needs = {
            "training": (settings.context + 1, f"--context {settings.context}", "a smaller --context or --validation"),
            "validation": (2, "that", "a larger --validation"),
        }
        for name, (least, asker, remedy) in needs.items():
            if (size := parts[name].stop - parts[name].start) < least:
                raise ValueError(
                    f"{path} has {count} tokens, {size} of them for {name}, and {asker} needs {least}: use more text "
                    f"or {remedy}."
                )
        self.train, self.valid = (
            TextWindows(lambda part=part: read()[part], settings.context, settings.batch, settings.seed, device)  # type: ignore[misc]
            for part in parts.values()
        )

    def _in_memory(self, path: Any, saved: Saved, device: torch.device) -> Callable[[], Tensor]:
        """The token ids of a text in memory."""
        text = read_text(path)
        self.digest = texts.digest(text)
        _check_digest(saved.digest, self.digest, path)
        self._learn_tokenizer([text])
        ids = torch.tensor(texts.encode(self.tokenizer, text)).to(device)
        return lambda: ids

    def _mapped(self, path: Any, saved: Saved, folder: Path) -> Callable[[], Tensor]:
        """The token ids of a large text, mapped by every call from a file that the first run wrote."""
        hasher, file = hashlib.sha256(), folder / corpus.TOKENS
        for piece in corpus.text_pieces(path):
            hasher.update(piece.encode())
        self.digest = hasher.hexdigest()
        _check_digest(saved.digest, self.digest, path)
        self._learn_tokenizer(corpus.text_pieces(path))
        if saved.digest is None:
            folder.mkdir(parents=True, exist_ok=True)
            corpus.write_tokens(file, corpus.text_pieces(path), self.tokenizer)
        self.tokens_digest = corpus.checksum(file)
        if saved.tokens not in (None, self.tokens_digest):
            raise ValueError(f"{file} is damaged or was edited: its checksum differs from the one in the settings.")
        return partial(corpus.map_tokens, file, self.tokenizer.get_vocab_size())

    def _learn_tokenizer(self, pieces: Any) -> None:
        if self.tokenizer is None:
            self.tokenizer = texts.learned(self.settings.tokens, pieces, self.settings.vocabulary)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        return self.train.at(step)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        return batch[0].numel()

    def targets(self, batch: tuple[Tensor, ...]) -> int | Tensor:
        return batch[1].numel()

    def examples(self) -> list[dict[str, str]]:
        return [{"prompt": self.tokenizer.decode(self.valid.ids[:PROMPT_TOKENS].tolist())}]

    def validate(self, model: nn.Module) -> float:
        # Sums, not a list: numbers between the large blocks of every batch would leave the heap in pieces.
        total, count = torch.zeros((), dtype=torch.float64, device=self.valid.device), 0
        for x, y in self.valid.all(64):
            total += self.loss(model, (x, y)).double() * y.numel()
            count += y.numel()
        return float(total) / count


class TranslateTask:
    """Translate sentence by sentence."""

    kind = "translate"
    static_shapes = False
    tokens_digest: str | None = None

    def __init__(
        self, files: tuple[Any, Any], validation: tuple[Any, Any] | None, settings: TranslateSettings, saved: Saved,
        device: torch.device,
    ) -> None:  # fmt: skip
        train, valid = _pairs(*files), None if validation is None else _pairs(*validation)
        self.settings = settings
        self.digest = texts.digest(*("\n".join(side) for part in (train, valid) if part for side in part))
        _check_digest(saved.digest, self.digest, *files)
        if valid is None:
            train, valid = _split_validation(train, files)
        self._examples = list(zip(valid[0], valid[1], strict=True))[:EXAMPLE_PAIRS]
        self.tokenizer = saved.tokenizer or texts.pairs_bpe([*train[0], *train[1]], settings.vocabulary)
        names = (texts.PAD, texts.START, texts.END)
        marks: Any = tuple(self.tokenizer.token_to_id(name) for name in names)
        short = _short(self._encoded(train), settings.max_length)
        if not short[0]:
            raise ValueError(
                f"no pair has at most --max-length {settings.max_length} tokens on each side: use a larger one."
            )
        self.train = SentencePairs(*short, marks, settings.batch, settings.seed, device)
        self.valid = SentencePairs(*self._encoded(valid), marks, settings.batch, settings.seed, device)

    def _encoded(self, pairs: tuple[list[str], list[str]]) -> tuple[list[list[int]], list[list[int]]]:
        source, target = ([line.ids for line in self.tokenizer.encode_batch(side)] for side in pairs)
        return source, target

    def batch(self, step: int) -> tuple[Tensor, ...]:
        return self.train.at(step)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        smoothing = self.settings.smoothing if model.training else 0.0
        return self._summed(model, batch, smoothing) / self.targets(batch)

    def _summed(self, model: nn.Module, batch: tuple[Tensor, ...], smoothing: float) -> Tensor:
        source, before, after = batch
        logits = model(source, before).flatten(0, 1).float()
        return nn.functional.cross_entropy(
            logits, after.flatten(), ignore_index=Translator.PAD, label_smoothing=smoothing, reduction="sum"
        )

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        return batch[0].numel() + batch[1].numel()

    def targets(self, batch: tuple[Tensor, ...]) -> int | Tensor:
        return (batch[2] != Translator.PAD).sum()

    def examples(self) -> list[dict[str, str]]:
        return [{"source": source, "reference": target} for source, target in self._examples]

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
    kind: str, files: tuple[Path, ...], validation: Any, settings: Settings, saved: Saved, device: Any, folder: Path
) -> Task:
    """The task of a kind. A large text is written into the folder as token ids."""
    if kind == "lm":
        assert isinstance(settings, LMSettings)
        return LMTask(files[0], settings, saved, device, folder)
    assert isinstance(settings, TranslateSettings)
    return TranslateTask((files[0], files[1]), validation, settings, saved, device)
