"""A notebook's pictures of objects that are not views: small tables and pictures in plain HTML, without a script.

They take the colours of the notebook: text is in its own colour, and weights are a blue of more or less opacity, which
reads on light and on dark ground. Text of the subject is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.masks.kinds import Mask
from ..core.weights import Weights
from .dot_head import max_map
from .layers import all_layers
from .masked_tiles import forbidden_tiles
from .png import png_source
from .token_text import printable

if TYPE_CHECKING:
    from ..recorder import Recording
    from .walk import Walk

__all__ = ["mask_html", "recording_html", "table_html", "walk_html", "weights_html"]

#: Heads that are drawn, cells a side of each, and weights up to which they are computed for that.
HEADS, CELLS, WEIGHTS = 12, 48, 2**24
#: Rows of a table.
ROWS = 24
_BLUE = (33, 104, 172)
_MASKED, _BROKEN = (torch.tensor(pixel, dtype=torch.uint8) for pixel in ((128, 128, 128, 70), (176, 64, 148, 255)))
_PADDING = "padding:2px 8px"  # of a cell: some notebooks give none


@torch.no_grad()
def weights_html(weights: Weights) -> str:
    """The description of a `Weights` and, where that costs little, the pattern of its first heads."""
    text = _line(repr(weights))
    if not 0 < weights.shape.numel() <= WEIGHTS or not weights._entire:
        return text
    view = all_layers(weights)[0]
    heads = list(range(min(HEADS, view.heads)))
    rows, cols = (min(CELLS, n) for n in view.sizes)
    maps = max_map(view.pick(heads), rows, cols)
    if (forbidden := forbidden_tiles(view.pick(heads), rows, cols)) is not None:
        maps = maps.masked_fill(forbidden, -1.0)
    more = [f"the first {HEADS} of {view.heads} heads"] if view.heads > HEADS else []
    more += ["the first sequence"] if weights.shape[:-3].numel() > 1 else []
    more += ["rows look at columns"]
    more += ["grey is masked"] if bool((maps < 0).any()) else []
    more += ["purple is not a number"] if bool(maps.isnan().any()) else []
    note = _line(f"{', '.join(more)}; show() opens the page")
    return text + _flow(_picture(maps[h], f"head {h}") for h in heads) + note


def recording_html(recording: Recording) -> str:
    """The layers of a recording as a table."""
    rows = [
        (layer.index, layer.name or "(model)", layer.kind, "×".join(map(str, layer.shape)))
        for layer in recording.layers[:ROWS]
    ]
    hidden = len(recording.layers) - len(rows)
    notes = [f"… {hidden} more layers"] if hidden > 0 else []
    notes += [f"not recorded: {name or '(model)'}: {reason}" for name, reason in recording.refused]
    notes += ["show() opens the page"] if rows else []
    table = _table(("layer", "name", "kind", "batch × heads × rows × keys"), rows) if rows else ""
    return _line(recording._title()) + table + "".join(map(_line, notes))


def table_html(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of numbers and names; of a long one the first rows."""
    more = _line(f"… {len(rows) - ROWS:,} more rows") if len(rows) > ROWS else ""
    return _table(columns, rows[:ROWS]) + more


def walk_html(walk: Walk) -> str:
    """The steps of attention for one word, a row a key, with its weight as a bar."""
    steps = {"2 " + walk.formula: walk.product, "3 " + walk.scaling: walk.scaled}
    steps |= dict(walk.changes) | {"masked": walk.masked}
    shown = {name: values for name, values in steps.items() if values is not None}
    rows = [
        (f"{n} {word}", *(float(values[n]) for values in shown.values()), float(walk.weights[n]))
        for n, word in enumerate(walk.words)
    ]
    best = sorted(walk.weights.nan_to_num().topk(min(ROWS, len(rows))).indices.tolist())
    bars = [_bar(float(walk.weights[n])) for n in best]
    table = _table(("key", *shown, "4 softmax"), [rows[n] for n in best], bars)
    y = ", ".join(f"{x:.3f}" for x in walk.y[:6].tolist())
    size = f"the first 6 of {len(walk.y)} numbers" if len(walk.y) > 6 else "all numbers"
    notes = [f"… {len(rows) - ROWS:,} keys of less weight"] if len(rows) > ROWS else []
    notes += [f"5 and 6, weight × value and their sum, {size}: {y}", *walk.notes]
    return _line(f"“{walk.word}” at {walk.position}") + table + "".join(map(_line, notes))


def mask_html(mask: Mask) -> str:
    """The name of a mask and its drawing: what is visible is blue."""
    i, j = mask.size() or (8, 8)
    visible = torch.tensor(
        [[letter != "·" for letter in line.split()] for line in mask.draw(min(i, CELLS), min(j, CELLS)).splitlines()]
    )
    corner = f"the first {CELLS} rows and columns of {i:,} × {j:,}" if max(i, j) > CELLS else ""
    return _line(repr(mask)) + _flow([_picture(visible.float(), "the mask")]) + (_line(corner) if corner else "")


def _line(text: str) -> str:
    return f'<div style="font-size:90%;margin:2px 0">{html.escape(printable(text, 400))}</div>'


def _flow(pictures: Any) -> str:
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px;margin:4px 0">{"".join(pictures)}</div>'


def _picture(weights: Tensor, name: str) -> str:
    """Numbers from 0 to 1 as a picture, a cell a pixel, enlarged by the browser."""
    style = "width:96px;height:96px;image-rendering:pixelated;border:1px solid rgba(128,128,128,.5)"
    return (
        f'<figure style="margin:0;text-align:center;font-size:80%"><img alt="{html.escape(name)}" style="{style}" '
        f'src="{_png(weights)}"><figcaption>{html.escape(name)}</figcaption></figure>'
    )


def _png(weights: Tensor) -> str:
    """The source of a PNG in one blue, its opacity a root of the weight, as in the page; −1 is grey, NaN purple."""
    weights = weights.float().cpu()
    alpha = (255 * weights.nan_to_num().clamp(0, 1) ** 0.6).round().to(torch.uint8)
    height, width = alpha.shape
    pixels = torch.tensor([*_BLUE, 0], dtype=torch.uint8).repeat(height, width, 1)
    pixels[..., 3] = alpha
    pixels[weights < 0], pixels[weights.isnan()] = _MASKED, _BROKEN
    return png_source(pixels)


def _bar(share: float) -> str:
    width = 100 * min(1.0, max(0.0, share)) if share == share else 0.0
    return f'<div style="width:{width:.1f}px;height:.7em;background:rgb{_BLUE}"></div>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], bars: Sequence[str] = ()) -> str:
    def cell(value: Any) -> str:
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        side = "left" if isinstance(value, str) else "right"
        return f'<td style="text-align:{side};{_PADDING}">{html.escape(printable(text, 60))}</td>'

    head = "".join(f'<th style="{_PADDING}">{html.escape(printable(column, 60))}</th>' for column in columns)
    head += "<th></th>" * bool(bars)
    body = "".join(
        f"<tr>{''.join(map(cell, row))}{f'<td>{bars[n]}</td>' if bars else ''}</tr>" for n, row in enumerate(rows)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
