"""The options of a view: one dataclass for the page, the picture, the terminal and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from .._options import check_options
from ..core.indexing import At
from ..core.patches import ImageLike

if TYPE_CHECKING:
    from torch import Tensor

    from ..learn.patterns import PatternLog
    from .word_vectors import WordVectors

__all__ = ["Selection", "ViewChanges", "ViewChoices", "ViewOptions", "changed_options"]


class Selection(TypedDict):
    """Which layers, heads and words of a view are shown."""

    layer: int | str | None
    head: int | None
    item: int
    hide_special: bool
    merge: bool


class ViewChoices(TypedDict, total=False):
    """`ViewOptions` as keywords beside `word`."""

    target: str | int | None
    layer: int | str | None
    head: int | None
    item: int
    hide_special: bool
    merge: bool
    title: str | None
    model: str | None
    command: str | None
    word_vectors: WordVectors | None
    values: Tensor | None
    grid: tuple[int, int] | None
    image: ImageLike | None
    patterns: PatternLog | None
    notes: Sequence[str]


class ViewChanges(ViewChoices, total=False):
    """`ViewOptions` as keywords."""

    word: str | int | At | None


_TWO = "Two recordings side by side: regard.compare(a, b).show()."


@dataclass(frozen=True)
class ViewOptions:
    """The state that a view begins with.

    Args:
        word: The word to light: ``"it"``, ``"the:1"`` for the first of several, ``W.at("the", 1)``, or a position.
            Default: the word that is tied to another one most clearly.
        target: With `word`: begin with the heads that give this word the most weight.
        layer: Only this layer, by position or by name; together with `head`, the head to begin with.
        head: Only this head of the layer.
        item: Which sequence of a batch.
        hide_special: Leave out [CLS], </s> and the like; the other weights are scaled up to the same sum.
        merge: Join the pieces of a word: a word gets the sum over its tokens, and looks with their mean.
        title: The title of the page or picture. Default: the text.
        model: The name of the model, which a page shows beside its sizes.
        command: The command that shows the same text again, which the caption of a page repeats.
        word_vectors: Word embeddings and their projections (`regard.look.word_vectors.word_vectors`), from which a page
            builds attention step by step.
        values: The value vectors of a `Weights`, ``(..., g, j, e)`` or ``(j, e)``, for the steps after softmax.
        grid: Rows and columns of an image's patches: axes without tokens that have as many positions, and a few before
            them, are shown as patches.
        image: The image, which a page draws below its patches: a tensor or an array (h, w, 3), (h, w) or (3, h, w), or
            an image of Pillow.
        patterns: Patterns of the heads of a run (`regard.learn.patterns.read_patterns`), which the page of its history
            shows step by step.
        notes: Sentences to write below, such as how much of the text was cut.

    Raises:
        ValueError: `target` was passed without `word`.

    Example:
        >>> regard.look.View(regard.weights(torch.eye(3)), ViewOptions(word=1, title="an example")).options.title
        'an example'
    """

    word: str | int | At | None = None
    target: str | int | None = None
    layer: int | str | None = None
    head: int | None = None
    item: int = 0
    hide_special: bool = False
    merge: bool = False
    title: str | None = None
    model: str | None = None
    command: str | None = None
    word_vectors: WordVectors | None = None
    values: Tensor | None = None
    grid: tuple[int, int] | None = None
    image: ImageLike | None = None
    patterns: PatternLog | None = None
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not (self.word is None or isinstance(self.word, str | At) or hasattr(self.word, "__index__")):
            raise TypeError(f"word must be a token or its position; got {type(self.word).__name__}. {_TWO}")
        if self.target is not None and self.word is None:
            raise ValueError("target=… needs word=…: it ranks the heads by the weight from one word to another.")
        if self.head is not None and not isinstance(self.head, int):
            raise TypeError(f"head must be the number of one head; got {self.head!r}. For several, show each of them.")

    @property
    def word_name(self) -> str | int | None:
        """The word as a name or a position: `W.at("the", 2)` is ``"the:2"``.

        Example:
            >>> ViewOptions(word=At("the", 2)).word_name
            'the:2'
        """
        return f"{self.word.word}:{self.word.nth}" if isinstance(self.word, At) else self.word

    @property
    def selection(self) -> Selection:
        """The arguments that choose layers, heads and words, as `spotlight` and `overview` take them.

        Example:
            >>> ViewOptions(layer=3).selection["layer"]
            3
        """
        return {
            "layer": self.layer,
            "head": self.head,
            "item": self.item,
            "hide_special": self.hide_special,
            "merge": self.merge,
        }


def changed_options(options: ViewOptions | None, changes: Mapping[str, Any]) -> ViewOptions:
    """`options` with single ones changed; by names that it has."""
    if options is not None and not isinstance(options, ViewOptions):
        raise TypeError(f"the options of a view are ViewOptions; got {type(options).__name__}. {_TWO}")
    names = [field.name for field in fields(ViewOptions)]
    check_options("a view", changes, names)
    return replace(options or ViewOptions(), **changes)
