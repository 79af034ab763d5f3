"""A view: one object for every medium. `print` shows it in a terminal, a notebook as a page, `save` writes a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Unpack, cast

from .._io import as_path, atomic_write
from .bands import Report
from .compare import HeadChanges
from .console import progress
from .history import History, HistoryLike, as_history, is_history
from .layers import Subject
from .options import ViewChanges, ViewOptions, changed_options
from .token_text import printable

if TYPE_CHECKING:
    from .svg import PicturePart

__all__ = ["View"]


class View:
    """Attention to look at: what `seen.show()` and `W.show()` return. Nothing is computed before it is shown.

    Args:
        subject: A `Recording`, a `Weights`, the result of `regard.compare`, or a training history: the (step, numbers)
            pairs of `regard.watch`.
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

    #: Called with the progress of a file; while `save` writes, that of the terminal.
    _report: Report = staticmethod(lambda step, done: None)

    def __init__(
        self,
        subject: Subject | HeadChanges | HistoryLike,
        options: ViewOptions | None = None,
        **changes: Unpack[ViewChanges],
    ) -> None:
        self.subject: Subject | HeadChanges | History
        if isinstance(subject, HeadChanges) or not is_history(subject):
            self.subject = cast(Subject | HeadChanges, subject)
        else:
            self.subject = as_history(subject)
        self.options = changed_options(options, changes)
        if self.options.grid is not None:
            self.subject = self._patched(self.options.grid)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_report"}

    def _patched(self, grid: tuple[int, int]) -> Subject:
        from .patches import with_patches

        if isinstance(self.subject, list):
            raise ValueError("grid=… is of one recording or matrix; leave it out here.")
        return with_patches(self.subject, grid, self.options.image)

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

    def save(self, path: str | os.PathLike[str], *, part: PicturePart | None = None, width: str | None = None) -> None:
        """Write one file.

        Args:
            path: Its suffix chooses the form: .html, a page that opens anywhere without a network, or a picture for a
                paper, .svg, .pdf or .png. PDF and PNG need ``regard[figure]``, no browser.
            part: Of a picture, only the sentence with its lines, ``"lines"``, or only the matrix, ``"square"``.
            width: How wide a picture is: ``"3.3in"`` for a column, ``"6.9in"`` for a page, ``"13.33in"`` for a slide;
                also in mm, cm, pt or px. Lines are broken so that its letters can be read.

        Raises:
            ValueError: The suffix, the part or the width is another one.
            ImportError: PDF and PNG: vl-convert is not installed.

        Example:
            >>> import pathlib, tempfile
            >>> file = pathlib.Path(tempfile.mkdtemp()) / "cat.svg"
            >>> view = regard.weights(torch.eye(3)).label(["the", "cat", "sat"]).show("cat")
            >>> view.save(file, part="lines", width="3.3in")
            >>> file.read_text()[:4]
            '<svg'
        """
        file = as_path(path, "save(path)")
        suffix = file.suffix.lower()
        if suffix in (".html", ".htm"):
            if part is not None or width is not None:
                raise ValueError(
                    "part and width are of pictures (.svg, .pdf, .png); a page has all parts: leave them out."
                )
            with progress(f"writing {printable(file.name)}") as self._report:
                data = self.html().encode("utf-8", errors="replace")
        elif suffix in (".svg", ".pdf", ".png"):
            from .svg import svg

            text = svg(self.subject, self.options, part=part, width=width)
            data = text.encode("utf-8", errors="replace") if suffix == ".svg" else _rendered(text, suffix, width)
        else:
            raise ValueError(
                f"save(path) writes .html, .svg, .pdf or .png, got {file.name!r}: choose one of these suffixes."
            )
        atomic_write(file, iter([data]))

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


def _rendered(text: str, suffix: str, width: str | None) -> bytes:
    from .export import render_svg

    return render_svg(text.encode("utf-8", errors="replace").decode(), suffix, width is not None)
