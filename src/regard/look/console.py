"""The console of the command line: printing in any encoding, colours that a terminal can show, progress on stderr."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator

from .token_text import cell_width, printable

__all__ = [
    "colours",
    "command_hint",
    "file_errors",
    "print_result",
    "print_status",
    "progress",
    "shell_quote",
    "terminal_width",
]

#: Letters of a text that a hint repeats, at most.
HINT_LETTERS = 120
_COLOURS = {"standard": "standard", "256": "256", "truecolor": "truecolor", "windows": "standard"}
#: Replacements for terminals whose encoding lacks these letters.
_ASCII = str.maketrans(
    {**dict.fromkeys("█▉▊▋▌▇▆▅▄", "#"), **dict.fromkeys("▍▎▏▃▂▁·…", "."), "×": "x", "→": ">", "−": "-"}
    | {**dict.fromkeys("“”", '"'), "»": ">", "«": "<", "÷": "/", "√": "sqrt "}
)


def terminal_width() -> int:
    """Columns to print in, 120 at most."""
    return min(shutil.get_terminal_size((80, 24)).columns, 120)


def colours(wanted: str) -> bool | str:
    """The colours to print in: none into a pipe or where NO_COLOR is set, else those of the terminal.

    Args:
        wanted: "auto", "always" or "never", as --color takes it.
    """
    if wanted == "never":
        return False
    if wanted == "auto" and (not sys.stdout.isatty() or os.environ.get("NO_COLOR")):
        return False
    try:
        from rich.console import Console
    except ImportError:
        return wanted == "always"  # `render` then says what to install
    system = Console(force_terminal=True, file=sys.stdout).color_system
    return _COLOURS.get(system or "", "truecolor" if wanted == "always" else False)


def print_result(text: str) -> None:
    """Print to stdout, with ASCII for bars and arrows where its encoding lacks them."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding)
    print(text)


def print_status(text: str) -> None:
    """Print to stderr what is no part of the result: files that were written, links, the end of a server."""
    with contextlib.suppress(UnicodeEncodeError):
        print(text, file=sys.stderr)


@contextlib.contextmanager
def progress(task: str) -> Iterator[Callable[[str, float], None]]:
    """Show a spinner on stderr while a block runs, if stderr is a terminal.

    Yields:
        A function of a step and the share of it that is done, which are shown beside the task.
    """
    if not sys.stderr.isatty():
        yield lambda step, done: None
        return
    try:
        from rich.console import Console
    except ImportError:
        print_status(f"{task} …")
        yield lambda step, done: None
        return
    with Console(stderr=True).status(f"{task} …") as status:
        yield lambda step, done: status.update(f"{task}: {step}, {done:.0%} …")


@contextlib.contextmanager
def file_errors(path: str) -> Iterator[None]:
    """Put the name of the file into the errors of the system."""
    try:
        yield
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(f"{printable(path)}: {error.strerror.lower()}.") from error


def command_hint(what: str, *command: str) -> str:
    """A command to type next; one that is too long for the terminal is broken between its arguments only.

    The lines end in a backslash, so that they can be pasted as they are.
    """
    line = " ".join([what, *command])
    if cell_width(line) <= terminal_width():
        return line
    lines, used = [f"{what}\n  {command[0]}"], cell_width(command[0]) + 2
    for part in command[1:]:
        used += cell_width(part) + 1
        if used > terminal_width() - 2:
            lines.append(part)
            used = cell_width(part) + 4
        else:
            lines[-1] += f" {part}"
    return " \\\n    ".join(lines)


def shell_quote(text: str) -> str:
    """A text as one types it in a shell."""
    readable = "'" in text and not set(text) & set('"$`\\!')
    return printable(f'"{text}"' if readable else shlex.quote(text), 4 * HINT_LETTERS)
