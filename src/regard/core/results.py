"""The results of questions to a matrix: typed, so that an editor completes the fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

__all__ = ["Peak", "StatisticName", "Statistics", "TopK"]

#: Statistics that `Weights.see` takes by name.
StatisticName: TypeAlias = Literal["lse", "max_score", "peak", "entropy", "received", "mean_distance"]


class TopK(NamedTuple):
    """The largest weights of every row, in the form of `torch.topk`.

    Attributes:
        values: Weights ``(..., h, i, k)``, largest first; 0 where a row sees fewer than k keys.
        indices: Key positions ``(..., h, i, k)``, int64, ties to the lower one; -1 where a row sees fewer than k keys.

    >>> W = regard.weights(torch.eye(3), score="dot", mask=regard.causal())
    >>> W.topk(2).indices
    tensor([[ 0, -1],
            [ 1,  0],
            [ 2,  0]])
    """

    values: Tensor
    indices: Tensor


class Peak(NamedTuple):
    """The largest weight of every row.

    Attributes:
        values: Weights ``(..., h, i)``; 0 for a row that sees no key.
        indices: Key positions ``(..., h, i)``, int64, ties to the lower one; -1 for a row that sees no key.

    >>> regard.weights(torch.eye(3)).peak().indices
    tensor([0, 1, 2])
    """

    values: Tensor
    indices: Tensor


#: Results that `Weights.see` takes a keyword for; the others are requested by their name.
_KEYWORDS = {"y": "values=v", "topk": "topk=k", "pool": "pool=(rows, cols)", "mass": "mass=keys"}


@dataclass(init=False, repr=False, eq=False)
class Statistics:
    """The results of `Weights.see`. A field that was not requested raises AttributeError.

    Attributes:
        y: ``W @ values``, ``(..., h, i, e)``.
        lse: Log of the sum of exp(score), ``(..., h, i)``.
        max_score: Largest score, ``(..., h, i)``.
        peak: Largest weight and its key, each ``(..., h, i)``.
        entropy: Entropy in nats, ``(..., h, i)``.
        topk: Largest weights and their keys, each ``(..., h, i, k)``.
        received: Weight that each key receives, ``(..., h, j)``.
        pool: Weight in each tile, ``(..., h, rows, cols)``.
        mean_distance: Mean distance to the keys, ``(..., h, i)``.
        mass: Weight on chosen keys, ``(..., h, i)``.

    >>> seen = regard.weights(torch.eye(3)).see("entropy", topk=2)
    >>> seen
    Statistics(entropy, topk)
    >>> seen.topk.values.shape
    torch.Size([3, 2])
    """

    y: Tensor
    lse: Tensor
    max_score: Tensor
    peak: Peak
    entropy: Tensor
    topk: TopK
    received: Tensor
    pool: Tensor
    mean_distance: Tensor
    mass: Tensor

    def __init__(self, **results: Tensor | Peak | TopK) -> None:
        # One by one: torch.compile of PyTorch 2.11 does not follow `vars(self).update`.
        for name, value in results.items():
            setattr(self, name, value)

    if not TYPE_CHECKING:  # hidden from type checkers, which then report a misspelt field

        def __getattr__(self, name: str) -> Any:
            if name not in Statistics.__annotations__:
                raise AttributeError(f"no statistic is called {name!r}; here are {', '.join(self.__dict__)}.")
            call = _KEYWORDS.get(name, repr(name))
            raise AttributeError(
                f"{name!r} was not requested; here are {', '.join(self.__dict__)}. Request it: see({call})."
            )

    def __repr__(self) -> str:
        return f"Statistics({', '.join(self.__dict__)})"
