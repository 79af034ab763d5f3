"""Sums of non-negative numbers without rounding: any split and any order of the terms gives the same bits.

A float64 is cut into digits of base 2³², from 2⁻⁹⁶ upwards, and digits are added as integers. Digits of a term below
2⁻⁹⁶ are cut off, whatever the other terms are.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DIGITS", "UNIT", "add", "as_digits", "as_integers", "from_integers"]

#: Digits of a sum, the lowest first; the value of the lowest digit's 1 is 1 / UNIT.
DIGITS, BITS, UNIT = 6, 32, 2**96


def as_digits(x: Tensor) -> Tensor:
    """The digits of numbers.

    Args:
        x: Non-negative float64 below 2⁹⁵.

    Returns:
        int64 ``(*x.shape, DIGITS)``.

    Raises:
        ValueError: A number is negative, nan or too large.

    >>> as_digits(torch.tensor([1.5], dtype=torch.float64))
    tensor([[         0,          0, 2147483648,          1,          0,          0]])
    """
    if not bool(((x >= 0) & (x < 2.0**95)).all()):
        raise ValueError(f"numbers to add must be >= 0 and < 2**95; got {float(x.min())} to {float(x.max())}.")
    digits, rest = [], x.double()
    for n in reversed(range(DIGITS)):
        unit = 2.0 ** (BITS * n) / UNIT
        digit = (rest / unit).long()  # a power of two: exact, but for what is cut off
        rest = rest - digit.double() * unit  # digit·unit holds the leading bits of rest: exact
        digits.append(digit)
    return torch.stack(digits[::-1], -1)


def add(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two numbers in digits, with carries passed on: no digit overflows, however many terms there are."""
    total = a + b
    for n in range(DIGITS - 1):
        total[..., n + 1] += total[..., n] >> BITS
        total[..., n] &= 2**BITS - 1
    return total


def as_integers(digits: Tensor) -> list[int]:
    """Sums as integer multiples of 1 / UNIT, flat."""
    return [sum(digit << (BITS * n) for n, digit in enumerate(row)) for row in digits.reshape(-1, DIGITS).tolist()]


def from_integers(sums: list[int], shape: tuple[int, ...]) -> Tensor:
    """The digits of integer multiples of 1 / UNIT, ``(*shape, DIGITS)``."""
    rows = [[(x >> (BITS * n)) & (2**BITS - 1) for n in range(DIGITS - 1)] + [x >> (BITS * (DIGITS - 1))] for x in sums]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(*shape, DIGITS)
