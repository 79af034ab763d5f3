"""The verbs `look` and `walk`.

Arguments are read and checked before a model is opened, so that a mistake is told at once; what is shown is made in
`terminal`, `picture` and `view`. Imports the rooms of `look` and the recorder, when a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .token_text import is_special, shown

if TYPE_CHECKING:
    from ..recorder import Recording
    from .loading import Opened
    from .walk import Walk

LOOK = """\
Whom does "it" look at? Whom the first of two "the"? Which heads tie "it" to "animal"?
  regard look "The animal didn't cross the street because it was too tired" --word it
  regard look "The animal didn't cross the street because it was too tired" --word the:1
  regard look "The animal didn't cross the street because it was too tired" --word it --to animal

Any transformers model, a folder or a name; a text from a file:
  regard look chapter.txt --model gpt2 --cut

A page that opens anywhere, a picture for a paper, a recording to look at again:
  regard look "the cat sat" --out page.html
  regard look "the cat sat" --word cat --out cat.svg
  regard look "the cat sat" --save run.regard
  regard look run.regard --word cat

Without --model it is the bundled all-MiniLM-L6-v2, offline. Without --word an overview is shown."""

WALK = """\
In the head that ties the word to another one most, or in one that is named:
  regard walk "the cat sat" --word cat
  regard walk "the cat sat" --word cat --layer 0 --head 2

On word embeddings alone, nothing trained in between; then with W_q and W_k; then with W_v too:
  regard walk "the cat sat" --word cat --basic
  regard walk "the cat sat" --word cat --with q,k
  regard walk "the cat sat" --word cat --with q,k,v

The steps: 1 q·k with every word, 2 scaled, 3 masked, 4 softmax, 5 weight × value, 6 their sum."""

_COLOURS = {"standard": "standard", "256": "256", "truecolor": "truecolor", "windows": "standard"}
_SUFFIXES = (".html", ".htm", ".svg")
#: What a text is cut to where a hint repeats it.
_HINT = 120


def add(verbs: Any) -> None:
    """Add the verbs to the command line."""
    look = _verb(verbs, "look", "See which words a word looks at.", LOOK)
    look.add_argument("--to", metavar="WORD", help="with --word: rank the heads by the weight on this word")
    look.add_argument("--out", metavar="FILE", help="write a page (.html) or a picture (.svg) instead")
    look.add_argument("--save", metavar="FILE", help="keep the recording as a .regard file")
    look.add_argument("--no-special", action="store_true", help="hide [CLS], </s> …; the other weights are scaled up")
    look.add_argument("--merge", action="store_true", help="merge the tokens of a word")
    look.set_defaults(run=run_look)
    walk = _verb(verbs, "walk", "Attention for one word, step by step, in numbers.", WALK)
    walk.add_argument("--basic", action="store_true", help="on word embeddings: x·x, without W_q, W_k, W_v")
    walk.add_argument("--with", dest="projected", metavar="q,k,v", help="on word embeddings with these switched on")
    walk.set_defaults(run=run_walk)


def _verb(verbs: Any, name: str, says: str, examples: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=says[:1].lower() + says[1:-1],
        description=says,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("text", help="a sentence, a text file, a .regard recording, or - for what is piped in")
    verb.add_argument("--word", help='the word to light: it, "the:1" for the first of several, 7 for a position')
    verb.add_argument(
        "--model", metavar="NAME", help="a folder, a name of the Hugging Face hub, or one of regard learn"
    )
    verb.add_argument("--target", metavar="TEXT", help="encoder–decoder models: the sentence that is being written")
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


def _layer(given: str) -> int | str:
    return int(given) if given.lstrip("-").isdecimal() else given


# look


def run_look(asked: argparse.Namespace) -> int:
    """Show a sentence, or write it to a page, a picture or a recording."""
    _check(asked)
    subject = _subject(asked)
    seen = subject.seen
    if asked.save:
        with _file_errors(asked.save):
            seen.save(asked.save)
        _say(f"recording written to {shown(asked.save)}")
    if asked.json:
        _print(_as_json(_look_json(asked, subject)))
    if asked.out:
        _write(asked, subject)
    elif not asked.json:
        _show(asked, subject)
    return 0


def _show(asked: argparse.Namespace, subject: Subject) -> None:
    from . import spotlight, terminal

    width = _width()
    face: dict[str, Any] = {"width": width, "colour": _colour(asked.color), "top": asked.top}
    if asked.word is None:
        with _progress("asking every word"):
            seen = spotlight.overview(subject.seen, **_reading(asked))
        picture, hint = terminal.draw_overview(seen, **face), _overview_hint(asked, seen)
    else:
        with _progress("asking every head"):
            lit = spotlight.spotlight(subject.seen, asked.word, to=asked.to, **_reading(asked))
        picture, hint = terminal.draw_spot(lit, **face), _spot_hint(asked, lit)
    _print(f"{_title(subject, width)}\n\n{picture}\n\n{hint}")


def _reading(asked: argparse.Namespace) -> dict[str, Any]:
    chosen = {"layer": asked.layer, "head": asked.head}
    return {**chosen, "hide_special": asked.no_special, "merge": asked.merge}


def _overview_hint(asked: argparse.Namespace, seen: Any) -> str:
    from .token_text import named

    plain = [n for n, label in enumerate(seen.rows.labels) if not is_special(label)]
    first = seen.links[0].word if seen.links else next(iter(plain), 0)
    word = named(seen.rows.labels, first)
    merged = " --merge" if asked.merge else ""
    return f"Next, one word: regard look {_again(asked)} --word {_quoted(word)}{merged}"


def _spot_hint(asked: argparse.Namespace, lit: Any) -> str:
    best = lit.shown[0]
    again = f"{_again(asked)} --word {_quoted(asked.word)}"
    group = lit.rows.groups[lit.at]
    if lit.layers[best.layer].values is None or group.stop - group.start > 1:
        return f"Next, as a page: regard look {again} --out page.html"
    return f"Next, number by number: regard walk {again} --layer {best.layer} --head {best.head}"


def _write(asked: argparse.Namespace, subject: Subject) -> None:
    """A page or a picture."""
    from .view import View

    title = subject.text if subject.text and len(subject.text) <= _HINT else Path(subject.name).name
    where = Path(asked.out)
    with _progress(f"writing {shown(where.name)}"), _file_errors(asked.out):
        embedded = None if where.suffix.lower() == ".svg" else _embedded(asked, subject)
        told: dict[str, Any] = {"title": title, "embedded": embedded, "notes": subject.notes}
        View(subject.seen, word=asked.word, to=asked.to, **told, **_reading(asked)).save(where)
    _say(f"written to {shown(asked.out)} ({where.stat().st_size / 1000:,.0f} kB)")


def _embedded(asked: argparse.Namespace, subject: Subject) -> Any:
    """Word embeddings for the page's first steps, where the model has any that fit."""
    from .loading import embedded

    if subject.model is None or subject.text is None:
        return None
    with contextlib.suppress(ValueError):
        return embedded(subject.text, subject.model, cut=asked.cut)
    return None


def _look_json(asked: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    from . import spotlight

    if asked.word is None:
        seen = spotlight.overview(subject.seen, **_reading(asked))
        ties = [_tie_json(link.head, seen.cols.labels, word=link.word) for link in seen.links[: asked.top]]
        measured = {
            name: [{"layer": layer, "head": head, "value": number} for layer, head, number in found]
            for name, found in seen.measured.items()
        }
        told = {"tokens": list(seen.rows.labels), "ties": ties, "heads": measured}
    else:
        lit = spotlight.spotlight(subject.seen, asked.word, to=asked.to, **_reading(asked))
        rows = [
            {"layer": one.layer, "head": one.head, "weights": weights, "hidden": hidden}
            for one, weights, hidden in zip(lit.shown, lit.weights, lit.hidden, strict=True)
        ]
        heads = [_tie_json(one, lit.cols.labels) for one in lit.heads[: asked.top]]
        if asked.to is not None or lit.alone:  # ranked by weight: habit was not asked for, or there is no other word
            heads = [{name: x for name, x in one.items() if name != "beyond_habit"} for one in heads]
        told = {"tokens": list(lit.rows.labels), "keys": list(lit.cols.labels)}
        told |= {"word": {"text": lit.word, "position": lit.at}, "alone": lit.alone, "heads": heads, "rows": rows}
    named = {"subject": subject.name, "special_hidden": asked.no_special, "merged": asked.merge}
    return {**named, **_cut_json(subject), **told}


def _cut_json(subject: Subject) -> dict[str, Any]:
    return {"cut": {"tokens": subject.cut[0], "of": subject.cut[1]}} if subject.cut else {}


def _tie_json(one: Any, labels: Any, **more: int) -> dict[str, Any]:
    told = {"layer": one.layer, "head": one.head, "looks_at": labels[one.key], "position": one.key}
    return {**more, **told, "weight": one.weight, "beyond_habit": one.beyond}


# walk


def run_walk(asked: argparse.Namespace) -> int:
    """Show the six steps for one word."""
    _check(asked)
    _check_walk(asked)
    made, told = _walk_embeddings(asked) if asked.basic or asked.projected else _walk_recorded(asked)
    if asked.json:
        _print(_as_json(_walk_json(made, told)))
        return 0
    from .terminal import draw_walk
    from .text_layout import wrapped

    picture = draw_walk(made, width=_width(), colour=_colour(asked.color), top=asked.top)
    _print(f"{wrapped(told, _width())}\n\n{picture}\n\n{_walk_hint(asked)}")
    return 0


def _walk_recorded(asked: argparse.Namespace) -> tuple[Walk, str]:
    """In a head of the model: the one that was named, or the one that ties the word to another most."""
    from . import spotlight
    from .walk import walk

    subject = _subject(asked)
    lit = spotlight.spotlight(subject.seen, asked.word, layer=asked.layer, head=asked.head)
    best = lit.shown[0]
    sheet = lit.layers[best.layer]
    values = sheet.values_of(best.head)
    if values is None:
        raise ValueError("this recording has no values, which the last steps need: record(model, values=True).")
    made = walk(sheet.weights[best.head], values, lit.at)
    why = (
        ""
        if asked.head is not None or lit.alone
        else f", where “{shown(lit.word)}” is tied to “{shown(lit.cols.labels[best.key])}”"
    )
    told = [f"{shown(subject.name)} · {sheet.place(best.head)}{why}", *subject.notes]
    return made, " · ".join(told)


def _walk_embeddings(asked: argparse.Namespace) -> tuple[Walk, str]:
    """On the model's word embeddings: basic self-attention, and W_q, W_k, W_v switched on as asked."""
    import regard

    from .loading import as_opened, embedded
    from .walk import walk

    on = _switched_on(asked.projected)
    text, recording = _text(asked)
    if recording is not None:
        raise ValueError("a recording holds no word embeddings; give the text itself.")
    with _progress("opening the model"):
        model = as_opened(asked.model)
        x = embedded(text, model, cut=asked.cut)
    notes = _cut_notes(_cut(asked, model, text))
    # [CLS] and its like are marks of the model: the textbook's sentence is words alone.
    kept = [n for n, token in enumerate(x.tokens) if not is_special(token)]
    q, k, v = (getattr(x, name if name in on else "x")[kept] for name in "qkv")
    # The basic form is x·x as it is. Trained queries and keys are all heads joined as one: scaled by the whole size, so
    # that scores stay as large as those of a head, though no head of the model sees these.
    score = "scaled_dot" if {"q", "k"} & on else "dot"
    weights = regard.weights(q, k, score=score).label([x.tokens[n] for n in kept])
    named = ", ".join(f"{name} = {f'x W_{name}' if name in on else 'x'}" for name in "qkv")
    joined = ["all heads joined as one"] if on else []
    told = [shown(model.name), "word embeddings x, no positions", named, *joined, *notes]
    return walk(weights, v, asked.word), " · ".join(told)


def _switched_on(given: str | None) -> set[str]:
    on = {part.strip().lower() for part in given.split(",")} if given else set()
    if not on <= {"q", "k", "v"}:
        raise ValueError(f"--with takes q, k and v, with commas between them: --with q,k; {shown(str(given))!r} came.")
    return on


def _walk_json(made: Walk, told: str) -> dict[str, Any]:
    numbers = ("q", "product", "scaled", "masked", "weights", "weighted", "y")
    found = {name: x.tolist() for name in numbers if (x := getattr(made, name)) is not None}
    shapes = {name: list(shape) for name, shape in made.shapes.items()}
    named = {"subject": told, "word": {"text": made.word, "position": made.position}, "keys": list(made.words)}
    return {**named, "formula": made.formula, "scaling": made.scaling, "sink": made.sink, "shapes": shapes, **found}


def _as_json(told: dict[str, Any]) -> str:
    """JSON knows no infinity and no NaN: what is masked, and what is not a number, is null."""

    def known(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: known(part) for name, part in x.items()}
        if isinstance(x, list | tuple):
            return [known(part) for part in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(known(told), allow_nan=False)


def _walk_hint(asked: argparse.Namespace) -> str:
    again = f"regard walk {_again(asked)} --word {_quoted(asked.word)}"
    if asked.projected or asked.text.endswith(".regard"):
        return f"Next, the whole picture: regard look {_again(asked)} --word {_quoted(asked.word)}"
    if asked.basic:
        return f"Next, with trained queries and keys: {again} --with q,k"
    return f"Next, without anything trained: {again} --basic"


# What is looked at.


@dataclass
class Subject:
    """A recording, with what is known of where it came from."""

    seen: Recording
    name: str
    text: str | None = None
    model: Opened | None = None
    cut: tuple[int, int] | None = None  # how many tokens are shown, and of how many, where some are not

    @property
    def notes(self) -> list[str]:
        return _cut_notes(self.cut)


def _cut_notes(cut: tuple[int, int] | None) -> list[str]:
    return [f"The first {cut[0]:,} of {cut[1]:,} tokens are shown, the rest is cut."] if cut else []


def _cut(asked: argparse.Namespace, model: Opened, text: str) -> tuple[int, int] | None:
    if not asked.cut:
        return None
    kept, total = model.kept_of(text)
    return (kept, total) if kept < total else None


def _subject(asked: argparse.Namespace) -> Subject:
    text, recording = _text(asked)
    if recording is not None:
        return Subject(recording, asked.text)
    from .loading import as_opened

    with _progress("opening the model"):
        model = as_opened(asked.model)
    with _progress(f"looking at {len(text):,} letters" if len(text) > 1000 else "looking"):
        seen = model.look_at(text, target=asked.target, cut=asked.cut)
        return Subject(seen, model.name, text, model, _cut(asked, model, text))


def _text(asked: argparse.Namespace) -> tuple[str, Recording | None]:
    """The text that was given, read from a file where it names one; or a recording."""
    given = asked.text
    if given == "-":
        return _decoded(sys.stdin.buffer.read(), "what was piped in"), None
    path = Path(given)
    if not given.strip() or not _exists(path):
        if path.suffix in (".regard", ".txt", ".md") and not any(letter.isspace() for letter in given):
            raise FileNotFoundError(f"there is no file {shown(given)}.")
        return given, None
    if path.is_dir():
        raise IsADirectoryError(f"{shown(given)} is a folder; give a sentence, a text file or a .regard file.")
    if path.suffix == ".regard":
        from ..recorder import load

        if asked.model or asked.target:
            raise ValueError("a recording is looked at without a model: leave out --model and --target.")
        with _file_errors(given), _progress("reading the recording"):
            return "", load(path)
    return _read(path), None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a file's name, or a null byte: a text
        return False


def _read(path: Path) -> str:
    with _file_errors(str(path)):
        data = path.read_bytes()
    return _decoded(data, shown(str(path)))


def _decoded(data: bytes, whose: str) -> str:
    from ..learn.tokenizer import decoded

    text = decoded(data, whose)
    if "\0" in text:
        raise ValueError(f"{whose} is not a text: there is a null byte at {text.index(chr(0))}.")
    return text


# Checks and small things.


def _check(asked: argparse.Namespace) -> None:
    """Mistakes that can be told before a model is opened."""
    if asked.top is not None and asked.top < 1:
        raise ValueError(f"--top takes a number from 1 on; {asked.top} came.")
    if getattr(asked, "to", None) is not None and asked.word is None:
        raise ValueError("--to goes with --word: the heads by the weight from one word to another.")
    for option in ("word", "to"):
        given = getattr(asked, option, None)
        if given is not None and not given.strip():
            raise ValueError(f"--{option} takes a word of the text, or its position counted from 0; nothing came.")
    for option in ("out", "save"):
        path = getattr(asked, option, None)
        if path is None:
            continue
        wanted = _SUFFIXES if option == "out" else (".regard",)
        if Path(path).suffix.lower() not in wanted:
            kinds = "a page (.html) or a picture (.svg)" if option == "out" else "a recording (.regard)"
            raise ValueError(f"--{option} writes {kinds}, by the end of the name; {shown(path)!r} came.")
        folder = Path(path).parent
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {shown(str(folder))} to write {shown(Path(path).name)} in.")


def _check_walk(asked: argparse.Namespace) -> None:
    if asked.word is None:
        raise ValueError("which word? regard walk TEXT --word WORD")
    if asked.basic and asked.projected is not None:
        raise ValueError("--basic is without W_q, W_k and W_v, and --with switches them on: leave one of them out.")
    if asked.basic or asked.projected is not None:
        for option in ("layer", "head", "target"):
            if getattr(asked, option) is not None:
                how = "--basic" if asked.basic else "--with"
                raise ValueError(f"{how} walks on word embeddings, before any layer: leave out --{option}.")


@contextlib.contextmanager
def _file_errors(path: str) -> Iterator[None]:
    """What the system says about a file, with its name, in words."""
    try:
        yield
    except OSError as wrong:
        if wrong.strerror is None:
            raise
        raise OSError(f"{shown(path)}: {wrong.strerror.lower()}.") from wrong


def _title(subject: Subject, width: int) -> str:
    from .text_layout import wrapped

    lines = [f"{shown(subject.name)} · {subject.seen._title()}", *subject.notes]
    return "\n".join(wrapped(line, width) for line in lines)


def _again(asked: argparse.Namespace) -> str:
    """The arguments that name the same model and text again."""
    text = asked.text if len(asked.text) <= _HINT else asked.text[:_HINT] + "…"
    again = _quoted(text)
    again += f" --model {_quoted(asked.model)}" if asked.model else ""
    again += f" --target {_quoted(asked.target)}" if asked.target else ""
    return again + (" --cut" if asked.cut else "")


def _quoted(text: str) -> str:
    """As one would type it in a shell."""
    plain = shlex.quote(text)
    simple = "'" in text and not set(text) & set('"$`\\!')
    return shown(f'"{text}"' if simple else plain, 4 * _HINT)


def _width() -> int:
    return min(shutil.get_terminal_size((80, 24)).columns, 120)


def _colour(wanted: str) -> bool | str:
    """What the terminal can show: nothing into a pipe or where NO_COLOR is set, else its number of colours."""
    if wanted == "never":
        return False
    if wanted == "auto" and (not sys.stdout.isatty() or os.environ.get("NO_COLOR")):
        return False
    try:
        from rich.console import Console
    except ImportError:
        return wanted == "always"  # which says what to install
    found = Console(force_terminal=True, file=sys.stdout).color_system
    return _COLOURS.get(found or "", "truecolor" if wanted == "always" else False)


#: For terminals without these letters.
_PLAIN = str.maketrans(
    {**dict.fromkeys("█▉▊▋▌▇▆▅▄", "#"), **dict.fromkeys("▍▎▏▃▂▁·…", "."), "×": "x", "→": ">", "−": "-"}
)


def _print(text: str) -> None:
    """To stdout, also where its encoding has no bars."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(_PLAIN).encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding)
    print(text)


def _say(text: str) -> None:
    """News for the person, apart from what is asked for."""
    with contextlib.suppress(UnicodeEncodeError):
        print(text, file=sys.stderr)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """Something that moves while one waits, on stderr and only where somebody looks."""
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
    except ImportError:
        _say(f"{what} …")
        yield
        return
    with Console(stderr=True).status(f"{what} …"):
        yield
