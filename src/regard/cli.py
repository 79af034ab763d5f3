"""The command line: `regard look`, `serve`, `walk`, `learn`, `generate`, `translate`, `corpus`."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from ._options import nearest

#: Modules with verbs. `add(verbs)` adds a parser for every verb, with `set_defaults(run=…)`: run(args) → exit code.
VERB_MODULES = (
    "regard.look.command",
    "regard.look.serve.command",
    "regard.learn.command",
    "regard.corpora.command",
)

TEACH = """\
Which words does "it" look at?
  regard look "The animal didn't cross the street because it was too tired" --word it

Your own sentences in a browser, and texts of any length:
  regard serve

How does that come about, number by number?
  regard walk "the cat sat" --word cat

Train a small model and look inside:
  regard learn lm text.txt --out bard/
  regard look "To be" --model bard/

Every verb explains itself: regard look --help
Exit codes: 0 done, 1 failed, 2 a mistake in the arguments, 130 interrupted."""


class Parser(argparse.ArgumentParser):
    """A parser that reports mistakes in one line, as all other mistakes are.

    A verb whose last argument takes many texts names that argument with `set_defaults(more=…)`.
    """

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, and note the parser of the verb: the innermost one returns first."""
        parsed, rest = super().parse_known_args(args, namespace)
        parsed.verb = getattr(parsed, "verb", self)
        return parsed, rest

    def parse_all(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all arguments. Texts may follow options, too: argparse alone takes them only side by side."""
        args, rest = self.parse_known_args(arguments)
        if rest and hasattr(args, "more") and not any(word.startswith("-") for word in rest):
            getattr(args, args.more).extend(rest)
        elif rest:
            args.verb.error(f"unrecognized arguments: {' '.join(rest)}{_nearest_flag(args.verb, rest)}")
        return args


def _nearest_flag(verb: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """The flag that is meant by the first of these words that begins with two dashes."""
    unknown = next((word.partition("=")[0] for word in words if word.startswith("--")), None)
    near = None if unknown is None else nearest(unknown, re.findall(r"--[\w-]+", verb.format_help()))
    return "" if near is None else f" (did you mean {near}?)"


class StderrHandler(logging.Handler):
    """Log messages for a user at a terminal. sys.stderr is looked up late, since a progress bar may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr.isatty():
            print(f"regard: {record.getMessage()}", file=sys.stderr)


def parser() -> Parser:
    """The parser of the command line, with all verbs."""
    from . import __version__

    top = Parser(
        prog="regard",
        description="See what attention attends to.",
        epilog=TEACH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"regard {__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True)
    for module in VERB_MODULES:
        import_module(module).add(verbs)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on stderr and exit code 2, never a traceback.

    Args:
        arguments: The arguments after `regard`. Default: those of the process.

    Returns:
        The exit code.

    Example:
        >>> main(["--version"])  # doctest: +ELLIPSIS
        regard ...
        0
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    _open_closed_streams()
    log = logging.getLogger("regard")
    if not any(isinstance(handler, StderrHandler) for handler in log.handlers):
        log.addHandler(StderrHandler())
        log.setLevel(logging.INFO)
    try:
        args = parser().parse_all(arguments or ["--help"])
        code = int(args.run(args) or 0)
        if (run := getattr(args, "finished_run", None)) is not None:  # learn and look do not know each other
            page = import_module("regard.look.run_report").write_report(run)
            print(f"report: {page}", file=sys.stderr)
        sys.stdout.flush()  # raises BrokenPipeError here, not when Python exits
        return code
    except SystemExit as end:  # after --help and --version
        return int(end.code or 0)
    except KeyboardInterrupt:
        print("\nregard: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe: `regard look … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, LookupError, OSError, ImportError, MemoryError, RuntimeError, TypeError) as error:
        if os.environ.get("REGARD_TRACEBACK"):
            raise
        # torch reports wrong sizes by these two, but they may also be a bug of regard.
        hint = " (REGARD_TRACEBACK=1 shows where)" if isinstance(error, RuntimeError | TypeError) else ""
        print(f"regard: {_one_line(error)}{hint}", file=sys.stderr)
        return 2


def _open_closed_streams() -> None:
    """Let a process with closed streams (`regard look … >&-`) print to nowhere: Python has None there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open until the process ends


def _one_line(error: BaseException) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
