"""The options of a training run: one dataclass field each, with its default and its help text.

The command line makes a flag of every field (`eval_every` is `--eval-every`), so names here are words of the API.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

__all__ = ["KINDS", "LMChoices", "LMSettings", "Settings", "TranslateChoices", "TranslateSettings", "from_json"]


def option(default: Any, help: str, words: Any = None) -> Any:
    """A field with its help text and, where it is one of some words, their Literal."""
    return field(default=default, metadata={"help": help, "choices": get_args(words)})


#: Annotation of a field: the types it accepts, and their name in an error.
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "int | None": ((int, type(None)), "an integer or None"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a string"),
    "bool": ((bool,), "true or false"),
}

PositionsName = Literal["rotary", "sinusoidal", "learned"]  # nn's too, which would import PyTorch for --help
OptimizerName = Literal["adamw", "muon"]
DeviceName = Literal["auto", "cpu", "cuda"]
PrecisionName = Literal["auto", "float32", "bfloat16"]
ArchitectureName = Literal["regard", "gpt2"]
TokensName = Literal["characters", "bytes", "bpe"]

WARMUP_HELP = "steps in which the learning rate rises, at most a fifth of --steps; afterwards it falls as a cosine"
EMA_HELP = (
    "decay of an exponential moving average of the weights, at most of the last fifth of the steps, which is then "
    "validated and saved; 0: none"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of every training run; see `LMSettings` and `TranslateSettings`."""

    steps: int = option(2000, "training steps")
    batch: int = option(12, "sequences per step")
    layers: int = option(4, "transformer blocks")
    heads: int = option(4, "attention heads per block")
    dim: int = option(128, "size of the vectors")
    hidden: int | None = option(None, "width of the feed-forward network (default: 8/3 of --dim)")
    positions: PositionsName = option("rotary", "position encoding", PositionsName)
    dropout: float = option(0.0, "dropout of embeddings and residual branches")
    attention_dropout: float = option(0.0, "dropout of attention weights")
    hidden_dropout: float = option(0.0, "dropout inside feed-forward networks")
    optimizer: OptimizerName = option("adamw", "muon learns more in a step, and a step takes longer", OptimizerName)
    lr: float = option(3e-3, "largest learning rate")
    warmup: int = option(100, WARMUP_HELP)
    weight_decay: float = option(0.1, "AdamW's weight decay, of matrices only")
    clip: float = option(1.0, "largest norm of the gradient")
    ema: float = option(0.0, EMA_HELP)
    accumulate: int = option(1, "parts of a batch that are computed one after the other, to the same gradient")
    eval_every: int = option(250, "steps between two validations; each saves a checkpoint")
    patience: int = option(0, "stop after this many validations without a smaller loss; 0: never")
    seed: int = option(0, "seed of everything random")
    device: DeviceName = option("auto", "auto: a GPU if there is one", DeviceName)
    precision: PrecisionName = option(
        "auto", "of matrix products; auto: bfloat16 on a GPU, float32 elsewhere", PrecisionName
    )
    compile: bool = option(
        False, "compile the training step with torch.compile; a GPU replays CUDA graphs, a translator's uncompiled"
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            types, what = TYPES["str" if spec.metadata["choices"] else str(spec.type)]
            value = getattr(self, spec.name)
            # isinstance(True, int) holds, but True is no number of steps.
            fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
            self._require(fits, spec.name, what)
        for name in ("steps", "batch", "layers", "heads", "dim", "accumulate", "eval_every"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(self.hidden is None or self.hidden >= 1, "hidden", "at least 1")
        self._require(self.warmup >= 0, "warmup", "at least 0")
        self._require(self.patience >= 0, "patience", "at least 0")
        self._require(self.accumulate <= self.batch, "accumulate", f"at most --batch {self.batch}")
        for name in ("dropout", "attention_dropout", "hidden_dropout", "ema"):
            self._require(0 <= getattr(self, name) < 1, name, "at least 0 and below 1")
        self._require(0 < self.lr < math.inf, "lr", "above 0 and finite")
        self._require(self.clip > 0, "clip", "above 0")
        self._require(0 <= self.weight_decay < math.inf, "weight_decay", "at least 0 and finite")
        self._require(abs(self.seed) < 2**63, "seed", "smaller than 2^63")
        for spec in dataclasses.fields(self):
            if choices := spec.metadata["choices"]:
                self._require(getattr(self, spec.name) in choices, spec.name, "one of " + ", ".join(choices))
        if self.dim % self.heads or (self.positions == "rotary" and self.dim // self.heads % 2):
            even = " of even size, which rotary positions need" if self.positions == "rotary" else ""
            raise ValueError(f"--dim {self.dim} must split into --heads {self.heads} heads{even}.")

    def _require(self, condition: bool, name: str, what: str) -> None:
        if not condition:
            raise ValueError(f"--{name.replace('_', '-')} must be {what}; got {_short_repr(getattr(self, name))}.")

    def json(self) -> dict[str, int | float | str | bool | None]:
        """The settings as plain values, for `settings.json`.

        Returns:
            Values by name.

        Example:
            >>> LMSettings(steps=10).json()["steps"]
            10
        """
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class LMSettings(Settings):
    """A language model: predicts the next token. The defaults take a few minutes on a CPU.

    Attributes:
        steps: Training steps.
        batch: Sequences per step.
        layers: Transformer blocks.
        heads: Attention heads per block.
        dim: Size of the vectors.
        hidden: Width of the feed-forward network; None: 8/3 of `dim`.
        positions: "rotary", "sinusoidal" or "learned".
        dropout: Dropout of embeddings and residual branches.
        attention_dropout: Dropout of attention weights.
        hidden_dropout: Dropout inside feed-forward networks.
        optimizer: "adamw", or "muon" for the matrices of the blocks with AdamW for the rest.
        lr: Largest learning rate.
        warmup: Steps in which the learning rate rises, at most a fifth of `steps`; afterwards it falls as a cosine.
        weight_decay: AdamW's weight decay, of matrices only.
        clip: Largest norm of the gradient.
        ema: Decay of an exponential moving average of the weights, which is validated and saved; 0: none. It is
            smaller in the first steps, so that the average is of the last fifth of them at most.
        accumulate: Parts of a batch that are computed one after the other, in less memory, to the same gradient.
        eval_every: Steps between two validations; each saves a checkpoint.
        patience: Validations without a smaller loss after which the run stops; 0: never.
        seed: Seed of everything random.
        device: "auto", "cpu" or "cuda".
        precision: "auto", "float32" or "bfloat16", of matrix products.
        compile: Whether the training step goes through torch.compile; on a GPU it is also replayed as a CUDA graph. A
            translator's is replayed there without being compiled, one graph for each length of its sentences.
        context: Tokens the model looks back.
        architecture: "regard" (RMS norms, SwiGLU, no biases) or "gpt2" (layer norms, GELU, biases, learned positions).
        tokens: "characters", "bytes" or "bpe".
        vocabulary: Number of BPE tokens.
        validation: Share of the text, at its end, that is used for validation; of a mapped text at most a million
            tokens.

    Example:
        >>> LMSettings(steps=100, dim=32, heads=2).context
        64
        >>> LMSettings(steps=0)
        Traceback (most recent call last):
            ...
        ValueError: --steps must be at least 1; got 0.
    """

    context: int = option(64, "tokens the model looks back")
    architecture: ArchitectureName = option(
        "regard", "GPT-2's has learned positions, layer norms and GELU", ArchitectureName
    )
    tokens: TokensName = option("characters", "what a token is", TokensName)
    vocabulary: int = option(1000, "number of BPE tokens (characters: as many as the text has)")
    validation: float = option(
        0.1, "share of the text, at its end, used for validation; of a mapped text at most a million tokens"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.context >= 2, "context", "at least 2")
        self._require(self.vocabulary >= 1, "vocabulary", "at least 1")
        self._require(0 < self.validation < 1, "validation", "between 0 and 1")
        if self.architecture == "gpt2" and self.positions != "learned":
            raise ValueError(f"--architecture gpt2 needs --positions learned; got {self.positions}.")


@dataclass(frozen=True, kw_only=True)
class TranslateSettings(Settings):
    """A translator: an encoder and a decoder. The defaults are for a GPU; on a CPU use fewer --steps.

    Every setting that is not listed means the same as in `LMSettings`; `batch` counts sentence pairs.

    Attributes:
        vocabulary: Number of BPE tokens of both languages together.
        smoothing: Label smoothing.
        max_length: Pairs with more tokens on a side are left out of training.

    Example:
        >>> TranslateSettings().positions
        'sinusoidal'
    """

    steps: int = option(6000, "training steps")
    batch: int = option(256, "sentence pairs per step")
    positions: PositionsName = option("sinusoidal", "position encoding", PositionsName)
    dropout: float = option(0.3, "dropout of embeddings and residual branches")
    warmup: int = option(600, WARMUP_HELP)
    ema: float = option(0.999, EMA_HELP)
    vocabulary: int = option(8000, "number of BPE tokens of both languages together")
    smoothing: float = option(0.1, "label smoothing")
    max_length: int = option(64, "pairs with more tokens on a side are left out of training")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.vocabulary >= 5, "vocabulary", "at least 5")
        self._require(0 <= self.smoothing < 1, "smoothing", "at least 0 and below 1")
        self._require(self.max_length >= 4, "max_length", "at least 4")


class _Choices(TypedDict, total=False):
    """`Settings` as keywords."""

    steps: int
    batch: int
    layers: int
    heads: int
    dim: int
    hidden: int | None
    positions: PositionsName
    dropout: float
    attention_dropout: float
    hidden_dropout: float
    optimizer: OptimizerName
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    ema: float
    accumulate: int
    eval_every: int
    patience: int
    seed: int
    device: DeviceName
    precision: PrecisionName
    compile: bool


class LMChoices(_Choices, total=False):
    """`LMSettings` as keywords."""

    context: int
    architecture: ArchitectureName
    tokens: TokensName
    vocabulary: int
    validation: float


class TranslateChoices(_Choices, total=False):
    """`TranslateSettings` as keywords."""

    vocabulary: int
    smoothing: float
    max_length: int


KINDS: dict[str, type[Settings]] = {"lm": LMSettings, "translate": TranslateSettings}


def from_json(kind: Any, values: Any) -> Settings:
    """Settings from the values of a `settings.json`; unknown names are an error."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"the kind of a model must be one of {', '.join(KINDS)}; got {_short_repr(kind)}.")
    if not isinstance(values, dict):
        raise ValueError(f"settings must be names with values; got {_short_repr(values)}.")
    names = {spec.name for spec in dataclasses.fields(KINDS[kind])}
    if unknown := set(values) - names:
        raise ValueError(f"unknown settings {', '.join(sorted(unknown)[:5])}: written by another version of regard.")
    return KINDS[kind](**values)


def _short_repr(value: Any) -> str:
    """repr in at most 60 characters: a hostile file may hold a value of megabytes."""
    text = type(value).__name__ if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
