"""The verbs of this room on the command line: learn, generate, translate. Imports the other rooms when they run."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import sys
from typing import Any

from .settings import LMSettings, Settings, TranslateSettings

__all__ = ["add"]

LEARN = """\
regard learn lm tinyshakespeare.txt --out bard/
regard learn translate train.en train.de --out ende/
Ctrl-C saves; the same command with --resume goes on, with the same result as if nothing had happened."""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this room's verbs."""
    raw = argparse.RawDescriptionHelpFormatter
    learn = verbs.add_parser(
        "learn", help="train a small model", description="Train a small model.", epilog=LEARN, formatter_class=raw
    )
    kinds = learn.add_subparsers(title="kinds", metavar="KIND", required=True)
    _add_lm(kinds)
    _add_translate(kinds)
    _add_generate(verbs)
    _add_translation(verbs)


def _add_lm(kinds: Any) -> None:
    lm = kinds.add_parser("lm", help="a language model", description=LMSettings.__doc__)
    lm.add_argument("file", metavar="FILE", help="the text to learn from, UTF-8")
    _add_settings(lm, LMSettings)
    lm.set_defaults(run=_learn_lm)


def _add_translate(kinds: Any) -> None:
    pairs = kinds.add_parser("translate", help="a translator", description=TranslateSettings.__doc__)
    pairs.add_argument("source", metavar="EN", help="sentences to read, one a line")
    pairs.add_argument("target", metavar="DE", help="their translations, line by line")
    pairs.add_argument(
        "--validation", nargs=2, metavar=("EN", "DE"), help="two files for validation; not given: the last pairs"
    )
    _add_settings(pairs, TranslateSettings)
    pairs.set_defaults(run=_learn_translate)


def _add_settings(parser: argparse.ArgumentParser, among: type[Settings]) -> None:
    parser.add_argument(
        "--out", required=True, type=_named, metavar="DIR", help="the folder of the run: model, checkpoints, history"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    for one in dataclasses.fields(among):
        flag, told = f"--{one.name.replace('_', '-')}", one.metadata["told"]
        if one.type == "bool":
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=told)
            continue
        kind = {"int": int, "int | None": int, "float": float}.get(str(one.type), str)
        among_these = one.metadata["among"] or None
        shown = (
            ""
            if one.default is None
            else f" (default {one.default:g})"
            if kind is float
            else f" (default {one.default})"
        )
        parser.add_argument(
            flag, type=kind, default=argparse.SUPPRESS, choices=among_these, help=told + shown,
            metavar=None if among_these else "N" if kind is int else "X",
        )  # fmt: skip


def _named(text: str) -> str:
    """A file or folder on the command line: `--out "$UNSET"` is no wish for the folder one stands in."""
    if not text:
        raise argparse.ArgumentTypeError("a name is needed, and nothing came")
    return text


def _given(asked: argparse.Namespace, among: type[Settings]) -> dict[str, Any]:
    return {one.name: getattr(asked, one.name) for one in dataclasses.fields(among) if hasattr(asked, one.name)}


def _learn_lm(asked: argparse.Namespace) -> int:
    from .training import lm

    return _learned(
        asked, lambda progress: lm(
            asked.file, asked.out, resume=asked.resume, progress=progress, **_given(asked, LMSettings)
        )
    )  # fmt: skip


def _learn_translate(asked: argparse.Namespace) -> int:
    from .training import translate

    given = _given(asked, TranslateSettings)
    held = tuple(asked.validation) if asked.validation else None
    return _learned(
        asked, lambda progress: translate(
            asked.source, asked.target, asked.out, held=held, resume=asked.resume, progress=progress, **given
        )
    )  # fmt: skip


def _learned(asked: argparse.Namespace, train: Any) -> int:
    from .progress import open_progress
    from .training import Diverged

    progress = open_progress()
    try:
        result = train(progress)
    except Diverged as wrong:
        progress.note(f"regard: {wrong}")
        return 1
    if result.finished:
        next_verb = "generate" if hasattr(asked, "file") else "translate"
        rest = '--prompt "…"' if next_verb == "generate" else '"…"'
        progress.note(
            f"done: validation loss {result.best:.4f}, {result.seconds:.0f} s. "
            f"Try: regard {next_verb} {result.folder} {rest}"
        )
        return 0
    none = "" if math.isfinite(result.best) else " (no model to use yet: the first validation keeps one)"
    progress.note(f"stopped at step {result.step:,} of {result.steps:,}, saved{none}. Go on with:\n{_again(asked)}")
    return 130


def _again(asked: argparse.Namespace) -> str:
    files = ["lm", asked.file] if hasattr(asked, "file") else ["translate", asked.source, asked.target]
    held = ["--validation", *asked.validation] if getattr(asked, "validation", None) and len(files) == 3 else []
    return "regard " + shlex.join(["learn", *files, *held, "--out", asked.out, "--resume"])


# Using what was trained.


def _add_generate(verbs: Any) -> None:
    generate = verbs.add_parser(
        "generate", help="write with a language model", description="Write with a trained language model."
    )
    generate.add_argument("model", metavar="DIR", help="a folder made by `regard learn lm`")
    generate.add_argument("--prompt", help="what to go on from (default: a new line)")
    generate.add_argument("--count", type=int, default=300, metavar="N", help="tokens to write (default 300)")
    generate.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0 takes the likeliest token, 1 draws as the model says (default 0.8)",
    )
    generate.add_argument("--top", type=int, metavar="N", help="draw among the N likeliest tokens only (default: all)")
    generate.add_argument("--seed", type=int, metavar="N", help="the same seed writes the same text (default: chance)")
    generate.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="where it runs (default auto)"
    )
    generate.set_defaults(run=_generate)


def _generate(asked: argparse.Namespace) -> int:
    from .checkpoint import open_model
    from .generate import sample
    from .training import chosen_device

    _need(asked.count >= 1, "count", asked.count, "at least 1")
    _need(asked.top is None or asked.top >= 1, "top", asked.top, "at least 1")
    _need(0 <= asked.temperature < math.inf, "temperature", asked.temperature, "at least 0 and finite")
    _need(asked.seed is None or abs(asked.seed) < 2**63, "seed", asked.seed, "smaller than 2^63")
    trained = open_model(asked.model, chosen_device(asked.device))
    trained.need("lm")
    ids = trained.beginning() if asked.prompt is None else trained.ids(asked.prompt)
    recent = ids[0].tolist()
    sys.stdout.write(trained.tokenizer.decode(recent))
    tokens = sample(
        trained.model,
        ids,
        asked.count,
        temperature=asked.temperature,
        top=asked.top,
        seed=asked.seed,
    )
    for number in tokens:
        # What a token adds depends on its neighbours, but not on all of the text.
        recent = recent[-32:]
        before, text = (trained.tokenizer.decode(part) for part in (recent, [*recent, number]))
        sys.stdout.write(text[len(before) :])
        sys.stdout.flush()
        recent.append(number)
    sys.stdout.write("\n")
    return 0


def _need(holds: bool, name: str, came: Any, what: str) -> None:
    if not holds:
        raise ValueError(f"--{name} must be {what}; {came} came.")


def _add_translation(verbs: Any) -> None:
    translate = verbs.add_parser(
        "translate",
        help="translate with a trained model",
        description="Translate with a trained model; lines of stdin where no text is given.",
    )
    translate.add_argument("model", metavar="DIR", help="a folder made by `regard learn translate`")
    translate.add_argument("text", nargs="*", metavar="TEXT", help="sentences; none: the lines of --file, or of stdin")
    translate.add_argument("--file", type=_named, metavar="EN", help="translate the lines of a file")
    translate.add_argument(
        "--reference", type=_named, metavar="DE", help="its translations by people: report BLEU on stderr"
    )
    translate.add_argument("--beam", type=int, default=5, metavar="N", help="beginnings kept in the search (default 5)")
    translate.add_argument(
        "--penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="judge by log p / length^X: more makes longer sentences (default 1)",
    )
    translate.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="where it runs (default auto)"
    )
    translate.set_defaults(run=_translate, more="text")


def _translate(asked: argparse.Namespace) -> int:
    from .checkpoint import open_model
    from .generate import Beam, bleu
    from .tokenizer import lines_of, read
    from .training import chosen_device

    trained = open_model(asked.model, chosen_device(asked.device))
    trained.need("translate")
    if asked.text and asked.file:
        raise ValueError("give sentences or --file, not both.")
    if asked.reference and not asked.file:
        raise ValueError("--reference goes with --file: line by line.")
    lines = asked.text or lines_of(read(asked.file, "a text to translate") if asked.file else _from_stdin())
    wanted = lines_of(read(asked.reference, "a translation")) if asked.reference else lines
    if len(wanted) != len(lines):  # before the work, not after it
        raise ValueError(
            f"{asked.file} has {len(lines)} lines and {asked.reference} has {len(wanted)}: one each is needed."
        )
    written = trained.translate_all(lines, Beam(asked.beam, asked.penalty))
    for line in written:
        print(line)
    if asked.reference:
        scores = bleu(written, wanted)
        print(
            f"BLEU {scores['cased']:.2f}, lower-cased {scores['lower']:.2f} ({scores['cased_signature']})",
            file=sys.stderr,
        )
    return 0


def _from_stdin() -> str:
    from .tokenizer import decoded

    return decoded(sys.stdin.buffer.read(), "stdin")
