"""A training step as one CUDA graph for each shape of a batch: a small model's launches cost more than its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["CapturedGradients", "CudaGraphs"]

Batch: TypeAlias = tuple[Tensor, ...]
LossAndGradients: TypeAlias = tuple[Tensor, tuple[Tensor, ...]]

#: Batches of a shape that run before it is captured: kernels are compiled and libraries set up outside of graphs.
RUNS_BEFORE = 2


class CudaGraphs:
    """Captures functions, in memory that all of their graphs share."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, run: Callable[[], LossAndGradients]) -> tuple[Callable[[], None], LossAndGradients]:
        """A replay of the function on the same memory, and its outputs there, which the first replay sets."""
        graph = torch.cuda.CUDAGraph()
        # Relaxed: a kernel that is first compiled here may be loaded.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="relaxed"):
            outputs = run()
        self.pool = graph.pool()
        return graph.replay, outputs


class CapturedGradients:
    """The loss of a batch, with its gradients in the parameters; forward and backward are replayed where they can be.

    Args:
        loss: The loss of a batch.
        parameters: All that it depends on.
        capture: As `CudaGraphs`.
    """

    def __init__(
        self, loss: Callable[[Batch], Tensor], parameters: Iterable[Tensor], capture: Callable[..., Any]
    ) -> None:
        self.loss, self.parameters, self.capture = loss, list(parameters), capture
        self.seen: Counter[Any] = Counter()
        self.graphs: dict[Any, tuple[Batch, Callable[[], None], LossAndGradients]] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """The loss, in memory that the next batch may overwrite, as it may the gradients."""
        shape = tuple(tensor.shape for tensor in batch)
        self.seen[shape] += 1
        loss, gradients = self._run(batch) if self.seen[shape] <= RUNS_BEFORE else self._replayed(shape, batch)
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        return loss

    def _run(self, batch: Batch) -> LossAndGradients:
        loss = self.loss(batch)
        return loss.detach(), torch.autograd.grad(loss, self.parameters)

    def _replayed(self, shape: Any, batch: Batch) -> LossAndGradients:
        if shape not in self.graphs:
            inputs = tuple(tensor.clone() for tensor in batch)
            self.graphs[shape] = (inputs, *self.capture(lambda: self._run(inputs)))
        inputs, replay, outputs = self.graphs[shape]
        for held, tensor in zip(inputs, batch, strict=True):
            held.copy_(tensor)
        replay()
        return outputs
