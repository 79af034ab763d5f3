"""How alike are a query and a key: similarity functions, and what may be done to a score before softmax.

A `Score` is a similarity (dot product, cosine, Gaussian, bilinear, additive, or a function of your own)
followed by modifiers in the order they are written:

    ScaledDot().bias(b).softcap(30.0).sink(logits)

Every score has two faces. `similarity` is the formula of the textbook; it defines what is right. `lower`
turns queries and keys into what the engines compute: nearly every similarity is a dot product of something.
Imports `block` and `tree`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .block import MatrixBlock, PickedCells
from .pytree import register_node

__all__ = [
    "Additive",
    "Alibi",
    "Bias",
    "Bilinear",
    "Cosine",
    "Dot",
    "Function",
    "Gaussian",
    "Lowered",
    "Modifier",
    "Modify",
    "Precomputed",
    "Product",
    "ScaledDot",
    "Score",
    "Similarity",
    "Softcap",
    "TanhSum",
    "as_score",
]  # fmt: skip


# Modifiers: each takes a block of scores and returns it changed.


class Modifier:
    """One modifier of a block of scores."""

    #: Whether the modifier compares positions, so that `align` matters when lengths differ.
    positional: ClassVar[bool] = False

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        raise NotImplementedError


@register_node
class Bias(Modifier):
    """s + tensor. As given by the user; (*batch|1, h|1, i|1, j|1) once laid over a matrix."""

    tensor: Tensor

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        return s + self.tensor.to(s.dtype)


@register_node
class Alibi(Modifier):
    """s − slope · |distance|. Slopes as given; (*batch|1, h|1, 1, 1) once laid over a matrix."""

    slopes: Tensor
    positional = True

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        return s - self.slopes.to(s.dtype) * (block.i - block.j).abs()


@register_node
class Softcap(Modifier):
    """cap · tanh(s / cap): scores stay within ±cap."""

    cap: float

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        return self.cap * torch.tanh(s / self.cap)


@register_node
class Modify(Modifier):
    """A user's function f(s, i, j, *parameters) of a block of scores and its positions."""

    function: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()
    positional = True

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        changed = self.function(s, block.i, block.j, *self.parameters)
        if not isinstance(changed, Tensor) or changed.shape != s.shape:
            came = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(
                f"modify(f): f(s, i, j) must return scores of the shape it was given, {tuple(s.shape)}; {came} came."
            )
        return changed


# What similarities become. Blocks have the axes (..., i, d) and (..., j, d), leading ones alike.


@register_node
class Product:
    """scale · q kᵀ."""

    scale: float

    def pairwise(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT) * self.scale


@register_node
class TanhSum:
    """Σ_a v_a tanh(q_a + k_a), of queries and keys that are projected already. v is (*batch|1, h|1, 1, a)."""

    v: Tensor

    def pairwise(self, q: Tensor, k: Tensor) -> Tensor:
        v = self.v.mT.to(q.dtype)  # b h a 1
        v = v.reshape(*v.shape[:-2], *[1] * (q.ndim - v.ndim + 1), *v.shape[-2:])
        return (torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) @ v).squeeze(-1)


@register_node
class Function:
    """A user's similarity f(q, k, *parameters) on blocks."""

    function: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()

    def pairwise(self, q: Tensor, k: Tensor) -> Tensor:
        s = self.function(q, k, *self.parameters)
        shape = (*q.shape[:-1], k.shape[-2])
        if not isinstance(s, Tensor) or s.shape != shape:
            came = tuple(s.shape) if isinstance(s, Tensor) else type(s).__name__
            raise ValueError(
                f"a similarity f(q, k) must return scores {shape} for q {tuple(q.shape)} and k {tuple(k.shape)}; "
                f"{came} came. The dot product, for example, is lambda q, k: q @ k.mT."
            )
        return s


@dataclass(frozen=True, eq=False)
class Lowered:
    """Queries, keys and how a block of them is scored: what the engines compute."""

    q: Tensor  # *batch h i d
    k: Tensor  # *batch g j d
    similarity_kernel: Product | TanhSum | Function
    modifiers: tuple[Modifier, ...]


# The scores themselves.


@register_node
class Score:
    """A similarity and its modifiers. Modifiers return a new score; they apply in the order written."""

    modifiers: tuple[Modifier, ...] = dataclasses.field(default=(), kw_only=True)
    sink_logits: Tensor | None = dataclasses.field(default=None, kw_only=True)
    #: Whether queries and keys may differ in size.
    sizes_may_differ: ClassVar[bool] = False
    #: Whether `lower` makes something else of the keys (a direction, a projection), with a gradient of its own.
    transforms_keys: ClassVar[bool] = False

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        """The textbook's formula: q (b, h, i, d) and k (b, h, j, d) give s (b, h, i, j)."""
        raise NotImplementedError

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        """The same in the form that engines compute; k may have fewer heads than q."""
        raise NotImplementedError

    def bias(self, tensor: Tensor) -> Self:
        """Add a tensor that broadcasts to (..., h, i, j). It gets gradients."""
        _need_floats(tensor, "bias(tensor)")
        return self._then(Bias(tensor))

    def alibi(self, slopes: Tensor) -> Self:
        """Subtract slope · |distance|, one slope a head. The slopes get gradients."""
        _need_floats(slopes, "alibi(slopes)")
        return self._then(Alibi(slopes))

    def softcap(self, cap: float) -> Self:
        """Keep scores within ±cap: cap · tanh(s / cap)."""
        if not isinstance(cap, (int, float)) or not 0 < cap < math.inf:
            raise ValueError(f"softcap(cap) needs a finite cap > 0; {cap!r} came. Leave it out for no cap.")
        return self._then(Softcap(float(cap)))

    def sink(self, logits: Tensor) -> Self:
        """A learned extra key, one logit a head, that takes weight and gives nothing: rows sum to less than one."""
        _need_floats(logits, "sink(logits)")
        if self.sink_logits is not None:
            raise ValueError("this score has a sink already, and a row has one sink. Add the logits up before.")
        return dataclasses.replace(self, sink_logits=logits)

    def modify(self, function: Callable[..., Tensor], *parameters: Tensor) -> Self:
        """Any change f(s, i, j, *parameters) → s of a block of scores at positions i, j. Parameters get gradients."""
        return self._then(Modify(*_open(function, parameters, "modify")))

    def _then(self, step: Modifier) -> Self:
        return dataclasses.replace(self, modifiers=(*self.modifiers, step))

    def __repr__(self) -> str:
        own = [f for f in dataclasses.fields(self) if not f.kw_only and getattr(self, f.name) is not None]
        text = f"{type(self).__name__}({', '.join(_brief(getattr(self, f.name)) for f in own)})"
        for step in self.modifiers:
            text += f".{type(step).__name__.lower()}({_brief(next(iter(vars(step).values())))})"
        return text if self.sink_logits is None else f"{text}.sink({_brief(self.sink_logits)})"


@register_node
class Dot(Score):
    """s = q · k: the basic form."""

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q, k, Product(1.0), self.modifiers)


@register_node
class ScaledDot(Score):
    """s = scale · q · k; without a scale 1/√d, which keeps softmax out of saturation."""

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            _need_finite(self.scale, "ScaledDot(scale)")

    def factor(self, size: int) -> float:
        # While compiling, a size may be a symbol: `index` makes it a number.
        return 1 / math.sqrt(max(operator.index(size), 1)) if self.scale is None else float(self.scale)

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.factor(q.shape[-1])

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q, k, Product(self.factor(q.shape[-1])), self.modifiers)


@register_node
class Cosine(Score):
    """s = scale · cos(q, k). A zero vector is alike to nothing: its cosine is 0."""

    scale: float = 1.0
    transforms_keys = True

    def __post_init__(self) -> None:
        _need_finite(self.scale, "Cosine(scale)")

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).mT * self.scale

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        q, k = (nn.functional.normalize(upcast(x), dim=-1).to(x.dtype) for x in (q, k))
        return Lowered(q, k, Product(float(self.scale)), self.modifiers)


@register_node
class Gaussian(Score):
    """s = −|q − k|² / 2σ²: alike means near."""

    sigma: float = 1.0
    transforms_keys = True

    def __post_init__(self) -> None:
        _need_finite(self.sigma, "Gaussian(sigma)")
        if not self.sigma > 0:
            raise ValueError(
                f"Gaussian(sigma) needs sigma > 0, the distance at which alikeness fades; {self.sigma} came."
            )

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1) / (2 * self.sigma**2)

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        # −|q − k|²/2σ² = q·k/σ² − |q|²/2σ² − |k|²/2σ²: a dot product, a bias per row and one per key.
        if q.dtype == k.dtype and q.dtype in (torch.float32, torch.float64):
            # The three terms cancel badly far from the origin; distances do not change when it moves to the keys.
            finite = torch.where(k.isfinite(), k, 0).detach()
            centre = finite.mean(-2, keepdim=True) if k.shape[-2] else finite.sum(-2, keepdim=True)
            q, k = q - _for_heads_of(q, centre), k - centre
        row = upcast(q).square().sum(-1, keepdim=True) / (-2 * self.sigma**2)  # *batch h i 1
        key = upcast(k).square().sum(-1).unsqueeze(-2) / (-2 * self.sigma**2)  # *batch g 1 j
        key = _for_heads_of(q, key)
        return Lowered(q, k, Product(1 / self.sigma**2), (Bias(row), Bias(key), *self.modifiers))


@register_node
class Bilinear(Score):
    """s = qᵀ W k; W is d × d′, or one such matrix a head (h, d, d′). It gets gradients."""

    weight: Tensor
    sizes_may_differ = True

    def __post_init__(self) -> None:
        _need_floats(self.weight, "Bilinear(weight)")
        _need_axes(self.weight, 2, "Bilinear(weight)", "(d, d′) or (h, d, d′)")

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ self.weight.to(q.dtype) @ k.mT

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q @ self.weight.to(q.dtype), k, Product(1.0), self.modifiers)


@register_node
class Additive(Score):
    """s = vᵀ tanh(q A + k B); A is d × a, B is d′ × a, v has a. A leading head axis is allowed. All get gradients."""

    query_weight: Tensor
    key_weight: Tensor
    v: Tensor
    sizes_may_differ = True
    transforms_keys = True

    def __post_init__(self) -> None:
        for name, tensor, axes in (
            ("query_weight", self.query_weight, 2),
            ("key_weight", self.key_weight, 2),
            ("v", self.v, 1),
        ):
            _need_floats(tensor, f"Additive({name})")
            _need_axes(tensor, axes, f"Additive({name})", {2: "(d, a) or (h, d, a)", 1: "(a,) or (h, a)"}[axes])
        sizes = {
            "query_weight": self.query_weight.shape[-1],
            "key_weight": self.key_weight.shape[-1],
            "v": self.v.shape[-1],
        }
        if len(set(sizes.values())) > 1:
            raise ValueError(f"Additive: query_weight, key_weight and v must end in one size a; they end in {sizes}.")

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        a, b = self._projected(q, k)
        return TanhSum(self.v).pairwise(a, b)

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        if self.key_weight.ndim > 2 and self.key_weight.shape[-3] > k.shape[-3]:
            k = _for_heads_of(q, k)
        return Lowered(*self._projected(q, k), TanhSum(self.v), self.modifiers)

    def _projected(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q @ self.query_weight.to(q.dtype), k @ self.key_weight.to(k.dtype)


@register_node
class Similarity(Score):
    """s = f(q, k, *parameters), your own function of blocks q (..., i, d) and k (..., j, d′); parameters get gradients.

    A module is taken with its parameters. The function sees one block at a time, in float32 (float64 for
    float64 inputs), with heads of q and k already matched.
    """

    function: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()
    sizes_may_differ = True

    def __post_init__(self) -> None:
        function, parameters = _open(self.function, self.parameters, "Similarity")
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "parameters", parameters)

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return Function(self.function, self.parameters).pairwise(q, k)

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q, k, Function(self.function, self.parameters), self.modifiers)


@register_node
class Precomputed(Score):
    """No score at all: weights that somebody else wrote out, (*batch, h, i, j)."""

    w: Tensor

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return upcast(self.w).log()


BY_NAME: dict[str, type[Score]] = {"dot": Dot, "scaled_dot": ScaledDot, "cosine": Cosine}


def as_score(score: Any) -> Score:
    """A score from what users pass: a Score, a name, or a function f(q, k)."""
    if isinstance(score, Score):
        return score
    if isinstance(score, str):
        if score in BY_NAME:
            return BY_NAME[score]()
        raise ValueError(
            f"unknown score {score!r}; the names are {', '.join(map(repr, BY_NAME))}. "
            "Others are objects: Gaussian(sigma), Bilinear(weight), Additive(...), or a function f(q, k)."
        )
    if isinstance(score, type) and issubclass(score, Score):
        raise TypeError(f"score must be an object, not the class: write score={score.__name__}(...).")
    if callable(score):
        return Similarity(score)
    raise TypeError(f"score must be a name, a Score or a function f(q, k); {type(score).__name__} came.")


def _for_heads_of(q: Tensor, x: Tensor) -> Tensor:
    """One head of x, made from keys, for every head of q; where no head was chosen there are none of either."""
    return x if x.shape[-3] == q.shape[-3] else x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def upcast(x: Tensor) -> Tensor:
    """In the type that scores and statistics are computed in: float32, float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True, eq=False)
class _ModuleCall:
    """A module as a function of its inputs and, explicitly, its parameters."""

    module: nn.Module
    names: tuple[str, ...]

    def __call__(self, *args: Tensor) -> Tensor:
        inputs, parameters = args[: len(args) - len(self.names)], args[len(args) - len(self.names) :]
        return torch.func.functional_call(self.module, dict(zip(self.names, parameters, strict=True)), inputs)


def _open(function: Any, parameters: tuple[Tensor, ...], what: str) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Make every tensor that must get a gradient a parameter that is passed, not one that is captured."""
    if not callable(function):
        raise TypeError(f"{what}: a function was expected; {type(function).__name__} came.")
    parameters = tuple(parameters)
    if isinstance(function, nn.Module) and not parameters:
        named = dict(function.named_parameters())
        return _ModuleCall(function, tuple(named)), tuple(named.values())
    if caught := _captured(function):
        raise ValueError(
            f"{what}: the function captures {caught}, which needs gradients; they would be lost. "
            f"Pass such tensors on: {what}(f, tensor) calls f(..., tensor). A module can be passed as it is."
        )
    return function, parameters


def _captured(function: Any) -> str | None:
    """The name of a tensor or module with gradients that a function reaches through its closure or globals."""
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    reached: list[tuple[str, Any]] = [(name, _content(cell)) for name, cell in cells]
    reached += [(name, function.__globals__[name]) for name in code.co_names if name in function.__globals__]
    for name, value in reached:
        if isinstance(value, Tensor) and value.requires_grad:
            return f"the tensor {name!r}"
        if isinstance(value, nn.Module) and any(p.requires_grad for p in value.parameters()):
            return f"the module {name!r}"
    return None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a cell that is not filled yet
        return None


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return "×".join(map(str, value.shape)) or "scalar"
    return getattr(value, "__name__", None) or (f"{value:g}" if isinstance(value, float) else str(value))


def _need_finite(value: Any, name: str) -> None:
    if not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be a finite number; {value!r} came.")


def _need_floats(tensor: Any, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor; {type(tensor).__name__} came. Use torch.tensor(...).")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor; dtype {tensor.dtype} came. Convert with .float().")


def _need_axes(tensor: Tensor, axes: int, name: str, shapes: str) -> None:
    if tensor.ndim < axes:
        raise ValueError(f"{name} must be {shapes}; shape {tuple(tensor.shape)} came.")
