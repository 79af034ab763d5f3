"""A matrix over chosen keys of every row, renormalised: what attention over a selection of keys looks at."""

from __future__ import annotations

import torch
from torch import Tensor

from .questions import RowQuestions
from .sources import ChosenRows, RowSource, safe_lse
from .strips import DenseForm, Question

__all__ = ["KeyChoice"]


class KeyChoice(RowQuestions):
    """Rows of a matrix renormalised over chosen keys; questions and comparisons as for the matrix itself."""

    def __init__(self, matrix: RowQuestions, keys: Tensor | None) -> None:
        self._matrix, self._keys = matrix, keys  # keys: (b|1, h|1, i, n), -1 for none; None: all, without the sink
        self._factors, self._engine, self._one_head = matrix._factors, matrix._engine, matrix._one_head
        self._tokens = matrix._tokens

    @property
    def shape(self) -> torch.Size:
        return self._matrix.shape

    @property
    def device(self) -> torch.device:
        return self._factors.q.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self._factors.q.dtype == torch.float64 else torch.float32

    @property
    def _row_heads(self) -> int:
        return self._matrix._row_heads

    def _row_source(self, batch: torch.Size) -> RowSource:
        rows = self._matrix._row_source(batch)
        return ChosenRows(rows, self._keys)  # type: ignore[arg-type]  # no choice of a choice is made

    def _answer_rows(self, sources: list[RowSource], question: Question, plain: bool) -> list[Tensor]:
        return self._matrix._answer_rows(sources, question, plain)

    def _dense_rows(self, batch: torch.Size, form: DenseForm) -> tuple[Tensor, Tensor | None]:
        # By logarithms: all that is chosen of a row may underflow.
        log_w, _ = self._matrix._dense_rows(batch, "log-weights")
        if self._keys is not None:
            n = log_w.shape[-1]
            cells = torch.zeros(*self._keys.shape[:3], n + 1, dtype=torch.bool, device=log_w.device)
            chosen = cells.scatter(-1, torch.where(self._keys < 0, n, self._keys), True)[..., :n]
            log_w = log_w.masked_fill(~chosen, -torch.inf)
        total = safe_lse(log_w, -1, keepdim=True)
        log_w = log_w - torch.where(total == -torch.inf, 0, total)
        return (log_w if form == "log-weights" else log_w.exp()), None
