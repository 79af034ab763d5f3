"""The command line: `regard look`, `walk`, `learn`, `generate`, `translate`. Each room brings its own verbs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

#: Rooms with verbs. Each has `add(verbs)`: one parser a verb, with `set_defaults(run=…)`, run(arguments) → exit code.
ROOMS = ("regard.look.command", "regard.learn.command")

TEACH = """\
Which words does "it" look at?
  regard look "The animal didn't cross the street because it was too tired" --word it

How does that come about, number by number?
  regard walk "the cat sat" --word cat

Train a small model and look inside:
  regard learn lm text.txt --out bard/
  regard look "To be" --model bard/

Every verb explains itself: regard look --help
Exit codes: 0 done, 1 failed, 2 a mistake in what was asked, 130 interrupted."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other mistake is told. A verb of many words names them `more`."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; {self.prog} --help tells more")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Notes which verb was meant: the innermost parser is the first to come back."""
        asked, left = super().parse_known_args(args, namespace)
        asked.verb = getattr(asked, "verb", self)
        return asked, left

    def parsed(self, arguments: Sequence[str]) -> argparse.Namespace:
        """All arguments. Texts may stand after options, too: argparse takes such only where they stand together."""
        asked, left = self.parse_known_args(arguments)
        if left and hasattr(asked, "more") and not any(word.startswith("-") for word in left):
            getattr(asked, asked.more).extend(left)
        elif left:
            asked.verb.error(f"unrecognized arguments: {' '.join(left)}")
        return asked


class Notes(logging.Handler):
    """What the library says of its work, to whoever waits at a terminal; a bar may stand in for stderr by then."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr.isatty():
            print(f"regard: {record.getMessage()}", file=sys.stderr)


def parser() -> Parser:
    from . import __version__

    top = Parser(
        prog="regard",
        description="See what attention attends to.",
        epilog=TEACH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"regard {__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True)
    for room in ROOMS:
        import_module(room).add(verbs)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. A user's mistake is one line on stderr and exit code 2, never a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    log = logging.getLogger("regard")
    if not any(isinstance(handler, Notes) for handler in log.handlers):
        log.addHandler(Notes())
        log.setLevel(logging.INFO)
    try:
        asked = parser().parsed(arguments or ["--help"])
        done = int(asked.run(asked) or 0)
        sys.stdout.flush()  # a reader that has gone shows here, not when Python ends
        return done
    except SystemExit as end:  # --help and --version have said what they had to say
        return int(end.code or 0)
    except KeyboardInterrupt:
        print("\nregard: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `regard look … | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, LookupError, OSError, ImportError, MemoryError, RuntimeError, TypeError) as wrong:
        if os.environ.get("REGARD_TRACEBACK"):
            raise
        # The last two are how torch reports a wrong size; they may as well be a fault of ours.
        more = " (REGARD_TRACEBACK=1 tells where)" if isinstance(wrong, RuntimeError | TypeError) else ""
        print(f"regard: {_one_line(wrong)}{more}", file=sys.stderr)
        return 2


def _one_line(wrong: BaseException) -> str:
    text = str(wrong.args[0]) if isinstance(wrong, KeyError) and wrong.args else str(wrong)
    return " ".join(text.split()) or type(wrong).__name__


if __name__ == "__main__":
    sys.exit(main())
