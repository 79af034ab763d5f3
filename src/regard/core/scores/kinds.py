"""Scores: how alike a query and a key are. Here are the similarities; `base` has what all scores share.

Every score has two forms: `similarity` is the textbook's formula and defines what is right; `lower` returns what
engines compute, since nearly every similarity is a dot product of something.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..broadcast import MatrixShape, repeat_kv, with_leading_axes
from ..pytree import register_node, replace_fields
from ..stored import check_finite, check_floats, check_parameter, check_positive, require
from .base import FormulaSteps, Lowered, Score, upcast
from .modifiers import (
    Alibi,
    Bias,
    Modifier,
    Modify,
    Softcap,
    need_axes,
    need_finite,
    need_floats,
    open_function,
    refuse_captures,
)
from .similarity import Distance, Function, Product, ReluSum, SimilarityKernel, TanhSum

__all__ = [
    "Additive",
    "Alibi",
    "Bias",
    "Bilinear",
    "Cosine",
    "Dot",
    "Function",
    "Gaussian",
    "Indexer",
    "Lowered",
    "Modifier",
    "Modify",
    "Precomputed",
    "Product",
    "ScaledDot",
    "Score",
    "Similarity",
    "SimilarityKernel",
    "Softcap",
    "TanhSum",
    "as_score",
    "repeat_kv",
    "upcast",
]  # fmt: skip


@register_node(storable=True)
class Dot(Score):
    """s = q · k.

    >>> regard.weights(torch.eye(2), score=regard.Dot()).max_score()
    tensor([1., 1.])
    """

    formula = "q·k"

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q, k, Product(1.0), self.modifiers)

    def product_scale(self, size: int) -> float:
        return 1.0


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
            object.__setattr__(self, "scale", need_finite(self.scale, "ScaledDot(scale)"))

    def check_stored(self, q: Tensor, k: Tensor) -> None:
        super().check_stored(q, k)
        if self.scale is not None:
            check_finite(self.scale, "the scale")

    def product_scale(self, size: int) -> float:
        return self._factor(size)

    def _factor(self, size: int) -> float:
        # Under torch.compile a size may be a SymInt: `index` makes it an int.
        return 1 / math.sqrt(max(operator.index(size), 1)) if self.scale is None else float(self.scale)

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self._factor(q.shape[-1])

    def formula_steps(self, q: Tensor, k: Tensor) -> FormulaSteps:
        product, size = q @ k.mT, q.shape[-1]
        factor = self._factor(size)
        usual = math.isclose(factor, size**-0.5, rel_tol=1e-6)  # models write 1/√d out
        return FormulaSteps(product, "q·k", product * factor, f"÷ √{size}" if usual else f"× {self.scale:.4g}")

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q, k, Product(self._factor(q.shape[-1])), self.modifiers)


def _product_dtype(x: Tensor) -> torch.dtype:
    """The type of queries and keys that a score computes from x.

    Computed in 16 bits they would be rounded twice. A CPU multiplies in float32 anyway; a GPU is fast in the type of x.
    """
    return x.dtype if x.is_cuda or x.dtype == torch.float64 else torch.float32


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
        object.__setattr__(self, "scale", need_finite(self.scale, "Cosine(scale)"))

    def check_stored(self, q: Tensor, k: Tensor) -> None:
        super().check_stored(q, k)
        check_finite(self.scale, "the scale")

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return _unit(q) @ _unit(k).mT * self.scale

    def formula_steps(self, q: Tensor, k: Tensor) -> FormulaSteps:
        product = Cosine().similarity(q, k)
        return FormulaSteps(product, "cos(q, k)", product * self.scale, f"× {self.scale:.4g}")

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        q, k = (_unit(upcast(x)).to(_product_dtype(x)) for x in (q, k))
        return Lowered(q, k, Product(float(self.scale)), self.modifiers)


def _unit(x: Tensor) -> Tensor:
    """x / |x|; 0 for a zero vector. Its largest number divides it first: 1e20 squared is inf, and 1e-25 is 0."""
    if x.shape[-1]:
        largest = x.detach().abs().amax(-1, keepdim=True)
        x = x / torch.where(largest > 0, largest, 1)
    return nn.functional.normalize(x, dim=-1)


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
        object.__setattr__(self, "sigma", need_finite(self.sigma, "Gaussian(sigma)"))
        if not 1e-18 <= self.sigma <= 1e18:  # float32 holds 1/sigma²
            raise ValueError(
                f"Gaussian(sigma) needs sigma > 0, the distance at which alikeness fades, from 1e-18 to 1e18; "
                f"got {self.sigma}."
            )

    def check_stored(self, q: Tensor, k: Tensor) -> None:
        super().check_stored(q, k)
        check_positive(self.sigma, "sigma")

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1) / (2 * self.sigma**2)

    def formula_steps(self, q: Tensor, k: Tensor) -> FormulaSteps:
        product = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
        return FormulaSteps(product, "|q − k|²", -product / (2 * self.sigma**2), f"÷ −2·{self.sigma:.4g}²")

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        # −|q − k|²/2σ² = q·k/σ² − |q|²/2σ² − |k|²/2σ²: a dot product, a bias per row and one per key.
        if q.dtype == k.dtype and q.dtype in (torch.float32, torch.float64):
            # The three terms cancel badly far from the origin; distances do not change when it moves to the keys.
            centre = _exact_centre(k.detach())
            q, k = q - repeat_kv(centre, q.shape[-3]), k - centre
        similarity = Distance(1 / self.sigma**2, 1 / (2 * self.sigma**2))
        return Lowered(q, k, similarity, (*map(Bias, similarity.own_biases(q, k)), *self.modifiers))


def _exact_centre(k: Tensor) -> Tensor:
    """The mean of the keys (*batch, g, 1, d), and 0 along an axis where its difference to some key would be rounded.

    Numbers within a factor of 2 of one another subtract exactly. Where keys differ by more, their mean is no larger
    than they are, and nothing is gained.
    """
    if not k.shape[-2]:
        return k.sum(-2, keepdim=True)
    centre = k.mean(-2, keepdim=True)
    low, high = k.amin(-2, keepdim=True), k.amax(-2, keepdim=True)
    reach = centre.abs() / 2
    return torch.where((high - centre <= reach) & (centre - low <= reach), centre, 0)


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
    formula = "qᵀ W k"

    def __post_init__(self) -> None:
        need_floats(self.weight, "Bilinear(weight)")
        need_axes(self.weight, 2, "Bilinear(weight)", "(d, d′) or (h, d, d′)")

    def check_sizes(self, q: Tensor, k: Tensor) -> None:
        _check_projections(self, q, k, {"weight": (q.shape[-1], k.shape[-1])})

    def check_stored(self, q: Tensor, k: Tensor) -> None:
        super().check_stored(q, k)
        check_parameter(self.weight, (q.shape[-1], k.shape[-1]), q.shape[1], "Bilinear")

    def broadcast_to(self, matrix: MatrixShape) -> Self:
        score = super().broadcast_to(matrix)
        return replace_fields(score, weight=with_leading_axes(self.weight, len(matrix.batch)))

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ self.weight.to(q.dtype) @ k.mT

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        dtype = _product_dtype(q)
        return Lowered(q.to(dtype) @ self.weight.to(dtype), k.to(dtype), Product(1.0), self.modifiers)


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
    formula = "vᵀ tanh(q A + k B)"

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

    def check_stored(self, q: Tensor, k: Tensor) -> None:
        super().check_stored(q, k)
        a, h = self.v.shape[-1], q.shape[1]
        check_parameter(self.v, (1, a), h, "Additive")
        check_parameter(self.query_weight, (q.shape[-1], a), h, "Additive")
        check_parameter(self.key_weight, (k.shape[-1], a), h, "Additive")

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
        return TanhSum(self.v if self.v.ndim > 1 else self.v[None]).pairwise(a, b)

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        if self.key_weight.ndim > 2 and self.key_weight.shape[-3] > k.shape[-3]:
            k = repeat_kv(k, q.shape[-3])
        return Lowered(*self._projected(q, k), TanhSum(self.v), self.modifiers)

    def _projected(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        dtype = _product_dtype(q)
        return q.to(dtype) @ self.query_weight.to(dtype), k.to(dtype) @ self.key_weight.to(dtype)


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

    def check_functions(self, q: Tensor, k: Tensor) -> None:
        super().check_functions(q, k)
        if 0 in (*q.shape, *k.shape):
            return
        # One query and key of every sequence and head, in memory of their own.
        cell = [upcast(x[..., :1, :].detach().reshape(-1, x.shape[-3], 1, x.shape[-1])).clone() for x in (q, k)]
        cell[1] = repeat_kv(cell[1], q.shape[-3])
        refuse_captures(self.function, tuple(cell), self.parameters, "Similarity")
        if any(not x.is_inference() and x._version for x in cell):
            raise ValueError(
                "a similarity f(q, k) must not change q or k in place: they are yours. Write q * x, not q.mul_(x)."
            )

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return Function(self.function, self.parameters).pairwise(q, k)

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q, k, Function(self.function, self.parameters), self.modifiers)


@register_node
class Indexer(Score):
    """s = Σ_n w_n ReLU(q_n · k), the score of a sparse-attention indexer: see `regard.losses.index_weights`.

    Queries are packed: all q_n of a row, then all w_n.
    """

    heads: int
    sizes_may_differ = True
    formula = "Σ_n w_n ReLU(q_n · k)"

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return ReluSum(self.heads).pairwise(q, k)

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q, k, ReluSum(self.heads), self.modifiers)


@register_node(storable=True)
class Precomputed(Score):
    """Weights (*batch, h, i, j) that exist already, in the place of a score."""

    w: Tensor

    @property
    def precomputed(self) -> Tensor:
        return self.w

    def crop(self, rows: slice, cols: slice) -> Self:
        return replace_fields(super().crop(rows, cols), w=self.w[..., rows, cols])

    def check_stored(self, q: Tensor, k: Tensor) -> None:
        super().check_stored(q, k)
        check_floats(self.w, "weights")
        shape = (*q.shape[:3], k.shape[2])
        require(tuple(self.w.shape) == shape, f"weights {tuple(self.w.shape)} do not have the shape {shape}")
        require(not self.modifiers and self.sink_logits is None, "weights have a modifier or a sink")
        require(self.w.dtype == q.dtype, "weights and queries differ in type")

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return upcast(self.w).log()


BY_NAME: dict[str, Score] = {"dot": Dot(), "scaled_dot": ScaledDot(), "cosine": Cosine()}


def as_score(score: Any) -> Score:
    """A score from what users pass: a name, a Score, or a function f(q, k)."""
    if isinstance(score, Score):
        return score
    if isinstance(score, str):
        if score in BY_NAME:
            return BY_NAME[score]
        raise ValueError(
            f"unknown score {score!r}; the names are {', '.join(map(repr, BY_NAME))}. "
            "Others are objects: Gaussian(sigma), Bilinear(weight), Additive(...), or a function f(q, k)."
        )
    if isinstance(score, type) and issubclass(score, Score):
        raise TypeError(f"score must be an object, not the class: write score={score.__name__}(...).")
    if callable(score):
        return Similarity(score)
    raise TypeError(f"score must be a name, a Score or a function f(q, k); got {type(score).__name__}.")


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
