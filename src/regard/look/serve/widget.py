"""The page in a notebook with the kernel behind it: exact tiles, rows and windows come from the weights themselves.

The page stands in a frame without an origin, as always; its questions go to the widget, and from there to the kernel,
which answers them as the server does.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.resources import files
from typing import Any

from ..page.html import HEIGHT, html
from ..view import View
from .answers import ANSWERS
from .guard import RefusedError
from .looks import BusyError, Look, Looks

__all__ = ["answer_page", "page_widget"]


def page_widget(view: View, device: str = "cpu") -> Any:
    """The widget of a view.

    Args:
        view: What is shown.
        device: Where tiles are computed.

    Returns:
        An anywidget, which a notebook shows.

    Raises:
        ImportError: anywidget is not installed.
        ValueError: There is nothing to show.
    """
    looks = Looks(device)
    look = Look(accepts_text=False)
    look.prepare(lambda: view, device, lambda: False, {"kernel": True})
    if look.packed is None:
        raise ValueError(look.error or "there is nothing to show.")
    widget = _widget_class()(page=html(look.packed), height=HEIGHT)

    def hear(_: Any, content: Any, buffers: Any) -> None:
        answer, block = answer_page(looks, look, content)
        widget.send(answer, buffers=[block] if block else [])

    widget.on_msg(hear)
    return widget


def answer_page(looks: Looks, look: Look, question: Any) -> tuple[dict[str, Any], bytes]:
    """The answer to a question of the page: its id with an error, or with a block of bytes.

    Args:
        looks: Computes the first levels of heads.
        look: What is shown.
        question: What the page has sent: {id, path, fields}.
    """
    if not isinstance(question, dict):
        return {"id": None, "error": "a question must be an object."}, b""
    name, path, fields = (question.get(key) for key in ("id", "path", "fields"))
    answer = ANSWERS.get(f"/{path}")
    if answer is None or not isinstance(fields, dict):
        return {"id": name, "error": "there is no such question."}, b""
    texts = {
        str(key): [str(x) for x in (value if isinstance(value, list) else [value])] for key, value in fields.items()
    }
    try:
        return {"id": name}, answer(look, texts, lambda pyramid: looks.request_first(look, pyramid))
    except RefusedError as error:
        return {"id": name, "error": error.why}, b""
    except BusyError:
        return {"id": name, "error": "too much is waiting; try again in a moment."}, b""


@functools.cache
def _widget_class() -> Any:
    """The class, made when it is first needed: anywidget is not a dependency of regard."""
    try:
        anywidget, traitlets = import_module("anywidget"), import_module("traitlets")
    except ImportError:
        raise ImportError('anywidget is not installed: pip install "regard[notebook]" brings it.') from None
    script = files("regard.look.page").joinpath("js/widget.js").read_text(encoding="utf-8")
    fields = {
        "_esm": script,
        "page": traitlets.Unicode().tag(sync=True),
        "height": traitlets.Int().tag(sync=True),
    }
    return type("PageWidget", (anywidget.AnyWidget,), fields)
