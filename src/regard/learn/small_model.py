"""regard-small: the model that comes with the package, for machines without all-MiniLM-L6-v2.

It was trained on generated sentences (`bench/small_model.py`) to fill in hidden words, and to say at every pronoun
which noun it stands for: so it has heads that tie a pronoun to nouns. Of other English it knows little.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..nn import TextEncoder
from . import checkpoint
from . import tokenizer as texts

__all__ = ["FOLDER", "NAME", "SHAPE", "SmallModel", "read_small_model", "save_small_model"]

NAME = "regard-small"
FOLDER = Path(__file__).parent / "small"
#: Arguments of its `TextEncoder`.
SHAPE: dict[str, Any] = {"dim": 128, "heads": 4, "layers": 4, "context": 64, "hidden": 512, "norm_first": True}


@dataclass(frozen=True)
class SmallModel:
    """The model in eval mode, its tokenizer, and what was measured when it was trained."""

    model: TextEncoder
    tokenizer: Any
    figures: dict[str, str]


def save_small_model(folder: Path, model: TextEncoder, tokenizer: str, figures: dict[str, str]) -> None:
    """Write the tokenizer, and the weights in float16 with a checksum of each and of the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    data = tokenizer.encode()
    (folder / checkpoint.TOKENIZER).write_bytes(data)
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    fields = {**figures, "tokenizer": hashlib.sha256(data).hexdigest()}
    checkpoint.save(folder / checkpoint.MODEL, weights, fields)


def read_small_model(folder: Path = FOLDER) -> SmallModel:
    """The model of a folder, by default the package's own, after its checksums were verified."""
    tensors, figures = checkpoint.read_tensors(folder / checkpoint.MODEL)
    data = (folder / checkpoint.TOKENIZER).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != figures.pop("tokenizer", None):
        raise ValueError(
            f"{folder / checkpoint.TOKENIZER} is damaged: its SHA-256 must be the one in {checkpoint.MODEL}, "
            f"got {digest[:12]}…. Install regard again."
        )
    tokenizer = texts.load(data, folder / checkpoint.TOKENIZER)
    model = TextEncoder(tokenizer.get_vocab_size(), **SHAPE)
    model.load_state_dict(tensors)  # copied from float16 into float32
    return SmallModel(model.eval(), tokenizer, figures)
