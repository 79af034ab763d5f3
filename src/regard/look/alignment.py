"""Two texts word by word: which word of one stands for which of the other, and which have no counterpart."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .token_groups import TokenGroups, group_tokens
from .token_text import bare, word_slices

__all__ = ["Alignment", "align_tokens"]

#: Words of a text up to which every word may anchor the alignment; beyond, frequent words do not, which keeps it quick.
_EXACT_WORDS = 4000


@dataclass(frozen=True)
class Alignment:
    """The words of two texts in one order: words that both have stand together, the others on their own."""

    sides: tuple[TokenGroups, TokenGroups]
    places: tuple[tuple[int | None, int | None], ...]  # the word of either text; None where it has none

    def __len__(self) -> int:
        return len(self.places)

    @property
    def in_both(self) -> list[int]:
        """The places of words that both texts have."""
        return [n for n, (a, b) in enumerate(self.places) if a is not None and b is not None]

    @property
    def units(self) -> tuple[str, str]:
        """One and several of what the places are called, as of `TokenGroups`."""
        return self.sides[0].units

    @property
    def labels(self) -> list[str]:
        """The word at every place, that of the first text where both have one."""
        sides = [{n: side.labels[word] for n, word in self.words(k)} for k, side in enumerate(self.sides)]
        return [sides[0].get(n, sides[1].get(n, "")) for n in range(len(self.places))]

    @property
    def continued(self) -> list[int]:
        """The places of pieces that continue the word of the place before them, in a text that has both."""
        places = set()
        for side, words in enumerate(self.sides):
            starts = {part.start for part in word_slices(words.tokens)}
            at = [pair[side] for pair in self.places]
            places |= {
                n
                for n, word in enumerate(at)
                if word and at[n - 1] == word - 1 and words.groups[word].start not in starts
            }
        return sorted(places)

    def words(self, side: int) -> list[tuple[int, int]]:
        """The (place, word) pairs of one text."""
        return [(n, word) for n, pair in enumerate(self.places) if (word := pair[side]) is not None]

    def spread(self, w: Tensor, side: int, missing: float = 0.0) -> Tensor:
        """Weights of one text's words, (..., n), at the places of both texts, (..., places)."""
        spread = w.new_full((*w.shape[:-1], len(self.places)), missing)
        pairs = self.words(side)
        at, words = (torch.tensor(x, dtype=torch.long, device=w.device) for x in zip(*pairs, strict=True))
        spread[..., at] = w[..., words]
        return spread


def align_tokens(
    a: Sequence[str] | None,
    b: Sequence[str] | None,
    sizes: tuple[int, int],
    *,
    merge: bool | None = None,
    hide_special: bool = False,
) -> Alignment:
    """Align two texts by the text of their tokens.

    Args:
        a: Tokens of the first text; None if it has none.
        b: Tokens of the second text.
        sizes: Their lengths, which must agree where a text has no tokens: then position stands for position.
        merge: Align merged words. Default: whichever of tokens and merged words finds more counterparts, tokens where
            both find as many. Tokenizers cut words differently.
        hide_special: Leave out [CLS], </s> and the like.
    """
    if a is None or b is None:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"two texts of {sizes[0]} and {sizes[1]} words are aligned by their tokens, and one has none: "
                "label both, W.label(tokens)."
            )
        a = b = a or b or tuple(map(str, range(sizes[0])))
    candidates = [
        _align(*(group_tokens(tokens, hide_special=hide_special, merge=merged) for tokens in (a, b)))
        for merged in ([False, True] if merge is None and tuple(a) != tuple(b) else [bool(merge)])
    ]
    return max(candidates, key=lambda one: 2 * len(one.in_both) / sum(len(side.labels) for side in one.sides))


def _align(a: TokenGroups, b: TokenGroups) -> Alignment:
    first, second = ([bare(label).casefold() for label in side.labels] for side in (a, b))
    if first == second:
        return Alignment((a, b), tuple((n, n) for n in range(len(first))))
    approximate = max(len(first), len(second)) > _EXACT_WORDS
    places: list[tuple[int | None, int | None]] = []
    for kind, a0, a1, b0, b1 in difflib.SequenceMatcher(None, first, second, autojunk=approximate).get_opcodes():
        if kind == "equal":
            places += zip(range(a0, a1), range(b0, b1), strict=True)
        else:
            places += [(n, None) for n in range(a0, a1)] + [(None, n) for n in range(b0, b1)]
    return Alignment((a, b), tuple(places))
