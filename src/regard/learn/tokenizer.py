"""Text to token ids and back, by the `tokenizers` library: characters, bytes, or BPE."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from .._io import decode as decoded  # look.command imports it from here

__all__ = [
    "END", "PAD", "START", "UNKNOWN", "bpe", "byte_level", "characters", "decoded", "digest", "encode", "learned",
    "lines_of", "load", "pairs_bpe",
]  # fmt: skip

PAD, START, END, UNKNOWN = "<pad>", "<start>", "<end>", "<unknown>"


def _library() -> Any:
    try:
        return import_module("tokenizers")
    except ImportError:
        raise ImportError("training needs tokenizers and safetensors: pip install 'regard[learn]'.") from None


def lines_of(text: str) -> list[str]:
    """The lines of a text, empty ones too, as `wc -l` counts them, plus a last one without a line end."""
    return text.removesuffix("\n").split("\n") if text else []


def digest(*texts: str) -> str:
    """SHA-256 of the training data, to recognise it when a run is resumed."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def learned(kind: str, pieces: Iterable[str], vocabulary: int) -> Any:
    """A tokenizer of a text in pieces, by the setting `tokens`: "characters", "bytes" or "bpe"."""
    if kind == "bpe":
        return bpe(pieces, vocabulary)
    return byte_level() if kind == "bytes" else characters(pieces)


def characters(pieces: Iterable[str]) -> Any:
    """A tokenizer with one token per character of a text: a string, or its pieces."""
    lib = _library()
    alphabet: set[str] = set()
    for piece in pieces:
        alphabet.update(piece)
    tokenizer = lib.Tokenizer(lib.models.WordLevel({char: n for n, char in enumerate(sorted(alphabet))}))
    tokenizer.pre_tokenizer = lib.pre_tokenizers.Split(lib.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = lib.decoders.Fuse()
    return tokenizer


def byte_level() -> Any:
    """A tokenizer with one token per byte of UTF-8; the id is the byte."""
    lib = _library()
    # A byte that is a printable letter is written as itself, the others as letters from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = lib.Tokenizer(lib.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    return tokenizer


def bpe(pieces: Iterable[str], vocabulary: int) -> Any:
    """A BPE tokenizer of words and line ends. Decoding restores the text, except that "▁" becomes a space."""
    lib = _library()
    tokenizer = lib.Tokenizer(lib.models.BPE())
    splits = [lib.pre_tokenizers.Split("\n", "isolated"), lib.pre_tokenizers.Metaspace(prepend_scheme="never")]
    tokenizer.pre_tokenizer = lib.pre_tokenizers.Sequence(splits)
    tokenizer.decoder = lib.decoders.Metaspace(prepend_scheme="never")
    lines = (line for piece in ([pieces] if isinstance(pieces, str) else pieces) for line in piece.splitlines(True))
    return _train(tokenizer, lines, vocabulary, [])


def pairs_bpe(lines: Iterable[str], vocabulary: int) -> Any:
    """A BPE tokenizer with one vocabulary for both languages; ▁ marks the start of a word."""
    lib = _library()
    tokenizer = lib.Tokenizer(lib.models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = lib.normalizers.Sequence([lib.normalizers.NFC(), lib.normalizers.Strip()])
    tokenizer.pre_tokenizer = lib.pre_tokenizers.Sequence(
        [lib.pre_tokenizers.Metaspace(), lib.pre_tokenizers.Punctuation("isolated")]
    )
    tokenizer.decoder = lib.decoders.Metaspace()
    return _train(tokenizer, lines, vocabulary, [PAD, START, END, UNKNOWN])


def _train(tokenizer: Any, lines: Iterable[str], vocabulary: int, special: list[str]) -> Any:
    trainer = _library().trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    size = tokenizer.get_vocab_size()
    if size < vocabulary:
        raise ValueError(
            f"the data has {size} BPE tokens, got --vocabulary {vocabulary}: use --vocabulary {size} or less, "
            "or more data."
        )
    if size > vocabulary:
        raise ValueError(
            f"--vocabulary must be at least {size}, the number of different characters of the data; got {vocabulary}."
        )
    return _plain(tokenizer)


def _plain(tokenizer: Any) -> Any:
    """Make a typed "<pad>" plain text of five characters: only the model's own code sets special tokens."""
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text; a character outside the vocabulary is an error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has no valid character at position {error.start}: its bytes are not in the encoding of this "
            "terminal. Set a UTF-8 locale, for example LC_ALL=C.UTF-8."
        ) from None
    if isinstance(tokenizer.decoder, _library().decoders.ByteLevel):
        if tokenizer.get_vocab_size() == 256 and tokenizer.to_str() == byte_level().to_str():
            return list(text.encode())  # the same ids, many times as fast
        # Every text has bytes. Not line by line: tokens of GPT-2 cross line ends.
        return tokenizer.encode(text, add_special_tokens=False).ids
    if tokenizer.token_to_id(UNKNOWN) is None:
        vocabulary = tokenizer.get_vocab()
        by_character = isinstance(tokenizer.model, _library().models.WordLevel)
        space = " " if "▁" in vocabulary and not by_character else ""  # BPE writes it as ▁
        if unknown := sorted(set(text).difference(vocabulary, space)):
            raise ValueError(
                f"the model never saw {', '.join(map(repr, unknown[:5]))}: "
                "it has only the characters of the text it was trained on."
            )
        if by_character:
            return [vocabulary[character] for character in text]
    # Line by line: the same ids, twice as fast. Without offsets.
    encoded = tokenizer.encode_batch_fast(text.splitlines(keepends=True), add_special_tokens=False)
    return [number for line in encoded for number in line.ids]


def load(data: bytes, name: Any) -> Any:
    """A tokenizer from the bytes of its file.

    Raises:
        ValueError: The bytes are no tokenizer, or its ids are not 0, 1, …, n − 1.
    """
    library = _library()
    try:
        tokenizer = _plain(library.Tokenizer.from_str(data.decode()))
        ids = tokenizer.get_vocab().values()
        size = tokenizer.get_vocab_size()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exceptions, and panics of Rust are BaseExceptions
        raise ValueError(f"{name} is no tokenizer: {str(error)[:200]}") from None
    if max(ids, default=0) >= size:
        raise ValueError(f"{name} is no tokenizer: its ids must be below {size}, got {max(ids)}.")
    return tokenizer
