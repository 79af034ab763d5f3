"""Models of transformers as models of `regard.nn`, with equal outputs: BERT-like encoders and GPT-2.

Two families, no zoo: any other model is looked into as it is, by `regard.record`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .block import Block
from .models import LanguageModel
from .options import ActivationName
from .text_encoder import TextEncoder

__all__ = ["from_pretrained"]

#: Activations by the names of transformers.
ACTIVATIONS: dict[str, ActivationName] = {
    "gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip

#: Options that change the model, and the value they must have. A config without the option has that value.
BERT_OPTIONS = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}
GPT2_OPTIONS = {
    "add_cross_attention": False, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}  # fmt: skip


def from_pretrained(model_or_folder: nn.Module | str | os.PathLike[str]) -> TextEncoder | LanguageModel:
    """A BERT, RoBERTa or GPT-2 model of transformers as a model of `regard.nn`, with equal outputs in eval mode.

    A BERT-like model (MiniLM is one, and XLM-R and CamemBERT are RoBERTas) becomes a `TextEncoder`, whose output is the
    last hidden state; poolers and heads above it are left out. Padding stands on the right and is hidden by
    ``mask=regard.padding(lengths)``. A GPT-2 becomes a `LanguageModel`, whose output is the logits. Weights are copied.

    Args:
        model_or_folder: A model of transformers, or a folder that its ``save_pretrained`` wrote (safetensors).

    Returns:
        The model, on the device, in the type and in the mode of the original; from a folder, in eval mode.

    Raises:
        ValueError: The model is of another family, has an option that `regard.nn` lacks, or its folder is damaged.
        TypeError: The argument is neither a model nor a folder.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> small = {"vocab_size": 50, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
        >>> theirs = GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0)).eval()
        >>> ids = torch.randint(50, (1, 6))
        >>> ours = from_pretrained(theirs)
        >>> torch.allclose(ours(ids), theirs(ids).logits, atol=1e-5)
        True
        >>> ours.body.blocks[1].attention.causal
        True
    """
    model = model_or_folder if isinstance(model_or_folder, nn.Module) else _opened(model_or_folder)
    convert = _converter(getattr(model, "config", None), type(model).__name__)
    with torch.no_grad():
        return convert(getattr(model, "base_model", model)).train(model.training)


def _converter(config: Any, name: str) -> Callable[[Any], TextEncoder | LanguageModel]:
    """The function that converts a model with this config."""
    family = getattr(config, "model_type", None)
    if family not in CONVERTERS:
        what = name if family is None else f"{name} (model_type {family!r})"
        raise ValueError(
            f"from_pretrained takes {', '.join(CONVERTERS)} models of transformers; got {what}. "
            "Look into any other model as it is: with regard.record(model) as seen: model(...)."
        )
    convert, options = CONVERTERS[family]
    for option, value in options.items():
        if (setting := getattr(config, option, value)) != value:
            raise ValueError(
                f"from_pretrained needs {option}={value!r} in the config; got {setting!r}, which regard.nn has not. "
                "Look into this model as it is, by regard.record(model)."
            )
    return convert


def _opened(folder: str | os.PathLike[str]) -> nn.Module:
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"from_pretrained takes a model or a folder; got {type(folder).__name__}.")
    if not Path(folder).is_dir():
        raise ValueError(
            f"from_pretrained takes a model or a folder, and {os.fspath(folder)!r} is no folder. Models of the hub are "
            "opened by transformers: from_pretrained(AutoModel.from_pretrained(name))."
        )
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(
            "from_pretrained takes a folder that save_pretrained of transformers wrote; "
            f"in {os.fspath(folder)!r} there is no config.json."
        )
    try:
        from transformers import AutoConfig, AutoModel
    except ImportError as error:
        raise ImportError('from_pretrained(folder) needs transformers: pip install "regard[record]".') from error
    with _damage_named(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _converter(config, str(folder))  # before the weights are read
    with _damage_named(folder):
        model, report = AutoModel.from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    # transformers fills them with random numbers; a pooler is left out here.
    if missing := sorted(name for name in report["missing_keys"] if not name.startswith("pooler.")):
        raise ValueError(
            f"the weights in {os.fspath(folder)!r} are not all of this model: {', '.join(missing[:3])} must be there, "
            f"of {len(missing)} that are missing. Save it again by save_pretrained."
        )
    opened: nn.Module = model.eval()
    return opened


@contextlib.contextmanager
def _damage_named(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Say in one line that a folder is damaged, and what its libraries say of it."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # the libraries raise types of their own
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"the model in {os.fspath(folder)!r} could not be opened: {why}. If its files are damaged, save it again "
            "by save_pretrained."
        ) from error


def _text_encoder(theirs: Any) -> TextEncoder:
    """A BERT or a RoBERTa, whose positions begin behind the number of the padding token."""
    config, words = theirs.config, theirs.embeddings
    start = words.position_embeddings.padding_idx
    places = words.position_embeddings.weight[0 if start is None else start + 1 :]
    ours = TextEncoder(
        config.vocab_size, dim=config.hidden_size, heads=config.num_attention_heads, layers=config.num_hidden_layers,
        context=len(places), segments=config.type_vocab_size, hidden=config.intermediate_size,
        dropout=config.hidden_dropout_prob, attention_dropout=config.attention_probs_dropout_prob,
        activation=_activation(config.hidden_act),
    ).to(places)  # fmt: skip
    ours.positions.table.copy_(places)
    copies = [
        (ours.words, words.word_embeddings),
        (ours.segments, words.token_type_embeddings),
        (ours.norm, words.LayerNorm),
    ]
    for block, layer in _pairs(ours.body.blocks, theirs.encoder.layer):
        attention, projections = block.attention, layer.attention.self
        copies += [
            (attention.query, projections.query),
            (attention.key, projections.key),
            (attention.value, projections.value),
            (attention.output, layer.attention.output.dense),
            (block.attention_norm, layer.attention.output.LayerNorm),
            (block.feed_forward.inner, layer.intermediate.dense),
            (block.feed_forward.outer, layer.output.dense),
            (block.feed_forward_norm, layer.output.LayerNorm),
        ]
    _copy(ours, copies, config.layer_norm_eps)
    return ours


def _language_model(theirs: Any) -> LanguageModel:
    """A GPT-2: its linear maps are written (in, out), and one of them makes q, k and v."""
    config, places = theirs.config, theirs.wpe.weight
    ours = LanguageModel(
        config.vocab_size, dim=config.n_embd, heads=config.n_head, layers=config.n_layer, context=len(places),
        positions="learned", embedding_scale=1.0, hidden=config.n_inner, dropout=config.resid_pdrop,
        attention_dropout=config.attn_pdrop, activation=_activation(config.activation_function),
    ).to(places)  # fmt: skip
    ours.embedding.dropout.p = config.embd_pdrop
    positions: Any = ours.embedding.positions
    positions.table.copy_(places)
    copies = [(ours.embedding.table, theirs.wte), (ours.body.norm, theirs.ln_f)]
    for block, layer in _pairs(ours.body.blocks, theirs.h):
        attention, feed = block.attention, block.feed_forward
        copies += [(block.attention_norm, layer.ln_1), (block.feed_forward_norm, layer.ln_2)]
        weights, biases = layer.attn.c_attn.weight.chunk(3, 1), layer.attn.c_attn.bias.chunk(3)
        parts: list[Any] = [*zip((attention.query, attention.key, attention.value), weights, biases, strict=True)]
        parts += [
            (linear, conv.weight, conv.bias)
            for linear, conv in (
                (attention.output, layer.attn.c_proj),
                (feed.inner, layer.mlp.c_fc),
                (feed.outer, layer.mlp.c_proj),
            )
        ]
        for linear, weight, bias in parts:
            linear.weight.copy_(weight.T)
            linear.bias.copy_(bias)
    _copy(ours, copies, config.layer_norm_epsilon)
    return ours


def _copy(ours: nn.Module, copies: Iterable[tuple[Any, Any]], eps: float) -> None:
    """Copy weights and biases from their modules to ours, and set the ε of all norms."""
    for mine, other in copies:
        mine.load_state_dict(other.state_dict())
    for module in ours.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps


def _pairs(blocks: Iterable[Any], layers: Iterable[Any]) -> Iterable[tuple[Block, Any]]:
    return zip(blocks, layers, strict=True)


def _activation(name: Any) -> ActivationName:
    if name not in ACTIVATIONS:
        raise ValueError(
            f"from_pretrained knows the activations {', '.join(ACTIVATIONS)}; got {name!r}. Look into this model as it "
            "is, by regard.record(model)."
        )
    return ACTIVATIONS[name]


#: By `config.model_type`: the conversion, and the options that a config must have.
CONVERTERS: dict[str, tuple[Callable[[Any], TextEncoder | LanguageModel], dict[str, Any]]] = {
    "bert": (_text_encoder, BERT_OPTIONS),
    "roberta": (_text_encoder, BERT_OPTIONS),
    "xlm-roberta": (_text_encoder, BERT_OPTIONS),  # RoBERTa of many languages
    "camembert": (_text_encoder, BERT_OPTIONS),  # and of French
    "gpt2": (_language_model, GPT2_OPTIONS),
}
