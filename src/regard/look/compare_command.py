"""Two inputs of `regard look`: two texts, two recordings, or one text in two models, side by side."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command_input import Input, read_input
from .console import colours, file_errors, print_result, print_status, progress, terminal_width
from .token_text import printable

if TYPE_CHECKING:
    from .compare import HeadChanges

__all__ = ["add_arguments", "is_comparison", "run_compare"]


def add_arguments(look: argparse.ArgumentParser) -> None:
    """Add the arguments that make `look` compare."""
    look.add_argument("other", nargs="?", help="another one, to compare with the first")
    look.add_argument("--against", metavar="MODEL", help="compare with this model, on the same text or the other one")
    look.add_argument(
        "--nearest", action="store_true", help="compare every head with the nearest one, for models of other shapes"
    )


def is_comparison(args: argparse.Namespace) -> bool:
    """Whether two inputs are given."""
    return args.other is not None or args.against is not None


def run_compare(args: argparse.Namespace) -> int:
    """Compare two inputs in the terminal, in a page or as JSON. Returns the exit code."""
    for option in ("target", "layer", "head", "save", "decoder_text"):
        if getattr(args, option) is not None:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} is for one input: leave it out to compare two.")
    sources = _read_both(args)
    with progress("comparing every head"):
        changes = _compare(args, sources)
    if args.json:
        from .command import to_json

        print_result(to_json({"subject": list(changes.names), "heads": [change._asdict() for change in changes]}))
    if args.out:
        _write_page(args, changes, sources)
    elif not args.json:
        from .terminal_compare import draw_changes

        layout: dict[str, Any] = {"width": terminal_width(), "colour": colours(args.color), "top": args.top}
        print_result(draw_changes(changes, word=args.word, **layout))
    return 0


def _read_both(args: argparse.Namespace) -> tuple[Input, Input]:
    if "-" in (args.text, args.other):
        raise ValueError("one text can be piped in, not two to compare: name both.")
    first = read_input(args)
    other = copy.copy(args)
    other.text = args.text if args.other is None else args.other
    # The model that is open serves the other text as well.
    other.model = args.against or first.model or args.model
    return first, read_input(other)


def _compare(args: argparse.Namespace, sources: tuple[Input, Input]) -> HeadChanges:
    from .compare import compare

    a, b = sources
    names = (a.name, b.name) if a.name != b.name else _names_from_first_difference(args.text, args.other or args.text)
    return compare(
        a.recording,
        b.recording,
        match="nearest" if args.nearest else "place",
        merge=True if args.merge else None,
        hide_special=args.no_special,
        names=(_short(names[0]), _short(names[1])),
    )


def _names_from_first_difference(a: str, b: str) -> tuple[str, str]:
    """Two texts from one word before the first that differs, since names are cut at their end."""
    words = a.split(), b.split()
    differs = next((n for n, (x, y) in enumerate(zip(*words, strict=False)) if x != y), min(map(len, words)))
    if differs < 3:
        return a, b
    first, second = (" ".join(["…", *text[differs - 1 :]]) for text in words)
    return first, second


def _short(name: str) -> str:
    """A text as it is, and a file or model by its last part."""
    one_line = " ".join(name.split())
    return printable(one_line if " " in one_line else Path(one_line).name or one_line, 60)


def _write_page(args: argparse.Namespace, changes: HeadChanges, sources: tuple[Input, Input]) -> None:
    from .command import same_input

    path = Path(args.out)
    notes = [note for source in sources for note in source.notes]
    with file_errors(args.out):
        changes.show(word=args.word, command=" ".join(["regard look", *same_input(args)]), notes=notes).save(path)
    print_status(f"written to {printable(args.out)} ({path.stat().st_size / 1000:,.0f} kB)")
