"""The verb `corpus` of the command line. Modules that need torch are imported when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import CorpusProgress

EXAMPLES = """\
Statistics of every head over a text file with one document a line, and their atlas:
  regard corpus all-MiniLM-L6-v2 corpus.txt --out run/
  regard look run/ --out atlas.html

A folder of .txt files, or texts in JSON; positions alone, no text in the result:
  regard corpus gpt2 books/ --out run/ --length 512
  regard corpus gpt2 corpus.jsonl --field content --out run/ --redact

Over 4 processes, with the same numbers:
  torchrun --nproc-per-node 4 -m regard corpus gpt2 corpus.txt --out run/

An interrupted run continues when the same command is given again."""


def add(verbs: Any) -> None:
    """Add the verb to the command line.

    Args:
        verbs: What `argparse.ArgumentParser.add_subparsers` returns.
    """
    verb: argparse.ArgumentParser = verbs.add_parser(
        "corpus",
        help="statistics of every head over many documents",
        description="Statistics of every head over many documents: exact, resumable, over any number of processes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument(
        "model", metavar="MODEL", help="regard-small, a name of the Hugging Face hub, or a folder, also of regard learn"
    )
    verb.add_argument(
        "data", metavar="DATA", help="a text file (one document a line), a .jsonl file, or a folder of .txt"
    )
    verb.add_argument("--out", metavar="FOLDER", required=True, help="the folder of the run; begun runs continue")
    verb.add_argument("--field", default="text", metavar="NAME", help="the field of a .jsonl object with its text")
    verb.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="tokens of a sequence, at most those the model takes; longer documents are cut",
    )
    verb.add_argument("--batch", type=int, default=8, metavar="N", help="sequences that run together (default 8)")
    verb.add_argument("--examples", type=int, default=8, metavar="N", help="examples stored of every head (default 8)")
    verb.add_argument("--redact", action="store_true", help="store positions alone, no text of the documents")
    verb.add_argument("--device", metavar="NAME", help="where the model runs (default: a GPU, if there is one)")
    verb.add_argument("--json", action="store_true", help="print all numbers for machines")
    verb.set_defaults(run=run_corpus)


def run_corpus(args: argparse.Namespace) -> int:
    """Run a model over a corpus and print the heads. Returns the exit code."""
    from .run import corpus

    first = os.environ.get("RANK", "0") == "0"
    try:
        result = corpus(
            args.model, args.data, args.out, field=args.field, length=args.length, batch=args.batch,
            examples=args.examples, redact=args.redact, device=args.device, progress=_show if first else None,
        )  # fmt: skip
    except KeyboardInterrupt:
        print(f"\nstopped; the same command continues from the parts in {args.out}", file=sys.stderr)
        raise
    if first:
        if sys.stderr.isatty():
            print(file=sys.stderr)
        if args.json:
            print(result.json())
            return 0
        print(result)
        print(f"\nNext, the atlas: regard look {args.out} --out atlas.html")
    return 0


def _show(progress: CorpusProgress) -> None:
    """One line on stderr, rewritten on a terminal; elsewhere one line for every tenth of the run."""
    rate = progress.tokens / max(progress.seconds, 1e-9)
    line = f"{progress.done:,} of {progress.chunks:,} parts, {progress.tokens:,} tokens, {rate:,.0f} tokens/s"
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    elif progress.done == progress.chunks or progress.done % max(1, progress.chunks // 10) == 0:
        print(line, file=sys.stderr, flush=True)
