"""What can be chosen for a training run: one field a choice, with its default and its sentence for `--help`.

Imports nothing of regard.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KINDS", "LMSettings", "Settings", "TranslateSettings", "from_json"]


def choice(default: Any, told: str, among: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"told": told, "among": among})


#: What a field's annotation allows, and its words for an error.
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "int | None": ((int, type(None)), "a whole number or nothing"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a word"),
    "bool": ((bool,), "true or false"),
}


#: Said of the warm-up of all kinds.
RISE = ", at most a fifth of --steps; after them it falls as a cosine"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every run has."""

    steps: int = choice(2000, "training steps")
    batch: int = choice(12, "sequences a step")
    layers: int = choice(4, "blocks on top of each other")
    heads: int = choice(4, "attention heads of a block")
    dim: int = choice(128, "size of the vectors between blocks")
    hidden: int | None = choice(None, "width of the feed-forward network (default: 8/3 of --dim)")
    positions: str = choice("rotary", "how attention is told where a word stands", ("rotary", "sinusoidal", "learned"))
    dropout: float = choice(0.0, "share of the residual branches dropped while training")
    lr: float = choice(3e-3, "largest learning rate")
    warmup: int = choice(100, f"steps in which the learning rate rises{RISE}")
    weight_decay: float = choice(0.1, "AdamW's weight decay, of matrices only")
    clip: float = choice(1.0, "largest norm of the gradient")
    average: float = choice(0.0, "keep a running average of the weights with this memory, and judge that; 0: none")
    check: int = choice(250, "steps between two validations; each saves a checkpoint")
    seed: int = choice(0, "everything random follows from it")
    device: str = choice("auto", "auto takes a GPU where there is one", ("auto", "cpu", "cuda"))
    precision: str = choice(
        "auto", "of products; auto is bfloat16 on a GPU and float32 elsewhere", ("auto", "float32", "bfloat16")
    )
    compile: bool = choice(
        False, "run the training step through torch.compile; on a GPU a language model's is replayed as CUDA graphs"
    )

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            kinds, what = TYPES[str(one.type)]
            value = getattr(self, one.name)
            # True is an int to Python, and no number of steps.
            fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            self._need(fits, one.name, what)
        for name in ("steps", "batch", "layers", "heads", "dim", "check"):
            self._need(getattr(self, name) >= 1, name, "at least 1")
        self._need(self.hidden is None or self.hidden >= 1, "hidden", "at least 1")
        self._need(self.warmup >= 0, "warmup", "at least 0")
        self._need(0 <= self.dropout < 1, "dropout", "from 0 up to, not including, 1")
        self._need(0 <= self.average < 1, "average", "from 0 up to, not including, 1")
        self._need(0 < self.lr < math.inf, "lr", "above 0 and finite")
        self._need(self.clip > 0, "clip", "above 0")
        self._need(0 <= self.weight_decay < math.inf, "weight_decay", "at least 0 and finite")
        self._need(abs(self.seed) < 2**63, "seed", "smaller than 2^63")
        for one in dataclasses.fields(self):
            if among := one.metadata["among"]:
                self._need(getattr(self, one.name) in among, one.name, "one of " + ", ".join(among))
        if self.dim % self.heads or (self.positions == "rotary" and self.dim // self.heads % 2):
            even = " of even size, which rotary positions turn in pairs" if self.positions == "rotary" else ""
            raise ValueError(f"--dim {self.dim} must split into --heads {self.heads} heads{even}.")

    def _need(self, holds: bool, name: str, what: str) -> None:
        if not holds:
            raise ValueError(f"--{name.replace('_', '-')} must be {what}; {getattr(self, name)!r} came.")

    def json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class LMSettings(Settings):
    """A language model: guesses the next token. The defaults take a few minutes on a CPU."""

    context: int = choice(64, "tokens it looks back")
    tokens: str = choice("characters", "what a token is", ("characters", "bpe"))
    vocabulary: int = choice(1000, "how many pieces BPE makes; characters are as many as there are")
    validation: float = choice(0.1, "share of the text, at its end, kept for validation")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need(self.context >= 2, "context", "at least 2")
        self._need(self.vocabulary >= 1, "vocabulary", "at least 1")
        self._need(0 < self.validation < 1, "validation", "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class TranslateSettings(Settings):
    """A translator: reads one language, writes another. Made for a GPU; on a CPU take fewer --steps."""

    steps: int = choice(6000, "training steps")
    batch: int = choice(256, "sentence pairs a step")
    positions: str = choice(
        "sinusoidal", "how attention is told where a word stands", ("rotary", "sinusoidal", "learned")
    )
    dropout: float = choice(0.3, "share of the residual branches dropped while training")
    warmup: int = choice(600, f"steps in which the learning rate rises{RISE}")
    average: float = choice(0.999, "keep a running average of the weights with this memory, and judge that; 0: none")
    vocabulary: int = choice(8000, "how many pieces BPE makes of both languages together")
    smoothing: float = choice(0.1, "share of the target's probability spread over all tokens (label smoothing)")
    longest: int = choice(64, "pairs with more tokens than this on a side are left out of training")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need(self.vocabulary >= 5, "vocabulary", "at least 5")
        self._need(0 <= self.smoothing < 1, "smoothing", "from 0 up to, not including, 1")
        self._need(self.longest >= 4, "longest", "at least 4")


KINDS: dict[str, type[Settings]] = {"lm": LMSettings, "translate": TranslateSettings}


def from_json(kind: str, told: dict[str, Any]) -> Settings:
    """Settings as they were written; names that no version of this room knows are an error."""
    if kind not in KINDS:
        raise ValueError(f"the kind of a model is one of {', '.join(KINDS)}; {kind!r} came.")
    if not isinstance(told, dict):
        raise ValueError(f"settings are names with values; {told!r} came.")
    known = {one.name for one in dataclasses.fields(KINDS[kind])}
    if strange := set(told) - known:
        raise ValueError(f"unknown settings {', '.join(sorted(strange))}: written by another version of regard.")
    return KINDS[kind](**told)
