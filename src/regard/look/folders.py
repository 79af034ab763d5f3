"""Folders that `regard look` opens, told apart by what they hold."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from .console import file_errors, print_result, print_status, progress
from .token_text import printable

__all__ = ["look_at_folder"]


def look_at_folder(args: argparse.Namespace) -> int | None:
    """Show a folder, if the argument names one that can be shown. Returns the exit code; None: it is something else."""
    path = Path(args.text)
    try:
        if not path.is_dir():
            return None
    except (OSError, ValueError):  # too long for a name, or a null byte: a text
        return None
    for is_one, show in _KINDS:
        if is_one(path):
            return show(args, path)
    return None


def _is_corpus(path: Path) -> bool:
    from ..corpora.folder import is_corpus

    return is_corpus(path)


def _show_corpus(args: argparse.Namespace, path: Path) -> int:
    """Print the heads of a corpus run, or write its atlas."""
    from ..corpora.result import load_corpus

    for option in ("word", "target", "model", "save", "layer", "head"):
        if getattr(args, option) is not None:
            raise ValueError(f"{printable(args.text)} is a corpus run: leave out --{option}; --out writes its atlas.")
    if args.out is not None and Path(args.out).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"the atlas of a corpus is a page: --out must end in .html; got {printable(args.out)!r}.")
    if args.out is not None and args.json:
        raise ValueError("--json prints the numbers of a corpus run and --out writes its atlas: leave one of them out.")
    corpus = load_corpus(path)
    if args.out is None:
        print_result(corpus.json() if args.json else repr(corpus))
        return 0
    with progress(f"writing {printable(args.out)}"), file_errors(args.out):
        corpus.save(args.out)
    print_status(f"written to {printable(args.out)} ({Path(args.out).stat().st_size / 1000:,.0f} kB)")
    return 0


def _is_run(path: Path) -> bool:
    from ..learn import checkpoint

    return checkpoint.is_checkpoint(path) and (path / checkpoint.HISTORY).exists()


def _show_run(args: argparse.Namespace, path: Path) -> int:
    """Print the heads of a training run over its steps, or write its page."""
    from ..learn import checkpoint
    from ..learn.patterns import read_patterns
    from .console import colours, terminal_width
    from .run_report import run_numbers
    from .terminal import draw
    from .view import View

    for option in ("word", "target", "model", "save", "layer", "head"):
        if getattr(args, option) is not None:
            name = printable(args.text)
            raise ValueError(
                f"{name} is a training run: leave out --{option}. To look at a text with its model: regard look TEXT "
                f"--model {name}"
            )
    if args.json:
        name, history = printable(args.text), printable(str(path / checkpoint.HISTORY))
        raise ValueError(f"{name} is a training run: leave out --json; its numbers are JSON in {history}.")
    numbers = run_numbers(checkpoint.read_history(path))
    if args.out is None:
        print_result(draw(numbers, width=terminal_width(), colour=colours(args.color)))
        return 0
    with file_errors(args.out):
        View(numbers, title=f"Training of {path.resolve().name}", patterns=read_patterns(path)).save(args.out)
    print_status(f"written to {printable(args.out)} ({Path(args.out).stat().st_size / 1000:,.0f} kB)")
    return 0


#: Kinds of folders: a test for each, and the function that shows it. A folder of another kind gets a line here.
_KINDS: tuple[tuple[Callable[[Path], bool], Callable[[argparse.Namespace, Path], int]], ...] = (
    (_is_corpus, _show_corpus),
    (_is_run, _show_run),
)
