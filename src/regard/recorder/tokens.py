"""Which words stand at the rows and columns of a layer.

The numbers are those the model itself looked up in its embedding; the words come from a tokenizer, or from the
caller. Encoder and decoder are told apart by the modules that stood on the stack. Imports nothing of regard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Embedded", "label"]


@dataclass
class Embedded:
    """Numbers that were looked up in a table of embeddings."""

    stack: list[str]  # the modules on the stack, innermost first
    rows: int  # of the table
    table: int  # where the table lives
    ids: Tensor  # b t


def label(layers: list[Any], embedded: list[Embedded], tokens: Any, model: Any) -> None:
    """Give every layer the words of its rows and columns, where they are known and fit."""
    if tokens is None or not layers:
        return
    if isinstance(tokens, list | tuple):
        for layer in layers:
            layer.words = tuple(_given(tokens, layer, axis) for axis in (0, 1))
        return
    sequences = _sequences(embedded, model)
    words = {stem: _words(tokens, ids) for stem, ids in sequences.items()}
    for layer in layers:
        rows = _nearest(words, layer.name, layer.shape[0], layer.shape[-2], layer.shape[-1], None)
        other = rows[0] if layer.kind == "cross" and rows is not None else None
        cols = _nearest(words, layer.name, layer.shape[0], layer.shape[-1], layer.shape[-1], other)
        layer.words = (None if rows is None else rows[1], None if cols is None else cols[1])


def _given(tokens: Any, layer: Any, axis: int) -> list[list[str]] | None:
    """The caller's words, where their number fits: one list, lists for a batch, or (source, target)."""
    batch, size = layer.shape[0], layer.shape[-2 + axis]
    if all(isinstance(word, str) for word in tokens):
        return [list(tokens)] * batch if len(tokens) == size else None
    if isinstance(tokens, tuple) and len(tokens) == 2:
        source, target = tokens
        decoder = "decoder" in layer.name or layer.kind == "cross"
        return _given(list(target if decoder and not (layer.kind == "cross" and axis == 1) else source), layer, axis)
    if len(tokens) == batch and all(len(words) == size for words in tokens):
        return [list(words) for words in tokens]
    return None


def _sequences(embedded: list[Embedded], model: Any) -> dict[str, Tensor]:
    """Token numbers by where they went in, steps of a generation put together."""
    embedded = [e for e in embedded if not _counts(e.ids)]
    tables = {id_ for id_ in (_table(model, name) for name in ("get_input_embeddings", "get_decoder")) if id_}
    chosen = [e for e in embedded if e.table in tables] if tables else []
    if not chosen and embedded:
        largest = max(e.rows for e in embedded)
        chosen = [e for e in embedded if e.rows == largest]
    else:
        rows = {e.rows for e in chosen}
        chosen = [e for e in embedded if e.table in tables or e.rows in rows]
    found: dict[str, Tensor] = {}
    for e in chosen:
        stem = e.stack[1] if len(e.stack) > 1 else ""
        if stem in found and len(found[stem]) == len(e.ids):
            found[stem] = torch.cat([found[stem], e.ids], 1)
        else:
            found[stem] = e.ids
    return found


def _counts(ids: Tensor) -> bool:
    """Whether these numbers only count up, as positions do."""
    return ids.shape[1] > 2 and bool((ids.diff(dim=1) == 1).all())


def _table(model: Any, how: str) -> int | None:
    try:
        part = getattr(model, how)()
        weight = part.weight if how == "get_input_embeddings" else part.get_input_embeddings().weight
        return weight.data_ptr()
    except Exception:  # a model without such a method, or one that answers otherwise
        return None


def _nearest(
    words: dict[str, list[list[str]]], name: str, batch: int, size: int, keys: int, other_than: str | None
) -> Any:
    """The sequence whose embedding stands nearest to the layer and whose length fits."""

    def fits(stem: str) -> bool:
        lists = words[stem]
        # The last token of a generation is embedded only if a step follows it; a step's rows are the last ones.
        return len(lists) == batch and len(lists[0]) >= size and stem != other_than

    near = [stem for stem in words if fits(stem)]
    if not near:
        return None
    best = max(near, key=lambda stem: (_common(stem, name), len(words[stem][0]) == size))
    lists = words[best]
    if len(lists[0]) == size:
        return best, lists
    return (best, [w[-size:] for w in lists]) if size < keys and len(lists[0]) == keys else None


def _common(stem: str, name: str) -> int:
    count = 0
    for a, b in zip(stem.split("."), name.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count


def _words(tokenizer: Any, ids: Tensor) -> list[list[str]]:
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return [[_clean(str(word)) for word in tokenizer.convert_ids_to_tokens(row)] for row in ids.tolist()]
    if hasattr(tokenizer, "id_to_token"):  # the tokenizers package
        return [[_clean(str(tokenizer.id_to_token(n))) for n in row] for row in ids.tolist()]
    if callable(tokenizer):
        return [[str(tokenizer(n)) for n in row] for row in ids.tolist()]
    if hasattr(tokenizer, "decode"):
        return [[str(tokenizer.decode([n])) for n in row] for row in ids.tolist()]
    raise TypeError(
        f"tokens is a tokenizer, a list of words or a function of a number; {type(tokenizer).__name__} came."
    )


def _clean(word: str) -> str:
    """Without the sign that tokenizers write for a space before a word."""
    bare = word.lstrip("Ġ▁")
    return bare if bare else word
