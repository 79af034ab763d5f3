"""Scores: how alike a query and a key are, and how scores are modified before softmax.

A `Score` is a similarity (dot product, cosine, Gaussian, bilinear, additive, or a function of your own) followed by
modifiers in the order they are written. Every score has two forms: `similarity` is the textbook's formula and defines
what is right; `lower` returns what engines compute, since nearly every similarity is a dot product of something.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .broadcast import MatrixShape, per_head, with_leading_axes
from .modifiers import Alibi, Bias, Modifier, Modify, Softcap, need_axes, need_finite, need_floats, open_function
from .pytree import register_node, replace_fields
from .similarity import Function, Product, TanhSum

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
    "repeat_kv",
    "upcast",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Lowered:
    """Queries, keys and how a block of them is scored, as engines compute it."""

    q: Tensor  # *batch h i d
    k: Tensor  # *batch g j d
    similarity_kernel: Product | TanhSum | Function
    modifiers: tuple[Modifier, ...]


# The scores themselves.


@register_node
class Score:
    """A similarity and its modifiers, which apply in the order written. Each modifier returns a new score.

    A score of your own is a subclass with `similarity` and `lower`, or simply a function: see `Similarity`.

    >>> regard.ScaledDot().softcap(30.0).alibi(torch.tensor([0.5]))
    ScaledDot().softcap(30).alibi(1)
    """

    modifiers: tuple[Modifier, ...] = dataclasses.field(default=(), kw_only=True)
    sink_logits: Tensor | None = dataclasses.field(default=None, kw_only=True)
    #: Whether queries and keys may differ in size.
    sizes_may_differ: ClassVar[bool] = False
    #: Whether `lower` computes other keys (a direction, a projection), which have a gradient of their own.
    transforms_keys: ClassVar[bool] = False

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        """The textbook's formula: q (b, h, i, d) and k (b, h, j, d) give s (b, h, i, j)."""
        raise NotImplementedError

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        """The same in the form that engines compute; k may have fewer heads than q."""
        raise NotImplementedError

    def check_sizes(self, q: Tensor, k: Tensor) -> None:
        """Raise ValueError unless this score can compare q (..., h, i, d) and k (..., g, j, d′)."""
        d, other = q.shape[-1], k.shape[-1]
        if d != other and not self.sizes_may_differ:
            hint = " It looks as if k is transposed: pass k.mT." if k.shape[-2] == d else ""
            raise ValueError(
                f"q has size {d} and k has size {other} on the last axis; "
                f"a {type(self).__name__} score needs them equal.{hint}"
            )

    def broadcast_to(self, matrix: MatrixShape) -> Self:
        """The same for one matrix: tensors checked, and with the axes (*batch|1, h|1, x, y)."""
        sink = None if self.sink_logits is None else per_head(self.sink_logits, matrix, "sink(logits)")
        modifiers = tuple(modifier.broadcast_to(matrix) for modifier in self.modifiers)
        return replace_fields(self, modifiers=modifiers, sink_logits=sink)

    def bias(self, tensor: Tensor) -> Self:
        """Add a tensor to the scores.

        Args:
            tensor: Broadcasts to ``(..., h, i, j)``. It gets gradients.

        Returns:
            A new score.

        >>> regard.weights(torch.zeros(2, 4), score=regard.Dot().bias(torch.tensor([[0.0, -torch.inf]]))).dense()
        tensor([[1., 0.],
                [1., 0.]])
        """
        tensor = need_floats(tensor, "bias(tensor)")
        return self._then(Bias(tensor))

    def alibi(self, slopes: Tensor) -> Self:
        """Subtract slope · |distance|: nearer keys weigh more (ALiBi).

        Args:
            slopes: One number a head, ``(h,)`` or ``(..., h)``. They get gradients.

        Returns:
            A new score.

        >>> W = regard.weights(torch.zeros(3, 4), score=regard.Dot().alibi(torch.tensor([9.0])))
        >>> W.peak().indices
        tensor([0, 1, 2])
        """
        slopes = need_floats(slopes, "alibi(slopes)")
        return self._then(Alibi(slopes))

    def softcap(self, cap: float) -> Self:
        """Limit scores smoothly to ±cap: cap · tanh(s / cap).

        Args:
            cap: A finite number > 0.

        Returns:
            A new score.

        >>> regard.weights(100 * torch.eye(2), score=regard.Dot().softcap(5.0)).max_score()
        tensor([5., 5.])
        """
        if not isinstance(cap, (int, float)) or not 0 < cap < math.inf:
            raise ValueError(f"softcap(cap) needs a finite cap > 0; got {cap!r}. Leave it out for no cap.")
        return self._then(Softcap(float(cap)))

    def sink(self, logits: Tensor) -> Self:
        """Add a learned key that takes weight and has no value: rows sum to less than one.

        Args:
            logits: The sink's score, one number a head, ``(h,)`` or ``(..., h)``. They get gradients.

        Returns:
            A new score.

        >>> regard.weights(torch.zeros(1, 4), score=regard.Dot().sink(torch.zeros(1))).dense()
        tensor([[0.5000]])
        """
        logits = need_floats(logits, "sink(logits)")
        if self.sink_logits is not None:
            raise ValueError("this score has a sink already, and a row has one sink. Add the logits up before.")
        return replace_fields(self, sink_logits=logits)

    def modify(self, function: Callable[..., Tensor], *parameters: Tensor) -> Self:
        """Change scores by a function of your own, block by block.

        Args:
            function: ``f(s, i, j, *parameters) -> s`` of scores ``(b, h, i, j)`` and the positions of their queries
                ``(i, 1)`` and keys ``(1, j)``; or a module.
            *parameters: Tensors that get gradients. The function must not capture such tensors.

        Returns:
            A new score.

        >>> nearby = regard.Dot().modify(lambda s, i, j: s - (i - j).abs())
        >>> regard.weights(torch.zeros(3, 4), score=nearby).peak().indices
        tensor([0, 1, 2])
        """
        return self._then(Modify(*open_function(function, parameters, "modify")))

    def _then(self, modifier: Modifier) -> Self:
        return replace_fields(self, modifiers=(*self.modifiers, modifier))

    def __repr__(self) -> str:
        own = [f for f in dataclasses.fields(self) if not f.kw_only and getattr(self, f.name) is not None]
        text = f"{type(self).__name__}({', '.join(_brief(getattr(self, f.name)) for f in own)})"
        for modifier in self.modifiers:
            text += f".{type(modifier).__name__.lower()}({_brief(next(iter(vars(modifier).values())))})"
        return text if self.sink_logits is None else f"{text}.sink({_brief(self.sink_logits)})"


@register_node(storable=True)
class Dot(Score):
    """s = q · k.

    >>> regard.weights(torch.eye(2), score=regard.Dot()).max_score()
    tensor([1., 1.])
    """

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q, k, Product(1.0), self.modifiers)


@register_node(storable=True)
class ScaledDot(Score):
    """s = scale · q · k, the default score.

    Args:
        scale: A finite number. Default: 1/√d, which keeps softmax out of saturation.

    >>> regard.weights(torch.eye(2), score=regard.ScaledDot(0.5)).max_score()
    tensor([0.5000, 0.5000])
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            need_finite(self.scale, "ScaledDot(scale)")

    def factor(self, size: int) -> float:
        # Under torch.compile a size may be a SymInt: `index` makes it an int.
        return 1 / math.sqrt(max(operator.index(size), 1)) if self.scale is None else float(self.scale)

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.factor(q.shape[-1])

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q, k, Product(self.factor(q.shape[-1])), self.modifiers)


@register_node(storable=True)
class Cosine(Score):
    """s = scale · cos(q, k). The cosine of a zero vector is 0.

    Args:
        scale: A finite number.

    >>> regard.weights(3 * torch.eye(2), score=regard.Cosine(10.0)).max_score()
    tensor([10., 10.])
    """

    scale: float = 1.0
    transforms_keys = True

    def __post_init__(self) -> None:
        need_finite(self.scale, "Cosine(scale)")

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return nn.functional.normalize(q, dim=-1) @ nn.functional.normalize(k, dim=-1).mT * self.scale

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        q, k = (nn.functional.normalize(upcast(x), dim=-1).to(x.dtype) for x in (q, k))
        return Lowered(q, k, Product(float(self.scale)), self.modifiers)


@register_node(storable=True)
class Gaussian(Score):
    """s = −|q − k|² / 2σ²: near vectors are alike.

    Args:
        sigma: The distance at which alikeness fades, > 0.

    >>> regard.weights(torch.tensor([[0.0], [5.0]]), score=regard.Gaussian(1.0)).max_score()
    tensor([0., 0.])
    """

    sigma: float = 1.0
    transforms_keys = True

    def __post_init__(self) -> None:
        need_finite(self.sigma, "Gaussian(sigma)")
        if not self.sigma > 0:
            raise ValueError(
                f"Gaussian(sigma) needs sigma > 0, the distance at which alikeness fades; got {self.sigma}."
            )

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1) / (2 * self.sigma**2)

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        # −|q − k|²/2σ² = q·k/σ² − |q|²/2σ² − |k|²/2σ²: a dot product, a bias per row and one per key.
        if q.dtype == k.dtype and q.dtype in (torch.float32, torch.float64):
            # The three terms cancel badly far from the origin; distances do not change when it moves to the keys' mean.
            finite = torch.where(k.isfinite(), k, 0).detach()
            centre = finite.mean(-2, keepdim=True) if k.shape[-2] else finite.sum(-2, keepdim=True)
            q, k = q - repeat_kv(centre, q.shape[-3]), k - centre
        row = upcast(q).square().sum(-1, keepdim=True) / (-2 * self.sigma**2)  # *batch h i 1
        key = upcast(k).square().sum(-1).unsqueeze(-2) / (-2 * self.sigma**2)  # *batch g 1 j
        key = repeat_kv(key, q.shape[-3])
        return Lowered(q, k, Product(1 / self.sigma**2), (Bias(row), Bias(key), *self.modifiers))


@register_node(storable=True)
class Bilinear(Score):
    """s = qᵀ W k.

    Args:
        weight: W, ``(d, d′)`` or one matrix a head ``(h, d, d′)``. It gets gradients.

    >>> q, k = torch.randn(5, 3), torch.randn(7, 2)
    >>> regard.weights(q, k, score=regard.Bilinear(torch.randn(3, 2))).shape
    torch.Size([5, 7])
    """

    weight: Tensor
    sizes_may_differ = True

    def __post_init__(self) -> None:
        need_floats(self.weight, "Bilinear(weight)")
        need_axes(self.weight, 2, "Bilinear(weight)", "(d, d′) or (h, d, d′)")

    def check_sizes(self, q: Tensor, k: Tensor) -> None:
        _check_projections(self, q, k, {"weight": (q.shape[-1], k.shape[-1])})

    def broadcast_to(self, matrix: MatrixShape) -> Self:
        score = super().broadcast_to(matrix)
        return replace_fields(score, weight=with_leading_axes(self.weight, len(matrix.batch)))

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ self.weight.to(q.dtype) @ k.mT

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q @ self.weight.to(q.dtype), k, Product(1.0), self.modifiers)


@register_node(storable=True)
class Additive(Score):
    """s = vᵀ tanh(q A + k B), with hidden size a. All tensors get gradients.

    Args:
        query_weight: A, ``(d, a)`` or one matrix a head ``(h, d, a)``.
        key_weight: B, ``(d′, a)`` or ``(h, d′, a)``.
        v: ``(a,)`` or ``(h, a)``.

    >>> score = regard.Additive(torch.randn(3, 8), torch.randn(2, 8), torch.randn(8))
    >>> regard.weights(torch.randn(5, 3), torch.randn(7, 2), score=score).shape
    torch.Size([5, 7])
    """

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
            need_floats(tensor, f"Additive({name})")
            need_axes(tensor, axes, f"Additive({name})", {2: "(d, a) or (h, d, a)", 1: "(a,) or (h, a)"}[axes])
        sizes = {
            "query_weight": self.query_weight.shape[-1],
            "key_weight": self.key_weight.shape[-1],
            "v": self.v.shape[-1],
        }
        if len(set(sizes.values())) > 1:
            raise ValueError(f"Additive: query_weight, key_weight and v must end in one size a; got {sizes}.")

    def check_sizes(self, q: Tensor, k: Tensor) -> None:
        a = self.v.shape[-1]
        sizes = {"query_weight": (q.shape[-1], a), "key_weight": (k.shape[-1], a), "v": (a,)}
        _check_projections(self, q, k, sizes)

    def broadcast_to(self, matrix: MatrixShape) -> Self:
        n = len(matrix.batch)
        return replace_fields(
            super().broadcast_to(matrix),
            query_weight=with_leading_axes(self.query_weight, n),
            key_weight=with_leading_axes(self.key_weight, n),
            v=with_leading_axes(self.v.unsqueeze(-2), n),
        )

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        a, b = self._projected(q, k)
        return TanhSum(self.v).pairwise(a, b)

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        if self.key_weight.ndim > 2 and self.key_weight.shape[-3] > k.shape[-3]:
            k = repeat_kv(k, q.shape[-3])
        return Lowered(*self._projected(q, k), TanhSum(self.v), self.modifiers)

    def _projected(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q @ self.query_weight.to(q.dtype), k @ self.key_weight.to(k.dtype)


@register_node
class Similarity(Score):
    """s = f(q, k, *parameters), a function of your own.

    Args:
        function: ``f(q, k, *parameters) -> (..., i, j)`` of blocks q ``(..., i, d)`` and k ``(..., j, d′)`` with the
            same heads, in float32 (float64 for float64 inputs); or a module, with its parameters.
        parameters: Tensors that get gradients. The function must not capture such tensors.

    >>> manhattan = regard.Similarity(lambda q, k: -torch.cdist(q, k, p=1))
    >>> regard.weights(torch.tensor([[0.0], [5.0]]), score=manhattan).peak().indices
    tensor([0, 1])
    """

    function: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()
    sizes_may_differ = True

    def __post_init__(self) -> None:
        function, parameters = open_function(self.function, self.parameters, "Similarity")
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "parameters", parameters)

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return Function(self.function, self.parameters).pairwise(q, k)

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q, k, Function(self.function, self.parameters), self.modifiers)


@register_node(storable=True)
class Precomputed(Score):
    """Weights (*batch, h, i, j) that exist already, in the place of a score."""

    w: Tensor

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return upcast(self.w).log()


BY_NAME: dict[str, type[Score]] = {"dot": Dot, "scaled_dot": ScaledDot, "cosine": Cosine}


def as_score(score: Any) -> Score:
    """A score from what users pass: a name, a Score, or a function f(q, k)."""
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
    raise TypeError(f"score must be a name, a Score or a function f(q, k); got {type(score).__name__}.")


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """One head of keys or values for every head of queries: (..., g, j, e) to (..., h, j, e)."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)


def _check_projections(score: Score, q: Tensor, k: Tensor, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless the named tensors of a score have these shapes, or these with a head axis."""
    h = q.shape[-3]
    for name, shape in shapes.items():
        got = getattr(score, name).shape
        extra = got[: -len(shape)]
        if tuple(got[-len(shape) :]) != shape or len(extra) > 1 or (extra and extra[0] not in (1, h)):
            raise ValueError(
                f"{type(score).__name__}({name}) must be {shape} or {(h, *shape)} for q of size {q.shape[-1]} with "
                f"{h} heads and k of size {k.shape[-1]}; got {tuple(got)}."
            )


def upcast(x: Tensor) -> Tensor:
    """In the dtype that scores and statistics are computed in: float32, float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return "×".join(map(str, value.shape)) or "scalar"
    return getattr(value, "__name__", None) or (f"{value:g}" if isinstance(value, float) else str(value))
