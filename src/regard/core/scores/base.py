"""The base of all scores: a similarity and its modifiers, which apply in the order they are written."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ..broadcast import MatrixShape, per_head
from ..pytree import register_node, replace_fields
from ..stored import check_broadcasts, require
from .modifiers import LARGEST, Alibi, Bias, Modifier, Modify, Softcap, need_floats, open_function
from .similarity import SimilarityKernel

__all__ = ["FormulaSteps", "Lowered", "Score", "upcast"]


@dataclass(frozen=True, eq=False)
class Lowered:
    """Queries, keys and how a block of them is scored, as engines compute it."""

    q: Tensor  # *batch h i d
    k: Tensor  # *batch g j d
    similarity_kernel: SimilarityKernel
    modifiers: tuple[Modifier, ...]


class FormulaSteps(NamedTuple):
    """A score in two steps, for display: the similarity before any scale, and the score."""

    product: Tensor
    formula: str  # of `product`
    scaled: Tensor
    scaling: str  # from `product` to `scaled`


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
    #: Whether `lower` computes other keys (a direction, a projection). Keys that no row sees are
    #: then zeroed first: their gradient would be 0 · nan.
    transforms_keys: ClassVar[bool] = False
    #: The similarity in a few signs, for display.
    formula: ClassVar[str] = "f(q, k)"

    def __init_subclass__(cls) -> None:
        """A subclass with another `lower` is no product unless it says so."""
        if "lower" in vars(cls) and "product_scale" not in vars(cls):
            cls.product_scale = Score.product_scale  # type: ignore[method-assign]

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        """The textbook's formula, before modifiers: it defines what is right.

        Args:
            q: Queries ``(b, h, i, d)``.
            k: Keys ``(b, h, j, d)``, with the heads of the queries.

        Returns:
            Scores ``(b, h, i, j)``.

        >>> regard.Dot().similarity(torch.eye(2)[None, None], torch.ones(1, 1, 3, 2)).shape
        torch.Size([1, 1, 2, 3])
        """
        raise NotImplementedError

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        """The same in the form that engines compute.

        Args:
            q: Queries ``(b, h, i, d)``.
            k: Keys ``(b, g, j, d′)``, which may have fewer heads than q.

        Returns:
            Other queries and keys, how engines compare them, and all modifiers.

        >>> regard.ScaledDot().lower(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)).similarity_kernel.scale
        0.5
        """
        raise NotImplementedError

    def product_scale(self, size: int) -> float | None:
        """The scale of a score that is scale · q·k before its modifiers.

        Args:
            size: d, the size of queries and keys.

        Returns:
            The scale; None for any other score.

        >>> regard.ScaledDot().product_scale(4), regard.Cosine().product_scale(4)
        (0.5, None)
        """
        return None

    @property
    def precomputed(self) -> Tensor | None:
        """Weights ``(*batch, h, i, j)`` that exist already, in the place of scores; None where scores are computed.

        >>> regard.Dot().precomputed is None
        True
        """
        return None

    def formula_steps(self, q: Tensor, k: Tensor) -> FormulaSteps:
        """The similarity in two steps, for display.

        Args:
            q: Queries ``(b, h, i, d)``.
            k: Keys ``(b, h, j, d)``.

        Returns:
            The product before any scale and the score, each ``(b, h, i, j)`` and with its formula.

        >>> steps = regard.ScaledDot().formula_steps(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
        >>> steps.formula, steps.product.item(), steps.scaling, steps.scaled.item()
        ('q·k', 4.0, '÷ √4', 2.0)
        """
        s = self.similarity(q, k)
        return FormulaSteps(s, self.formula, s, "unscaled")

    def check_sizes(self, q: Tensor, k: Tensor) -> None:
        """Check that this score can compare queries and keys of these sizes.

        Args:
            q: Queries ``(..., h, i, d)``.
            k: Keys ``(..., g, j, d′)``.

        Raises:
            ValueError: The sizes do not fit; the message says what does.

        >>> regard.Dot().check_sizes(torch.zeros(1, 2, 4), torch.zeros(1, 3, 4))
        """
        d, other = q.shape[-1], k.shape[-1]
        if d != other and not self.sizes_may_differ:
            hint = " It looks as if k is transposed: pass k.mT." if k.shape[-2] == d else ""
            raise ValueError(
                f"q has size {d} and k has size {other} on the last axis; "
                f"a {type(self).__name__} score needs them equal.{hint}"
            )

    def check_functions(self, q: Tensor, k: Tensor) -> None:
        """Check that no function of a user loses a gradient or changes what it is passed.

        Args:
            q: Queries ``(..., h, i, d)``.
            k: Keys ``(..., g, j, d′)``.

        Raises:
            ValueError: A function captures a tensor that needs gradients, or changes queries or keys in place.

        >>> regard.Dot().check_functions(torch.zeros(1, 2, 4), torch.zeros(1, 3, 4))
        """
        for modifier in self.modifiers:
            modifier.check_function(q.shape[-3], upcast(q[..., :0, :]))

    def broadcast_to(self, matrix: MatrixShape) -> Self:
        """The same for one matrix.

        Args:
            matrix: Its shape ``(*batch, h, i, j)``, offset and device.

        Returns:
            A score whose tensors were checked, and have the axes ``(*batch|1, h|1, x, y)``.

        >>> matrix = MatrixShape((5, 2, 3, 3), 0, torch.device("cpu"))
        >>> regard.Dot().sink(torch.zeros(2)).broadcast_to(matrix).sink_logits.shape
        torch.Size([1, 2, 1, 1])
        """
        if not self.modifiers and self.sink_logits is None:
            return self
        sink = None if self.sink_logits is None else per_head(self.sink_logits, matrix, "sink(logits)")
        modifiers = tuple(modifier.broadcast_to(matrix) for modifier in self.modifiers)
        return replace_fields(self, modifiers=modifiers, sink_logits=sink)

    def crop(self, rows: slice, cols: slice) -> Self:
        """The same for a part of the matrix, of a score that is broadcast to one.

        Args:
            rows: Adjacent rows, a slice with both ends.
            cols: Adjacent keys, likewise.

        Returns:
            A score whose tensors are cut to that part.

        >>> score = regard.Dot().bias(torch.zeros(1, 1, 4, 4)).crop(slice(0, 2), slice(1, 4))
        >>> score.modifiers[0].tensor.shape
        torch.Size([1, 1, 2, 3])
        """
        return replace_fields(self, modifiers=tuple(modifier.crop(rows, cols) for modifier in self.modifiers))

    def check_stored(self, q: Tensor, k: Tensor) -> None:
        """Raise ValueError unless the fields, read from a file, are those of a score broadcast to a matrix.

        Args:
            q: Queries ``(b, h, i, d)``.
            k: Keys ``(b, g, j, d′)``.

        Raises:
            ValueError: A field has another type or shape.

        >>> regard.Dot().check_stored(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4))
        """
        (b, h, i, d), (j, other) = q.shape, k.shape[2:]
        require(isinstance(self.modifiers, tuple), "a score's modifiers are no tuple")
        for modifier in self.modifiers:
            require(isinstance(modifier, Modifier), f"a score has a modifier {type(modifier).__name__}")
            modifier.check_stored((b, h, i, j))
        if self.sink_logits is not None:
            check_broadcasts(self.sink_logits, (b, h, 1, 1), "a sink")
        require(d == other or self.sizes_may_differ, f"queries have size {d} and keys {other}")

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
        if not isinstance(cap, (int, float, numbers.Real)) or not 0 < cap <= LARGEST:
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


def upcast(x: Tensor) -> Tensor:
    """In the dtype that scores and statistics are computed in: float32, float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return "×".join(map(str, value.shape)) or "scalar"
    return getattr(value, "__name__", None) or (f"{value:g}" if isinstance(value, float) else str(value))
