"""A view: one value with every face. `str()` for the terminal, `_repr_html_` for a notebook, `save` for a file.

`Recording.show` and `Weights.show` make one. Nothing is computed before a face is asked for. Imports the recorder's
`file`, which writes all or nothing, and, when they are used, the rooms of the faces.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.indexing import At
from ..recorder.file import write

__all__ = ["View"]


class View:
    """What `seen.show()` and `W.show()` return.

    view = seen.show("it")          the heads that matter for "it" come first
    view                            a notebook shows the page, a terminal the picture
    view.save("it.html")            one file that needs no network
    view.save("it.svg")             vectors, for a paper

    subject   a Recording, a Weights, or a training history: the (step, numbers) pairs that
              regard.watch(model, callback=lambda numbers, step: history.append((step, numbers))) collects
    word      the word to begin with: "it", "the:1" for the first of several, or a position
    to        with `word`: begin with the heads that give this word the most weight
    layer     with `head`: the head to begin with
    embedded  word vectors and their projections, for the steps from word vectors to a head (`regard.look.model`)
    values    the value vectors of a `Weights`, (..., h, j, e) or (j, e), for the steps after softmax
    item      which sequence of a batch
    notes     sentences to be written below, such as what was left out of the text
    hide_special, merge   begin without special tokens, with pieces merged to words
    """

    def __init__(
        self,
        subject: Any,
        *,
        word: Any = None,
        to: str | int | None = None,
        title: str | None = None,
        layer: int | str | None = None,
        head: int | None = None,
        embedded: Any = None,
        values: Tensor | None = None,
        item: int = 0,
        notes: Sequence[str] = (),
        hide_special: bool = False,
        merge: bool = False,
    ) -> None:
        if to is not None and word is None:
            raise ValueError("to=… goes with word=…: the heads by the weight from one word to another.")
        self.subject = as_history(subject) if is_history(subject) else subject
        word = f"{word.word}:{word.nth}" if isinstance(word, At) else word
        self.word, self.title, self.layer, self.head = word, title, layer, head
        self.embedded, self.values, self.item = embedded, values, item
        self.to, self.notes = to, list(notes)
        self.hide_special, self.merge = hide_special, merge

    @property
    def _begin(self) -> dict[str, Any]:
        """What every face is told."""
        return {
            "word": self.word,
            "to": self.to,
            "layer": self.layer,
            "head": self.head,
            "item": self.item,
            "hide_special": self.hide_special,
            "merge": self.merge,
        }

    def html(self, fragment: bool = False) -> str:
        """The page as one string; as a `fragment` the frame that a notebook shows."""
        from .page.html import frame, html
        from .page.payload import pack

        packed = pack(
            self.subject,
            title=self.title,
            embedded=self.embedded,
            values=self.values,
            notes=self.notes,
            **self._begin,
        )
        return frame(html(packed)) if fragment else html(packed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file: .html, a page that opens anywhere, or .svg, a picture for a paper."""
        where = Path(path)
        kind = where.suffix.lower()
        if kind in (".html", ".htm"):
            text = self.html()
        elif kind == ".svg":
            from .svg import svg

            text = svg(self.subject, title=self.title, notes=self.notes, **self._begin)
        else:
            raise ValueError(f"save(path) writes .html or .svg, by the end of the name; {where.name!r} came.")
        write(where, iter([text.encode("utf-8", errors="replace")]))

    def _repr_html_(self) -> str:
        return self.html(fragment=True)

    def __str__(self) -> str:
        from .terminal import draw

        return draw(self.subject, **self._begin)

    def __repr__(self) -> str:
        # At the prompt, showing is what `show` is for.
        return str(self)


# Training histories.

History = list[tuple[int, dict[str, float]]]


def is_history(subject: Any) -> bool:
    """Whether this is a training history: pairs of a step and its numbers, either way round, or {step: numbers}."""
    if isinstance(subject, Mapping):
        return bool(subject) and all(isinstance(numbers, Mapping) for numbers in subject.values())
    if not isinstance(subject, Sequence) or isinstance(subject, str):
        return False
    return all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in subject)


def as_history(subject: Any) -> History:
    """(step, numbers) pairs in the order of the steps."""
    pairs = list(subject.items()) if isinstance(subject, Mapping) else [tuple(pair) for pair in subject]
    pairs = [(b, a) if isinstance(a, Mapping) else (a, b) for a, b in pairs]
    if not pairs:
        raise ValueError(
            "a training history needs at least one look: regard.watch(model, callback=lambda numbers, step: "
            "history.append((step, numbers)))."
        )
    return sorted(((int(step), dict(numbers)) for step, numbers in pairs), key=lambda pair: pair[0])
