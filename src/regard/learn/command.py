"""The command line of `learn`: the verbs learn, generate and translate."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import math
import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any

from .._io import decode, read_text
from .settings import LMSettings, Settings, TranslateSettings

__all__ = ["add"]

LEARN = """\
regard learn lm tinyshakespeare.txt --out bard/
regard learn translate train.en train.de --out ende/
regard learn lm text.txt --from gpt2/ --context 128 --out mine/
torchrun --nproc-per-node 4 -m regard learn lm tinyshakespeare.txt --out bard/
Ctrl-C saves; the same command with --resume continues, with the same result as an uninterrupted run.
A finished run is extended by --resume with more --steps. At the end, report.html shows losses, samples and heads."""


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs learn, generate and translate to a parser."""
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
    lm = kinds.add_parser("lm", help="a language model", description=_summary(LMSettings))
    lm.add_argument(
        "file",
        type=_text_file,
        metavar="FILE",
        help="the text to learn from, UTF-8; one above 32 MB is mapped from disk",
    )
    lm.add_argument(
        "--from", dest="pretrained", type=_path, metavar="DIR",
        help="fine-tune this GPT-2, a folder that transformers' save_pretrained wrote (default of --lr: 1e-4)",
    )  # fmt: skip
    _add_settings(lm, LMSettings)
    lm.set_defaults(run=_learn_lm)


def _add_translate(kinds: Any) -> None:
    pairs = kinds.add_parser("translate", help="a translator", description=_summary(TranslateSettings))
    pairs.add_argument("source", type=_text_file, metavar="EN", help="sentences to read, one a line")
    pairs.add_argument("target", type=_text_file, metavar="DE", help="their translations, line by line")
    pairs.add_argument(
        "--validation",
        nargs=2,
        type=_text_file,
        metavar=("EN", "DE"),
        help="two files for validation (default: the last pairs)",
    )
    _add_settings(pairs, TranslateSettings)
    pairs.set_defaults(run=_learn_translate)


def _summary(settings: type[Settings]) -> str:
    """The first paragraph of a docstring."""
    return (settings.__doc__ or "").partition("\n\n")[0]


def _add_settings(parser: argparse.ArgumentParser, settings: type[Settings]) -> None:
    parser.add_argument(
        "--out", required=True, type=_path, metavar="DIR", help="the folder of the run: model, checkpoints, history"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --out; with more --steps, extend it")
    for spec in dataclasses.fields(settings):
        flag, text = f"--{spec.name.replace('_', '-')}", spec.metadata["help"]
        if spec.type == "bool":
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        kind = {"int": int, "int | None": int, "float": float}.get(str(spec.type), str)
        choices = spec.metadata["choices"] or None
        if spec.default is not None:
            text += f" (default {spec.default:g})" if kind is float else f" (default {spec.default})"
        parser.add_argument(
            flag, type=kind, default=argparse.SUPPRESS, choices=choices, help=text,
            metavar=None if choices else "N" if kind is int else "X",
        )  # fmt: skip


def _path(text: str) -> str:
    """argparse type of a file or folder: rejects an empty path, as `--out "$UNSET"` gives."""
    if not text:
        raise argparse.ArgumentTypeError("a path is needed, got an empty one")
    return text


def _text_file(text: str) -> str:
    """argparse type of a text to learn from."""
    if text == "-":
        raise argparse.ArgumentTypeError("a file is needed, which --resume reads again; save the text of stdin in one")
    return _path(text)


def _overrides(args: argparse.Namespace, settings: type[Settings]) -> dict[str, Any]:
    """The settings that the command line names."""
    return {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(settings) if hasattr(args, spec.name)}


def _learn_lm(args: argparse.Namespace) -> int:
    from .training import lm

    return _train(
        args, lambda progress: lm(
            args.file, args.out, resume=args.resume, pretrained=args.pretrained, progress=progress,
            **_overrides(args, LMSettings),
        )
    )  # fmt: skip


def _learn_translate(args: argparse.Namespace) -> int:
    from .training import translate

    overrides = _overrides(args, TranslateSettings)
    validation = tuple(args.validation) if args.validation else None
    return _train(
        args, lambda progress: translate(
            args.source, args.target, args.out, validation=validation, resume=args.resume, progress=progress,
            **overrides,
        )
    )  # fmt: skip


def _train(args: argparse.Namespace, train: Any) -> int:
    from .progress import TrainingProgress, open_progress
    from .training import Diverged

    first = os.environ.get("RANK", "0") == "0"  # of the processes of torchrun: it alone reports
    progress = open_progress() if first else TrainingProgress()
    try:
        result = train(progress)
    except Diverged as error:
        progress.note(f"regard: {error}")
        return 1
    if result.finished:
        args.finished_run = result.folder if first else None
        next_verb = "generate" if hasattr(args, "file") else "translate"
        rest = '--prompt "…"' if next_verb == "generate" else '"…"'
        progress.note(
            f"{'stopped early' if result.stopped_early else 'done'} at step {result.step:,}: validation loss "
            f"{result.best:.4f}, {result.seconds:.0f} s. "
            f"Try: regard {next_verb} {shlex.quote(str(result.folder))} {rest}"
        )
        return 0
    no_model = "" if math.isfinite(result.best) else " (no model to use yet: the first validation saves one)"
    resume = _resume_command(args)
    progress.note(f"stopped at step {result.step:,} of {result.steps:,}, saved{no_model}. Continue with:\n{resume}")
    return 130


def _resume_command(args: argparse.Namespace) -> str:
    files = ["lm", args.file] if hasattr(args, "file") else ["translate", args.source, args.target]
    validation = ["--validation", *args.validation] if getattr(args, "validation", None) and len(files) == 3 else []
    return "regard " + shlex.join(["learn", *files, *validation, "--out", args.out, "--resume"])


# Using a trained model.


def _add_generate(verbs: Any) -> None:
    generate = verbs.add_parser(
        "generate", help="write text with a language model", description="Write text with a trained language model."
    )
    generate.add_argument("model", type=_path, metavar="DIR", help="a folder made by `regard learn lm`")
    generate.add_argument("--prompt", help="the beginning of the text (default: a new line)")
    generate.add_argument("--count", type=int, default=300, metavar="N", help="number of tokens (default 300)")
    generate.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0 takes the likeliest token, 1 samples the model's distribution (default 0.8)",
    )
    generate.add_argument(
        "--top", type=int, metavar="N", help="sample among the N likeliest tokens only (default: all)"
    )
    generate.add_argument("--seed", type=int, metavar="N", help="seed of the samples (default: random)")
    generate.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: a GPU if there is one (default auto)"
    )
    generate.set_defaults(run=_generate)


@contextlib.contextmanager
def _imports_that_stay() -> Iterator[None]:
    """Import without collecting garbage, now and when Python ends: PyTorch's objects are many, and all of them stay."""
    if "torch" in sys.modules:  # then the process is more than this command
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def _generate(args: argparse.Namespace) -> int:
    _require(args.count >= 1, "count", args.count, "at least 1")
    _require(args.top is None or args.top >= 1, "top", args.top, "at least 1")
    _require(0 <= args.temperature < math.inf, "temperature", args.temperature, "at least 0 and finite")
    _require(args.seed is None or abs(args.seed) < 2**63, "seed", args.seed, "smaller than 2^63")
    with _imports_that_stay():
        from .generate import sample, text_pieces
        from .parallel import choose_device, wake

        wake(device := choose_device(args.device))
        from .trained import open_model  # while the device starts

    trained = open_model(args.model, device)
    trained.require("lm")
    ids = trained.default_prompt() if args.prompt is None else trained.ids(args.prompt)
    tokens = sample(
        trained.model, ids, args.count, temperature=args.temperature, top=args.top, seed=args.seed
    )  # fmt: skip
    for text in text_pieces(trained.tokenizer, ids[0].tolist(), tokens):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _require(condition: bool, name: str, value: Any, what: str) -> None:
    if not condition:
        raise ValueError(f"--{name} must be {what}; got {value}.")


def _add_translation(verbs: Any) -> None:
    translate = verbs.add_parser(
        "translate",
        help="translate with a trained model",
        description="Translate sentences, or the lines of stdin, with a trained model.",
    )
    translate.add_argument("model", type=_path, metavar="DIR", help="a folder made by `regard learn translate`")
    translate.add_argument(
        "text", nargs="*", metavar="TEXT", help="sentences (default: the lines of --file, or of stdin)"
    )
    translate.add_argument("--file", type=_path, metavar="EN", help="translate the lines of a file")
    translate.add_argument(
        "--reference", type=_path, metavar="DE", help="reference translations of --file: report BLEU on stderr"
    )
    translate.add_argument("--beam", type=int, default=5, metavar="N", help="hypotheses of the beam search (default 5)")
    translate.add_argument(
        "--penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="rank by log p / length^X: a larger X favours longer sentences (default 1)",
    )
    translate.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: a GPU if there is one (default auto)"
    )
    translate.set_defaults(run=_translate, more="text")


def _translate(args: argparse.Namespace) -> int:
    with _imports_that_stay():
        from .generate import Beam, bleu
        from .parallel import choose_device, wake
        from .tokenizer import lines_of

        wake(device := choose_device(args.device))
        from .trained import open_model  # while the device starts

    trained = open_model(args.model, device)
    trained.require("translate")
    if args.text and args.file:
        raise ValueError("pass sentences or --file, not both.")
    if args.reference and not args.file:
        raise ValueError("--reference goes with --file: line by line.")
    lines = args.text or lines_of(read_text(args.file, "a text to translate") if args.file else _read_stdin())
    references = lines_of(read_text(args.reference, "a translation")) if args.reference else lines
    if len(references) != len(lines):  # before the work, not after it
        raise ValueError(
            f"{args.file} has {len(lines)} lines and {args.reference} has {len(references)}: one each is needed."
        )
    written = trained.translate_all(lines, Beam(args.beam, args.penalty))
    for line in written:
        print(line)
    if args.reference:
        scores = bleu(written, references)
        print(
            f"BLEU {scores['cased']:.2f}, lower-cased {scores['lower']:.2f} ({scores['cased_signature']})",
            file=sys.stderr,
        )
    return 0


def _read_stdin() -> str:
    return decode(sys.stdin.buffer.read(), "stdin")
