"""The array protocol of a lazy matrix: sizes, indices, casts, NumPy, and PyTorch's functions of two matrices.

Whatever would store the matrix says so: `dense`, `numpy` and `np.asarray` take quadratic memory, and are refused with
their bytes where those are not free. Any other attribute of a tensor names the way to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, overload

import torch
from torch import Tensor

from .evaluation import LazyMatrix, torch_function
from .indexing import At, as_index, as_int, expand, pick_axes, positions_of, word_at
from .inherited import named_by_class
from .tensor_kinds import refuse_jit_trace
from .torch_state import without_autocast
from .types import IndexLike, KeyLike, ToLike

if TYPE_CHECKING:
    import numpy as np

    #: `:`, which leaves an axis alone, and what picks positions of one, words aside.
    Every: TypeAlias = slice[None, None, None]
    Positions: TypeAlias = int | slice | range | list[int] | Tensor

__all__ = ["ArrayProtocol", "Scores"]

#: Methods of a tensor that a matrix answers in another way than by storing itself.
_INSTEAD = {
    "argmax": "W.peak().indices",
    "amax": "W.peak().values",
    "max": "W.peak().values",
    "mean": 'W.reduce_heads("mean"), the mean of heads, or W.received() / i, the mean of rows',
    "argsort": "W.topk(k).indices",
    "logsumexp": "W.lse(), of the scores",
    "sort": "W.topk(k)",
    "topk": "W.topk(k)",
    "sum": "W.received(), which sums over queries, or W.mass(keys), which sums over keys",
    "transpose": "W.mT",
    "t": "W.mT",
    "numel": "W.shape.numel()",
    "dim": "W.ndim",
}


class ArrayProtocol(LazyMatrix):
    """Sizes, indices and conversions of a lazy matrix ``(..., h, i, j)``, or ``(i, j)`` for one head."""

    @property
    def ndim(self) -> int:
        """Number of axes.

        >>> regard.weights(torch.randn(2, 8, 5, 4)).ndim
        4
        """
        return len(self.shape)

    @overload
    def size(self, dim: None = None) -> torch.Size: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or the length of one axis, as `torch.Tensor.size` returns it.

        Args:
            dim: An axis, also counted from the end.

        Returns:
            `shape`, or one of its numbers.

        >>> regard.weights(torch.randn(2, 8, 5, 4)).size(-1)
        5
        """
        if dim is None:
            return self.shape
        if (axis := as_int(dim)) is None or not -self.ndim <= axis < self.ndim:
            raise IndexError(f"size(dim) takes one of the {self.ndim} axes {tuple(self.shape)}; got {dim!r}.")
        return self.shape[axis]

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        raise ValueError(
            f"the truth of a matrix of {'×'.join(map(str, self.shape))} numbers is ambiguous. "
            "Compare with None (W is None), or ask about a number: bool(W[..., i, j] > 0.5)."
        )

    @property
    def tokens(self) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
        """Tokens of the rows and of the columns, as passed to `label`; None where there are none.

        >>> regard.weights(torch.eye(2)).label(["a", "b"]).tokens
        (('a', 'b'), ('a', 'b'))
        """
        rows, cols = self._tokens
        return rows.words if rows else None, cols.words if cols else None

    # Conversions.

    def to(self, *args: ToLike, **kwargs: ToLike) -> Self:
        """The same on another device, or from queries and keys of another floating-point type.

        Args:
            *args: As for `torch.Tensor.to`: a device, a dtype, or both.
            **kwargs: As for `torch.Tensor.to`.

        Returns:
            A new matrix. Integer and bool tensors (masks) change their device only.

        >>> regard.weights(torch.eye(2)).to(torch.float64).dtype
        torch.float64
        """
        factors = self._factors.map(lambda t: _to(t, *args, **kwargs))
        # Parameters of functions keep their type, which their function expects.
        moved = self._with(factors.map_all(lambda t: t.to(factors.q.device)))
        if not moved._factors.q.is_floating_point():
            raise TypeError(
                f"queries and keys are floating-point tensors; got .to({moved._factors.q.dtype}). Convert what is "
                "computed from them: W.dense().to(...)."
            )
        return moved

    def half(self) -> Self:
        """The same from queries and keys in float16; statistics of float16 inputs are float32.

        Returns:
            A new matrix.

        >>> regard.weights(torch.eye(2)).half().dtype
        torch.float32
        """
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """The same from queries and keys in bfloat16; statistics of bfloat16 inputs are float32.

        Returns:
            A new matrix.

        >>> regard.weights(torch.eye(2)).bfloat16().dtype
        torch.float32
        """
        return self.to(torch.bfloat16)

    def float(self) -> Self:
        """The same from queries and keys in float32; statistics of float32 inputs are float32.

        Returns:
            A new matrix.

        >>> regard.weights(torch.eye(2)).float().dtype
        torch.float32
        """
        return self.to(torch.float32)

    def double(self) -> Self:
        """The same from queries and keys in float64; statistics of float64 inputs are float64.

        Returns:
            A new matrix.

        >>> regard.weights(torch.eye(2)).double().dtype
        torch.float64
        """
        return self.to(torch.float64)

    def cpu(self) -> Self:
        """The same on the CPU.

        Returns:
            A matrix whose factors are on the CPU.

        >>> regard.weights(torch.eye(2)).cpu().device
        device(type='cpu')
        """
        return self.to("cpu")

    def cuda(self, device: torch.device | int | str | None = None) -> Self:
        """The same on an NVIDIA GPU.

        Args:
            device: As for `torch.Tensor.cuda`. Default: the current GPU.

        Returns:
            A matrix whose factors are on the GPU.

        >>> regard.weights(torch.eye(2)).cuda().device  # doctest: +SKIP
        device(type='cuda', index=0)
        """
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def detach(self) -> Self:
        """The same without autograd.

        Returns:
            A matrix over detached factors; cached results, which never have a gradient, stay.

        >>> regard.weights(torch.eye(2, requires_grad=True)).detach().entropy().requires_grad
        False
        """
        detached = self._with(self._factors.map_all(Tensor.detach))
        detached._cache = self._cache.copy()  # a detached tensor shares its change counter
        return detached

    def numpy(self) -> np.ndarray:
        """All of it as a NumPy array on the CPU, in quadratic memory: `dense` without autograd.

        Returns:
            ``(..., h, i, j)`` or ``(i, j)``.

        Raises:
            MemoryError: It would not fit; the message says what to ask for instead.

        >>> regard.weights(torch.zeros(1, 4)).numpy()
        array([[1.]], dtype=float32)
        """
        return self.dense().numpy(force=True)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError(
                "these numbers are computed when they are asked for: np.asarray(W) makes an array, copy=False cannot."
            )
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        return self.dense().detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return torch_function(func, args, kwargs, _INSTEAD if cls._multiplies else {})

    if not TYPE_CHECKING:  # hidden from type checkers, which then report a misspelt name

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name.startswith("_") or not hasattr(Tensor, name):
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            # The hints are of weights; the scores before softmax have no statistics.
            matrix, hints = ("W", _INSTEAD) if self._multiplies else ("W.scores", {})
            instead = hints.get(name, f"{matrix}.dense().{name}, in quadratic memory")
            raise AttributeError(f"{kind!r} object has no attribute {name!r}, which is one of tensors: use {instead}.")

    # Indexing. Type checkers cannot know the shape: for them the axes are (b, h, i, j), and brackets that leave rows
    # and columns alone return a matrix, others a tensor. `...` types a matrix of fewer axes: W[..., 2, :] is a row.

    @overload
    def __getitem__(self, key: str | At) -> Tensor: ...
    @overload
    def __getitem__(self, key: Positions | EllipsisType) -> Self: ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(  # type: ignore[overload-overlap]
        self,
        key: tuple[Positions]
        | tuple[Positions, Positions | EllipsisType]
        | tuple[Positions, Positions, Every | EllipsisType]
        | tuple[Positions, Positions, Every, Every]
        | tuple[EllipsisType, Every]
        | tuple[EllipsisType, Every, Every]
        | tuple[EllipsisType, Positions, Every, Every],
    ) -> Self: ...
    @overload
    def __getitem__(self, key: IndexLike) -> Tensor: ...
    def __getitem__(self, key: IndexLike) -> Self | Tensor:
        refuse_jit_trace()  # whose sizes are tensors
        items = self._checked(lambda: expand(key, self.shape))
        picks = self._checked(lambda: pick_axes(items, self.shape, self._tokens))
        chosen = self._select(picks[:-2])
        # Only `:` and `...` leave rows and columns alone, so that the type does not depend on lengths.
        if all(isinstance(item, slice) and item == slice(None) for item in items[-2:]):
            return chosen
        rows, cols = picks[-2:]
        block = chosen._block(positions_of(rows), positions_of(cols))
        if chosen._one_head:
            block = block.squeeze(-3)
        if isinstance(cols, int):
            block = block.squeeze(-1)
        if isinstance(rows, int):
            block = block.squeeze(-1 if isinstance(cols, int) else -2)
        return block

    def __iter__(self) -> Iterator[Self]:
        return (self[n] for n in range(self.shape[0]))

    def __contains__(self, word: Any) -> bool:
        if not isinstance(word, (str, At)):
            raise TypeError(
                f"`in` asks for a token of the rows or columns; got {type(word).__name__}. "
                "To look for a number: (W.dense() == number).any(), in quadratic memory."
            )
        return any(tokens is not None and tokens.has(word) for tokens in self._tokens)

    def at(self, word: str, nth: int) -> At:
        """One of several equal tokens, as an index.

        Args:
            word: The token.
            nth: Which occurrence, counted from 1.

        Returns:
            An index for the last two axes.

        >>> W = regard.weights(torch.eye(3)).label(["the", "cat", "the"])
        >>> W[W.at("the", 2), "cat"] == W[2, 1]
        tensor(True)
        """
        return word_at(word, nth)

    def row(self, i: KeyLike) -> Tensor:
        """Row i: where query i looks.

        Args:
            i: A position or a token; ``"the:2"`` is the second of several equal ones.

        Returns:
            ``(..., h, j)``.

        >>> regard.weights(torch.zeros(2, 4)).row(0)
        tensor([0.5000, 0.5000])
        """
        return self[..., i, :]

    def column(self, j: KeyLike) -> Tensor:
        """Column j: who looks at key j.

        Args:
            j: A position or a token; ``"the:2"`` is the second of several equal ones.

        Returns:
            ``(..., h, i)``.

        >>> regard.weights(torch.zeros(2, 4), mask=regard.causal()).column(0)
        tensor([1.0000, 0.5000])
        """
        return self[..., :, j]

    def dense(self) -> Tensor:
        """All of it as a tensor, in quadratic memory.

        Returns:
            ``(..., h, i, j)`` or ``(i, j)``.

        Raises:
            MemoryError: It would not fit; the message says what to ask for instead.

        >>> regard.weights(torch.zeros(2, 4), mask=regard.causal()).dense()
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
        """
        block = self._block(range(self._sizes[0]), range(self._sizes[1]))
        return block.squeeze(-3) if self._one_head else block


@named_by_class
class Scores(ArrayProtocol):
    """Scores ``(..., h, i, j)`` before softmax, with modifiers, −inf where the mask hides a key: `Weights.scores`.

    They are indexed as weights are, computed where they are asked for, and differentiable.

    >>> W = regard.weights(torch.eye(3), mask=regard.causal())
    >>> torch.allclose(W.scores.row(2).softmax(-1), W.row(2))
    True
    """

    def _block(self, rows: list[int] | range, cols: list[int] | range) -> Tensor:
        """The scores at these rows and columns, (*batch, h, i, j)."""
        self._check_fits(rows, cols)
        problem = self._factors.problem().with_nan_as_bias().with_exact_distances()
        block = problem.block(as_index(rows, self.device), as_index(cols, self.device))
        s = without_autocast(problem.q, lambda: problem.scores(block).to(self.dtype))
        return s.reshape(*self._factors.batch, *s.shape[1:])

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape))
        return f"Scores({shape}, {self._factors.score!r}, {self.dtype}, {self.device}; not stored)"


def _to(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`t.to(...)`, where a floating-point type leaves integers and bools as they are."""
    moved = t.to(*args, **kwargs)
    return moved if t.is_floating_point() or moved.dtype == t.dtype else t.to(moved.device)
