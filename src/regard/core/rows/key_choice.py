"""A matrix over chosen keys of every row, renormalised: what attention over a selection of keys looks at."""

from __future__ import annotations

import torch
from torch import Tensor

from .questions import RowQuestions
from .sources import ChosenRows, RowSource
from .strips import Question

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

    def _dense_rows(self, batch: torch.Size, scores: bool) -> tuple[Tensor, Tensor | None]:
        w, _ = self._matrix._dense_rows(batch, scores)
        if self._keys is not None:
            n = w.shape[-1]
            cells = torch.zeros(*self._keys.shape[:3], n + 1, dtype=torch.bool, device=w.device)
            w = w * cells.scatter(-1, torch.where(self._keys < 0, n, self._keys), True)[..., :n]
        total = w.sum(-1, keepdim=True)
        return w / torch.where(total == 0, 1, total), None
