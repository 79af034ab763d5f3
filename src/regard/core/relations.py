"""Questions about complete rows: two matrices compared, and more than one pass of an online softmax can carry.

`RowQuestions` are the methods that any matrix with a source of rows has; `Relations` gives them to `Weights`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engines.reference import dense
from .comparison import Comparison
from .evaluation import LazyMatrix
from .problem import Factors
from .scores import Precomputed
from .stats import Request
from .strips import DenseRows, Question, RowSource, ScoreRows, walk
from .torch_state import as_size

__all__ = ["Relations", "RowQuestions"]


class RowQuestions:
    """Methods of a matrix whose complete rows can be computed, a strip at a time."""

    _factors: Factors
    _engine: str
    _one_head: bool

    @property
    def shape(self) -> torch.Size:
        """``(..., h, i, j)``, or ``(i, j)`` for one head."""
        raise NotImplementedError

    def _row_source(self, batch: torch.Size) -> RowSource:
        """This matrix over a batch that its own broadcasts to."""
        raise NotImplementedError

    def _dense_rows(self, batch: torch.Size) -> tuple[Tensor, Tensor | None]:
        """By the textbook: weights (b, h, i, j), and the share (b, h, i) of a sink, if there is one."""
        raise NotImplementedError

    def _ask_rows(self, question: Question, *others: RowQuestions) -> list[Tensor]:
        """The outputs of a question to this matrix and others, with batch and head axes."""
        matrices = [self, *others]
        batch = _joint_batch(matrices)
        if any(matrix._engine == "reference" and not _is_precomputed(matrix) for matrix in matrices):
            outputs = question.of_dense(_dense_matrices(matrices, batch, question.counts_sink))
        else:
            outputs = list(walk([matrix._row_source(batch) for matrix in matrices], question))
        one_head = all(matrix._one_head for matrix in matrices)
        unfolded = [x if len(batch) == 1 else x.reshape(*batch, *x.shape[1:]) for x in outputs]
        return [x.squeeze(len(batch)) if one_head else x for x in unfolded]

    def _compare(self, measure: str, other: RowQuestions) -> Tensor:
        if not isinstance(other, RowQuestions):
            raise TypeError(
                f"{measure}(other) compares with another Weights; got {type(other).__name__}. "
                "Weights that exist as a tensor: regard.Weights.from_dense(w)."
            )
        if self.shape[-2:] != other.shape[-2:]:
            raise ValueError(
                f"{measure}(other) compares rows of equal keys: both matrices must have the same i and j; "
                f"got {tuple(self.shape)} and {tuple(other.shape)}."
            )
        ours, theirs = (1 if m._one_head else m.shape[-3] for m in (self, other))
        if ours != theirs and 1 not in (ours, theirs):
            raise ValueError(
                f"{measure}(other) compares head by head: heads must be equal, or one; got {ours} and {theirs}."
            )
        for name in ("device", "dtype"):
            if (a := getattr(self, name)) != (b := getattr(other, name)):
                raise ValueError(f"{measure}(other): one matrix is {a} and the other {b}; move one with .to().")
        return self._ask_rows(Comparison(measure), other)[0]

    def cross_entropy(self, other: RowQuestions) -> Tensor:
        """Cross-entropy -Σ_j p_ij log q_ij of every row of another matrix q under this one, p, in nats.

        Args:
            other: Weights of the same rows and keys; other queries, keys, scores and masks. One head stands for all.

        Returns:
            ``(..., h, i)``; 0 for a row of p that sees no key, inf where q forbids a key that p sees. A sink counts
            as one more outcome. Both matrices get gradients.

        >>> p, q = regard.weights(torch.eye(2)), regard.weights(torch.zeros(2, 2))
        >>> p.cross_entropy(q)  # two keys alike: log 2
        tensor([0.6931, 0.6931])
        """
        return self._compare("cross_entropy", other)

    def kl(self, other: RowQuestions) -> Tensor:
        """Kullback-Leibler divergence Σ_j p_ij (log p_ij - log q_ij) of every row from another matrix q, in nats.

        Computed from log-weights that are centred on the maxima of both rows: large scores cancel nothing.

        Args:
            other: Weights of the same rows and keys; other queries, keys, scores and masks. One head stands for all.

        Returns:
            ``(..., h, i)``; 0 for a row of p that sees no key, inf where q forbids a key that p sees (such a row has
            gradient 0). A sink counts as one more outcome. Both matrices get gradients.

        >>> teacher, student = (regard.weights(torch.randn(4, 6, d), mask=regard.causal()) for d in (64, 16))
        >>> teacher.kl(student).shape, bool((teacher.kl(student) >= -1e-6).all())
        (torch.Size([4, 6]), True)
        >>> teacher.kl(teacher).abs().max()
        tensor(0.)
        """
        return self._compare("kl", other)

    def js(self, other: RowQuestions) -> Tensor:
        """Jensen-Shannon divergence of every row, ½ KL(p ‖ m) + ½ KL(q ‖ m) with m = (p + q) / 2, in nats.

        Args:
            other: Weights of the same rows and keys. One head stands for all.

        Returns:
            ``(..., h, i)``, between 0 and log 2. Both matrices get gradients.

        >>> p = regard.Weights.from_dense(torch.tensor([[1.0, 0.0]]))
        >>> p.js(regard.Weights.from_dense(torch.tensor([[0.0, 1.0]])))  # nothing in common: log 2
        tensor([0.6931])
        """
        return self._compare("js", other)

    def overlap(self, other: RowQuestions) -> Tensor:
        """The weight Σ_j min(p_ij, q_ij) that every row has in common with another matrix q.

        Args:
            other: Weights of the same rows and keys. One head stands for all.

        Returns:
            ``(..., h, i)``, between 0 and 1. A sink counts as one more outcome. Both matrices get gradients.

        >>> p = regard.Weights.from_dense(torch.tensor([[0.5, 0.5, 0.0]]))
        >>> p.overlap(regard.Weights.from_dense(torch.tensor([[0.25, 0.0, 0.75]])))
        tensor([0.2500])
        """
        return self._compare("overlap", other)

    def total_variation(self, other: RowQuestions) -> Tensor:
        """Total variation ½ Σ_j |p_ij - q_ij| between every row and that of another matrix q.

        Args:
            other: Weights of the same rows and keys. One head stands for all.

        Returns:
            ``(..., h, i)``, between 0 and 1. A sink counts as one more outcome. Both matrices get gradients.

        >>> p = regard.Weights.from_dense(torch.tensor([[0.5, 0.5, 0.0]]))
        >>> p.total_variation(regard.Weights.from_dense(torch.tensor([[0.25, 0.0, 0.75]])))
        tensor([0.7500])
        """
        return self._compare("total_variation", other)


class Relations(LazyMatrix, RowQuestions):
    """`RowQuestions` of factors."""

    def _row_source(self, batch: torch.Size) -> RowSource:
        factors = self._factors.expanded(batch)
        if isinstance(factors.score, Precomputed):
            w = factors.score.w
            flat = w.expand(*batch, *w.shape[-3:]).reshape(batch.numel(), *w.shape[-3:])
            return DenseRows(flat, factors.query_offset)
        return ScoreRows(factors.problem().zero_invisible_keys(Request(("lse",)))[0])

    def _dense_rows(self, batch: torch.Size) -> tuple[Tensor, Tensor | None]:
        _, w, _, sink = dense(self._factors.expanded(batch).folded())
        return w, sink


def _is_precomputed(matrix: RowQuestions) -> bool:
    return isinstance(matrix._factors.score, Precomputed)


def _joint_batch(matrices: list[RowQuestions]) -> torch.Size:
    batches = [matrix._factors.batch for matrix in matrices]
    if all(batch == batches[0] for batch in batches):
        return batches[0]
    try:
        return as_size(torch.broadcast_shapes(*batches))
    except RuntimeError:
        raise ValueError(
            f"batch axes {[tuple(batch) for batch in batches]} of the matrices do not broadcast."
        ) from None


def _dense_matrices(matrices: list[RowQuestions], batch: torch.Size, counts_sink: bool) -> list[Tensor]:
    """Dense weights of all matrices; where one of them has a sink that counts, its share is the last column."""
    pairs: list[tuple[Tensor, Tensor | None]] = [matrix._dense_rows(batch) for matrix in matrices]
    if not counts_sink or all(sink is None for _, sink in pairs):
        return [w for w, _ in pairs]
    return [
        torch.cat([w, (torch.zeros_like(w[..., 0]) if sink is None else sink).unsqueeze(-1)], -1) for w, sink in pairs
    ]
