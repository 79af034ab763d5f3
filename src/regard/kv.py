"""Which keys of a cache matter: scores of published methods as functions of `regard.Weights`, and eviction.

Scores are ``(..., kv_heads, j)``, larger is worth more; `evict` drops the rest from a transformers cache.

>>> import regard.kv
>>> W = regard.weights(torch.randn(1, 8, 96, 16), torch.randn(1, 2, 96, 16), mask=regard.causal())
>>> regard.kv.snapkv(W, window=16).shape, regard.kv.keep(regard.kv.h2o(W), 32).shape
(torch.Size([1, 2, 96]), torch.Size([1, 2, 32]))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .core.arguments import at_least_one
from .core.shared import called_by_all_ranks
from .core.tensor_kinds import readable_numbers
from .core.weights import Weights, need_weights

__all__ = ["evict", "h2o", "keep", "oracle", "snapkv", "tova", "update"]


class KVCache(Protocol):
    """A cache of keys and values in layers, as `transformers.DynamicCache` is."""

    @property
    def layers(self) -> Sequence[object]:
        """In the order of the model, each with `keys` and `values`."""


@called_by_all_ranks
def h2o(weights: Weights, mean: bool = True) -> Tensor:
    """Attention that each key received from all queries, averaged over the heads that share it (H2O).

    Args:
        weights: Causal attention of the prompt, ``(..., h, i, j)``.
        mean: Divide by the number of queries at or after the key, as kvpress' observed attention does; the paper adds
            up.

    Returns:
        ``(..., kv_heads, j)``.

    >>> regard.kv.h2o(regard.weights(torch.zeros(1, 2, 4), mask=regard.causal()))
    tensor([[0.7500, 0.5000]])
    """
    need_weights(weights, "h2o(weights)", heads=True)
    scores = weights.reduce_heads("mean", groups="kv").received()
    if not mean:
        return scores
    rows = weights.shape[-2]
    weights._need_positions("h2o")
    before = (weights._keys_here - weights._factors.query_offset).clamp(0, rows)
    return scores / (rows - before).clamp(min=1)


@called_by_all_ranks
def tova(weights: Weights) -> Tensor:
    """The weights of the last query, averaged over all heads; the last key is never dropped (TOVA).

    Args:
        weights: Attention ``(..., h, i, j)``; only its last row is computed.

    Returns:
        ``(..., kv_heads, j)``, the same for every head.

    >>> regard.kv.tova(regard.weights(torch.zeros(1, 4, 2), mask=regard.causal()))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    need_weights(weights, "tova(weights)", heads=True)
    if not weights.shape[-2]:
        raise ValueError("tova(weights) takes the weights of a last query; got a matrix without rows.")
    row = weights.row(weights.shape[-2] - 1).mean(-2, keepdim=True)
    scores = _with_largest_at_the_end(row, 1)
    return scores.expand(*scores.shape[:-2], weights._factors.k.shape[-3], -1)


@called_by_all_ranks
def snapkv(weights: Weights, window: int = 64, kernel: int = 5) -> Tensor:
    """The mean weight from the last queries, smoothed along keys, averaged over heads that share keys (SnapKV).

    Args:
        weights: Causal attention ``(..., h, i, j)``; only the last `window` rows are computed, and no more are needed.
        window: Queries that observe; their own keys are never dropped.
        kernel: Keys that are averaged, an odd number.

    Returns:
        ``(..., kv_heads, j)``.

    >>> W = regard.weights(torch.randn(4, 40, 8), mask=regard.causal())
    >>> regard.kv.snapkv(W, window=8, kernel=3).shape
    torch.Size([4, 40])
    """
    need_weights(weights, "snapkv(weights)", heads=True)
    weights._need_entire("snapkv")
    i, j = weights.shape[-2:]
    if at_least_one(window, "snapkv(window=)") > i or window >= j:
        fits = max(1, min(i, j // 2))
        raise ValueError(
            f"snapkv(window=) must be at most the {i} queries and less than the {j} keys, which the window judges; "
            f"got {window}. Pass a smaller one, such as window={fits}."
        )
    if at_least_one(kernel, "snapkv(kernel=)") % 2 == 0:
        raise ValueError(f"snapkv(kernel=) must be odd; got {kernel}.")
    mean = weights.rows(slice(-window, None)).reduce_heads("mean", groups="kv").received()[..., :-window] / window
    flat = torch.nn.functional.avg_pool1d(mean.reshape(-1, 1, j - window), kernel, stride=1, padding=kernel // 2)
    return _with_largest_at_the_end(torch.nn.functional.pad(flat.reshape(mean.shape), (0, window)), window)


@called_by_all_ranks
def oracle(weights: Weights, by: Literal["sum", "max"] = "sum") -> Tensor:
    """The weights of the queries that come later: the bound that methods without foresight are judged by.

    Args:
        weights: Attention of the later queries over the cached keys, ``(..., h, i, j)``.
        by: ``"sum"`` over queries, or ``"max"``, as methods that rebuild the prompt use it.

    Returns:
        ``(..., kv_heads, j)``: the mean over heads that share keys of a sum, the largest of a maximum.

    >>> regard.kv.oracle(regard.weights(torch.zeros(1, 3, 4)), by="max")
    tensor([[0.3333, 0.3333, 0.3333]])
    """
    need_weights(weights, "oracle(weights)", heads=True)
    if by not in ("sum", "max"):
        raise ValueError(f"oracle(by=) must be 'sum' or 'max'; got {by!r}.")
    if by == "sum" or not weights.shape[-2]:  # over ranks: of this rank's keys
        return weights.reduce_heads("mean", groups="kv").received()
    return weights.reduce_heads("max", groups="kv").pool_blocks(weights.shape[-2], 1, by="max").squeeze(-2)


@called_by_all_ranks
def update(scores: Tensor, step: Weights) -> Tensor:
    """Accumulated scores after one more decoding step, at the cost of the step.

    Args:
        scores: ``(..., kv_heads, j)`` of `h2o` with ``mean=False``, over the keys before the step.
        step: Attention of the new queries over all keys, ``(..., h, new, j + new)``.

    Returns:
        ``(..., kv_heads, j + new)``.

    >>> x = torch.randn(2, 9, 4)
    >>> prompt, entire = (regard.weights(x[:, :n], mask=regard.causal()) for n in (8, 9))
    >>> step = regard.weights(x[:, 8:], x)  # the query of token 8, over all nine keys
    >>> scores = regard.kv.update(regard.kv.h2o(prompt, mean=False), step)
    >>> torch.allclose(scores, regard.kv.h2o(entire, mean=False), atol=1e-6)
    True
    """
    need_weights(step, "update(scores, step)", heads=True)
    step._need_entire("update")
    received = step.reduce_heads("mean", groups="kv").received()
    _need_scores(scores, "update(scores, step)")
    if scores.shape[:-1] != received.shape[:-1]:
        raise ValueError(
            f"update(scores, step) takes scores (..., kv_heads, j) of the step's key heads, {tuple(received.shape)} "
            f"after it; got {tuple(scores.shape)}."
        )
    new_keys = received.shape[-1] - scores.shape[-1]
    if new_keys < 0:
        raise ValueError(
            f"update(scores, step): the step must see all {scores.shape[-1]} keys; got {received.shape[-1]}."
        )
    return torch.nn.functional.pad(scores, (0, new_keys)) + received


def keep(scores: Tensor, n: int) -> Tensor:
    """The positions of the n largest scores of every head, in their order.

    Args:
        scores: ``(..., kv_heads, j)``.
        n: How many keys stay.

    Returns:
        int64 ``(..., kv_heads, n)``, ascending.

    >>> regard.kv.keep(torch.tensor([[0.1, 0.4, 0.2, 0.3]]), 2)
    tensor([[1, 3]])
    """
    _need_scores(scores, "keep(scores, n)")
    if at_least_one(n, "keep(scores, n)") > scores.shape[-1]:
        raise ValueError(f"keep(scores, n): n must be at most the {scores.shape[-1]} keys; got {n}.")
    return scores.topk(n, dim=-1).indices.sort(dim=-1).values


def _need_scores(scores: Any, what: str) -> None:
    if not isinstance(scores, Tensor) or not scores.ndim:
        got = "a number" if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"{what} takes a tensor (..., kv_heads, j), such as kv.h2o(W); got {got}.")
    readable_numbers(scores, what)
    if scores.is_complex() or scores.dtype == torch.bool:
        raise TypeError(f"{what} takes numbers of which some are larger, such as kv.h2o(W); got {scores.dtype}.")


def evict(cache: KVCache, scores: Sequence[Tensor | None], n: int) -> list[Tensor | None]:
    """Drop all but the n best keys and values of every layer from a transformers cache, in place.

    Decoding goes on at the true positions: `get_seq_length()` still counts the tokens that were seen, so that a model's
    forward and `generate` need nothing else. Layers of one kind share a mask: drop as many keys from all of them. A
    padded key that stays would be seen: in a padded batch n is at most the shortest prompt. Models that add a bias of
    positions to scores (ALiBi, T5) would take the keys that stay for neighbours.

    Args:
        cache: A `transformers.DynamicCache`, or any object whose `layers` have `keys` and `values` ``(b, g, j, d)``.
        scores: For each layer ``(b, g, j)``; None leaves a layer as it is.
        n: How many keys stay in each head.

    Returns:
        For each layer the positions that stay, ``(b, g, n)``, ascending: scores that `update` follows are gathered
        there.

    Raises:
        TypeError: A layer holds more than keys and values: one with a window, a quantised or a static one.

    >>> from types import SimpleNamespace
    >>> layer = SimpleNamespace(keys=torch.randn(1, 2, 6, 4), values=torch.randn(1, 2, 6, 4))
    >>> (stay,) = regard.kv.evict(SimpleNamespace(layers=[layer]), [torch.rand(1, 2, 6)], 3)
    >>> layer.keys.shape, stay.shape
    (torch.Size([1, 2, 3, 4]), torch.Size([1, 2, 3]))
    """
    if hasattr(cache, "cross_attention_cache"):
        raise TypeError(
            f"evict(cache, ...) takes the keys of one attention; got {type(cache).__name__}, which has two caches. "
            "Pass cache.self_attention_cache or cache.cross_attention_cache."
        )
    if not hasattr(cache, "layers"):
        raise TypeError(
            f"evict(cache, ...) takes a cache of transformers, such as outputs.past_key_values of a model called with "
            f"use_cache=True; got {type(cache).__name__}."
        )
    layers: list[Any] = list(cache.layers)
    if not isinstance(scores, Iterable):
        raise TypeError(f"evict(cache, scores) takes a list of scores, one a layer; got {type(scores).__name__}.")
    scores = list(scores)
    if len(layers) != len(scores):
        raise ValueError(
            f"evict(cache, scores) takes scores of every layer; got {len(scores)} for {len(layers)} layers."
        )
    stay = [
        None if of_layer is None else _best_positions(layer, of_layer, n, number)
        for number, (layer, of_layer) in enumerate(zip(layers, scores, strict=True))
    ]
    for layer, positions in zip(layers, stay, strict=True):  # after all checks: a cache is never half evicted
        if positions is None:
            continue
        dropped = layer.keys.shape[-2] - n
        for name in ("keys", "values"):
            states = getattr(layer, name)
            at = positions.to(states.device).unsqueeze(-1)  # an offloaded layer is on another one
            setattr(layer, name, states.gather(-2, at.expand(*positions.shape, states.shape[-1])))
        if hasattr(layer, "get_seq_length"):
            _count_dropped(layer, dropped)
    return stay


def _count_dropped(layer: Any, tokens: int) -> None:
    if not hasattr(layer, "dropped"):
        layer.__class__, layer.dropped = _evicted(type(layer)), 0
    layer.dropped += tokens


def _evicted(kind: Any) -> Any:
    """The same layer of a transformers cache, which counts tokens whose keys are gone, as one with a window does."""

    class Evicted(kind):  # type: ignore[misc]
        keys: Tensor
        values: Tensor
        dropped: int

        def get_seq_length(self) -> int:
            return int(super().get_seq_length()) + self.dropped

        def get_mask_sizes(self, queries: Any) -> tuple[int, int]:
            """How many keys a mask has, and the position of the first: all that stay are before the queries."""
            length, start = super().get_mask_sizes(queries)
            return length - self.dropped, start + self.dropped

        def crop(self, tokens: int) -> None:
            """Remove the last tokens, or, as older versions count, all after the first."""
            removed = -tokens if tokens <= 0 else self.get_seq_length() - tokens
            end = self.keys.shape[-2] - max(0, removed)
            self.keys, self.values = self.keys[..., :end, :], self.values[..., :end, :]

        def reset(self) -> None:
            self.dropped = 0
            super().reset()

        def __reduce__(self) -> Any:
            return _restored, (kind, vars(self))

    Evicted.__name__ = Evicted.__qualname__ = f"Evicted{kind.__name__}"
    return Evicted


def _restored(kind: Any, fields: dict[str, Any]) -> Any:
    layer = object.__new__(_evicted(kind))
    vars(layer).update(fields)
    return layer


def _best_positions(layer: Any, scores: Tensor, n: int, number: int) -> Tensor:
    for kind in type(layer).__mro__:  # a class of one's own may inherit what would be lost
        if kind.__module__.startswith("transformers.") and kind.__name__ not in ("DynamicLayer", "CacheLayerMixin"):
            raise TypeError(
                f"evict: layer {number} of the cache is a {kind.__name__}, which holds more than keys and values; "
                "pass None for its scores to leave it as it is."
            )
    if not isinstance(layer.keys, Tensor):
        raise ValueError(
            f"evict: layer {number} of the cache holds no keys yet; call the model first, or pass None for its scores."
        )
    _need_scores(scores, f"evict: layer {number}")
    if scores.shape != (shape := layer.keys.shape[:-1]):
        hint = "Ask for scores after the pass that filled it; what was evicted has none."
        per_query_head = scores.ndim == 3 and (scores.shape[0], scores.shape[2]) == (shape[0], shape[2])
        if per_query_head and scores.shape[1] % shape[1] == 0:
            hint = (
                "A model that repeats its keys for every query head, as eager attention does, is recorded so: pass "
                f"scores.unflatten(1, ({shape[1]}, -1)).mean(2)."
            )
        raise ValueError(
            f"evict: layer {number} needs a score for each key of the cache, {tuple(shape)}; got "
            f"{tuple(scores.shape)}. {hint}"
        )
    return keep(scores, n)


def _with_largest_at_the_end(scores: Tensor, n: int) -> Tensor:
    """The last n keys get a score just above all others, so that they stay."""
    n = min(n, scores.shape[-1])
    others = scores[..., : scores.shape[-1] - n]
    largest = others.detach().amax() if others.numel() else scores.new_ones(())
    above = torch.nextafter(largest, torch.full_like(largest, torch.inf))  # a tie might go to another key
    return torch.cat([others, above.expand(*scores.shape[:-1], n)], -1)
