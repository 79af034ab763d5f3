"""A pretrained GPT-2 as the start of a run: its weights, its tokenizer, and the settings that follow from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..nn import LanguageModel, from_pretrained
from . import tokenizer as texts

__all__ = ["Pretrained", "read_pretrained"]

#: Default of the learning rate: a rate for training from scratch would destroy what the weights know.
RATE = 1e-4
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Pretrained:
    """Weights by the names of our model, the tokenizer, and the settings with what the model decides."""

    weights: dict[str, Tensor]
    tokenizer: Any
    overrides: dict[str, Any]


def read_pretrained(folder: str | os.PathLike[str], overrides: dict[str, Any]) -> Pretrained:
    """Read a GPT-2 that transformers saved, together with its tokenizer.

    Args:
        folder: The folder of `save_pretrained`.
        overrides: Settings of the user; sizes that differ from the model's are an error.

    Raises:
        ValueError: The folder holds no GPT-2 or no tokenizer, or a setting contradicts the model.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"--from takes a folder with a GPT-2 that save_pretrained wrote; there is no folder {folder}.")
    model = from_pretrained(folder)
    if not isinstance(model, LanguageModel):
        raise ValueError(
            f"--from takes a folder with a GPT-2; {folder} holds an encoder, which predicts no next token."
        )
    tokenizer = _tokenizer(Path(folder) / TOKENIZER, model)
    block: Any = model.body.blocks[0]
    _require_standard(folder, block)
    sizes = {
        "architecture": "gpt2", "positions": "learned", "layers": len(model.body.blocks),
        "heads": block.attention.heads, "dim": block.attention.dim, "hidden": block.feed_forward.inner.out_features,
    }  # fmt: skip
    for name, value in overrides.items():
        if name in ("tokens", "vocabulary") or value != sizes.get(name, value):
            own = "its own tokenizer" if name in ("tokens", "vocabulary") else f"{name} {sizes[name]}"
            raise ValueError(f"the model in {folder} has {own}, got {value}: leave --{name} out.")
    context = overrides.get("context", model.context)
    if not isinstance(context, int) or context > model.context:
        raise ValueError(f"--context must be at most {model.context}, the positions of the model; got {context}.")
    weights = {name: p.detach().float() for name, p in model.named_parameters()}
    table, places = "embedding.table.weight", "embedding.positions.table"
    weights[table] = weights[table][: tokenizer.get_vocab_size()]  # some tables are padded to a round number
    weights[places] = weights[places][:context]
    return Pretrained(weights, tokenizer, {"lr": RATE, **overrides, **sizes, "context": context})


def _tokenizer(path: Path, model: LanguageModel) -> Any:
    if not path.is_file():
        raise ValueError(f"--from needs {path}: save the tokenizer beside the model, by tokenizer.save_pretrained.")
    tokenizer = texts.load(path.read_bytes(), path)
    size, rows = tokenizer.get_vocab_size(), model.embedding.table.num_embeddings
    if size > rows:
        raise ValueError(f"{path} has {size} tokens and the model {rows}: they are not of one model.")
    return tokenizer


def _require_standard(folder: Any, block: Any) -> None:
    """Refuse what `--architecture gpt2` builds otherwise: its settings would open another model."""
    activation = block.feed_forward.activation
    if not isinstance(activation, nn.GELU) or activation.approximate != "tanh":
        raise ValueError(f"--from needs GPT-2's activation gelu_new; got {activation} in {folder}.")
    if block.attention_norm.eps != nn.LayerNorm(1).eps:
        raise ValueError(f"--from needs layer_norm_epsilon 1e-05; got {block.attention_norm.eps} in {folder}.")
