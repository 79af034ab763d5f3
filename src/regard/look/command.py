"""The verbs `look` and `walk` of the command line.

Arguments are checked before a model is opened, so that a mistake is reported at once. Modules that need torch are
imported when a verb runs: `regard --help` answers without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import compare_command
from .command_input import Input, cut_note, cut_of, read_input, text_of
from .console import (
    HINT_LETTERS,
    colours,
    command_hint,
    file_errors,
    print_result,
    print_status,
    progress,
    shell_quote,
    terminal_width,
)
from .folders import look_at_folder
from .token_text import is_special, name_of, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .options import ViewOptions
    from .spotlight import HeadTie, Overview, Spotlight
    from .walk import Walk
    from .word_vectors import WordVectors

LOOK = """\
Which words does "it" look at? Which the first of two "the"? Which heads tie "it" to "animal"?
  regard look "The animal didn't cross the street because it was too tired" --word it
  regard look "The animal didn't cross the street because it was too tired" --word the:1
  regard look "The animal didn't cross the street because it was too tired" --word it --target animal

Two inputs, two recordings, or one text in two models, side by side:
  regard look "it was too tired" "it was too wide" --word it
  regard look before.regard after.regard --out change.html
  regard look "the cat sat" --model gpt2 --against distilgpt2 --nearest

Any transformers model, a folder or a name; a text from a file:
  regard look chapter.txt --model gpt2 --cut

A page that opens anywhere, a picture for a paper, a recording to look at again:
  regard look "the cat sat" --out page.html
  regard look "the cat sat" --word cat --out cat.svg
  regard look "the cat sat" --save run.regard
  regard look run.regard --word cat

The atlas of a corpus run, as regard corpus leaves it:
  regard look run/ --out atlas.html

Without --model it is all-MiniLM-L6-v2 where installed, else regard-small; both offline.
Without --word an overview is shown."""

WALK = """\
In the head that ties the word to another one most, or in one that is named:
  regard walk "the cat sat" --word cat
  regard walk "the cat sat" --word cat --layer 0 --head 2

On word embeddings alone, nothing trained in between; then with W_q and W_k; then with W_v too:
  regard walk "the cat sat" --word cat --basic
  regard walk "the cat sat" --word cat --with q,k
  regard walk "the cat sat" --word cat --with q,k,v

The steps: 1 query, keys and values, 2 q·k with every word, 3 scaled (then masked, where there is a mask), 4 softmax,
5 weight × value, 6 their sum."""

_SUFFIXES = {"out": (".html", ".htm", ".svg", ".pdf", ".png"), "save": (".regard",)}


def add(verbs: Any) -> None:
    """Add the verbs to the command line.

    Args:
        verbs: What `argparse.ArgumentParser.add_subparsers` returns.
    """
    look = _add_verb(verbs, "look", "See which words a word looks at.", LOOK)
    compare_command.add_arguments(look)
    look.add_argument("--target", metavar="WORD", help="with --word: rank the heads by the weight on this word")
    look.add_argument("--out", metavar="FILE", help="write a page (.html) or a picture (.svg, .pdf, .png) instead")
    look.add_argument("--save", metavar="FILE", help="save the recording as a .regard file")
    look.add_argument("--no-special", action="store_true", help="hide [CLS], </s> …; the other weights are scaled up")
    look.add_argument("--merge", action="store_true", help="merge the tokens of a word")
    look.set_defaults(run=run_look)
    walk = _add_verb(verbs, "walk", "Attention for one word, step by step, in numbers.", WALK)
    walk.add_argument("--basic", action="store_true", help="on word embeddings: x·x, without W_q, W_k, W_v")
    walk.add_argument("--with", dest="projections", metavar="q,k,v", help="on word embeddings with these switched on")
    walk.set_defaults(run=run_walk)


def _add_verb(verbs: Any, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary[:1].lower() + summary[1:-1],
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("text", help="a sentence, a text file, a .regard recording, or - for what is piped in")
    verb.add_argument("--word", help='the word to light: it, "the:1" for the first of several, 7 for a position')
    verb.add_argument(
        "--model", metavar="NAME", help="a folder, a name of the Hugging Face hub, or one of regard learn"
    )
    verb.add_argument(
        "--decoder-text", metavar="TEXT", help="encoder–decoder models: what the decoder reads; else it writes its own"
    )
    verb.add_argument("--layer", type=_layer, metavar="N", help="only this layer, counted from 0; or its name")
    verb.add_argument("--head", type=int, metavar="N", help="only this head, counted from 0")
    verb.add_argument("--top", type=int, metavar="N", help="show the N strongest words")
    verb.add_argument("--cut", action="store_true", help="take the beginning of a text that is too long for the model")
    verb.add_argument("--json", action="store_true", help="print numbers for machines")
    verb.add_argument(
        "--color",
        "--colour",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: in a terminal, unless NO_COLOR is set",
    )
    return verb


def _layer(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


# look


def run_look(args: argparse.Namespace) -> int:
    """Show a text, or write it to a page, a picture or a recording. Returns the exit code."""
    _check_arguments(args)
    if compare_command.is_comparison(args):
        return compare_command.run_compare(args)
    if (code := look_at_folder(args)) is not None:
        return code
    source = read_input(args)
    if args.save:
        with file_errors(args.save):
            source.recording.save(args.save)
        print_status(f"recording written to {printable(args.save)}")
    if args.json:
        print_result(to_json(_look_fields(args, source)))
    if args.out:
        _write_file(args, source)
    elif not args.json:
        _print_picture(args, source)
    return 0


def _options(args: argparse.Namespace, **more: Any) -> ViewOptions:
    from .options import ViewOptions

    names = ("word", "target", "layer", "head", "merge")
    return ViewOptions(**{name: getattr(args, name) for name in names}, hide_special=args.no_special, **more)


def _light_word(args: argparse.Namespace, source: Input) -> Spotlight:
    from .spotlight import spotlight

    return spotlight(source.recording, args.word, target=args.target, **_options(args).selection)


def _print_picture(args: argparse.Namespace, source: Input) -> None:
    from . import terminal
    from .spotlight import overview

    width = terminal_width()
    layout: dict[str, Any] = {"width": width, "colour": colours(args.color), "top": args.top}
    if args.word is None:
        with progress("ranking every word"):
            summary = overview(source.recording, **_options(args).selection)
        picture, hint = terminal.draw_overview(summary, **layout), _overview_hint(args, summary)
    else:
        with progress("ranking every head"):
            lit = _light_word(args, source)
        picture, hint = terminal.draw_spotlight(lit, **layout), _spotlight_hint(args, lit)
    print_result(f"{_title(source, width)}\n\n{picture}\n\n{hint}")


def _title(source: Input, width: int) -> str:
    from .text_layout import wrap

    lines = [f"{printable(source.name)} · {source.recording._title()}", *source.notes]
    return "\n".join(wrap(line, width) for line in lines)


def _overview_hint(args: argparse.Namespace, summary: Overview) -> str:
    labels = summary.rows.labels
    plain = [n for n, label in enumerate(labels) if not is_special(label)]
    word = name_of(labels, summary.ties[0].word if summary.ties else next(iter(plain), 0))
    merge = " --merge" if args.merge else ""
    return command_hint("Next, one word:", "regard look", *same_input(args), f"--word {shell_quote(word)}{merge}")


def _spotlight_hint(args: argparse.Namespace, lit: Spotlight) -> str:
    best = lit.heads[0]
    same_word = [*same_input(args), f"--word {shell_quote(args.word)}"]
    group = lit.rows.groups[lit.position]
    if lit.layers[best.layer].values is None or group.stop - group.start > 1:
        return command_hint("Next, as a page:", "regard look", *same_word, "--out page.html")
    place = f"--layer {best.layer} --head {best.head}"
    return command_hint("Next, number by number:", "regard walk", *same_word, place)


def _write_file(args: argparse.Namespace, source: Input) -> None:
    """Write a page or a picture."""
    from .view import View

    path = Path(args.out)
    text = " ".join((source.text or "").split())
    with file_errors(args.out):
        options = _options(
            args,
            title=(text if len(text) <= HINT_LETTERS else f"{text[:HINT_LETTERS]}…") or None,
            model=Path(source.name).name,
            command=" ".join(["regard look", *same_input(args)]),
            word_vectors=None if path.suffix.lower() not in (".html", ".htm") else _word_vectors(args, source),
            notes=source.notes,
        )
        View(source.recording, options).save(path)
    print_status(f"written to {printable(args.out)} ({path.stat().st_size / 1000:,.0f} kB)")


def _word_vectors(args: argparse.Namespace, source: Input) -> WordVectors | None:
    """Word vectors for the first steps of a page, if the model has any that fit."""
    from .word_vectors import word_vectors

    if source.model is None or source.text is None:
        return None
    with contextlib.suppress(ValueError):
        return word_vectors(source.text, source.model, cut=args.cut)
    return None


# walk


def run_walk(args: argparse.Namespace) -> int:
    """Show the six steps for one word. Returns the exit code."""
    _check_arguments(args)
    _check_walk_arguments(args)
    steps, title = _walk_word_vectors(args) if args.basic or args.projections else _walk_recording(args)
    if args.json:
        print_result(to_json(_walk_fields(steps, title)))
        return 0
    from .terminal_walk import draw_walk
    from .text_layout import wrap

    width = terminal_width()
    picture = draw_walk(steps, width=width, colour=colours(args.color), top=args.top)
    print_result(f"{wrap(title, width)}\n\n{picture}\n\n{_walk_hint(args)}")
    return 0


def _walk_recording(args: argparse.Namespace) -> tuple[Walk, str]:
    """The steps in a head of the model, the named one or the one that ties the word to another most; and a title."""
    from .spotlight import spotlight
    from .walk import walk

    source = read_input(args)
    lit = spotlight(source.recording, args.word, layer=args.layer, head=args.head)
    best = lit.heads[0]
    view = lit.layers[best.layer]
    values = view.values_of(best.head)
    if values is None:
        raise ValueError("this recording has no values, which the last steps need: record(model, values=True).")
    reason = ""
    if args.head is None and not lit.alone and best.key is not None:
        reason = f", where “{printable(lit.word)}” is tied to “{printable(lit.cols.labels[best.key])}”"
    title = [f"{printable(source.name)} · {view.head_name(best.head)}{reason}", *source.notes]
    return walk(view.weights[best.head], values, lit.position), " · ".join(title)


def _walk_word_vectors(args: argparse.Namespace) -> tuple[Walk, str]:
    """The steps on word embeddings, with W_q, W_k, W_v switched on by the arguments; and a title."""
    import regard

    from . import loading
    from .walk import walk
    from .word_vectors import word_vectors

    on = _switched_on(args.projections)
    text, recording = text_of(args)
    if recording is not None:
        raise ValueError("a recording holds no word embeddings: give the text itself.")
    with progress("opening the model"):
        model = loading.as_loaded(args.model)
        vectors = word_vectors(text, model, cut=args.cut)
    # Special tokens are left out: the textbook's sentence is words alone.
    words = [n for n, token in enumerate(vectors.tokens) if not is_special(token)]
    q, k, v = (getattr(vectors, name if name in on else "x")[words] for name in "qkv")
    # The basic form is x·x as it is. Trained queries and keys are scaled by their full width, all heads joined, so that
    # scores are as large as those of a head, although no head of the model has exactly these.
    score: Literal["scaled_dot", "dot"] = "scaled_dot" if {"q", "k"} & on else "dot"
    weights = regard.weights(q, k, score=score).label([vectors.tokens[n] for n in words])
    title = [
        printable(model.name),
        "word embeddings x, no positions",
        ", ".join(f"{name} = {f'x W_{name}' if name in on else 'x'}" for name in "qkv"),
        *(["all heads joined as one"] if on else []),
        *cut_note(cut_of(args, model, text)),
    ]
    return walk(weights, v, args.word), " · ".join(title)


def _switched_on(names: str | None) -> set[str]:
    on = {part.strip().lower() for part in names.split(",")} if names else set()
    if not on <= {"q", "k", "v"}:
        raise ValueError(
            f"--with takes q, k and v, with commas between them: --with q,k; got {printable(str(names))!r}."
        )
    return on


def _walk_hint(args: argparse.Namespace) -> str:
    same_word = [*same_input(args), f"--word {shell_quote(args.word)}"]
    if args.projections or args.text.endswith(".regard"):
        return command_hint("Next, the whole picture:", "regard look", *same_word)
    if args.basic:
        return command_hint("Next, with trained queries and keys:", "regard walk", *same_word, "--with q,k")
    return command_hint("Next, without anything trained:", "regard walk", *same_word, "--basic")


def same_input(args: argparse.Namespace) -> list[str]:
    """The arguments that name the same model and text again."""
    text = args.text if len(args.text) <= HINT_LETTERS else args.text[:HINT_LETTERS] + "…"
    command = [shell_quote(text)]
    if other := getattr(args, "other", None):
        command.append(shell_quote(other if len(other) <= HINT_LETTERS else other[:HINT_LETTERS] + "…"))
    command += [f"--against {shell_quote(args.against)}"] if getattr(args, "against", None) else []
    command += [f"--model {shell_quote(args.model)}"] if args.model else []
    command += [f"--decoder-text {shell_quote(args.decoder_text)}"] if args.decoder_text else []
    return command + (["--cut"] if args.cut else [])


# Arguments.


def _check_arguments(args: argparse.Namespace) -> None:
    """Report mistakes before a model is opened."""
    if args.top is not None and args.top < 1:
        raise ValueError(f"--top takes a number from 1 on, got {args.top}.")
    if getattr(args, "target", None) is not None and args.word is None:
        raise ValueError("--target needs --word: it ranks the heads by the weight from one word to another.")
    if getattr(args, "nearest", False) and not compare_command.is_comparison(args):
        raise ValueError("--nearest compares two: pass a second text or recording, or --against MODEL.")
    for option in ("word", "target"):
        word = getattr(args, option, None)
        if word is not None and not word.strip():
            raise ValueError(f"--{option} takes a word of the text, or its position counted from 0; got an empty one.")
    for option, suffixes in _SUFFIXES.items():
        path = getattr(args, option, None)
        if path is None:
            continue
        if Path(path).suffix.lower() not in suffixes:
            kinds = "a page (.html) or a picture (.svg, .pdf, .png)" if option == "out" else "a recording (.regard)"
            raise ValueError(f"--{option} writes {kinds}, by the end of the name; got {printable(path)!r}.")
        folder = Path(path).parent
        if not folder.is_dir():
            name = printable(Path(path).name)
            raise FileNotFoundError(f"there is no folder {printable(str(folder))} to write {name} in.")


def _check_walk_arguments(args: argparse.Namespace) -> None:
    if args.word is None:
        raise ValueError("which word? regard walk TEXT --word WORD")
    if args.basic and args.projections is not None:
        raise ValueError("--basic is without W_q, W_k and W_v, and --with switches them on: leave one of them out.")
    if args.basic or args.projections is not None:
        for option in ("layer", "head", "decoder_text"):
            if getattr(args, option) is not None:
                how, name = "--basic" if args.basic else "--with", option.replace("_", "-")
                raise ValueError(f"{how} walks on word embeddings, before any layer: leave out --{name}.")


# JSON.


def _look_fields(args: argparse.Namespace, source: Input) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "subject": source.name,
        "special_hidden": args.no_special,
        "merged": args.merge,
    }
    if source.cut:
        fields["cut"] = {"tokens": source.cut[0], "of": source.cut[1]}
    return fields | (_overview_fields(args, source) if args.word is None else _spotlight_fields(args, source))


def _overview_fields(args: argparse.Namespace, source: Input) -> dict[str, Any]:
    from .spotlight import overview

    summary = overview(source.recording, **_options(args).selection)
    ties = [{"word": tie.word, **_tie_fields(tie.head, summary.cols.labels)} for tie in summary.ties[: args.top]]
    heads = {
        name: [{"layer": layer, "head": head, "value": value} for layer, head, value in table]
        for name, table in summary.metrics.items()
    }
    return {"tokens": list(summary.rows.labels), "ties": ties, "heads": heads}


def _spotlight_fields(args: argparse.Namespace, source: Input) -> dict[str, Any]:
    lit = _light_word(args, source)
    rows = [
        {"layer": tie.layer, "head": tie.head, "weights": weights, "hidden": hidden}
        for tie, weights, hidden in zip(lit.heads, lit.weights, lit.hidden, strict=True)
    ]
    heads = [_tie_fields(tie, lit.cols.labels) for tie in lit.ranking[: args.top]]
    if args.target is not None or lit.alone:  # ranked by weight, not by habit
        for head in heads:
            del head["beyond_habit"]
    return {
        "tokens": list(lit.rows.labels),
        "keys": list(lit.cols.labels),
        "word": {"text": lit.word, "position": lit.position},
        "alone": lit.alone,
        "heads": heads,
        "rows": rows,
    }


def _tie_fields(tie: HeadTie, labels: Sequence[str]) -> dict[str, Any]:
    return {
        "layer": tie.layer,
        "head": tie.head,
        "looks_at": None if tie.key is None else labels[tie.key],
        "position": tie.key,
        "weight": tie.weight,
        "beyond_habit": tie.beyond,
    }


def _walk_fields(steps: Walk, title: str) -> dict[str, Any]:
    names = ("q", "product", "scaled", "masked", "weights", "weighted", "y")
    tensors = {name: x.tolist() for name in names if (x := getattr(steps, name)) is not None}
    return {
        "subject": title,
        "word": {"text": steps.word, "position": steps.position},
        "keys": list(steps.words),
        "formula": steps.formula,
        "scaling": steps.scaling,
        "sink": steps.sink,
        "shapes": {name: list(shape) for name, shape in steps.shapes.items()},
        **tensors,
    }


def to_json(fields: dict[str, Any]) -> str:
    """JSON has no infinity and no NaN: masked scores and NaN become null."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: finite(part) for name, part in x.items()}
        if isinstance(x, list | tuple):
            return [finite(part) for part in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(fields), allow_nan=False)
