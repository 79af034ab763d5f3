"""Matrices of which other ranks may have a part: ranks call a function alike, and the error of one is that of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar

__all__ = ["Shareable", "called_by_all_ranks", "refuse_one_over_ranks"]

P = ParamSpec("P")
X = TypeVar("X")


class Shareable:
    """A matrix, all of which is here; `distributed` has those that other ranks have a part of."""

    #: Whether other ranks may have a part.
    _shared: ClassVar[bool] = False

    def _checked(self, check: Callable[[], X]) -> X:
        """The answer of a check of arguments, which may raise; over ranks its error is that of all of them."""
        return check()

    def _called(self, function: Callable[..., X], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> X:
        """The result of a function of this matrix; over ranks its arguments and errors are those of all of them."""
        return function(*args, **kwargs)


def called_by_all_ranks(function: Callable[P, X]) -> Callable[P, X]:
    """The function, whose errors on one rank are those of all ranks where an argument is a matrix over ranks."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> X:
        for matrix in _matrices((*args, *kwargs.values())):
            if matrix._shared:
                return matrix._called(function, args, kwargs)
        return function(*args, **kwargs)

    return called


def _matrices(arguments: tuple[Any, ...]) -> Iterator[Shareable]:
    """The matrices among arguments, and in lists of them."""
    for argument in arguments:
        for item in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(item, Shareable):
                yield item


def refuse_one_over_ranks(first: Shareable, second: Shareable) -> None:
    """Raise NotImplementedError where other ranks have a part of one of two matrices alone."""

    def refuse() -> NoReturn:
        raise NotImplementedError(
            "one matrix is split over ranks and the other is not; pass mesh= and each rank's part to both, or DTensors."
        )

    if first._shared != second._shared:
        (first if first._shared else second)._checked(refuse)
