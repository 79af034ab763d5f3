"""A training step as one CUDA graph for each shape of a batch: a small model's launches cost more than its kernels."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["CapturedGradients", "CudaGraphs"]

log = logging.getLogger("regard")

Batch: TypeAlias = tuple[Tensor, ...]
LossAndGradients: TypeAlias = tuple[Tensor, tuple[Tensor, ...]]

#: Batches of a shape that run before it is captured: kernels are compiled and libraries set up outside of graphs.
RUNS_BEFORE = 2


class CudaGraphs:
    """Captures functions, in memory that all of their graphs share, on a stream of its own."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream = torch.cuda.Stream()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Work on the stream of the graphs.

        Steps before a capture must be on it too: autograd remembers on which stream the gradients of a parameter
        arrive, and another stream cannot wait for one that is captured.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self.stream)

    def __call__(self, run: Callable[[], LossAndGradients]) -> tuple[Callable[[], None], LossAndGradients]:
        """A replay of the function on the same memory, and its outputs there, which the first replay sets."""
        graph = torch.cuda.CUDAGraph()
        # Relaxed: a kernel that is first compiled here may be loaded.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="relaxed"):
            outputs = run()
        self.pool = graph.pool()
        return graph.replay, outputs


class CapturedGradients:
    """The loss of a batch, with its gradients in the parameters; forward and backward are replayed where they can be.

    Args:
        loss: The loss of a batch.
        parameters: All that it depends on.
        capture: As `CudaGraphs`. Where it fails, all batches run as they are, and one line of the log says why.
    """

    def __init__(
        self, loss: Callable[[Batch], Tensor], parameters: Iterable[Tensor], capture: Callable[..., Any]
    ) -> None:
        self.loss, self.parameters = loss, list(parameters)
        self.capture: Callable[..., Any] | None = capture
        self.runs: Counter[Any] = Counter()
        self.graphs: dict[Any, tuple[Batch, Callable[[], None], LossAndGradients]] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """The loss, in memory that the next batch may overwrite, as it may the gradients."""
        shape = tuple(tensor.shape for tensor in batch)
        self.runs[shape] += 1
        replays = self.runs[shape] > RUNS_BEFORE and self._is_captured(shape, batch)
        loss, gradients = self._replayed(shape, batch) if replays else self._run(batch)
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        return loss

    def _run(self, batch: Batch) -> LossAndGradients:
        loss = self.loss(batch)
        return loss.detach(), torch.autograd.grad(loss, self.parameters)

    def _is_captured(self, shape: Any, batch: Batch) -> bool:
        """Whether a graph of this shape exists, now at the latest."""
        if shape not in self.graphs:
            if self.capture is None:
                return False
            inputs = tuple(tensor.clone() for tensor in batch)
            try:
                self.graphs[shape] = (inputs, *self.capture(lambda: self._run(inputs)))
            except RuntimeError as error:
                self.capture, why = None, str(error).split("\n")[0]
                log.warning("Training steps run without CUDA graphs, which takes longer: %s", why)
                return False
        return True

    def _replayed(self, shape: Any, batch: Batch) -> LossAndGradients:
        inputs, replay, outputs = self.graphs[shape]
        for held, tensor in zip(inputs, batch, strict=True):
            held.copy_(tensor)
        replay()
        return outputs
