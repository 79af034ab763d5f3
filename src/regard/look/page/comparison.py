"""The page of a comparison: pairs of heads on the words of both texts, side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..alignment import Alignment
from ..compare import HeadChanges, HeadPair
from ..layers import LONG
from ..options import ViewOptions
from ..token_text import bare, is_special, printable
from .content import WEIGHT_BYTES
from .format import Packed, Packer, regard_version

__all__ = ["pack_changes"]

#: Tiles a side of the patterns of a long text, and heads of long texts at most: each costs a pass.
TILES, LONG_HEADS = 192, 8


def pack_changes(changes: HeadChanges, options: ViewOptions) -> Packed:
    """Pack a comparison for a page: both patterns of every pair of heads, those that differ most first."""
    packer = Packer()
    groups: list[tuple[Alignment, Alignment]] = []
    heads: list[dict[str, Any]] = []
    used = 0
    number, place = changes.first(options.word_name)
    # The pair of the lit word is in the page, whatever its rank.
    for n in sorted(range(len(changes)), key=lambda n: (n != number, n)):
        pair = changes.pairs[n]
        axes = (pair.rows, pair.cols)
        long = max(map(len, axes)) > LONG
        rows, cols = (min(len(axis), TILES) if long else len(axis) for axis in axes)
        used += 4 * rows * cols * (3 if long else 2)
        if heads and (used > WEIGHT_BYTES or (long and len(heads) >= LONG_HEADS)):
            break
        if axes not in groups:
            groups.append(axes)
        heads.append({"rank": n, **_head(packer, pair, groups.index(axes), long)})
    heads.sort(key=lambda head: head["rank"])
    notes = [*changes.notes, *options.notes]
    if len(heads) < len(changes):
        notes.append(f"This page holds {len(heads)} of {len(changes)} pairs of heads, those that differ most.")
    names = [printable(name, 60) for name in changes.names]
    header = {
        "kind": "comparison",
        "title": options.title if options.title is not None else " and ".join(names),
        "about": f"{len(changes)} pairs of heads · {len(groups[0][1].in_both)} {groups[0][1].units[1]} in both",
        "version": regard_version(),
        "command": options.command,
        "names": names,
        "groups": [{"rows": _axis(rows), "cols": _axis(cols)} for rows, cols in groups],
        "heads": heads,
        "start": {"pair": [head["rank"] for head in heads].index(number), "word": place},
        "refused": [],
        "notes": notes,
    }
    return packer.pack(header)


def _axis(axis: Alignment) -> dict[str, Any]:
    """The words of both texts in one order, and which text has them: 0 both, 1 the first alone, 2 the second alone."""
    return {
        "labels": [printable(bare(label)) for label in axis.labels],
        "special": [n for n, label in enumerate(axis.labels) if is_special(label)],
        "inside": axis.continued,
        "side": [1 if b is None else 2 if a is None else 0 for a, b in axis.places],
    }


def _head(packer: Packer, pair: HeadPair, group: int, long: bool) -> dict[str, Any]:
    change = pair.change
    assert change is not None, "set where the pair was measured"
    brief = [f"{layer}·{head}" for layer, head in ((change.layer, change.head), (change.layer_b, change.head_b))]
    numbers = {"js": float(f"{change.js:.5g}"), "total_variation": float(f"{change.total_variation:.5g}")}
    return {
        "group": group,
        "name": pair.name,
        "brief": " – ".join(dict.fromkeys(brief)),
        **{name: x if x == x else None for name, x in numbers.items()},
        "cell": pair.cell,
        "w": packer.add(_tiles(pair) if long else _cells(pair)),
        "tiled": long,
    }


def _cells(pair: HeadPair) -> Tensor:
    """Both patterns, (2, rows, columns); −1 where the mask forbids a weight, NaN where a text has no such word."""
    places = range(len(pair.rows))
    return torch.stack([pair.weights(side, places).masked_fill(pair.forbidden(side, places), -1.0) for side in (0, 1)])


def _tiles(pair: HeadPair) -> Tensor:
    """Largest weights of either pattern and the largest change, (3, tiles, tiles), a few rows at a time.

    A weight is −1 where the mask forbids all of a tile.
    """
    rows, cols = (min(len(axis), TILES) for axis in (pair.rows, pair.cols))
    tile_of = (torch.arange(len(pair.cols)) * cols // len(pair.cols)).expand(3, -1)
    tiles = torch.zeros(3, rows, cols)
    for r in range(rows):
        part = range(r * len(pair.rows) // rows, (r + 1) * len(pair.rows) // rows)
        a, b = (pair.weights(side, part).nan_to_num(nan=0.0) for side in (0, 1))
        w = torch.stack([a, b, b - a])  # 3 row column
        most, least = (
            torch.zeros(3, cols).scatter_reduce(1, tile_of, extreme, how)
            for extreme, how in ((w.amax(1), "amax"), (w.amin(1), "amin"))
        )
        tiles[:, r] = torch.where(most >= -least, most, least)  # the change keeps its sign
        for side in (0, 1):
            visible = ~pair.forbidden(side, part).all(0)
            any_visible = torch.zeros(cols, dtype=torch.bool).index_fill_(0, tile_of[0, visible], True)
            tiles[side, r].masked_fill_(~any_visible, -1.0)
    return tiles
