"""Weights of words: tokens that make one word are read as one, and some are left out. Imports `words`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .token_text import is_special, joined, resolve, words

__all__ = ["Reading", "reading"]


@dataclass(frozen=True)
class Reading:
    """How the tokens of one axis are read: which make a word, which are left out."""

    tokens: tuple[str, ...]
    groups: tuple[slice, ...]  # the tokens of every word that is shown
    labels: tuple[str, ...]  # those words
    hidden: tuple[int, ...] = ()  # tokens that are not shown

    def columns(self, w: Tensor) -> Tensor:
        """Weights of tokens (..., j) as weights of words (..., n): what a word is given is the sum over its tokens."""
        if len(self.groups) == w.shape[-1]:
            return w
        parts = [w[..., group].sum(-1, keepdim=True) for group in self.groups]
        return torch.cat(parts, -1) if parts else w[..., :0]

    def rows(self, w: Tensor) -> Tensor:
        """Rows of tokens (..., i) as rows of words (..., n): how a word looks is the mean over its tokens."""
        if len(self.groups) == w.shape[-1]:
            return w
        parts = [w[..., group].mean(-1, keepdim=True) for group in self.groups]
        return torch.cat(parts, -1) if parts else w[..., :0]

    def shares(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of words, renormalised over what is shown, and the weight (...) that hidden tokens had."""
        kept = self.columns(w)
        if not self.hidden:
            return kept, w.new_zeros(w.shape[:-1])
        took = w[..., list(self.hidden)].sum(-1)
        left = kept.sum(-1, keepdim=True)
        # What a sink key holds is nobody's: the shown and the hidden together stay what they were.
        return torch.where(left > 0, kept / left.clamp(min=1e-30) * (left + took.unsqueeze(-1)), 0), took

    def resolve(self, word: str | int) -> int:
        """The position of a word among the labels."""
        return resolve(self.labels, word)


def reading(tokens: Sequence[str], *, hide_special: bool = False, merge: bool = False) -> Reading:
    """How these tokens are read: special ones hidden or not, pieces merged to words or not."""
    tokens = tuple(tokens)
    groups = words(tokens) if merge else [slice(n, n + 1) for n in range(len(tokens))]
    hidden = [n for n, token in enumerate(tokens) if hide_special and is_special(token)]
    kept = tuple(group for group in groups if group.start not in set(hidden))
    labels = tuple(joined(tokens[group]) if merge else tokens[group.start] for group in kept)
    return Reading(tokens, kept, labels, tuple(hidden))
