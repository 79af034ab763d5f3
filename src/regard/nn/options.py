"""Types of layers: of the keywords that they hand down to the layers inside them, and of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypedDict, TypeVar

from .._options import check_options
from ..core.types import KeysLike, PoolLike, ScoreLike
from .positions import PositionsLike

__all__ = [
    "ActivationName",
    "AttentionOptions",
    "BlockOptions",
    "LayerScore",
    "ModelOptions",
    "NormName",
    "SeeOptions",
    "check_layer_options",
    "check_see_options",
    "typed_as",
]

F = TypeVar("F", bound=Callable[..., Any])

#: The scores of `regard.weights`, and those for which a layer creates parameters.
LayerScore = ScoreLike | Literal["additive", "bilinear"]

ActivationName = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu"]
NormName = Literal["layer", "rms"]


class SeeOptions(TypedDict, total=False):
    """Questions of `Weights.see` that are keywords."""

    topk: int | None
    pool: PoolLike | None
    mass: KeysLike | None


class _SharedOptions(TypedDict, total=False):
    """Keywords that self-attention and cross-attention have in common."""

    kv_heads: int | None
    key_size: int | None
    value_size: int | None
    score: LayerScore | None
    output: bool
    parameters: bool
    attention_dropout: float


class AttentionOptions(_SharedOptions, total=False):
    """Keywords of `SelfAttention` that a `Block` hands down."""

    positions: PositionsLike | None
    causal: bool


class ModelOptions(_SharedOptions, total=False):
    """Keywords of `Block` that `LanguageModel`, `Translator` and `TextEncoder` hand down."""

    hidden: int | None
    activation: ActivationName
    norm: NormName
    norm_first: bool
    hidden_dropout: float
    bias: bool


class BlockOptions(ModelOptions, total=False):
    """Keywords of `Block` that `Encoder` and `Decoder` hand down."""

    positions: PositionsLike | None
    causal: bool
    dropout: float
    cross: bool


def check_layer_options(layer: object, passed: Iterable[str], handed_down: type) -> None:
    """Refuse an option that neither the layer nor what it hands down, a TypedDict above, has."""
    names = handed_down.__annotations__
    if not all(name in names for name in passed):
        parameters = inspect.signature(type(layer).__init__).parameters.values()
        own = [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
        check_options(f"{type(layer).__name__}(...)", passed, dict.fromkeys([*own, *names]))


def check_see_options(passed: Iterable[str]) -> None:
    """Refuse a keyword that is no question of a layer's `see`."""
    check_options("see(...)", passed, ("mask", "cache", *SeeOptions.__annotations__))


def typed_as(forward: F) -> Callable[[Callable[..., Any]], F]:
    """Give a layer's `__call__` the type of its `forward`: that of `nn.Module` returns Any. For type checkers only."""
    return lambda call: forward
