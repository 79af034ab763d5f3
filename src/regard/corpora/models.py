"""The model of a corpus run: from texts to token ids, and a pass over them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["CorpusModel", "TokenizerLike", "as_corpus_model", "device_of"]

#: Values of every parameter that enter the checksum of a model.
SAMPLED = 256


class Tokenizer(Protocol):
    """A tokenizer of transformers, of the tokenizers package, or of one's own."""

    def encode(self, text: str, /) -> Any:
        """Its token ids."""

    def decode(self, ids: list[int], /) -> Any:
        """Their text."""


#: A tokenizer, or a function from a text to token ids.
TokenizerLike: TypeAlias = Tokenizer | Callable[[str], Sequence[int]]


class CorpusModel:
    """A model that reads token ids, with its tokenizer.

    Attributes:
        name: For people.
        module: Called with ids ``(b, t)``.
        limit: Tokens that it takes at most; None: any number.
    """

    def __init__(
        self, name: str, module: nn.Module, limit: int | None, encode: Any, tokens: Any, apart: bool = True
    ) -> None:
        self.name, self.module, self.limit, self._encode, self._tokens = name, module, limit, encode, tokens
        self._apart = apart  # a token's text does not depend on its neighbours

    def ids(self, content: str | Sequence[int]) -> list[int]:
        """Token ids of a text; ids stay as they are."""
        if not isinstance(content, str):
            return list(content)
        if self._encode is None:
            raise ValueError("texts need a tokenizer: corpus(model, data, tokenizer=...); or pass lists of token ids.")
        ids = self._encode(content)
        try:
            return [int(token) for token in ids]
        except (TypeError, ValueError):
            raise TypeError(f"tokenizer must make a list of token ids of a text; got {ids!r:.60}.") from None

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Tokens as text."""
        return [str(token) for token in ids] if self._tokens is None else self._tokens(list(ids))

    def tokens_of(self, ids: Sequence[int]) -> Callable[[list[int]], list[str]]:
        """A function from positions in a sequence to their tokens as text.

        A sequence of thousands is turned into text where it is asked for alone, or once where a token's text depends on
        the others.
        """
        if self._apart:
            return lambda positions: self.tokens([ids[at] for at in positions])
        texts: list[str] = []

        def tokens_at(positions: list[int]) -> list[str]:
            if not texts:
                texts.extend(self.tokens(ids))
            return [texts[at] for at in positions]

        return tokens_at

    def checksum(self) -> str:
        """Of the names, types and sizes of all parameters, and of values spread over each of them."""
        digest = hashlib.sha256()
        values = []
        for name, parameter in sorted(self.module.state_dict().items()):
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)} ".encode())
            flat = parameter.detach().flatten()
            values.append(flat[:: max(1, flat.numel() // SAMPLED)])
        digest.update(_bytes_of(values))
        return digest.hexdigest()


def _bytes_of(values: list[Tensor]) -> bytes:
    """Numbers as float64, by one copy for each device and type: every copy waits for the device's queue."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in values:
        alike.setdefault((x.device, x.dtype), []).append(x)
    copied = {kind: torch.cat(parts).double().cpu().split([len(x) for x in parts]) for kind, parts in alike.items()}
    numbers = {kind: iter(parts) for kind, parts in copied.items()}
    return b"".join(next(numbers[x.device, x.dtype]).numpy().astype("<f8").tobytes() for x in values)


def as_corpus_model(model: Any, tokenizer: Any, device: str | torch.device | None) -> CorpusModel:
    """A model of `regard look` by name or folder, or any module with a tokenizer."""
    device = None if device is None else _here(device)
    if isinstance(model, nn.Module):
        encode, tokens = _of_tokenizer(tokenizer)
        corpus_model = CorpusModel(type(model).__name__, model, None, encode, tokens)
    else:
        if tokenizer is not None:
            raise ValueError("a model by name brings its own tokenizer: leave out tokenizer=.")
        corpus_model = _loaded(model)
        if device is None and torch.cuda.is_available():
            device = _here("cuda")
    if device is not None:
        corpus_model.module.to(device)
    return corpus_model


def _here(name: str | torch.device) -> torch.device:
    """A device by name; processes of torchrun take the GPUs of their machine in turn."""
    try:
        name = torch.device(name)
        if name.type == "cuda" and name.index is None and "LOCAL_RANK" in os.environ:
            name = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
        torch.empty(0, device=name)
        if name.type != "meta":
            return name
        why = "it holds no numbers"
    except (RuntimeError, AssertionError, TypeError) as error:  # no such name; no such device in this PyTorch, or here
        why = str(error).partition("\n")[0]
    raise ValueError(f"device must be one that is here, such as cpu, cuda or cuda:1; got {str(name)!r} ({why:.100}).")


def _loaded(model: str | Path | None) -> CorpusModel:
    loading = import_module("regard.look.loading")
    loaded = loading.as_loaded(None if model == loading.BUNDLED and not Path(loading.BUNDLED).exists() else model)
    if getattr(loaded, "encoder_decoder", False) or getattr(getattr(loaded, "trained", None), "kind", "lm") != "lm":
        raise ValueError(f"{loaded.name} has encoder and decoder; a corpus run takes models that read one text.")
    return CorpusModel(
        loaded.name,
        loaded.model,
        loaded.limit,
        lambda text: loaded._ids(text)[0].tolist(),
        lambda ids: loaded.tokens(torch.tensor([ids], device="cpu")),
        apart=False,
    )


def _of_tokenizer(tokenizer: Any) -> tuple[Callable[[str], Any] | None, Callable[[list[int]], list[str]] | None]:
    if tokenizer is None:
        return None, None
    if hasattr(tokenizer, "convert_ids_to_tokens"):  # transformers
        return (lambda text: tokenizer(text)["input_ids"]), lambda ids: list(
            map(str, tokenizer.convert_ids_to_tokens(ids))
        )
    if hasattr(tokenizer, "id_to_token"):  # tokenizers
        return (lambda text: tokenizer.encode(text).ids), lambda ids: [str(tokenizer.id_to_token(n)) for n in ids]
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode"):
        return tokenizer.encode, lambda ids: [str(tokenizer.decode([n])) for n in ids]
    if callable(tokenizer):
        return tokenizer, None
    raise TypeError(
        f"tokenizer must have encode and decode, or be a function from a text to token ids; "
        f"got {type(tokenizer).__name__}."
    )


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))
