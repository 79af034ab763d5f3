"""The content of a page: the layers, the sequences they look at, and the heads that fit into its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.patches import ImageLike
from ..layers import LayerView
from ..patches import image_pixels
from ..ranking import beyond_habit, beyond_received
from ..token_text import bare, is_patches, is_special, join_tokens, printable, text_of, unknown_text, word_slices
from .format import Packer

__all__ = ["PageContent", "Start"]

#: Bytes that a page holds, before packing: weights of short inputs, all of long ones, and queries, keys and values.
WEIGHT_BYTES, LONG_BYTES, VECTOR_BYTES = 5_000_000, 4_200_000, 2_000_000


@dataclass
class Start:
    """Where a page begins."""

    stack: int
    word: int  # a row of the stack
    target: int | None = None  # a column of the stack
    layer: int | None = None  # among the layers of the page
    #: (layer, head); empty: the heads that matter for the word.
    heads: list[tuple[int, int]] = field(default_factory=list)
    hide: bool = False
    merge: bool = False


class PageContent:
    """The layers of a page. Layers that look from one sequence at one sequence make a stack."""

    def __init__(self, layers: list[LayerView], notes: list[str], image: ImageLike | None = None) -> None:
        self.layers, self.notes, self.image = layers, notes, image
        self.packer = Packer()
        self.nan_heads = 0
        self.sequences: list[dict[str, Any]] = []
        self._sequence_numbers: dict[Any, int] = {}
        self.stacks: list[dict[str, Any]] = []
        self.stack_of: list[int] = []  # of every layer
        self.held: list[list[int]] = [[] for _ in layers]  # heads whose weights are in the page
        self.with_vectors: list[list[int]] = [[] for _ in layers]  # heads whose queries, keys and values are, too
        for view in layers:
            rows, cols = (self._sequence(t, n) for t, n in zip(view.weights.tokens, view.sizes, strict=True))
            stack = {"same": view.same, "rows": rows, "cols": cols, "long": view.long, "writes": view.writes}
            if stack not in self.stacks:
                self.stacks.append(stack)
            self.stack_of.append(self.stacks.index(stack))

    def _sequence(self, tokens: Sequence[str] | None, length: int) -> int:
        key = tuple(tokens) if tokens else length
        if key not in self._sequence_numbers:
            self._sequence_numbers[key] = len(self.sequences)
            header = _sequence_header(tokens, length)
            image = getattr(tokens, "image", None) if self.image is None else self.image
            if image is not None and tokens and is_patches(tokens):
                header["image"] = self.packer.add(image_pixels(image), "u1")
            self.sequences.append(header)
        return self._sequence_numbers[key]

    def layers_of_stack(self, stack: int) -> list[int]:
        return [n for n, number in enumerate(self.stack_of) if number == stack]

    def first_layer(self, stack: int) -> LayerView:
        return self.layers[self.stack_of.index(stack)]

    def layer_number(self, index: int) -> int:
        """The place of a recorded layer among the layers of the page."""
        return next(n for n, view in enumerate(self.layers) if view.index == index)

    def title(self) -> str:
        """The texts themselves, source before target."""
        texts = []
        for tokens in dict.fromkeys(t for view in self.layers for t in reversed(view.weights.tokens) if t):
            plain = [token for token in tokens[:400] if not is_special(token)]
            if is_patches(plain):
                texts.append(f"An image of {sum(not is_special(token) for token in tokens):,} patches")
                continue
            texts.append(printable(text_of(plain), 160))
        if texts:
            return " → ".join(texts[:2])
        i, j = self.layers[0].sizes
        return f"Attention of {i:,} words" if i == j else f"Attention of {i:,} words to {j:,}"

    # Which heads fit.

    def choose_heads(self, start: Start) -> None:
        """Choose the heads that fit: all of them, or those of the start, then those that matter most for the word."""
        all_heads = [list(range(view.heads)) for view in self.layers]
        if self._weights_fit(all_heads) and self.vector_bytes(all_heads) <= VECTOR_BYTES:
            self.held, self.with_vectors = all_heads, all_heads
            return
        order = sorted((-strength, n, h) for n in range(len(self.layers)) for h, strength in self._strengths(n, start))
        for _, n, h in order:
            self.held[n].append(h)
            self.with_vectors[n].append(h)
            if not self._weights_fit(self.held) and sum(map(len, self.held)) > 1:
                self.held[n].pop()
                self.with_vectors[n].pop()
            elif self.vector_bytes(self.with_vectors) > VECTOR_BYTES:
                self.with_vectors[n].pop()
        self.held = [sorted(heads) for heads in self.held]
        self.with_vectors = [sorted(heads) for heads in self.with_vectors]
        self._note_missing_heads(len(order))

    def _weights_fit(self, heads: list[list[int]]) -> bool:
        """Whether the weights of these heads of every layer fit; short and long inputs have limits of their own."""
        used = {False: 0.0, True: 0.0}
        for view, chosen in zip(self.layers, heads, strict=True):
            used[view.long] += len(chosen) * _head_bytes(view)[0]
        return used[False] <= WEIGHT_BYTES and used[True] <= LONG_BYTES

    def vector_bytes(self, heads: list[list[int]]) -> float:
        """Bytes of the queries, keys and values of these heads of every layer, in float16."""
        return sum(len(chosen) * _head_bytes(view)[1] for view, chosen in zip(self.layers, heads, strict=True))

    def long_bytes_per_head(self) -> float:
        """Bytes for every head of a long input that is in the page."""
        return LONG_BYTES / sum(len(held) for held, view in zip(self.held, self.layers, strict=True) if view.long)

    def _note_missing_heads(self, total: int) -> None:
        held, with_vectors = sum(map(len, self.held)), sum(map(len, self.with_vectors))
        remedy = "show(layer=…, head=…) brings another one."
        if held < total:
            self.notes.append(f"This page holds {held} of {total} heads, those that say most; {remedy}")
        elif with_vectors < total:
            self.notes.append(
                f"This page holds the weights of all {total} heads, and queries and keys of {with_vectors}; {remedy}"
            )

    def _strengths(self, n: int, start: Start) -> list[tuple[int, float]]:
        """How much the heads of a layer matter for the word of the start."""
        view = self.layers[n]
        if len(self.layers) == view.heads == 1:
            return [(0, 0.0)]
        mine = start.stack == self.stack_of[n]
        if view.long:
            strength = beyond_received(view.weights, start.word if mine else 0, view.special, view.same).beyond[:, 0]
        else:
            beyond = beyond_habit(view.weights.dense(), view.special, view.same).beyond
            strength = beyond[:, start.word] if mine else beyond.amax(-1)
        # Heads that the page opens with come first, then others of their stack.
        bounded = strength.nan_to_num(nan=-9.0).clamp(min=-9).tolist()
        return [(h, s + 30 * ((n, h) in start.heads) - (0 if mine else 20)) for h, s in enumerate(bounded)]


def _sequence_header(tokens: Sequence[str] | None, length: int) -> dict[str, Any]:
    if tokens is None:
        return {"length": length, "tokens": None, "special": [], "unknown": [], "words": None}
    groups = word_slices(tokens)
    words = None
    if len(groups) < len(tokens):
        words = [[group.start, group.stop, printable(join_tokens(tokens[group]))] for group in groups]
    return {
        "length": length,
        "tokens": [printable(bare(token) if unknown_text(token) else token) for token in tokens],
        "special": [n for n, token in enumerate(tokens) if is_special(token)],
        "unknown": [n for n, token in enumerate(tokens) if unknown_text(token)],
        "words": words,
    }


def _head_bytes(view: LayerView) -> tuple[float, float]:
    """Bytes of one head, before packing: of its weights, and of its vectors."""
    i, j = view.sizes
    if view.long:
        rows, cols = view.tiles
        return 6.0 * rows * cols + 12 * i + 4 * j + 4 * 4 * j, 0.0  # the maps, statistics, four exact rows
    factors = view.weights._factors
    e = 0 if view.values is None else view.values.shape[-1]
    return 4.0 * i * j, 2.0 * (i * factors.q.shape[-1] + j * factors.k.shape[-1] + j * e)
