"""Where a word stands, told to attention, which by itself sees its input as a set.

Two ways: a vector is *added* to the input (sinusoidal, learned), or queries and keys are *turned* by an angle that
grows with the position (rotary), so that a score depends on the distance. Imports nothing of regard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Learned", "Positions", "Rotary", "Sinusoidal", "as_positions"]

#: How many positions `positions="learned"` makes room for; `Learned(length, dim)` says it.
LENGTH = 1024
#: Positions up to which rotary ones are kept.
LONGEST = 2**16


class Positions(nn.Module):
    """The base of all: each kind does one of the two things and leaves the other as it is."""

    def add_to(self, x: Tensor, start: int = 0) -> Tensor:
        """The input (..., t, dim) with its positions, the first of which is `start`."""
        return x

    def rotate(self, q: Tensor, start: int = 0) -> Tensor:
        """Queries or keys (..., h, t, d) with their positions."""
        return q


class Sinusoidal(Positions):
    """x + p with p_2n = sin(position / base^(2n/dim)), p_2n+1 = cos of the same; any length, no parameters."""

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
    """x + p with one learned vector a position, for up to `length` of them."""

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, dim) * 0.02)

    def add_to(self, x: Tensor, start: int = 0) -> Tensor:
        t, length = x.shape[-2], len(self.table)
        if start + t > length:
            raise ValueError(
                f"{length} positions were learned and {start + t} are needed; "
                f"make it positions=Learned({start + t}, {x.shape[-1]}), or use rotary ones, which have no end."
            )
        return x + self.table[start : start + t]

    def extra_repr(self) -> str:
        return "{}, {}".format(*self.table.shape)


class Rotary(Positions):
    """Pairs of q and k turned by position · base^(−2n/d): the product depends on the distance alone.

    Sines and cosines of the first positions are kept, and of more as they come: a compiler would make them anew for
    every number that is turned (bench/LOG.md). They are no buffer: they are no state, and their number grows.
    """

    turns: Tensor | None = None  # 2 n d/2 : cos and sin, in float32

    def __init__(self, base: float = 10_000.0) -> None:
        super().__init__()
        self.base = base

    def check(self, key_size: int) -> None:
        """That heads of this size can be turned; makes ready for it."""
        if key_size % 2:
            raise ValueError(f"rotary positions turn pairs of numbers: key_size must be even; {key_size} came.")
        if self.turns is None:
            self.turns = self._made(0, LENGTH, key_size, torch.empty(0, dtype=torch.float32))

    def rotate(self, q: Tensor, start: int = 0) -> Tensor:
        cos, sin = self._from(start, q)
        left, right = q.to(cos.dtype).chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(q.dtype)

    def _from(self, start: int, q: Tensor) -> Tensor:
        """cos and sin of the positions of q, (2, t, d/2)."""
        self.check(q.shape[-1])
        end, size, kept = start + q.shape[-2], q.shape[-1], self.turns
        if q.dtype == torch.float64 or end > LONGEST:
            return self._made(start, end, size, q)
        if kept is None or kept.shape[1] < end or 2 * kept.shape[2] != size or kept.device != q.device:
            kept = self._made(0, max(LENGTH, 1 << (end - 1).bit_length()), size, q)
            if type(kept) is Tensor and not torch.compiler.is_compiling():  # and no tensor that only stands for one
                self.turns = kept
        return kept[:, start:end]

    def _made(self, start: int, end: int, size: int, like: Tensor) -> Tensor:
        with torch.inference_mode(False):  # what is kept may be differentiated through later
            angles = _angles(self.base, start, end - start, size, like)
            return torch.stack([angles.cos(), angles.sin()])

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        """Made anew where the model is moved to, so that a compiler finds it there."""
        super()._apply(fn, recurse)
        device = fn(torch.empty(0)).device
        if self.turns is not None and self.turns.device != device:
            _, count, half = self.turns.shape
            self.turns = self._made(0, count, 2 * half, torch.empty(0, dtype=torch.float32, device=device))
        return self

    def extra_repr(self) -> str:
        return f"base={self.base:g}"


def _angles(base: float, start: int, count: int, size: int, like: Tensor) -> Tensor:
    """position · base^(−2n/size), (count, ⌈size/2⌉)."""
    # Narrow types cannot tell position 300 from 301: float32, or float64 where it is asked for.
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    at = torch.arange(start, start + count, device=like.device, dtype=dtype)
    rates = base ** (-torch.arange(0, size, 2, device=like.device, dtype=dtype) / size)
    return at[:, None] * rates


def as_positions(positions: Any, dim: int, length: int = LENGTH) -> Positions | None:
    """Positions from what users pass: a name, an object, or None."""
    if positions is None or isinstance(positions, Positions):
        return positions
    made: dict[str, Callable[[], Positions]] = {
        "rotary": Rotary,
        "sinusoidal": Sinusoidal,
        "learned": lambda: Learned(length, dim),
    }
    if isinstance(positions, str) and positions in made:
        return made[positions]()
    raise ValueError(
        f'positions are "rotary", "sinusoidal", "learned", None, or an object such as Learned(length, dim); '
        f"{positions!r} came."
    )
