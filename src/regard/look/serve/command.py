"""The verb `serve` of the command line: the page of a recording, a saved page or a model, on loopback."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import HINT_LETTERS, file_errors, print_result, print_status, progress, shell_quote
from ..token_text import printable

if TYPE_CHECKING:
    from ..loading import LoadedModel
    from ..view import View
    from .server import PageServer

SERVE = """\
A recording of any length: the map asks for its tiles, down to single weights.
  regard serve run.regard

Your own sentences on a model, a folder or a name; without one it is the bundled all-MiniLM-L6-v2:
  regard serve
  regard serve gpt2 --text "To be, or not to be"

A page that was saved before:
  regard serve page.html

It listens on this machine alone, reads and never writes, and logs nothing. Ctrl-C ends it."""

#: The sentence that a model is shown with until one is typed.
SENTENCE = "The animal didn't cross the street because it was too tired"


def add(verbs: Any) -> None:
    """Add the verb to the command line.

    Args:
        verbs: What `argparse.ArgumentParser.add_subparsers` returns.
    """
    verb: argparse.ArgumentParser = verbs.add_parser(
        "serve",
        help="the page on this machine: long texts, and sentences that you type",
        description="The page on this machine: long texts, and sentences that you type.",
        epilog=SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument(
        "source", nargs="?", metavar="SOURCE", help="a .regard recording, a saved page (.html), or a model"
    )
    verb.add_argument("--text", help="the first sentence, for a model")
    verb.add_argument(
        "--port", type=int, default=0, metavar="N", help="the port on 127.0.0.1; else a free one is taken"
    )
    verb.add_argument("--device", metavar="NAME", help="where tiles are computed; else on the GPU, if there is one")
    verb.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Returns the exit code."""
    _check_arguments(args)
    with _open_server(args) as server:
        try:
            print_result(f"{server.guard.link}\nOpen this link; it works once. Ctrl-C ends the server.")
            server.serve_forever()
        except KeyboardInterrupt:
            print_status("\nstopped")
    if server.is_computing():
        # A thread that comes back from PyTorch while Python exits is ended inside C++, which aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port takes a number below 65536, got {args.port}.")
    if args.text is not None and not args.text.strip():
        raise ValueError("--text takes a sentence, got an empty one.")
    if args.text is not None and _is_file(args.source):
        raise ValueError("--text is for a model: a recording or a page has its text already.")


def _is_file(source: str | None) -> bool:
    return source is not None and Path(source).suffix.lower() in (".regard", ".html", ".htm")


def _open_server(args: argparse.Namespace) -> PageServer:
    import torch

    from .server import PageServer

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device:
        torch.empty(0, device=device)  # raises now for an unknown one
    with _port_errors(args.port):  # now, and not once a large model is loaded
        socket.create_server(("127.0.0.1", args.port)).close()
    first, look_at = _open_source(args)
    with _port_errors(args.port):
        return PageServer(first, port=args.port, device=device, look_at=look_at, on_entry=_print_link)


def _print_link(link: str) -> None:
    print_status(f"opened. The next link: {link}")


def _open_source(
    args: argparse.Namespace,
) -> tuple[str | Callable[[], View], Callable[[str, str | None], View] | None]:
    """The source of the first view, and the function that looks at a typed sentence; None without a model."""
    from ..view import View

    if not _is_file(args.source):
        from ..loading import as_loaded

        with progress("opening the model"):
            model = as_loaded(args.source)
        text = SENTENCE if args.text is None else args.text
        return lambda: look_at_text(model, args.source, text), lambda typed, decoder: look_at_text(
            model, args.source, typed, decoder
        )
    path = Path(args.source)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {printable(args.source)}.")
    if path.suffix.lower() != ".regard":
        from ..page.html import served_policy

        with file_errors(args.source):
            page = path.read_text(encoding="utf-8", errors="replace")
        served_policy(page)  # raises for a page that regard did not write
        return page, None
    from ...recorder import load

    with file_errors(args.source), progress("reading the recording"):
        recording = load(path)
    command = f"regard look {shell_quote(args.source)}"
    return lambda: View(recording, model=path.name, command=command), None


def look_at_text(model: LoadedModel, name: str | None, text: str, decoder_text: str | None = None) -> View:
    """Run a model on a text; the view of what was recorded. The text is neither written nor logged.

    Args:
        model: The model.
        name: How the command line names it.
        text: The text; of one that is too long the beginning is taken.
        decoder_text: For encoder–decoder models, what the decoder reads.
    """
    from ..command_input import cut_note
    from ..view import View
    from ..word_vectors import word_vectors

    recording = model.look_at(text, decoder_text=decoder_text, cut=True)
    left, total = model.cut_length(text)
    vectors = None
    with contextlib.suppress(ValueError):
        vectors = word_vectors(text, model, cut=True)
    line = " ".join(text.split())
    command = f"regard look {shell_quote(line[:HINT_LETTERS])}"
    return View(
        recording,
        title=line if len(line) <= HINT_LETTERS else f"{line[:HINT_LETTERS]}…",
        model=Path(model.name).name,
        command=command + (f" --model {shell_quote(name)}" if name else ""),
        word_vectors=vectors,
        notes=cut_note((left, total) if left < total else None),
    )


@contextlib.contextmanager
def _port_errors(port: int) -> Any:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"--port {port} cannot be taken: {(error.strerror or 'refused').lower()}; leave it out."
        ) from error
