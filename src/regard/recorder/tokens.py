"""The tokens at the rows and columns of a layer.

Ids are those that the model itself looked up in its embedding; the text comes from a tokenizer, or from the caller.
Encoder and decoder are distinguished by the modules on the stack of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["EmbeddedIds", "TokensLike", "check_tokens", "label"]

#: One of these methods makes a tokenizer.
_TOKENIZERS = ("convert_ids_to_tokens", "id_to_token", "decode")


class ConvertsIds(Protocol):
    """A tokenizer of transformers."""

    def convert_ids_to_tokens(self, ids: list[int], /) -> object:
        """The tokens of these ids."""


class LooksUpId(Protocol):
    """A tokenizer of the tokenizers package."""

    def id_to_token(self, id: int, /) -> str | None:
        """The token of this id."""


class Decodes(Protocol):
    """A tokenizer that turns ids into text."""

    def decode(self, ids: list[int], /) -> object:
        """The text of these ids."""


#: Texts of positions: a tokenizer, a function id -> text, tokens, a list of them a sequence, or (source, target).
TokensLike: TypeAlias = (
    ConvertsIds | LooksUpId | Decodes | Callable[[int], str] | Sequence[str] | Sequence[Sequence[str]]
)


@dataclass
class EmbeddedIds:
    """Token ids that were looked up in a table of embeddings."""

    stack: list[str]  # the modules on the stack, innermost first
    rows: int  # of the table
    table: int  # address of the table
    ids: Tensor  # b t, where the model looked them up: a copy to the host would wait for a GPU
    before: int | None = None  # tokens that came before, where a generation was cut back; None: all that did


def check_tokens(tokens: Any) -> None:
    """Refuse what is no `record(tokens=)`."""
    if tokens is None:
        return
    if isinstance(tokens, list | tuple):
        lists = [token for token in tokens if isinstance(token, list | tuple)]
        if lists and len(lists) < len(tokens):
            raise TypeError("tokens must be strings, or one list of strings for each sequence; got both in one list.")
        for token in [token for line in lists for token in line] if lists else tokens:
            if not isinstance(token, str) and not (lists and isinstance(tokens, tuple) and isinstance(token, list)):
                raise TypeError(
                    f"tokens must be strings, or one list of strings for each sequence; got {type(token).__name__}. "
                    "Ids become text by a tokenizer, tokens=tokenizer, or by a function, tokens=str."
                )
        return
    text = isinstance(tokens, str | bytes | bytearray)
    if text or not (callable(tokens) or any(hasattr(tokens, name) for name in _TOKENIZERS)):
        way = (
            "A text is not split here: pass its tokens, such as tokens=text.split()."
            if text
            else "Ids become text by a tokenizer, tokens=tokenizer, or by a function, tokens=str."
        )
        raise TypeError(
            f"tokens must be a tokenizer, a list of tokens or a function id -> text; got {type(tokens).__name__}. {way}"
        )


def label(layers: list[Any], embedded: list[EmbeddedIds], tokens: TokensLike | None, model: Any) -> None:
    """Set the tokens of every layer's rows and columns, where they are known and fit its shape.

    Args:
        layers: The layers of a pass.
        embedded: Ids that the pass looked up.
        tokens: `record(tokens=)`.
        model: The model, for its own account of its embeddings.
    """
    if tokens is None or not layers:
        return
    if isinstance(tokens, list | tuple):
        for layer in layers:
            layer.tokens = tuple(_from_caller(tokens, layer, axis) for axis in (0, 1))
        return
    sequences = _sequences(embedded, model)
    texts = {stem: _texts(tokens, ids) for stem, ids in sequences.items()}
    for layer in layers:
        rows = _nearest(texts, layer.name, layer.shape[0], layer.shape[-2], layer.shape[-1], None)
        other = rows[0] if layer.kind == "cross" and rows is not None else None
        cols = _nearest(texts, layer.name, layer.shape[0], layer.shape[-1], layer.shape[-1], other)
        layer.tokens = (None if rows is None else rows[1], None if cols is None else cols[1])


def _from_caller(tokens: Any, layer: Any, axis: int) -> list[list[str]] | None:
    """The caller's tokens where their number fits: one list, lists for a batch, or (source, target)."""
    batch, size = layer.shape[0], layer.shape[-2 + axis]
    if all(isinstance(token, str) for token in tokens):
        return [list(tokens)] * batch if len(tokens) == size else None
    if isinstance(tokens, tuple) and len(tokens) == 2:
        source, target = tokens
        decoder = "decoder" in layer.name or layer.kind == "cross"
        side = target if decoder and not (layer.kind == "cross" and axis == 1) else source
        return _from_caller(list(side), layer, axis)
    if len(tokens) == batch and all(len(line) == size for line in tokens):
        return [list(line) for line in tokens]
    return None


def _sequences(embedded: list[EmbeddedIds], model: Any) -> dict[str, Tensor]:
    """Token ids by the module that embedded them, the steps of a generation concatenated."""
    embedded = [replace(e, ids=e.ids.cpu()) for e in embedded]
    tables = {id_ for id_ in (_table_address(model, name) for name in ("get_input_embeddings", "get_decoder")) if id_}
    if len({e.table for e in embedded}) > 1:  # one of them may be that of positions
        embedded = [e for e in embedded if e.table in tables or not _counts(e.ids)]
    chosen = [e for e in embedded if e.table in tables] if tables else []
    if not chosen and embedded:
        largest = max(e.rows for e in embedded)
        chosen = [e for e in embedded if e.rows == largest]
    else:
        rows = {e.rows for e in chosen}
        chosen = [e for e in embedded if e.table in tables or e.rows in rows]
    by_stem: dict[str, Tensor] = {}
    for e in chosen:
        stem = e.stack[1] if len(e.stack) > 1 else ""
        if stem in by_stem and len(by_stem[stem]) == len(e.ids):
            by_stem[stem] = torch.cat([by_stem[stem][:, : e.before], e.ids], 1)
        else:
            by_stem[stem] = e.ids
    return by_stem


def _counts(ids: Tensor) -> bool:
    """Whether these numbers only count up, as positions do."""
    return ids.shape[1] > 2 and bool((ids.diff(dim=1) == 1).all())


def _table_address(model: Any, method: str) -> int | None:
    try:
        part = getattr(model, method)()
        weight = part.weight if method == "get_input_embeddings" else part.get_input_embeddings().weight
        return weight.data_ptr()
    except Exception:  # a model without such a method, or one that answers otherwise
        return None


def _nearest(
    texts: dict[str, list[list[str]]], name: str, batch: int, size: int, keys: int, other_than: str | None
) -> Any:
    """The sequence of fitting length whose embedding is nearest to the layer in the module tree."""

    def fits(stem: str) -> bool:
        lists = texts[stem]
        # The last token of a generation is embedded only if a step follows; the rows of a step are the last tokens.
        return len(lists) == batch and len(lists[0]) >= size and stem != other_than

    fitting = [stem for stem in texts if fits(stem)]
    if not fitting:
        return None
    best = max(fitting, key=lambda stem: (_common(stem, name), len(texts[stem][0]) == size))
    lists = texts[best]
    if len(lists[0]) == size:
        return best, lists
    return (best, [line[-size:] for line in lists]) if size < keys and len(lists[0]) == keys else None


def _common(stem: str, name: str) -> int:
    count = 0
    for a, b in zip(stem.split("."), name.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count


def _texts(tokenizer: Any, ids: Tensor) -> list[list[str]]:
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return [[_clean(str(token)) for token in tokenizer.convert_ids_to_tokens(row)] for row in ids.tolist()]
    if hasattr(tokenizer, "id_to_token"):  # the tokenizers package
        return [[_clean(str(tokenizer.id_to_token(n))) for n in row] for row in ids.tolist()]
    if callable(tokenizer):
        return [[str(tokenizer(n)) for n in row] for row in ids.tolist()]
    return [[str(tokenizer.decode([n])) for n in row] for row in ids.tolist()]


def _clean(token: str) -> str:
    """Without the sign that tokenizers write for a space before a word."""
    bare = token.lstrip("Ġ▁")
    return bare if bare else token
