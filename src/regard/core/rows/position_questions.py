"""Questions about complete rows that compare positions: where a row looks, counted from its query."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..indexing import as_int
from ..tensor_kinds import readable_numbers
from ..torch_state import is_tracing
from .complete_rows import DistanceBins, DistanceVariance, induction_targets
from .questions import RowQuestions

__all__ = ["PositionQuestions"]

#: No key stands so far from a query; positions minus this are an int64.
FARTHEST = 2**62


class PositionQuestions(RowQuestions):
    """`RowQuestions`, and those about how far from its query a key stands."""

    def offset_mass(self, offset: int) -> Tensor:
        """The weight of every row on the key that stands `offset` positions before it: 1 the previous, 0 itself.

        Args:
            offset: A whole number; negative looks ahead.

        Returns:
            ``(..., h, i)``; 0 where there is no such key.

        >>> regard.weights(torch.zeros(3, 2), mask=regard.causal()).offset_mass(1)
        tensor([0.0000, 0.5000, 0.3333])
        """
        if (before := as_int(offset)) is None:
            raise ValueError(f"offset_mass(offset) takes a whole number of positions; got {offset!r}.")
        at = self._positions("offset_mass") - max(min(before, FARTHEST), -FARTHEST)
        at = torch.where((at >= 0) & (at < self.shape[-1]), at, -1)
        return self.gather(at[:, None]).squeeze(-1)

    def induction_mass(self, tokens: Tensor | Sequence[int | str]) -> Tensor:
        """The weight of every row on the key after the last earlier occurrence of its token: the induction target.

        Args:
            tokens: Token of each key position, ``(j,)``: ids or strings.

        Returns:
            ``(..., h, i)``; 0 where the token did not occur before.

        >>> W = regard.weights(torch.zeros(4, 2), mask=regard.causal())
        >>> W.induction_mass(["a", "b", "c", "a"])  # the last row looks at the "b" after the first "a"
        tensor([0.0000, 0.0000, 0.0000, 0.2500])
        """
        return self.gather(induction_targets(tokens, self._positions("induction_mass"))[:, None]).squeeze(-1)

    def distance_variance(self) -> Tensor:
        """The variance Σ_j w_ij (|i - j| - mean distance)² of the distance that every row looks, in positions².

        Returns:
            ``(..., h, i)``.

        >>> regard.weights(torch.zeros(3, 2), mask=regard.causal()).distance_variance()
        tensor([0.0000, 0.2500, 0.6667])
        """
        self._positions("distance_variance")
        return self._ask_rows(self._distance_variance())[0]

    def _distance_variance(self) -> DistanceVariance:
        return DistanceVariance(self._factors.query_offset)

    def distance_histogram(self, edges: Sequence[int] | Tensor) -> Tensor:
        """The weight of every row by distance.

        Args:
            edges: n + 1 ascending distances; bin r holds edges[r] <= |i - j| < edges[r + 1].

        Returns:
            ``(..., h, i, n)``.

        >>> regard.weights(torch.zeros(4, 2), mask=regard.causal()).distance_histogram([0, 1, 2, 4])[3]
        tensor([0.2500, 0.2500, 0.5000])
        """
        self._positions("distance_histogram")
        edges = readable_numbers(edges, "distance_histogram(edges)") if isinstance(edges, Tensor) else edges
        try:
            bounds = torch.as_tensor(edges, device=self._factors.q.device)
        except (TypeError, ValueError, RuntimeError):
            bounds = torch.empty(0, device=self._factors.q.device)
        bounds = bounds if bounds.is_floating_point() else bounds.long()  # unsigned ones have no differences
        if bounds.ndim != 1 or len(bounds) < 2 or not (is_tracing() or bool((bounds.diff() > 0).all())):
            raise ValueError(f"distance_histogram(edges) takes at least two ascending distances; got {edges}.")
        return self._ask_rows(DistanceBins(bounds, self._factors.query_offset))[0]

    def _positions(self, what: str) -> Tensor:
        """Key positions of the queries, (i,)."""
        if self._factors.offset is None:
            raise ValueError(
                f'{what} compares positions of queries and keys: pass align="start" or "end" to weights().'
            )
        return self._rows_here + self._factors.offset
