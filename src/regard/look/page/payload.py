"""The data of a page, packed: everything that its script shows, and no text of the subject outside of it.

A short input is stored as it is: the weights of every head in float32, with queries, keys and values. A long one is
stored as pooled maps, statistics of rows and columns, a few exact rows and, of the first heads, queries and keys from
which the page computes exact weights; never as i × j weights.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, cast

import torch

from ...core.weights import Weights
from ...recorder.head_metrics import BY, HeadMeasure
from ..bands import Report
from ..compare import HeadChanges
from ..history import History
from ..layers import LayerView, Subject, all_layers, batch_note, layers_of, unknown_note
from ..options import ViewOptions
from ..ranking import nan_note
from ..token_text import printable
from ..word_vectors import WordVectors
from .arrays import layer_headers, thumbnails
from .comparison import pack_changes
from .content import PageContent
from .exact import VectorBlock
from .format import Packed, regard_version
from .start import find_start
from .training import pack_history

__all__ = ["METRICS", "pack"]

#: Coordinates of word vectors that are shown one by one.
COORDINATES = 16

METRICS: tuple[HeadMeasure, ...] = ("entropy", "mean_distance_without_sink", "sink", "previous", "induction")


@torch.no_grad()
def pack(
    subject: Subject | HeadChanges | History,
    options: ViewOptions,
    layers: list[LayerView] | None = None,
    served: dict[str, Any] | None = None,
    report: Report | None = None,
) -> Packed:
    """Pack everything that a page needs to show a recording, a `Weights`, a comparison or a training history.

    Args:
        subject: What is shown.
        options: What the page begins with.
        layers: Its layers, if they are there already.
        served: Facts about its server that a served page needs.
        report: Called with the step of the work on a long input, and its share that is done.
    """
    if isinstance(subject, HeadChanges):
        return pack_changes(subject, options)
    if isinstance(subject, list):
        return pack_history(cast(History, subject), options.title, options.notes, patterns=options.patterns)
    layers = all_layers(subject, options.item, options.values) if layers is None else layers
    for view in layers:
        view.report = report or view.report
    with_weights = [view for view in layers if view.maybe_weights is not None]
    if not with_weights:
        layers_of(subject, options.item)  # raises, and says why there are none
    content = PageContent(
        with_weights,
        [*batch_note(subject, options.item), *unknown_note(with_weights), *options.notes],
        options.image,
    )
    start = find_start(subject, content, options)
    content.choose_heads(start)
    vectors = VectorBlock()
    vectors.add_heads(content, start)
    title = options.title if options.title is not None else content.title()
    header = {
        "kind": "attention",
        "title": title,
        "about": " · ".join([*([printable(options.model)] if options.model else []), *_sizes(layers, content)]),
        "version": regard_version(),
        "served": served,
        "command": options.command,
        "sequences": content.sequences,
        "stacks": content.stacks,
        "layers": layer_headers(content, start, {(one["place"], one["head"]) for one in vectors.heads}),
        "start": asdict(start),
        "vectors": vectors.heads,
        "metrics": _metrics(layers),
        # All layers, also those of which only statistics were recorded: they are in the overview alone.
        "all": [[v.index, v.name, v.heads, with_weights.index(v) if v in with_weights else None] for v in layers],
        "thumbs": [
            thumbnails(content, view, content.held[with_weights.index(view)]) if view in with_weights else None
            for view in layers
        ],
        "embedded": _word_vector_arrays(options.word_vectors, content),
        "refused": [[name or "(model)", reason] for name, reason in _refused(subject)],
    }
    content.notes += nan_note(content.nan_heads, sum(map(len, content.held)))
    return content.packer.pack({**header, "nan": content.nan_heads, "notes": content.notes}, b"".join(vectors.parts))


def _refused(subject: Subject) -> list[tuple[str, str]]:
    return [] if isinstance(subject, Weights) else list(subject.refused)


def _sizes(layers: list[LayerView], content: PageContent) -> list[str]:
    """How many layers, heads and tokens there are, for the header of the page."""
    heads = {view.heads for view in layers}
    if len(layers) == 1:
        sizes = [f"{max(heads)} heads"] if max(heads) > 1 else []
    else:
        sizes = [f"{len(layers)} layers × {max(heads)} heads" if len(heads) == 1 else f"{len(layers)} layers"]
    lengths = [sequence["length"] for sequence in content.sequences]
    return [*sizes, " and ".join(f"{n:,}" for n in lengths) + (" token" if lengths == [1] else " tokens")]


def _metrics(layers: list[LayerView]) -> dict[str, list[Any]]:
    """Every metric of `Recording.heads`: the numbers of every layer's heads, None where it does not apply."""
    if sum(view.heads for view in layers) == 1:  # nothing to compare, and every metric costs a pass
        return {name: [None] for name in METRICS}
    return {name: [_metric(view, name) for view in layers] for name in METRICS}


def _metric(view: LayerView, name: HeadMeasure) -> list[float | None] | None:
    if name not in ("entropy", "sink") and view.kind != "self":
        return None
    try:
        if view.maybe_weights is not None:
            values = BY[name](view.weights)
        elif name == "entropy":
            values = view.statistics["entropy"].float().mean((0, 2))
        else:
            return None
    except ValueError:  # no word occurs twice, or positions do not correspond
        return None
    finite = [float(f"{x:.5g}") if math.isfinite(x) else None for x in values.tolist()]
    return finite if any(x is not None for x in finite) else None


def _word_vector_arrays(vectors: WordVectors | None, content: PageContent) -> dict[str, Any] | None:
    """Word vectors x and x·W_q, x·W_k, x·W_v: all their products, and the first coordinates to show one by one."""
    if vectors is None:
        return None
    x, q, k, v = (part.detach().float().cpu() for part in (vectors.x, vectors.q, vectors.k, vectors.v))
    fitting = [
        n
        for n, stack in enumerate(content.stacks)
        if stack["same"] and not stack["long"] and content.sequences[stack["rows"]]["length"] == len(x)
    ]
    if not fitting:
        return None
    add, few = content.packer.add, slice(0, COORDINATES)
    return {
        "stack": fitting[0],
        "size": x.shape[-1],
        "dots": add(torch.stack([x @ x.T, q @ x.T, x @ k.T, q @ k.T])),  # without W_q and W_k, with W_q, W_k, both
        **{name: add(part[:, few]) for name, part in zip("xqkv", (x, q, k, v), strict=True)},
    }
