"""A view: one object for every medium. `print` shows it in a terminal, a notebook as a page, `save` writes a file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast

from .._io import atomic_write
from .bands import Report
from .console import progress
from .history import History, HistoryLike, as_history, is_history
from .layers import Subject
from .options import ViewChanges, ViewOptions
from .token_text import printable

__all__ = ["View"]


class View:
    """Attention to look at: what `seen.show()` and `W.show()` return. Nothing is computed before it is shown.

    Args:
        subject: A `Recording`, a `Weights`, or a training history: the (step, numbers) pairs of `regard.watch`.
        options: What the view begins with.
        changes: Single options, by the names of `ViewOptions`: ``View(seen, word="it", merge=True)``.

    Example:
        >>> import torch, regard
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
        >>> view = regard.weights(x).label(["the", "cat", "sat"]).show("cat")
        >>> print(str(view).splitlines()[0])
        “cat” → “cat” 0.768
        >>> view.save("cat.html")                   # doctest: +SKIP
        >>> view.save("cat.svg")                    # doctest: +SKIP
    """

    def __init__(
        self, subject: Subject | HistoryLike, options: ViewOptions | None = None, **changes: Unpack[ViewChanges]
    ) -> None:
        self.subject: Subject | History = as_history(subject) if is_history(subject) else cast(Subject, subject)
        self.options = replace(options or ViewOptions(), **changes)
        self._report: Report = lambda step, done: None

    def html(self, fragment: bool = False) -> str:
        """The page as one string.

        Args:
            fragment: Return the sandboxed frame that a notebook shows instead of a document.

        Returns:
            A document that needs no network and no other file.

        Example:
            >>> regard.weights(torch.eye(3)).show().html().startswith("<!doctype html>")
            True
        """
        from .page.html import frame, html
        from .page.payload import pack

        page = html(pack(self.subject, self.options, report=self._report))
        return frame(page) if fragment else page

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file.

        Args:
            path: Its suffix chooses the form: .html, a page that opens anywhere without a network, or .svg, a picture
                for a paper.

        Raises:
            ValueError: The suffix is another one.

        Example:
            >>> import pathlib, tempfile
            >>> file = pathlib.Path(tempfile.mkdtemp()) / "cat.svg"
            >>> regard.weights(torch.eye(3)).label(["the", "cat", "sat"]).show("cat").save(file)
            >>> file.read_text()[:4]
            '<svg'
        """
        file = Path(path)
        suffix = file.suffix.lower()
        if suffix in (".html", ".htm"):
            with progress(f"writing {printable(file.name)}") as self._report:
                text = self.html()
        elif suffix == ".svg":
            from .svg import svg

            text = svg(self.subject, self.options)
        else:
            raise ValueError(f"save(path) writes .html or .svg, got {file.name!r}: choose one of these suffixes.")
        atomic_write(file, iter([text.encode("utf-8", errors="replace")]))

    def widget(self, device: str = "cpu") -> Any:
        """The page in a notebook with the kernel behind it: exact tiles of any length, score and mask come from it.

        Args:
            device: Where tiles are computed.

        Returns:
            An anywidget; needs ``pip install "regard[notebook]"``.

        Example:
            >>> regard.weights(torch.eye(3)).show().widget()  # doctest: +SKIP
        """
        from .serve.widget import page_widget

        return page_widget(self, device)

    def _repr_html_(self) -> str:
        return self.html(fragment=True)

    def __str__(self) -> str:
        from .terminal import draw

        return draw(self.subject, self.options)

    def __repr__(self) -> str:
        return str(self)  # at the prompt, the picture is what one wants to see
