"""The files of a run, and how they are opened again. Nothing in them is ever executed.

    settings.json       kind of model, all settings, digests of the training data, of tokenizer.json and tokens.bin
    tokenizer.json      of the `tokenizers` library
    tokens.bin          the token ids of a large text, which training maps
    model.safetensors   the best weights so far, by validation loss
    last.safetensors    everything to resume from: weights, their moving average, the optimizer's moments, the step
    history.json        the numbers shown while training
    patterns.safetensors  what every head gives over one piece of the validation data, at every validation

Every file is written atomically: a run that is killed, or runs out of disk, leaves the old file or the new one. Every
tensor, the fields beside them, the tokenizer, the settings and the history carry checksums, verified before they are
used. There is no random state to save: it follows from the seed and the step.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._io import atomic_write, partial_files, why_unwritten
from . import tokenizer as texts
from .corpus import TOKENS
from .settings import Settings, from_json
from .tasks import build

__all__ = [
    "Description",
    "began_pretrained",
    "discard_unsaved",
    "encode_json",
    "exclusive_lock",
    "is_checkpoint",
    "read_history",
    "read_json",
    "read_model",
    "read_settings",
    "read_tensors",
    "read_tokenizer",
    "save",
    "save_history",
    "save_json",
    "save_settings",
    "seal",
    "sweep",
    "tokens_digest",
    "update_settings",
    "write",
]

FORMAT = "regard model 3"

SETTINGS, TOKENIZER, MODEL, LAST, HISTORY, PATTERNS = (
    "settings.json", "tokenizer.json", "model.safetensors", "last.safetensors", "history.json", "patterns.safetensors",
)  # fmt: skip
FILES = SETTINGS, TOKENIZER, MODEL, LAST, HISTORY, PATTERNS, TOKENS

#: Larger JSON files were not written by regard.
MAX_JSON_BYTES = 1 << 30


# Writing.


def safetensors() -> Any:
    """The safetensors library; loaded before a run starts, not when it first saves."""
    try:
        return import_module("safetensors.torch"), import_module("safetensors")
    except ImportError:
        raise ImportError("checkpoints need safetensors: pip install 'regard[learn]'.") from None


def save(path: Path, tensors: dict[str, Tensor], fields: dict[str, str] | None = None) -> None:
    """Write tensors and fields of text, with a checksum for each tensor and one for all of the rest."""
    plain = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    checksums = {name: _checksum(tensor) for name, tensor in plain.items()}
    metadata = seal({"fields": fields or {}, "tensors": checksums})
    # One metadata entry: the library writes several in random order, and the same run must give the same bytes.
    write(path, safetensors()[0].save(plain, {"regard": json.dumps(metadata, sort_keys=True)}))


def save_json(path: Path, value: Any) -> None:
    """Write JSON."""
    write(path, encode_json(value))


def encode_json(value: Any) -> bytes:
    """JSON as it stands in the files of a run."""
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


@dataclass(frozen=True)
class Description:
    """The fields of `settings.json` beside the tokenizer's digest."""

    kind: str
    settings: Settings
    data: str  # digest of the texts
    tokens: str | None = None  # SHA-256 of tokens.bin, where there is one
    pretrained: bool = False  # whether the run began from a pretrained model


def save_settings(folder: Path, description: Description, tokenizer: str) -> None:
    """Write the tokenizer and then the settings: a folder with settings is a run."""
    encoded = encode_json(json.loads(tokenizer))
    values: dict[str, Any] = {
        "format": FORMAT, "kind": description.kind, "settings": description.settings.json(), "data": description.data,
        "tokenizer": hashlib.sha256(encoded).hexdigest(),
    }  # fmt: skip
    values |= {"tokens": description.tokens} if description.tokens else {}
    values |= {"pretrained": True} if description.pretrained else {}
    try:
        write(folder / TOKENIZER, encoded)
        save_json(folder / SETTINGS, seal(values))
    except OSError:
        with contextlib.suppress(OSError):  # a folder in which nothing can be written
            (folder / TOKENIZER).unlink()  # the next attempt would refuse to overwrite it
        raise


def update_settings(folder: Path, settings: Settings) -> None:
    """Write the settings of a run that is extended."""
    description = read_json(folder / SETTINGS)
    if description["settings"] != settings.json():
        save_json(folder / SETTINGS, seal({**description, "settings": settings.json()}))


def discard_unsaved(folder: Path) -> bool:
    """Free the folder of a run that saved nothing for another attempt; whether it was such a run."""
    if any((folder / name).exists() for name in (MODEL, LAST, HISTORY, PATTERNS)):
        return False
    for name in (SETTINGS, TOKENIZER, TOKENS):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    return True


def save_history(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write `history.json`, with a checksum."""
    save_json(folder / HISTORY, seal({"rows": json.loads(encode_json(rows))}))


def seal(description: dict[str, Any]) -> dict[str, Any]:
    """A description with the checksum of everything else in it."""
    rest = {name: value for name, value in description.items() if name != "checksum"}
    canonical = json.dumps(rest, sort_keys=True, ensure_ascii=True).encode()
    return {**rest, "checksum": hashlib.sha256(canonical).hexdigest()}


def _checksum(tensor: Tensor) -> str:
    """Checksum of a contiguous CPU tensor: its type, its shape and its bytes."""
    hasher = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if size := tensor.numel() * tensor.element_size():
        hasher.update((ctypes.c_char * size).from_address(tensor.data_ptr()))
    return hasher.hexdigest()


def write(path: Path, data: bytes) -> None:
    """Write a file of a run; an error says how the run goes on."""
    try:
        atomic_write(path, [data])
    except OSError as error:
        reason, remedy = why_unwritten(error)
        old = "; the old file is unchanged" if path.exists() else ""
        then = "then continue with --resume" if (path.parent / SETTINGS).exists() else "then start again"
        raise OSError(f"{path} ({len(data):,} bytes) could not be written: {reason}{old}. {remedy}, {then}.") from None


def sweep(folder: Path) -> None:
    """Remove temporary files of a run that was killed while it wrote."""
    for name in FILES:
        for partial in partial_files(folder / name):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Allow one run at a time in a folder. The system releases the lock, however the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows has none
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"{folder} is in use by another run: stop that one, or choose another --out.") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(handle)


# Reading.


def read_json(path: Path) -> Any:
    """JSON of a file; anything else is a ValueError that names the file."""
    data = _read_bytes(path)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"{path} is damaged: its values are nested too deeply.") from None
    except ValueError as error:  # no UTF-8, no JSON, a number of too many digits
        raise ValueError(f"{path} is damaged: {error}") from None


def _read_bytes(path: Path) -> bytes:
    if not path.is_file():  # opening a pipe would wait for a writer
        raise ValueError(f"{path} is missing or no regular file.")
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(f"{path} is damaged: {size:,} bytes are too many.")
    return path.read_bytes()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and fields of a file, after their checksums were verified."""
    library = safetensors()[1]
    if not path.is_file():
        raise ValueError(f"{path} is missing or no regular file.")
    try:
        with library.safe_open(str(path), "pt") as file:
            metadata = (file.metadata() or {}).get("regard", "{}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no dict
    except (library.SafetensorError, OSError, RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    try:
        description = json.loads(metadata)
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is damaged: its metadata is no JSON.") from None
    _check_seal(description, path)
    fields, checksums = description.get("fields"), description.get("tensors")
    if not _is_text_table(fields) or not _is_text_table(checksums) or checksums.keys() != tensors.keys():
        raise ValueError(f"{path} is damaged: its metadata does not list its tensors.")
    for name, tensor in tensors.items():
        if _checksum(tensor.contiguous()) != checksums[name]:
            raise ValueError(f"{path} is damaged: the checksum of {name} differs.")
    return tensors, fields


def _check_seal(description: Any, path: Path) -> None:
    if not isinstance(description, dict) or "checksum" not in description:
        raise ValueError(f"{path} is damaged: it has no checksum.")
    if seal(description)["checksum"] != description["checksum"]:
        raise ValueError(f"{path} is damaged or was edited: its checksum differs.")


def _is_text_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a run of `regard learn`.

    Args:
        path: The folder.

    Returns:
        True if its `settings.json` is one of regard, of any version. Never raises.

    Example:
        >>> is_checkpoint("/")
        False
    """
    try:
        description = read_json(Path(path) / SETTINGS)
        return isinstance(description, dict) and str(description.get("format")).startswith("regard model")
    except (OSError, ValueError, TypeError):
        return False


def read_settings(folder: Path) -> tuple[str, Settings, str]:
    """The kind of a run, its settings, and the digest of its training data."""
    path = folder / SETTINGS
    description = read_json(path)
    if not isinstance(description, dict) or "format" not in description:
        raise ValueError(f"{path} is damaged: it has no format.")
    if description["format"] != FORMAT:
        raise ValueError(f"{path} has the format {str(description['format'])[:40]!r}; this version reads {FORMAT!r}.")
    if missing := [name for name in ("kind", "settings", "data", "tokenizer") if name not in description]:
        raise ValueError(f"{path} is damaged: {', '.join(map(repr, missing))} must be in it.")
    _check_seal(description, path)
    try:
        settings = from_json(description["kind"], description["settings"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return description["kind"], settings, str(description["data"])


def tokens_digest(folder: Path) -> str | None:
    """SHA-256 of the token ids of a run, where they are in a file."""
    digest = read_json(folder / SETTINGS).get("tokens")
    return None if digest is None else str(digest)


def began_pretrained(folder: Path) -> bool:
    """Whether a run began from a pretrained model."""
    return bool(read_json(folder / SETTINGS).get("pretrained"))


def read_tokenizer(folder: Path, kind: str) -> Any:
    """The tokenizer of a run, after its digest was compared with the one in the settings."""
    path = folder / TOKENIZER
    data = _read_bytes(path)
    if hashlib.sha256(data).hexdigest() != read_json(folder / SETTINGS).get("tokenizer"):
        raise ValueError(f"{path} is damaged or was edited: its checksum differs from the one in {SETTINGS}.")
    tokenizer = texts.load(data, path)
    special = (texts.PAD, texts.START, texts.END) if kind == "translate" else ()
    if missing := [name for name in special if tokenizer.token_to_id(name) is None]:
        raise ValueError(f"{path} is no tokenizer of a translator: {', '.join(missing)} must be in it.")
    return tokenizer


def read_model(folder: Path, kind: str, settings: Settings, vocabulary: int) -> nn.Module:
    """The best model of a run. Shapes are compared with the file before anything is allocated."""
    path = folder / MODEL
    tensors, _ = read_tensors(path)
    check_shapes(tensors, kind, settings, vocabulary, path)
    model = build(kind, settings, vocabulary)
    model.load_state_dict(tensors)
    return model


def check_shapes(tensors: dict[str, Tensor], kind: str, settings: Settings, vocabulary: int, path: Path) -> None:
    """Compare the tensors of a file with the model that its settings describe, built without memory."""
    if settings.layers > len(tensors):  # a hostile number of layers would take hours even without memory
        raise ValueError(
            f"{path} does not fit its settings: it has {len(tensors)} tensors for {settings.layers} layers."
        )
    try:
        with torch.device("meta"), _NothingInPlace():
            expected = _forms(dict(build(kind, settings, vocabulary).state_dict()))
    except RuntimeError as error:  # sizes beyond 2^63
        raise ValueError(f"{path} does not fit its settings: {error}") from None
    if expected != (forms := _forms(tensors)):
        differ = sorted(name for name in expected.keys() | forms.keys() if expected.get(name) != forms.get(name))
        raise ValueError(f"{path} does not fit its settings: {', '.join(differ[:3])} differ.")


class _NothingInPlace(TorchFunctionMode):
    """Skips what changes a tensor in place: without memory it does nothing, and PyTorch loads its compiler for it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def _forms(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The rows of `history.json`, checked: one dict per step, with numbers per head where heads were watched."""
    path = folder / HISTORY
    history = read_json(path)
    if isinstance(history, list):
        raise ValueError(f"{path} was written without a checksum: remove it, and the run resumes without its numbers.")
    _check_seal(history, path)
    rows = history.get("rows")
    if not isinstance(rows, list) or not all(_is_history_row(row) for row in rows):
        raise ValueError(
            f"{path} is damaged: it must be a list of rows, each with a step and, under heads, numbers of every head."
        )
    return rows


def _is_history_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("step"), int) or isinstance(row["step"], bool):
        return False
    heads = row.get("heads", {})
    return isinstance(heads, dict) and all(
        isinstance(statistics, dict) and all(_is_number_list(values) for values in statistics.values())
        for statistics in heads.values()
    )


def _is_number_list(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in values
    )
