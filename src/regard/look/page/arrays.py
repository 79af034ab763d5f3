"""The arrays of a page: all weights of short inputs with queries, keys and values; a map and some rows of long ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.block import MatrixBlock
from ...core.problem import Factors
from ..layers import LayerView
from ..token_text import printable
from .content import PageContent, Start
from .format import Packer

__all__ = ["layer_headers"]

#: Bytes of queries, keys and values up to which they are stored in float32.
EXACT_BYTES = 100_000
#: Exact rows of a long input, at most.
EXACT_ROWS = 24


def layer_headers(content: PageContent, start: Start) -> list[dict[str, Any]]:
    """The header of every layer; its arrays go into the packer."""
    exact = 2 * content.vector_bytes(content.with_vectors) <= EXACT_BYTES
    return [_layer_header(content, n, start, exact) for n in range(len(content.layers))]


def _layer_header(content: PageContent, n: int, start: Start, exact: bool) -> dict[str, Any]:
    view, held = content.layers[n], content.held[n]
    header: dict[str, Any] = {
        "name": view.name,
        "index": view.index,
        "kind": view.kind,
        "heads": view.heads,
        "held": held,
        "with_vectors": content.with_vectors[n],
        "stack": content.stack_of[n],
    }
    if held and view.long:
        word = start.word if start.stack == content.stack_of[n] else None
        header["long"] = _long_arrays(content, view, held, word)
    elif held:
        header |= _short_arrays(content, view, held)
        if content.with_vectors[n]:
            header |= _vector_arrays(content.packer, view, content.with_vectors[n], exact)
    return header


# Short inputs.


def _short_arrays(content: PageContent, view: LayerView, held: list[int]) -> dict[str, Any]:
    score = view.weights._factors.score
    w = view.pick(held).dense()
    content.nan_heads += _count_nan_heads(w)
    return {"w": content.packer.add(w), "score": type(score).__name__, "sink": score.sink_logits is not None}


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
    """How scores follow from products: a scale, or the scores themselves where modifiers change them; and the mask."""
    q, k, score = factors.q, factors.k, factors.score
    problem = factors.problem()
    block = MatrixBlock(slice(0, q.shape[-2]), slice(0, k.shape[-2]), problem.offset, q.device)
    header: dict[str, Any] = {}
    if (scale := score.product_scale(q.shape[-1])) is not None:
        header["scale"] = scale
    if factors.mask is not None:
        visible = factors.mask.visible(block)
        visible = visible.expand(*visible.shape[:-2], q.shape[-2], k.shape[-2])
        header["visible"] = packer.add(visible.reshape(-1, *visible.shape[-2:]), "u1")
        header["mask_name"] = printable(repr(factors.mask), 80)
    if score.modifiers or "scale" not in header:
        header["s"] = packer.add(problem.at(block).bare_scores(block)[0])  # before the mask
        header["score_name"] = printable(repr(score), 80)
    return header


# Long inputs.


def _long_arrays(content: PageContent, view: LayerView, held: list[int], word: int | None) -> dict[str, Any]:
    """A map, statistics of rows and columns, and some exact rows: linear in the length."""
    (i, j), (rows, cols) = view.sizes, view.tiles
    summary, add = view.summary, content.packer.add
    content.nan_heads += _count_nan_heads(summary.received[held])
    spare = content.long_bytes_per_head() - 4 * rows * cols - 12 * i - 4 * j
    count = int(max(1, min(EXACT_ROWS, spare // (4 * j))))
    exact = _choose_rows(view.ties()[held].amax(0), word, count)
    return {
        "tiles": [rows, cols],
        "pool": add(summary.pool[held]),
        "entropy": add(summary.entropy[held]),
        "peak": add(summary.peak.values[held]),
        "peak_at": add(summary.peak.indices[held], "u4"),
        "received": add(summary.received[held]),
        "settled": view.first_settled_row,
        "rows": exact,
        "exact": add(view.pick(held)[..., exact, :]),  # h row j
    }


def _choose_rows(ties: Tensor, word: int | None, count: int) -> list[int]:
    """The row of the word, rows with the strongest ties, and the rest evenly spread from the first row to the last."""
    strongest = ties.argsort(descending=True).tolist()[: max(1, count // 2)]
    rows = list(dict.fromkeys([*([] if word is None else [word]), *strongest]))[:count]
    spread = torch.linspace(0, len(ties) - 1, count - len(rows)).round().long().tolist()
    return sorted({*rows, *spread})
