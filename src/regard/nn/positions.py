"""Position encodings: attention alone treats its input as a set.

Absolute encodings add a vector to the input (`Sinusoidal`, `Learned`). `Rotary` rotates queries and keys by an angle
that grows with the position, so that a score depends on the distance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Learned", "Positions", "PositionsLike", "PositionsName", "Rotary", "Sinusoidal", "as_positions"]

#: Number of positions of `positions="learned"`, and of the first rotary table.
LENGTH = 1024
#: Longest rotary table that is cached; longer sequences compute theirs at every call.
MAX_CACHED_LENGTH = 2**16


class Positions(nn.Module):
    """Base class: override `add_to` (absolute positions) or `rotate` (rotary ones).

    Both return their input unchanged here.

    Example:
        >>> class Even(Positions):
        ...     def add_to(self, x, start=0):
        ...         at = torch.arange(start, start + x.shape[-2])
        ...         return x + (at % 2 == 0)[:, None]
        >>> Even().add_to(torch.zeros(3, 2))[:, 0]
        tensor([1., 0., 1.])
    """

    def add_to(self, x: Tensor, start: int = 0) -> Tensor:
        """Add the encoding of positions ``start, start + 1, …`` to the input.

        Args:
            x: The layer's input ``(..., t, dim)``.
            start: Position of the first of the t vectors: the length of the cache.

        Returns:
            A tensor of the shape of x.

        Example:
            >>> Sinusoidal().add_to(torch.zeros(2, 4))[0]
            tensor([0., 1., 0., 1.])
        """
        return x

    def rotate(self, q: Tensor, start: int = 0) -> Tensor:
        """Rotate queries or keys by the angles of positions ``start, start + 1, …``.

        Args:
            q: Queries or keys ``(..., h, t, d)``.
            start: Position of the first of the t vectors: the length of the cache.

        Returns:
            A tensor of the shape of q.

        Example:
            >>> q = torch.randn(2, 5, 8)
            >>> torch.allclose(Rotary().rotate(q).norm(dim=-1), q.norm(dim=-1))   # a rotation keeps lengths
            True
        """
        return q


class Sinusoidal(Positions):
    """Adds sin(t / base^(2n/dim)) to component 2n and the cosine to 2n + 1; any length, no parameters.

    Args:
        base: Ratio of the longest wavelength to the shortest.

    Example:
        >>> Sinusoidal().add_to(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, base: float = 10_000.0) -> None:
        super().__init__()
        self.base = base

    def add_to(self, x: Tensor, start: int = 0) -> Tensor:
        t, dim = x.shape[-2:]
        angles = _angles(self.base, start, t, dim, x)  # t ⌈dim/2⌉
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[:, :dim]
        return x + waves.to(x.dtype)

    def extra_repr(self) -> str:
        return f"base={self.base:g}"


class Learned(Positions):
    """Adds one learned vector per position; longer inputs raise.

    Args:
        length: Number of positions.
        dim: Size of the vectors.

    Example:
        >>> Learned(16, 8).add_to(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, dim) * 0.02)

    def add_to(self, x: Tensor, start: int = 0) -> Tensor:
        t, length = x.shape[-2], len(self.table)
        if start + t > length:
            raise ValueError(
                f"there are {length} learned positions, and this input needs {start + t}; pass "
                f"positions=Learned({start + t}, {x.shape[-1]}), or use rotary positions, which have no limit."
            )
        return x + self.table[start : start + t]

    def extra_repr(self) -> str:
        return "{}, {}".format(*self.table.shape)


class Rotary(Positions):
    """Rotates pairs (n, n + d/2) of q and k by position · base^(−2n/d): scores depend on distances alone.

    Cosines and sines are cached, and the cache grows with the longest sequence: torch.compile would fuse their
    computation into every use of q and k (bench/LOG.md). The cache is no buffer: it is no state and has no fixed size.

    Args:
        base: Ratio of the slowest rotation's period to the fastest one's.

    Example:
        >>> q, k = torch.randn(2, 1, 8).double()
        >>> turn = lambda x, at: Rotary().rotate(x, at)
        >>> near, far = turn(q, 5) @ turn(k, 3).mT, turn(q, 105) @ turn(k, 103).mT
        >>> torch.allclose(near, far)
        True
    """

    table: Tensor | None = None  # (2, length, d/2): cos and sin in float32

    def __init__(self, base: float = 10_000.0) -> None:
        super().__init__()
        self.base = base

    def check(self, key_size: int) -> None:
        """Check that heads of this size can be rotated, and compute the first table.

        Args:
            key_size: d, the size of a head's queries and keys.

        Raises:
            ValueError: `key_size` is odd.

        Example:
            >>> Rotary().check(7)
            Traceback (most recent call last):
                ...
            ValueError: rotary positions rotate pairs: key_size must be even, got 7.
        """
        if key_size % 2:
            raise ValueError(f"rotary positions rotate pairs: key_size must be even, got {key_size}.")
        if self.table is None:
            self.table = self._cos_sin(0, LENGTH, key_size, torch.empty(0, dtype=torch.float32))

    def rotate(self, q: Tensor, start: int = 0) -> Tensor:
        cos, sin = self._table_for(start, q)
        left, right = q.to(cos.dtype).chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(q.dtype)

    def _table_for(self, start: int, q: Tensor) -> Tensor:
        """cos and sin of the positions of q, (2, t, d/2)."""
        self.check(q.shape[-1])
        end, size, table = start + q.shape[-2], q.shape[-1], self.table
        if q.dtype == torch.float64 or end > MAX_CACHED_LENGTH:
            return self._cos_sin(start, end, size, q)
        if table is None or table.shape[1] < end or 2 * table.shape[2] != size or table.device != q.device:
            table = self._cos_sin(0, max(LENGTH, 1 << (end - 1).bit_length()), size, q)
            if type(table) is Tensor and not torch.compiler.is_compiling():  # never a fake or functional tensor
                self.table = table
        return table[:, start:end]

    def _cos_sin(self, start: int, end: int, size: int, like: Tensor) -> Tensor:
        if like.is_meta:  # no numbers, for whose shape PyTorch would load its compiler
            dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
            return like.new_empty(2, end - start, size // 2, dtype=dtype)
        with torch.inference_mode(False):  # the cached table may take part in a gradient later
            angles = _angles(self.base, start, end - start, size, like)
            return torch.stack([angles.cos(), angles.sin()])

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        """Compute the table again on the device that the model moves to, so that a compiled graph finds it there."""
        super()._apply(fn, recurse)
        device = fn(torch.empty(0)).device
        if self.table is not None and self.table.device != device:
            _, count, half = self.table.shape
            self.table = self._cos_sin(0, count, 2 * half, torch.empty(0, dtype=torch.float32, device=device))
        return self

    def extra_repr(self) -> str:
        return f"base={self.base:g}"


def _angles(base: float, start: int, count: int, size: int, like: Tensor) -> Tensor:
    """position · base^(−2n/size), (count, ⌈size/2⌉)."""
    # bfloat16 cannot tell position 300 from 301: at least float32.
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    positions = torch.arange(start, start + count, device=like.device, dtype=dtype)
    rates = base ** (-torch.arange(0, size, 2, device=like.device, dtype=dtype) / size)
    return positions[:, None] * rates


PositionsName: TypeAlias = Literal["rotary", "sinusoidal", "learned"]

#: Positions of a layer or model: by name, or an object.
PositionsLike: TypeAlias = PositionsName | Positions


def as_positions(positions: PositionsLike | None, dim: int, length: int = LENGTH) -> Positions | None:
    """Positions from a user's argument: a name, an object, or None."""
    if positions is None or isinstance(positions, Positions):
        return positions
    constructors: dict[str, Callable[[], Positions]] = {
        "rotary": Rotary,
        "sinusoidal": Sinusoidal,
        "learned": lambda: Learned(length, dim),
    }
    if isinstance(positions, str) and positions in constructors:
        return constructors[positions]()
    raise ValueError(
        f'positions must be "rotary", "sinusoidal", "learned", None, or an object such as Learned(length, dim); '
        f"got {positions!r}."
    )
