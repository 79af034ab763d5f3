"""The atlas of a corpus: every head with its numbers, its distances and its strongest examples, as one page.

The page has no script: a click on a head is a link to its section, which CSS shows when it is the target. It has the
style of the other pages, and a Content-Security-Policy that allows this style alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .page.html import HEAD, page_style, text_html

if TYPE_CHECKING:
    from ..corpora.result import Corpus, CorpusDistance, CorpusExample, CorpusHead, CorpusPosition

__all__ = ["corpus_page", "kind_of"]

_PAGE = (
    HEAD
    + """\
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div class="regard">
<header class="top"><p class="mark">regard</p><h1>{title}</h1><p class="about">{about}</p></header>
<main>
<h2>All heads</h2>
<p class="look">Each square is a head: where its weight lies, from its own position (left) to far away (right). A word
names the position that takes most of it. Choose a head for its numbers and examples.</p>
<div class="columns"><div><div class="scroll">{grid}</div>
{sections}
</div><div class="peek">{lists}</div></div>
</main>
<footer>{notes}</footer>
</div>
</body>
</html>
"""
)

_STYLE = """
.grid { width: 100%; }
.grid th:first-child { width: 1.6rem; }
.grid a.headcell { text-decoration: none; color: var(--ink); width: 100%; min-width: 3.1rem; }
.headcell svg { display: block; width: 100%; height: 1.6rem; }
.bars { fill: var(--soft); }
.bars.previous { fill: var(--h1); }
.bars.first { fill: var(--h0); }
.bars.induction { fill: var(--h2); }
section.head { display: none; border-top: 1px solid var(--line); margin-top: 1.4rem; }
section.head:target { display: block; }
section.head dl { display: grid; grid-template-columns: max-content max-content; gap: 0 .9rem; margin: 0; }
section.head dt { color: var(--soft); }
section.head dd { margin: 0; text-align: end; }
.headcell > span { text-align: center; }
.facts { display: flex; flex-wrap: wrap; gap: 1rem 1.4rem; }
.facts figure { flex: 1 1 18rem; max-width: 30rem; margin: 0; }
.facts svg { width: 100%; height: auto; }
.facts text { fill: var(--soft); font: 400 11px var(--sans); }
.ties { padding-inline-start: 1.4rem; }
.ties li { margin: .35rem 0; font-family: var(--serif); }
.ties b { color: var(--h0); }
.ties mark { background: none; color: var(--accent); font-weight: 600; }
.ties .who { font-family: var(--sans); }
.best { list-style: none; padding: 0; margin: 0 0 .8rem; font-size: .875rem; }
.best a, section.head a { color: var(--accent); }
@container (max-width: 760px) { .columns > .peek { order: 0; } }
@media print { section.head { display: block; } }
"""

#: A head is named after a position that takes at least this share of its weight.
NAMED = 0.25

#: Of every list of heads: its title, what its numbers are, and whether the largest comes first.
_LISTS: tuple[tuple[str, str, Callable[[CorpusHead], float], bool], ...] = (
    ("Looks at the token before", "mean weight", lambda head: head.previous, True),
    ("Looks at the first token", "mean weight", lambda head: head.first, True),
    ("Continues a repetition", "mean weight", lambda head: head.induction, True),
    ("Sharpest", "entropy in nats", lambda head: head.entropy, False),
    ("Farthest", "mean distance in tokens", lambda head: head.distance, True),
)


def kind_of(head: CorpusHead) -> str:
    """The position that takes most of a head's weight: "previous", "first", "induction", or "" for none of them."""
    shares = {name: getattr(head, name) for name in ("previous", "first", "induction")}
    best = max(shares, key=lambda name: -1 if math.isnan(shares[name]) else shares[name])
    return best if shares[best] >= NAMED else ""


def corpus_page(corpus: Corpus) -> str:
    """The page of a corpus run, in ASCII."""
    heads = corpus.heads
    distances: dict[tuple[int, int], list[CorpusDistance]] = defaultdict(list)
    received: dict[tuple[int, int], list[CorpusPosition]] = defaultdict(list)
    examples: dict[tuple[int, int], list[CorpusExample]] = defaultdict(list)
    for d in corpus.distances:
        distances[d.layer, d.head].append(d)
    for r in corpus.received:
        received[r.layer, r.head].append(r)
    for e in corpus.examples:
        examples[e.layer, e.head].append(e)
    sections = [_section(head, distances[head[:2]], received[head[:2]], examples[head[:2]]) for head in heads]
    style, digest = page_style(_STYLE)
    about = f"{corpus.documents:,} documents · {corpus.sequences:,} sequences · {corpus.tokens:,} tokens"
    return _PAGE.format(
        policy=f"default-src 'none'; style-src '{digest}'; base-uri 'none'; form-action 'none'",
        style=style,
        title=text_html(f"{corpus.settings['model']} over {corpus.settings['data']}"),
        about=about,
        grid=_grid(heads, distances),
        lists=_lists(heads),
        sections="\n".join(sections),
        notes="".join(f"<p>left out: {text_html(name)}: {text_html(why)}</p>" for name, why in corpus.refused.items()),
    )


def _grid(heads: Sequence[CorpusHead], distances: dict[tuple[int, int], list[CorpusDistance]]) -> str:
    rows: dict[int, list[str]] = defaultdict(list)
    for head in heads:
        kind = kind_of(head)
        bars = _bars([d.share for d in distances[head[:2]]], kind)
        label = f"layer {head.layer}, head {head.head}{f': {kind}' if kind else ''}"
        rows[head.layer].append(
            f'<td><a class="headcell" href="#{_anchor(head)}" aria-label="{label}">{bars}'
            f"<span>{kind or '&nbsp;'}</span></a></td>"
        )
    most = max(map(len, rows.values()), default=0)
    title = "<tr><th>layer</th>" + "".join(f"<th>{h}</th>" for h in range(most)) + "</tr>"
    body = "".join(f"<tr><th>{layer}</th>{''.join(cells)}</tr>" for layer, cells in rows.items())
    return f'<table class="grid"><thead>{title}</thead><tbody>{body}</tbody></table>'


def _lists(heads: Sequence[CorpusHead]) -> str:
    lists = []
    for title, what, value, largest in _LISTS:
        ranked = sorted((h for h in heads if not math.isnan(value(h))), key=value, reverse=largest)[:4]
        items = "".join(
            f'<li><a href="#{_anchor(head)}">layer {head.layer} head {head.head}</a> {value(head):.3g}</li>'
            for head in ranked
        )
        lists.append(f'<h3>{title}</h3><p class="who">{what}</p><ol class="best">{items}</ol>')
    return "".join(lists)


def _section(
    head: CorpusHead,
    distances: Sequence[CorpusDistance],
    received: Sequence[CorpusPosition],
    examples: Sequence[CorpusExample],
) -> str:
    names = {
        "entropy": f"{head.entropy:.3f} ± {head.entropy_std:.3f}",
        "largest weight": f"{head.peak:.3f} ± {head.peak_std:.3f}",
        "distance": f"{head.distance:.1f} ± {head.distance_std:.1f}",
        "token before": f"{head.previous:.3f}",
        "first token": f"{head.first:.3f}",
        "induction": "–" if math.isnan(head.induction) else f"{head.induction:.3f}",
    }
    facts = "".join(f"<dt>{name}</dt><dd>{text_html(value)}</dd>" for name, value in names.items())
    charts = _chart("weight by distance", [(d.start, d.share) for d in distances])
    charts += _chart("received by position", [(r.start, r.received) for r in received])
    ties = "".join(f"<li>{_tie(example)}</li>" for example in examples)
    return (
        f'<section class="head" id="{_anchor(head)}">'
        f"<h2>layer {head.layer}, head {head.head} · {text_html(head.name)}</h2>"
        f'<div class="facts"><dl>{facts}</dl>{charts}</div>'
        f'<h3>Strongest ties</h3><ol class="ties">{ties}</ol></section>'
    )


def _tie(example: CorpusExample) -> str:
    place = f"{example.source}, token {example.query:,} to {example.key:,}"
    who = f'{example.weight:.3f} <span class="who">{text_html(place)}</span>'
    if not example.text:
        return who
    ends = f"<b>{text_html(example.query_token)}</b> → <mark>{text_html(example.key_token)}</mark>"
    return f'{ends} {who}<br><span class="token">{text_html(example.text)}</span>'


def _anchor(head: CorpusHead) -> str:
    return f"l{head.layer}h{head.head}"


def _bars(shares: Sequence[float], kind: str) -> str:
    """A small bar chart without text."""
    top = max(shares, default=0) or 1
    bars = "".join(
        f'<rect x="{n + 0.1:.1f}" y="{1 - share / top:.3f}" width=".8" height="{share / top:.3f}"/>'
        for n, share in enumerate(shares)
    )
    size = max(1, len(shares))
    return f'<svg class="bars {kind}" viewBox="0 0 {size} 1" preserveAspectRatio="none" aria-hidden="true">{bars}</svg>'


def _chart(title: str, points: Sequence[tuple[int, float]]) -> str:
    top = max((value for _, value in points), default=0) or 1
    wide = 300 / max(1, len(points))
    bars = "".join(
        f'<rect class="bars" x="{n * wide + 1:.1f}" y="{70 - 60 * value / top:.1f}" width="{wide - 2:.1f}" '
        f'height="{60 * value / top:.1f}"><title>from {start:,}: {value:.4g}</title></rect>'
        f'<text x="{(n + 0.5) * wide:.1f}" y="82" text-anchor="middle">{_short(start)}</text>'
        for n, (start, value) in enumerate(points)
    )
    return (
        f'<figure><svg viewBox="0 0 300 86" role="img" aria-label="{title}">{bars}</svg>'
        f"<figcaption>{title}; largest {top:.3g}</figcaption></figure>"
    )


def _short(n: int) -> str:
    return f"{n >> 20}M" if n >= 2**20 else f"{n >> 10}k" if n >= 2**10 else str(n)
