"""Tokens grouped into words: the pieces of one word become one label, and special tokens can be left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .token_text import is_special, join_tokens, resolve, units_of, word_slices

__all__ = ["TokenGroups", "group_tokens"]


@dataclass(frozen=True)
class TokenGroups:
    """The words of one axis: which tokens make each of them, and which tokens are left out."""

    tokens: tuple[str, ...]
    groups: tuple[slice, ...]  # the tokens of every word
    labels: tuple[str, ...]  # the text of every word
    hidden: tuple[int, ...] = ()  # tokens that are left out

    @property
    def units(self) -> tuple[str, str]:
        """One and several of what the positions are called: "word" and "words", of an image "patch" and "patches"."""
        return units_of(self.tokens)

    def sum_columns(self, w: Tensor) -> Tensor:
        """Weights of tokens (..., j) as weights of words (..., n): the weight of a word is the sum over its tokens."""
        if len(self.groups) == w.shape[-1]:
            return w
        parts = [w[..., group].sum(-1, keepdim=True) for group in self.groups]
        return torch.cat(parts, -1) if parts else w[..., :0]

    def mean_rows(self, w: Tensor) -> Tensor:
        """Rows of tokens (..., i, j) as rows of words (..., n, j): the row of a word is the mean over its tokens."""
        if len(self.groups) == w.shape[-2]:
            return w
        parts = [w[..., group, :].mean(-2, keepdim=True) for group in self.groups]
        return torch.cat(parts, -2) if parts else w[..., :0, :]

    def word_weights(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of words (..., n), the share of hidden tokens spread over them, and that share, (...).

        A row that had the sum 0.9, because a sink took 0.1, still has it.
        """
        visible = self.sum_columns(w)
        if not self.hidden:
            return visible, w.new_zeros(w.shape[:-1])
        hidden = w[..., list(self.hidden)].sum(-1)
        total = visible.sum(-1, keepdim=True)
        scale = (total + hidden.unsqueeze(-1)) / total.clamp(min=1e-30)
        return torch.where(total > 0, visible * scale, 0), hidden

    def resolve(self, word: str | int) -> int:
        """The position of a word among the labels."""
        return resolve(self.labels, word)

    def first_token(self, word: int) -> int:
        """The position of the first token of a word."""
        return self.groups[word].start


def group_tokens(tokens: Sequence[str], *, hide_special: bool = False, merge: bool = False) -> TokenGroups:
    """Group tokens into words.

    Args:
        tokens: The tokens of one axis.
        hide_special: Leave out [CLS], </s> and the like.
        merge: Join the pieces of a word; otherwise every token is a word of its own.
    """
    tokens = tuple(tokens)
    slices = word_slices(tokens) if merge else [slice(n, n + 1) for n in range(len(tokens))]
    hidden = tuple(n for n, token in enumerate(tokens) if hide_special and is_special(token))
    groups = tuple(group for group in slices if group.start not in set(hidden))
    labels = tuple(join_tokens(tokens[group]) if merge else tokens[group.start] for group in groups)
    return TokenGroups(tokens, groups, labels, hidden)
