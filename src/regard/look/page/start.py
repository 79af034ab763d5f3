"""Where a page begins: the layers, the word and the heads that are shown first, the same as in the terminal."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..layers import Subject, check_head, select_layers
from ..options import ViewOptions
from ..ranking import beyond_habit
from ..spotlight import overview, spotlight
from ..token_groups import group_tokens
from ..token_text import is_special
from .content import PageContent, Start

__all__ = ["find_start"]


def find_start(subject: Subject, content: PageContent, options: ViewOptions) -> Start:
    """The stack, the word and, where the options or a long input need it, the heads that a page shows first."""
    layer = _layer_number(content, options)
    heads = [] if layer is None or options.head is None else [(layer, options.head % content.layers[layer].heads)]
    # As in the terminal, attention between two sequences comes before attention within one.
    cross_first = sorted(range(len(content.stacks)), key=lambda n: content.first_layer(n).kind != "cross")
    stacks = cross_first if layer is None else [content.stack_of[layer]]
    word = options.word_name
    if word is None:
        start = _most_telling(subject, content, stacks[0], options)
    else:
        stack, row = _find_word(content, stacks, word, options.merge)
        start = _with_first_heads(subject, content, Start(stack, row), options)
    if heads and options.target is None:
        start.heads = heads
    return replace(start, layer=layer, hide=options.hide_special, merge=options.merge)


def _layer_number(content: PageContent, options: ViewOptions) -> int | None:
    """The layer of the options among those of the page."""
    if options.layer is None:
        if options.head is None:
            return None
        if len(content.layers) > 1:
            raise ValueError(f"head {options.head} of which layer? Give both: show(layer=…, head={options.head}).")
        check_head(content.layers[0], options.head)
        return 0
    (view,) = select_layers(content.layers, options.layer, options.head)
    return content.layers.index(view)


def _find_word(content: PageContent, stacks: list[int], word: str | int, merge: bool) -> tuple[int, int]:
    """The first stack whose rows have the word, and its row there."""
    error: LookupError | None = None
    for stack in stacks:
        view = content.first_layer(stack)
        if view.weights.tokens[0] is None and isinstance(word, str) and not word.isdecimal():
            error = error or LookupError(
                f"{word!r}: these weights have no tokens. Label them first: W.label(tokens).show(…)."
            )
            continue
        try:
            # The first token of a merged word stands for it.
            groups = group_tokens(view.rows, merge=merge)
            return stack, groups.first_token(groups.resolve(word))
        except LookupError as this:
            error = error or this
    assert error is not None, "there is at least one stack"
    raise error


def _with_first_heads(subject: Subject, content: PageContent, start: Start, options: ViewOptions) -> Start:
    """The heads that give a target the most weight; for a long input, which the page cannot rank, the best head."""
    layers = [content.layers[n] for n in content.layers_of_stack(start.stack)]
    rank_long = layers[0].long and sum(view.heads for view in layers) > 1
    word = options.word_name
    if word is None or (options.target is None and not rank_long):
        return start
    lit = spotlight(subject, word, target=options.target, **options.selection)
    first = lit.heads if options.target is not None else lit.heads[:1]
    heads = [(content.layer_number(tie.layer), tie.head) for tie in first]
    target = None if lit.target is None else lit.cols.first_token(lit.target)
    return replace(start, heads=heads, target=target)


def _most_telling(subject: Subject, content: PageContent, stack: int, options: ViewOptions) -> Start:
    """The row that is tied to another word most clearly and, for a long input, the head that ties it."""
    numbers = content.layers_of_stack(stack)
    layers = [content.layers[n] for n in numbers]
    if layers[0].long and not all(view.fits_dense for view in layers):
        ties = {n: content.layers[n].ties() for n in numbers}
        best = max(ties, key=lambda n: float(ties[n].max()))
        head, row = divmod(int(ties[best].argmax()), ties[best].shape[-1])
        return Start(stack, row, heads=[(best, head)])
    summary = overview(subject, metrics=False, **options.selection)
    if summary.ties:
        tie = summary.ties[0]
        heads = [(content.layer_number(tie.head.layer), tie.head.head)] if layers[0].long else []
        return Start(stack, summary.rows.first_token(tie.word), heads=heads)
    # Without a word that could be tied to another, special tokens and punctuation are left.
    beyond = torch.stack([beyond_habit(v.weights.dense(), v.special, v.same).beyond.amax(0) for v in layers]).amax(0)
    special = torch.tensor([is_special(token) for token in layers[0].rows], device=beyond.device)
    return Start(stack, int((beyond.nan_to_num(nan=-9.0) - 2 * special).argmax()))
