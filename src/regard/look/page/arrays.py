"""The arrays of a page: all weights of short inputs with queries, keys and values; a map and some rows of long ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.problem import Factors
from ..dot_head import max_map, why_not_exact
from ..layers import LayerView, all_cells, visible_cells
from ..masked_tiles import forbidden_tiles
from ..token_text import printable
from .content import PageContent, Start
from .format import Packer

__all__ = ["layer_headers", "thumbnails"]

#: Bytes of queries, keys and values up to which they are stored in float32.
EXACT_BYTES = 100_000
#: Exact rows of a long input, at most.
EXACT_ROWS = 24


def layer_headers(content: PageContent, start: Start, computed: set[tuple[int, int]]) -> list[dict[str, Any]]:
    """The header of every layer; its arrays go into the packer.

    Args:
        content: The layers and heads of the page.
        start: Where it begins.
        computed: The (layer, head) pairs of long inputs whose weights the page computes itself.
    """
    exact = 2 * content.vector_bytes(content.with_vectors) <= EXACT_BYTES
    return [_layer_header(content, n, start, exact, computed) for n in range(len(content.layers))]


def _layer_header(
    content: PageContent, n: int, start: Start, exact: bool, computed: set[tuple[int, int]]
) -> dict[str, Any]:
    view, held = content.layers[n], content.held[n]
    header: dict[str, Any] = {
        "name": view.name,
        "index": view.index,
        "kind": view.kind,
        "heads": view.heads,
        "held": held,
        "with_vectors": content.with_vectors[n],
        "stack": content.stack_of[n],
        "masked": view.weights._factors.mask is not None,
    }
    if held and view.long:
        word = start.word if start.stack == content.stack_of[n] else None
        header["long"] = _long_arrays(content, view, held, word)
        if not computed >= {(n, h) for h in held}:
            header["long"]["exact"] = content.packer.add(view.pick(held)[..., header["long"]["rows"], :])  # h row j
    elif held:
        header |= _short_arrays(content, view, held)
        if content.with_vectors[n]:
            header |= _vector_arrays(content.packer, view, content.with_vectors[n], exact)
    return header


#: Cells a side of a thumbnail, at most, and weights of a layer up to which it shows the largest weight of every cell.
THUMBNAIL, MAX_CELLS = 48, 2**31


def thumbnails(content: PageContent, view: LayerView, held: list[int]) -> int | None:
    """The pattern of every head of a layer, (h, rows, cols), if the page does not hold all of them; else None.

    A number is the root of the largest weight of a cell, in 253 steps; 254 stands for what is not a number, and 255 for
    what the mask forbids. Where a layer has too many weights for one more pass over them, it is the root of the share
    of a row.
    """
    if len(held) == view.heads:
        return None
    rows, cols = (min(n, THUMBNAIL) for n in view.sizes)
    if view.weights.shape.numel() <= MAX_CELLS:
        tiles = max_map(view.weights, rows, cols, view.summary.lse if view.long else None)
    else:
        tiles = view.weights.pool(rows, cols) * rows / view.sizes[0]
    steps = (253 * tiles.clamp(0, 1).sqrt()).round().nan_to_num(nan=254.0).cpu()
    forbidden = forbidden_tiles(view.weights, rows, cols)
    return content.packer.add(steps if forbidden is None else steps.masked_fill(forbidden, 255.0), "u1")


# Short inputs.


def _short_arrays(content: PageContent, view: LayerView, held: list[int]) -> dict[str, Any]:
    score = view.weights._factors.score
    w = view.pick(held).dense()
    content.nan_heads += _count_nan_heads(w)
    header = {"w": content.packer.add(w), "score": type(score).__name__, "sink": score.sink_logits is not None}
    return header | _mask_arrays(content.packer, view.pick(held)._factors)


def _count_nan_heads(x: Tensor) -> int:
    """How many heads, the first axis, have NaN."""
    return int(x.isnan().flatten(1).any(1).sum())


def _vector_arrays(packer: Packer, view: LayerView, heads: list[int], exact: bool) -> dict[str, Any]:
    """Values, queries, keys, and what turns their products into scores."""
    header: dict[str, Any] = {}
    if view.values is not None:
        v = view.values.reshape(-1, *view.values.shape[-2:])
        header["per_value"] = per_value = view.heads // v.shape[0]  # heads that share a head of values
        header["v"] = packer.add(v[heads] if per_value == 1 else v, _vector_dtype(v, exact))
    factors = view.pick(heads)._factors
    if factors.score.precomputed is not None:
        return header
    q, k = factors.q, factors.k
    header["d"] = q.shape[-1]
    if q.shape[-1] == k.shape[-1]:
        header["per_key"] = q.shape[-3] // k.shape[-3]
        header |= {"q": packer.add(q, _vector_dtype(q, exact)), "k": packer.add(k, _vector_dtype(k, exact))}
    return header | _score_arrays(packer, factors)


def _vector_dtype(x: Tensor, exact: bool) -> str:
    """float16 where its precision and its small range suffice."""
    largest = float(x.abs().max()) if x.numel() else 0.0
    return "f2" if not exact and 1e-2 < largest < 6e4 else "f4"


def _score_arrays(packer: Packer, factors: Factors) -> dict[str, Any]:
    """How scores follow from products: a scale, or the scores themselves where modifiers change them."""
    q, score = factors.q, factors.score
    header: dict[str, Any] = {}
    if (scale := score.product_scale(q.shape[-1])) is not None:
        header["scale"] = scale
    if score.modifiers or "scale" not in header:
        block = all_cells(factors)
        header["s"] = packer.add(factors.problem().at(block).bare_scores(block)[0])  # before the mask
        header["score_name"] = printable(repr(score), 80)
        header["by_place"] = bool(score.modifiers)  # words that are shuffled do not keep these scores
    return header


def _mask_arrays(packer: Packer, factors: Factors) -> dict[str, Any]:
    """Which cells may be seen, (heads or 1, i, j), and the name of the mask; nothing without a mask."""
    if factors.mask is None:
        return {}
    return {
        "visible": packer.add(visible_cells(factors), "u1"),
        "mask_name": printable(repr(factors.mask), 80),
    }


# Long inputs.


def _long_arrays(content: PageContent, view: LayerView, held: list[int], word: int | None) -> dict[str, Any]:
    """A map, statistics of rows and columns, and some exact rows: linear in the length."""
    (i, j), (rows, cols) = view.sizes, view.tiles
    summary, add = view.summary, content.packer.add
    content.nan_heads += _count_nan_heads(summary.received[held])
    spare = content.long_bytes_per_head() - 6 * rows * cols - 12 * i - 4 * j
    count = int(max(1, min(EXACT_ROWS, spare // (4 * j))))
    rows_shown = _choose_rows(view.ties()[held].amax(0), word, count)
    return {
        "tiles": [rows, cols],
        "pool": add(summary.pool[held]),
        "max": add(view.max_map(held), "f2"),
        "why": why_not_exact(view.weights),
        "entropy": add(summary.entropy[held]),
        "peak": add(summary.peak.values[held]),
        "peak_at": add(summary.peak.indices[held], "u4"),
        "received": add(summary.received[held]),
        "settled": view.first_settled_row,
        "rows": rows_shown,
    }


def _choose_rows(ties: Tensor, word: int | None, count: int) -> list[int]:
    """The row of the word, rows with the strongest ties, and the rest evenly spread from the first row to the last."""
    strongest = ties.argsort(descending=True).tolist()[: max(1, count // 2)]
    rows = list(dict.fromkeys([*([] if word is None else [word]), *strongest]))[:count]
    spread = torch.linspace(0, len(ties) - 1, count - len(rows)).round().long().tolist()
    return sorted({*rows, *spread})
