"""Keywords that a function hands down: an unknown one is refused in the name of the function that a user called.

Python's own error names the function that they reach in the end, such as ``SelfAttention.__init__()`` for a misspelt
option of a `LanguageModel`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["check_options", "nearest"]


def check_options(owner: str, passed: Iterable[str], names: Iterable[str]) -> None:
    """Refuse an option that is not among `names`.

    Args:
        owner: Who has the options: "a view", "LanguageModel(...)".
        passed: Names that a user passed.
        names: All options.

    Raises:
        TypeError: There is no such option; the nearest name is shown.
    """
    names = list(names)
    unknown = [name for name in passed if name not in names]
    if unknown:
        near = nearest(unknown[0], names)
        meant = "" if near is None else f" Did you mean {near!r}?"
        raise TypeError(f"{owner} has no option {unknown[0]!r}; its options are {', '.join(names)}.{meant}")


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that is spelt most like a word; None where none is near."""
    return next(iter(get_close_matches(word, list(names), n=1)), None)
