"""Self-attention and cross-attention layers with trainable W_q, W_k, W_v and W_o.

A layer projects its input to queries, keys and values and calls `regard.attend`; `layer.weights` gives the same
queries and keys to `regard.weights`. A layer stores nothing of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from ..core.api import attend, weights
from ..core.dropout import attend_with_dropout, check_dropout
from ..core.masks.kinds import Mask, as_mask, causal
from ..core.types import Align, MaskLike, StatisticName
from ..core.weights import Statistics, Weights
from .cache import Cache, check_cache
from .options import LayerScore, SeeOptions, check_see_options, typed_as
from .positions import PositionsLike, Rotary, as_positions
from .probe import Probe
from .score_module import as_score_module

__all__ = ["CrossAttention", "SelfAttention"]


class _Attention(nn.Module):
    """Shared by both layers: projections into heads, the score, and W_o."""

    def __init__(
        self, dim: int, memory_dim: int, heads: int, kv_heads: int | None, key_size: int | None, value_size: int | None,
        score: LayerScore | None, bias: bool, output: bool, parameters: bool, attention_dropout: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention_dropout = check_dropout(attention_dropout)
        kv_heads = heads if kv_heads is None else kv_heads
        _check_sizes(
            dim=dim, memory_dim=memory_dim, heads=heads, kv_heads=kv_heads, key_size=key_size, value_size=value_size
        )
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, both at least 1; got {heads} and {kv_heads}.")
        if not parameters:
            _refuse_parameters(heads, kv_heads, key_size, value_size, score, bias)
        if key_size is None:
            if dim % heads:
                raise ValueError(f"dim {dim} does not split into {heads} heads of one size: pass key_size=....")
            key_size = dim // heads
        value_size = key_size if value_size is None else value_size
        sizes = {"dim": dim, "memory_dim": memory_dim, "key_size": key_size, "value_size": value_size}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1; got {size}.")
        self.dim, self.heads, self.kv_heads = dim, heads, kv_heads
        self.key_size, self.value_size = key_size, value_size
        self.query = nn.Linear(dim, heads * key_size, bias) if parameters else nn.Identity()
        self.key = nn.Linear(memory_dim, kv_heads * key_size, bias) if parameters else nn.Identity()
        self.value = nn.Linear(memory_dim, kv_heads * value_size, bias) if parameters else nn.Identity()
        self.output = nn.Linear(heads * value_size, dim, bias) if output and parameters else nn.Identity()
        # The basic form without W_q and W_k is defined with the unscaled product.
        self.score = as_score_module(score or ("scaled_dot" if parameters else "dot"), heads, key_size)

    def _split_heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(-2, -3)  # ... h t d

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, align: Align | None, probe: Probe | None
    ) -> Tensor:
        """Attention of all heads, (..., h, i, e). `regard.record` hooks this method."""
        if probe is not None:
            statistics = self._statistics(q, k, v, mask, align, probe.names)
            probe._append(statistics)
            return statistics.y
        if p := self._active_dropout():
            return attend_with_dropout(q, k, v, self.score(), mask, align, None, p)
        return attend(q, k, v, score=self.score(), mask=mask, align=align)

    def _statistics(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, align: Align | None, names: Iterable[StatisticName],
        **more: Unpack[SeeOptions],
    ) -> Statistics:  # fmt: skip
        """Statistics of the weights before dropout, and the output of all heads, (..., h, i, e), after it."""
        score, p = self.score(), self._active_dropout()
        w = weights(q, k, score=score, mask=mask, align=align)
        if not p:
            return w.see(*names, values=v, **more)
        statistics = w.see(*dict.fromkeys((*names, "lse")), **more)
        return Statistics(
            **{**vars(statistics), "y": attend_with_dropout(q, k, v, score, mask, align, statistics.lse, p)}
        )

    def _active_dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _merge_heads(self, y: Tensor) -> Tensor:
        return self.output(y.transpose(-2, -3).flatten(-2))  # ... t dim

    def extra_repr(self) -> str:
        shared = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        dropped = f", attention_dropout={self.attention_dropout:g}" if self.attention_dropout else ""
        causal = ", causal=True" if getattr(self, "causal", False) else ""
        sizes = f"key_size={self.key_size}, value_size={self.value_size}"
        return f"{self.dim}, heads={self.heads}{shared}, {sizes}{dropped}{causal}"


class SelfAttention(_Attention):
    """Self-attention: y = softmax(score(x W_q, x W_k)) x W_v W_o, ``(..., t, dim)`` in and out.

    Args:
        dim: Size of the input and output vectors.
        heads: Number of query heads.
        kv_heads: Number of key and value heads, a divisor of `heads` (grouped-query attention). Default: `heads`.
        key_size: Size of a head's queries and keys. Default: ``dim // heads``.
        value_size: Size of a head's values. Default: `key_size`.
        score: As in `regard.weights`; "additive" and "bilinear" create their own parameters. Default: "scaled_dot",
            and "dot" without parameters.
        positions: "rotary", "sinusoidal", "learned", or an object of `regard.nn`. Default: none.
        causal: Whether a token sees only itself and the tokens before it.
        bias: Whether the projections have a bias.
        output: Whether there is a W_o.
        parameters: False gives the basic form softmax(x xᵀ) x, without any projection.
        attention_dropout: Share of the weights dropped while training, the same in forward and backward: by PyTorch's
            fused attention on a GPU, else block by block. Statistics and recordings are of the weights before dropout.

    Example:
        >>> layer = SelfAttention(16, heads=4)
        >>> x = torch.randn(2, 5, 16)
        >>> layer(x).shape, layer.weights(x).shape
        (torch.Size([2, 5, 16]), torch.Size([2, 4, 5, 5]))
        >>> basic = SelfAttention(16, parameters=False)            # softmax(x xᵀ) x
        >>> torch.allclose(basic(x), (x @ x.mT).softmax(-1) @ x, atol=1e-5)
        True
        >>> grouped = SelfAttention(16, heads=4, kv_heads=2)       # two query heads share keys and values
        >>> grouped.key.weight.shape
        torch.Size([8, 16])
    """

    def __init__(
        self, dim: int, heads: int = 1, *, kv_heads: int | None = None, key_size: int | None = None,
        value_size: int | None = None, score: LayerScore | None = None,
        positions: PositionsLike | None = None, causal: bool = False, bias: bool = False, output: bool = True,
        parameters: bool = True, attention_dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, dim, heads, kv_heads, key_size, value_size, score, bias, output, parameters, attention_dropout
        )
        if positions == "learned" and not parameters:
            raise ValueError('parameters=False leaves nothing to learn; positions="sinusoidal" or "rotary" have none.')
        self.positions = as_positions(positions, dim)
        if isinstance(self.positions, Rotary):
            self.positions.check(self.key_size)
        self.causal = causal

    def forward(
        self, x: Tensor, mask: MaskLike | None = None, cache: Cache | None = None, probe: Probe | None = None
    ) -> Tensor:
        """Attend to x, and to the cached tokens before it.

        Args:
            x: Input ``(..., t, dim)``.
            mask: Further mask over ``(..., h, t, n)``, combined with the causal one.
            cache: Keys and values of earlier tokens; those of x are appended.
            probe: Collects statistics in the same pass.

        Returns:
            Output ``(..., t, dim)``.

        Example:
            >>> SelfAttention(16, heads=4, causal=True)(torch.randn(2, 5, 16)).shape
            torch.Size([2, 5, 16])
        """
        q, k, v = self._qkv(x, cache)
        y = self._merge_heads(self._attended(q, k, v, *self._visible(mask, q, k), probe))
        if cache is not None:  # a call that failed has added nothing
            cache.k, cache.v = k, v
        return y

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def weights(self, x: Tensor, mask: MaskLike | None = None, cache: Cache | None = None) -> Weights:
        """The attention weights of `forward`, lazily; a cache is read and not changed.

        Args:
            x: Input ``(..., t, dim)``.
            mask: As in `forward`.
            cache: As in `forward`.

        Returns:
            `Weights` of shape ``(..., h, t, n)``, n the number of cached tokens plus t.

        Example:
            >>> W = SelfAttention(16, heads=4, causal=True).weights(torch.randn(2, 5, 16))
            >>> W.entropy().shape, W[0, 0, 0, 1].item()
            (torch.Size([2, 4, 5]), 0.0)
        """
        q, k, _ = self._qkv(x, cache)
        visible, align = self._visible(mask, q, k)
        return weights(q, k, score=self.score(), mask=visible, align=align)

    def see(
        self, x: Tensor, *names: StatisticName, mask: MaskLike | None = None, cache: Cache | None = None,
        **more: Unpack[SeeOptions],
    ) -> Statistics:  # fmt: skip
        """The output and statistics of its weights, in one fused pass.

        Args:
            x: Input ``(..., t, dim)``.
            names: Statistics of `Weights.see`: "entropy", "lse", "max_score", …
            mask: As in `forward`.
            cache: As in `forward`.
            more: Further questions of `Weights.see`, as keywords: ``topk=``, ``pool=``, ``mass=``.

        Returns:
            `Statistics`: the output as ``y``, and each statistic under its name.

        Example:
            >>> seen = SelfAttention(16, heads=4).see(torch.randn(2, 5, 16), "entropy", "max_score")
            >>> seen.y.shape, seen.entropy.shape
            (torch.Size([2, 5, 16]), torch.Size([2, 4, 5]))
        """
        check_see_options(more)
        q, k, v = self._qkv(x, cache)
        visible, align = self._visible(mask, q, k)
        statistics = self._statistics(q, k, v, visible, align, names, **more)
        if cache is not None:
            cache.k, cache.v = k, v
        return Statistics(**{**vars(statistics), "y": self._merge_heads(statistics.y)})

    def _qkv(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x; keys and values of the cache followed by those of x."""
        _check_input(x, self.dim, "x")
        check_cache(cache)
        start = 0 if cache is None else len(cache)
        if self.positions is not None:
            x = self.positions.add_to(x, start)
        q = self._split_heads(self.query(x), self.heads)
        k, v = (self._split_heads(f(x), self.kv_heads) for f in (self.key, self.value))
        if self.positions is not None:
            q, k = (self.positions.rotate(heads, start) for heads in (q, k))
        return (q, k, v) if cache is None else (q, *cache.append(k, v))

    def _visible(self, mask: Any, q: Tensor, k: Tensor) -> tuple[Mask | None, Align | None]:
        """The effective mask, and how positions correspond: the last query is at the last key."""
        i, j = q.shape[-2], k.shape[-2]
        visible = None if mask is None else as_mask(mask)
        if self.causal and i > 1:  # a single query at the end sees all keys
            visible = causal() if visible is None else causal() & visible
        return visible, None if i == j else "end"

    @staticmethod
    def from_torch(mha: nn.MultiheadAttention, *, causal: bool = False) -> SelfAttention:
        """A layer with the weights of an `nn.MultiheadAttention`; equal outputs in eval mode.

        Args:
            mha: The layer, with ``batch_first=True`` or not: only its weights are read.
            causal: Whether the new layer is causal.

        Returns:
            The layer, on the device and in the type of `mha`.

        Example:
            >>> mha, x = torch.nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
            >>> torch.allclose(SelfAttention.from_torch(mha)(x), mha(x, x, x)[0], atol=1e-5)
            True
        """
        from .torch_interop import self_attention

        return self_attention(mha, causal)

    def to_torch(self) -> nn.MultiheadAttention:
        """This layer as an `nn.MultiheadAttention`, batch first; pass it a causal mask at every call.

        Returns:
            The layer, on the same device and in the same type.

        Raises:
            ValueError: The layer has something `nn.MultiheadAttention` lacks: another score, positions, kv_heads, ….

        Example:
            >>> layer, x = SelfAttention(16, heads=4), torch.randn(2, 5, 16)
            >>> torch.allclose(layer.to_torch()(x, x, x)[0], layer(x), atol=1e-5)
            True
        """
        from .torch_interop import multihead

        return multihead(self)


class CrossAttention(_Attention):
    """Cross-attention: queries of x, keys and values of another sequence, the memory.

    Every argument that is not listed means the same as in `SelfAttention`.

    Args:
        dim: Size of the vectors of x and of the output.
        heads: Number of query heads.
        memory_dim: Size of the memory's vectors. Default: `dim`.

    Example:
        >>> layer = CrossAttention(16, heads=4)
        >>> x, memory = torch.randn(2, 5, 16), torch.randn(2, 9, 16)
        >>> layer(x, memory).shape, layer.weights(x, memory).shape
        (torch.Size([2, 5, 16]), torch.Size([2, 4, 5, 9]))
    """

    def __init__(
        self, dim: int, heads: int = 1, *, memory_dim: int | None = None, kv_heads: int | None = None,
        key_size: int | None = None, value_size: int | None = None, score: LayerScore | None = None, bias: bool = False,
        output: bool = True, parameters: bool = True, attention_dropout: float = 0.0,
    ) -> None:  # fmt: skip
        memory_dim = dim if memory_dim is None else memory_dim
        if not parameters and memory_dim != dim:
            raise ValueError(f"without parameters x and memory must have one size; got {dim} and {memory_dim}.")
        super().__init__(
            dim, memory_dim, heads, kv_heads, key_size, value_size, score, bias, output, parameters, attention_dropout
        )
        self.memory_dim = memory_dim

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        mask: MaskLike | None = None,
        cache: Cache | None = None,
        probe: Probe | None = None,
    ) -> Tensor:
        """Attend from x to the memory.

        Args:
            x: Input ``(..., t, dim)``.
            memory: The other sequence ``(..., n, memory_dim)``; None with a filled cache.
            mask: Mask over ``(..., h, t, n)``, for example `regard.padding(lengths)`.
            cache: Keys and values of the memory: filled at the first call, used at the next ones.
            probe: Collects statistics in the same pass.

        Returns:
            Output ``(..., t, dim)``.

        Example:
            >>> layer, cache = CrossAttention(16, heads=4), Cache()
            >>> y = layer(torch.randn(1, 1, 16), torch.randn(1, 9, 16), cache=cache)
            >>> layer(torch.randn(1, 1, 16), None, cache=cache).shape
            torch.Size([1, 1, 16])
        """
        q, k, v = self._qkv(x, memory, cache)
        y = self._merge_heads(self._attended(q, k, v, None if mask is None else as_mask(mask), None, probe))
        _fill(cache, k, v, memory)
        return y

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def weights(
        self, x: Tensor, memory: Tensor | None, mask: MaskLike | None = None, cache: Cache | None = None
    ) -> Weights:
        """The attention weights of `forward`, lazily.

        Args:
            x: Input ``(..., t, dim)``.
            memory: As in `forward`.
            mask: As in `forward`.
            cache: As in `forward`; read and not changed.

        Returns:
            `Weights` of shape ``(..., h, t, n)``.

        Example:
            >>> CrossAttention(16, heads=4).weights(torch.randn(5, 16), torch.randn(9, 16)).shape
            torch.Size([4, 5, 9])
        """
        q, k, _ = self._qkv(x, memory, cache)
        return weights(q, k, score=self.score(), mask=mask)

    def see(
        self, x: Tensor, memory: Tensor | None, *names: StatisticName, mask: MaskLike | None = None,
        cache: Cache | None = None, **more: Unpack[SeeOptions],
    ) -> Statistics:  # fmt: skip
        """The output and statistics of its weights, in one fused pass.

        Args:
            x: Input ``(..., t, dim)``.
            memory: As in `forward`.
            names: Statistics of `Weights.see`: "entropy", "lse", "max_score", …
            mask: As in `forward`.
            cache: As in `forward`.
            more: Further questions of `Weights.see`, as keywords: ``topk=``, ``pool=``, ``mass=``.

        Returns:
            `Statistics`: the output as ``y``, and each statistic under its name.

        Example:
            >>> seen = CrossAttention(16, heads=4).see(torch.randn(5, 16), torch.randn(9, 16), "entropy")
            >>> seen.y.shape, seen.entropy.shape
            (torch.Size([5, 16]), torch.Size([4, 5]))
        """
        check_see_options(more)
        q, k, v = self._qkv(x, memory, cache)
        statistics = self._statistics(q, k, v, None if mask is None else as_mask(mask), None, names, **more)
        _fill(cache, k, v, memory)
        return Statistics(**{**vars(statistics), "y": self._merge_heads(statistics.y)})

    def _qkv(self, x: Tensor, memory: Tensor | None, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        _check_input(x, self.dim, "x")
        check_cache(cache)
        q = self._split_heads(self.query(x), self.heads)
        if cache is not None and cache.k is not None and cache.v is not None:
            _check_memory(cache, memory)
            return q, cache.k, cache.v
        if memory is None:
            raise ValueError("cross-attention needs a memory: pass memory=..., or a cache that is filled.")
        _check_input(memory, self.memory_dim, "memory")
        k, v = (self._split_heads(f(memory), self.kv_heads) for f in (self.key, self.value))
        return q, k, v

    @staticmethod
    def from_torch(mha: nn.MultiheadAttention) -> CrossAttention:
        """A layer with the weights of an `nn.MultiheadAttention`; equal outputs in eval mode.

        Args:
            mha: The layer; its ``kdim`` and ``vdim`` must be equal.

        Returns:
            The layer, on the device and in the type of `mha`.

        Example:
            >>> mha = torch.nn.MultiheadAttention(16, 4, batch_first=True)
            >>> x, memory = torch.randn(2, 5, 16), torch.randn(2, 9, 16)
            >>> torch.allclose(CrossAttention.from_torch(mha)(x, memory), mha(x, memory, memory)[0], atol=1e-5)
            True
        """
        from .torch_interop import cross_attention

        return cross_attention(mha)

    def to_torch(self) -> nn.MultiheadAttention:
        """This layer as an `nn.MultiheadAttention`, batch first.

        Returns:
            The layer, on the same device and in the same type.

        Example:
            >>> layer, x, memory = CrossAttention(16, heads=4), torch.randn(2, 5, 16), torch.randn(2, 9, 16)
            >>> torch.allclose(layer.to_torch()(x, memory, memory)[0], layer(x, memory), atol=1e-5)
            True
        """
        from .torch_interop import multihead

        return multihead(self)


def _check_input(x: Any, dim: int, name: str) -> None:
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != dim:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be (..., length, {dim}); got {got}.")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be vectors of floats; got {x.dtype}. Token ids go through nn.Embedding first.")


def _fill(cache: Cache | None, k: Tensor, v: Tensor, memory: Tensor | None) -> None:
    """Store keys and values of a memory in an empty cache."""
    if cache is not None and cache.k is None:
        cache.k, cache.v, cache.memory = k, v, memory


def _check_memory(cache: Cache, memory: Tensor | None) -> None:
    """Refuse another memory than the one that filled the cache: it would be ignored in silence."""
    if memory is None or memory is cache.memory:
        return
    old = cache.memory
    alike = old is not None and (old.shape, old.dtype, old.device) == (memory.shape, memory.dtype, memory.device)
    if old is None or not alike or not torch.equal(memory, old):
        raise ValueError(
            "this cache was filled from another memory: pass memory=None to continue with that one, "
            "or an empty Cache() for the new one."
        )


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not hasattr(size, "__index__")):
            raise TypeError(f"{name} must be a whole number; got {size!r}.")


def _refuse_parameters(
    heads: int, kv_heads: int, key_size: int | None, value_size: int | None, score: LayerScore | None, bias: bool
) -> None:
    conflicts = [
        ("key_size and value_size", key_size is not None or value_size is not None),
        ("kv_heads", heads != kv_heads),
        (f"score={score!r}", isinstance(score, str) and score in ("additive", "bilinear")),
        ("bias=True", bias),
    ]
    if refused := [what for what, conflict in conflicts if conflict]:
        raise ValueError(f"parameters=False is attention of x itself; {refused[0]} needs parameters.")
