"""Text to tokens and back, by the `tokenizers` library: characters, or pieces found by BPE.

Imports nothing of regard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = [
    "END", "PAD", "START", "UNKNOWN", "bpe", "characters", "decoded", "digest", "ids_of", "lines_of", "load",
    "pairs_bpe", "read",
]  # fmt: skip

PAD, START, END, UNKNOWN = "<pad>", "<start>", "<end>", "<unknown>"


def _library() -> Any:
    try:
        return import_module("tokenizers")
    except ImportError:
        raise ImportError("training needs tokenizers and safetensors: pip install 'regard[learn]'.") from None


def read(path: Any, wanted: str = "a text to learn from") -> str:
    """A text file; what is empty or no text is an error."""
    try:
        data = Path(path).read_bytes()
    except OSError as wrong:
        why = "is a folder" if Path(path).is_dir() else f"cannot be read ({wrong.strerror})"
        raise type(wrong)(f"{path} {why}; a text file is needed.") from None
    text = decoded(data, path)
    if not text.strip():
        raise ValueError(f"{path} is empty; {wanted} is needed.")
    return text


def decoded(data: bytes, name: Any) -> str:
    """Bytes as text with line ends as they are here."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as wrong:
        raise ValueError(f"{name} is not UTF-8 text: byte {wrong.start} cannot be read. Convert it first.") from None


def lines_of(text: str) -> list[str]:
    """The lines of a text, as `wc -l` counts them, and one more that is not ended; empty ones are lines too."""
    return text.removesuffix("\n").split("\n") if text else []


def digest(*texts: str) -> str:
    """A number that tells whether the data of a run is still the same."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def characters(text: str) -> Any:
    """Every character of the text is a token."""
    lib = _library()
    made = lib.Tokenizer(lib.models.WordLevel({char: n for n, char in enumerate(sorted(set(text)))}))
    made.pre_tokenizer = lib.pre_tokenizers.Split(lib.Regex(r"[\s\S]"), "isolated")
    made.decoder = lib.decoders.Fuse()
    return made


def bpe(text: str, vocabulary: int) -> Any:
    """Pieces of words and line ends; nothing of the text is lost, but "▁", which stands for a space, becomes one."""
    lib = _library()
    made = lib.Tokenizer(lib.models.BPE())
    cuts = [lib.pre_tokenizers.Split("\n", "isolated"), lib.pre_tokenizers.Metaspace(prepend_scheme="never")]
    made.pre_tokenizer = lib.pre_tokenizers.Sequence(cuts)
    made.decoder = lib.decoders.Metaspace(prepend_scheme="never")
    return _trained(made, text.splitlines(keepends=True), vocabulary, [])


def pairs_bpe(lines: Sequence[str], vocabulary: int) -> Any:
    """Pieces of words and of signs, one vocabulary for both languages; ▁ marks the beginning of a word."""
    lib = _library()
    made = lib.Tokenizer(lib.models.BPE(unk_token=UNKNOWN))
    made.normalizer = lib.normalizers.Sequence([lib.normalizers.NFC(), lib.normalizers.Strip()])
    made.pre_tokenizer = lib.pre_tokenizers.Sequence(
        [lib.pre_tokenizers.Metaspace(), lib.pre_tokenizers.Punctuation("isolated")]
    )
    made.decoder = lib.decoders.Metaspace()
    return _trained(made, lines, vocabulary, [PAD, START, END, UNKNOWN])


def _trained(made: Any, lines: Sequence[str], vocabulary: int, special: list[str]) -> Any:
    trainer = _library().trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    made.train_from_iterator(lines, trainer)
    found = made.get_vocab_size()
    if found < vocabulary:
        raise ValueError(
            f"a vocabulary of {vocabulary} was asked for, and the data supports {found} pieces: "
            f"take --vocabulary {found} or less, or more data."
        )
    if found > vocabulary:
        raise ValueError(
            f"a vocabulary of {vocabulary} is smaller than the {found} single characters of the data: "
            "take a larger --vocabulary."
        )
    return _plain(made)


def _plain(tokenizer: Any) -> Any:
    """A tokenizer to which "<pad>" in a text is five signs like any others: only the model's own code sets marks."""
    tokenizer.encode_special_tokens = True
    return tokenizer


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Numbers of the tokens of a text; a character that was never seen is an error."""
    if tokenizer.token_to_id(UNKNOWN) is None:
        known = tokenizer.get_vocab()
        strange = sorted({c for c in set(text) if c not in known and not (c == " " and "▁" in known)})
        if strange:
            raise ValueError(
                f"the model never saw {', '.join(map(repr, strange[:5]))}: "
                "it knows the characters of the text it was trained on."
            )
    # Line by line, which is the same and twice as fast.
    encoded = tokenizer.encode_batch(text.splitlines(keepends=True), add_special_tokens=False)
    return [number for line in encoded for number in line.ids]


def load(path: Any) -> Any:
    """A tokenizer from its file."""
    lib = _library()
    try:
        return _plain(lib.Tokenizer.from_file(str(path)))
    except Exception as wrong:  # the library raises bare exceptions
        raise ValueError(f"{path} is no tokenizer: {wrong}") from None
