"""Statistics of every attention layer, computed in the same fused pass as the output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.torch_state import in_backward
from ..core.types import StatisticName
from ..core.weights import STATISTICS, Statistics

__all__ = ["Probe"]


class Probe:
    """Statistics that every attention layer of a model computes in the same fused pass as its output.

    Pass a fresh one to each call of a model; the layers append their results, in order. ``probe[n]`` is the
    `Statistics` of layer n, part of the graph.

    Args:
        names: Statistics of `Weights.see`, for example "entropy", "max_score", "lse".

    Attributes:
        names: The requested statistics.
        statistics: One `Statistics` per layer so far.

    Example:
        >>> from regard.nn import LanguageModel
        >>> model, probe = LanguageModel(65, dim=16, heads=2, layers=3), Probe("entropy", "max_score")
        >>> logits = model(torch.randint(65, (4, 10)), probe=probe)
        >>> probe[2].entropy.shape                      # layer 2, (b, h, i)
        torch.Size([4, 2, 10])
        >>> probe.heads("max_score").shape              # (layers, h)
        torch.Size([3, 2])
        >>> probe
        Probe(entropy, max_score; 3 layers)
    """

    def __init__(self, *names: StatisticName) -> None:
        for name in names:
            if name not in STATISTICS:
                raise ValueError(f"unknown statistic {name!r}; a layer computes {', '.join(STATISTICS)}.")
        self.names = names
        self.statistics: list[Statistics] = []

    def __len__(self) -> int:
        return len(self.statistics)

    def __getitem__(self, layer: int) -> Statistics:
        self._require_results()
        return self.statistics[layer]

    def __iter__(self) -> Iterator[Statistics]:
        return iter(self.statistics)

    def __repr__(self) -> str:
        return f"Probe({', '.join(self.names)}; {len(self)} layer{'s' * (len(self) != 1)})"

    def heads(self, name: StatisticName) -> Tensor:
        """One number per head: the largest "max_score", the mean of every other statistic.

        Args:
            name: One of the statistics this probe asks for.

        Returns:
            ``(layers, h)``, detached from the graph.

        Example:
            >>> from regard.nn import SelfAttention
            >>> layer, probe = SelfAttention(16, heads=4), Probe("entropy")
            >>> y = layer(torch.randn(2, 5, 16), probe=probe)
            >>> probe.heads("entropy").shape
            torch.Size([1, 4])
        """
        if name not in self.names:
            raise ValueError(
                f"{name!r} was not requested; this probe has {', '.join(map(repr, self.names))}. "
                f"Request it: Probe({name!r})."
            )
        self._require_results()
        with torch.no_grad():  # detach alone is not enough: some compilers still send zero gradients through it
            rows = [getattr(of_layer, name).detach() for of_layer in self.statistics]  # layers × (..., h, i)
            if len({row.shape for row in rows}) == 1:  # one reduction for all layers
                return _reduce_rows(torch.stack(rows), name)
            return torch.stack([_reduce_rows(row.unsqueeze(0), name).squeeze(0) for row in rows])

    def _append(self, statistics: Statistics) -> None:
        # In a backward an activation checkpoint recomputes its layers: their statistics are there already.
        if torch.compiler.is_compiling() or not in_backward():
            self.statistics.append(statistics)

    def _require_results(self) -> None:
        if not self.statistics:
            raise ValueError("this probe has no results yet: call the model with probe=… first.")


def _reduce_rows(rows: Tensor, name: str) -> Tensor:
    """One number per head, (layers, h), from rows (layers, ..., h, i)."""
    others = [n for n in range(1, rows.ndim) if n != rows.ndim - 2]
    return rows.amax(others) if name == "max_score" else rows.mean(others)
