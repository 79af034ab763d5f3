"""Tokens as people read them: which are special, which make one word, which one is meant, how an odd one is shown.

A piece that continues the word before it is written with ## in front, as WordPiece does; the signs of byte-level BPE
(Ġ) and of SentencePiece (▁) for a space are read as well.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

__all__ = [
    "bare",
    "cell_width",
    "clip",
    "is_patches",
    "is_special",
    "join_tokens",
    "name_of",
    "numbered_texts",
    "occurrence_suffix",
    "printable",
    "resolve",
    "text_of",
    "units_of",
    "unknown_text",
    "unknown_token",
    "word_slices",
]

#: Marks of where a text begins and ends, not words of it. [MASK] and [UNK] stand for words and are kept.
_SPECIAL = re.compile(
    r"\[(CLS|SEP|PAD)\]|</?s>|<\|[^|<>]{1,40}\|>"
    r"|<(bos|eos|pad|cls|sep|start|end)>|\[(BOS|EOS)\]|<(start|end)_of_\w{1,20}>",
    re.IGNORECASE,
)
#: A token that its model does not know, with the text that it stands for: "[UNK:字]".
_UNKNOWN = re.compile(r"[\[<]unk:(.+)[\]>]", re.IGNORECASE | re.DOTALL)
_SPACE_BEFORE = ("Ġ", "▁")
#: Scripts without spaces between words, with their punctuation; and marks that stand close to the word before.
_UNSPACED = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff60\U00020000-\U0003ffff]")
_CLOSING, _OPENING = re.compile(r"[,.;:!?%)\]}…\u060c\u061b\u061f]+$"), "([{¿¡"
_PATCH = re.compile(r"\d+,\d+")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ENDINGS = frozenset(("t", "s", "d", "m", "re", "ve", "ll"))


def is_special(token: str) -> bool:
    """Whether a token marks a place ([CLS], </s>, <|endoftext|>) rather than being a word."""
    return bool(_SPECIAL.fullmatch(token))


def is_patches(tokens: Sequence[str]) -> bool:
    """Whether all tokens, special ones apart, are places of patches, "3,8"."""
    plain = [token for token in tokens if not is_special(token)]
    return bool(plain) and all(_PATCH.fullmatch(token) for token in plain)


def units_of(tokens: Sequence[str]) -> tuple[str, str]:
    """One and several of what the positions of a sequence are called: patches of an image, or words."""
    return ("patch", "patches") if is_patches(tokens) else ("word", "words")


def bare(token: str) -> str:
    """A token without the marks of its tokenizer: "Ġcat" and "##cat" are "cat", "[UNK:字]" is "字"."""
    if text := unknown_text(token):
        return text
    text = token.removeprefix("##").lstrip("".join(_SPACE_BEFORE))
    return text or token


def unknown_token(token: str, text: str) -> str:
    """A token such as [UNK] together with the text that it stands for: "[UNK:字]"."""
    return (
        f"{token[:-1]}:{text}{token[-1]}" if text and _UNKNOWN.fullmatch(f"{token[:-1]}:{text}{token[-1]}") else token
    )


def unknown_text(token: str) -> str | None:
    """The text that an unknown token stands for; None for any other token."""
    named = _UNKNOWN.fullmatch(token)
    return named.group(1) if named else None


# Words of several tokens.


def word_slices(tokens: Sequence[str], marked: bool | None = None) -> list[slice]:
    """The tokens of every word: neighbouring slices that cover all tokens.

    Args:
        tokens: The tokens of a text.
        marked: Whether a word begins only where a space is marked. Default: whether there is such a mark.
    """
    if marked is None:
        marked = any(token.startswith(_SPACE_BEFORE) and len(token) > 1 for token in tokens) or _is_spelt(tokens)
    starts = [n for n in range(len(tokens)) if n == 0 or not _continues(tokens, n, marked)]
    return [slice(a, b) for a, b in itertools.pairwise([*starts, len(tokens)])]


def _is_spelt(tokens: Sequence[str]) -> bool:
    """Whether every token is a character, spaces among them: then a word is the letters between two spaces."""
    return any(token == " " for token in tokens) and all(len(token) == 1 or is_special(token) for token in tokens)


def _continues(tokens: Sequence[str], n: int, marked: bool) -> bool:
    """Whether a token belongs to the word of the token before it."""
    token, before = tokens[n], tokens[n - 1]
    if is_special(token) or is_special(before):
        return False
    if token.startswith("##") and len(token) > 2:
        return True
    if _BYTE.match(token) and before.endswith(">") and _BYTE.match(before[-6:]):
        return True  # bytes of one letter
    if _apostrophe(before) and n > 1 and bare(token).lower() in _ENDINGS and _is_word(tokens[n - 2]):
        return True  # didn ' t
    if _apostrophe(token) and n + 1 < len(tokens) and bare(tokens[n + 1]).lower() in _ENDINGS and _is_word(before):
        return True
    if not marked or token.startswith(_SPACE_BEFORE):
        return False
    return before in _SPACE_BEFORE or (_is_word(token) and _is_word(before))


def _apostrophe(token: str) -> bool:
    return bare(token) in ("'", "’")


def _is_word(token: str) -> bool:
    """Whether a token is letters, digits or a clitic such as 's, of which words of several pieces are made."""
    text = bare(token)
    return bool(_BYTE.match(text)) or text[:1].isalnum() or (text[:1] in "'’" and text[1:].isalpha())


def join_tokens(tokens: Sequence[str]) -> str:
    """Several tokens as the one word they make; bytes become the character they spell."""
    text = "".join(bare(token) for token in tokens if len(tokens) == 1 or token not in _SPACE_BEFORE)
    return re.sub(r"(?:<0x[0-9A-Fa-f]{2}>)+", _spelt, text)


def text_of(tokens: Sequence[str]) -> str:
    """The text that tokens make: words with spaces between them, but for Chinese and Japanese, and before a comma."""
    text = ""
    for word in (join_tokens(tokens[part]) for part in word_slices(tokens)):
        joined = not text or text[-1] in _OPENING or _CLOSING.match(word)
        joined = joined or word.isspace() or text[-1].isspace() or (_UNSPACED.match(text[-1]) and _UNSPACED.match(word))
        text += word if joined else f" {word}"
    return text


def _spelt(run: re.Match[str]) -> str:
    spelt = bytes(int(code, 16) for code in _BYTE.findall(run.group()))
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return run.group()


# Which word is meant.


def resolve(tokens: Sequence[str], word: str | int) -> int:
    """The position of a word.

    Args:
        tokens: The tokens of a text.
        word: "it", "the:1" for the first of several, or a position, counted from 0 (−1 is the last).
    """
    if isinstance(word, int):
        return _in_range(tokens, word)
    if not word.strip() and word not in tokens:
        raise LookupError("word must be a word of the text or its position counted from 0, got an empty one.")
    places = _places(tokens, word)
    if len(places) == 1:
        return places[0]
    if places:
        at = ", ".join(map(str, places[:12])) + (" …" if len(places) > 12 else "")
        name = printable(word)
        raise LookupError(
            f"{name!r} occurs {len(places)} times, at positions {at}; say which one: {name}:1 is the first, "
            f"{name}:{len(places)} the last."
        )
    name, _, nth = word.rpartition(":")
    if not (nth.isdecimal() and nth.isascii()):
        raise LookupError(_missing_word(tokens, word))
    if not name:  # "7" or ":7"
        return _in_range(tokens, int(nth))
    places = _places(tokens, name)
    if not places:
        raise LookupError(_missing_word(tokens, name))
    if not 1 <= int(nth) <= len(places):
        times = "once" if len(places) == 1 else f"{len(places)} times"
        raise LookupError(f"{printable(name)!r} occurs {times}, counted from 1; got {printable(word)}.")
    return places[int(nth) - 1]


def name_of(tokens: Sequence[str], position: int) -> str:
    """The name that `resolve` finds a position by: "it", or "the:2" if the word occurs several times."""
    word = bare(tokens[position])
    places = _places(tokens, word)
    if position not in places or word != printable(word):
        return str(position)
    return word if len(places) == 1 else f"{word}:{places.index(position) + 1}"


def occurrence_suffix(tokens: Sequence[str], position: int) -> str:
    """The suffix that tells equal tokens apart: ":2" for the second, nothing for the only one."""
    places = [n for n, token in enumerate(tokens) if token == tokens[position]]
    return f":{places.index(position) + 1}" if len(places) > 1 else ""


def numbered_texts(tokens: Sequence[str], width: int = 200) -> list[str]:
    """Every token, safe to print and cut to so many columns, with its number if it occurs several times: the:2."""
    total, before = Counter(tokens), Counter[str]()
    texts = []
    for token in tokens:
        before[token] += 1
        texts.append(clip(printable(token), width) + (f":{before[token]}" if total[token] > 1 else ""))
    return texts


def _places(tokens: Sequence[str], word: str) -> list[int]:
    """The positions of the tokens that are this word: exactly, else without marks, else in any case."""
    for same in (str, bare, lambda token: bare(token).casefold()):
        if places := [n for n, token in enumerate(tokens) if same(token) == same(word)]:
            return places
    return []


def _in_range(tokens: Sequence[str], position: int) -> int:
    if not -len(tokens) <= position < len(tokens):
        raise LookupError(f"position must be 0 to {len(tokens) - 1}, got {position}.")
    return position % len(tokens)


def _missing_word(tokens: Sequence[str], word: str) -> str:
    """The message for a word that is not there: its tokens if it is several, else the words that are."""
    for part in word_slices(tokens):
        if part.stop - part.start > 1 and join_tokens(tokens[part]).casefold() == word.casefold():
            count, pieces = part.stop - part.start, " ".join(printable(token) for token in tokens[part])
            return f"{printable(word)!r} is {count} tokens here: {pieces}; name one, or merge them (--merge)."
    unique = list(dict.fromkeys(printable(bare(token)) for token in tokens if not is_special(token)))
    more = f" … ({len(unique)} in all)" if len(unique) > 20 else ""
    return f"{printable(word)!r} is not among the words: {' '.join(unique[:20])}{more}."


# Odd characters.


def printable(text: str, limit: int = 200) -> str:
    """A text made safe and visible on one line: no control characters or escapes, nothing that reorders the line."""
    if not text:
        return "∅"
    if text.isspace():
        return "".join("␣" if letter == " " else _visible(letter, "", "") for letter in text[:limit])
    around = zip(text, " " + text, text[1:] + " ", strict=False)
    safe = "".join(_visible(letter, before, after) for letter, before, after in itertools.islice(around, limit))
    if unicodedata.combining(safe[0]):
        safe = "◌" + safe  # a mark would sit on whatever stands before it
    return safe if len(text) <= limit else safe + "…"


def _visible(letter: str, before: str, after: str) -> str:
    code = ord(letter)
    if code < 0x20:
        return chr(0x2400 + code)  # ␀ … ␟: the pictures of control characters
    if code == 0x7F:
        return "␡"
    kind = unicodedata.category(letter)
    if kind == "Cs":
        return "\N{REPLACEMENT CHARACTER}"
    # Joiners are part of emoji and of words in several scripts; alone they would be invisible.
    if letter in "\u200c\u200d" and before not in ("", " ") and after not in ("", " "):
        return letter
    if kind in ("Cc", "Cf", "Zl", "Zp") or (kind == "Zs" and letter != " "):
        return f"<U+{code:04X}>"
    return letter


def cell_width(text: str) -> int:
    """How many columns of a terminal a text takes: two for wide letters and emoji, none for marks and joiners."""
    total, last, glued = 0, 0, False
    for letter in text:
        if letter == "\u200d":
            glued = total > 0
        elif letter == "\ufe0f":
            total += 1 if last == 1 else 0  # asks for the coloured, wide form
            last = 2
        elif unicodedata.combining(letter) or unicodedata.category(letter) in ("Mn", "Me", "Cf"):
            continue
        else:
            last = 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1
            skin = "\U0001f3fb" <= letter <= "\U0001f3ff" and total > 0
            total += 0 if glued or skin else last
            glued = False
    return total


def clip(text: str, width: int) -> str:
    """A text cut to so many columns, with … where something is missing."""
    if cell_width(text) <= width:
        return text
    start = ""
    for letter in text:
        if cell_width(start + letter) > width - 1:
            break
        start += letter
    return start + "…" if width > 0 else ""
