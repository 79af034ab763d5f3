"""The layers: self-attention and cross-attention with trainable W_q, W_k, W_v and W_o.

A layer makes queries, keys and values, and leaves the rest to `regard.attend`; asked for its weights it gives the same
factors to `regard.weights`. It keeps nothing of what passes through it. Imports the door, `positions` and `scoring`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.api import attend, weights
from ..core.masks import Mask, as_mask, causal
from ..core.weights import STATISTICS, Statistics, Weights
from .positions import Rotary, as_positions
from .score_module import as_scoring

__all__ = ["Cache", "CrossAttention", "Probe", "SelfAttention"]


class Cache:
    """Keys and values of the words so far, (b, g, n, d) and (b, g, n, e); a layer's forward adds the new ones."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.memory: Tensor | None = None  # what cross-attention filled it from

    def __len__(self) -> int:
        return 0 if self.k is None else self.k.shape[-2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What came before and then these."""
        if self.k is None or self.v is None:
            return k, v
        if self.k.shape[:-2] != k.shape[:-2]:
            had, came = (tuple(x.shape[:-2]) for x in (self.k, k))
            raise ValueError(
                f"this cache holds keys of (batch, heads) {had}, and {came} came: begin a new one with Cache()."
            )
        return torch.cat([self.k, k], -2), torch.cat([self.v, v], -2)

    def reorder(self, sequences: Tensor) -> None:
        """Keep these sequences of the batch, in this order: beams that go on."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k.index_select(0, sequences), self.v.index_select(0, sequences)
        if self.memory is not None:
            self.memory = self.memory.index_select(0, sequences)


class Probe:
    """What every attention layer is to tell while it computes, in the same fused pass; one for each call.

    Answers are added to it, layer after layer.

    probe = regard.nn.Probe("entropy", "max_score")
    logits = model(ids, probe=probe)
    probe[3].entropy            # layer 3, (b, h, i), part of the graph
    probe.heads("max_score")    # (layers, h), detached: the largest score of every head, the mean of all else
    """

    def __init__(self, *names: str) -> None:
        for name in names:
            if name not in STATISTICS:
                raise ValueError(f"unknown statistic {name!r}; a layer can be asked {', '.join(STATISTICS)}.")
        self.names = names
        self.seen: list[Statistics] = []

    def __len__(self) -> int:
        return len(self.seen)

    def __getitem__(self, layer: int) -> Statistics:
        return self.seen[layer]

    def __iter__(self) -> Iterator[Statistics]:
        return iter(self.seen)

    def heads(self, name: str) -> Tensor:
        """One number a head of every layer, (layers, h), detached."""
        if name not in self.names:
            raise ValueError(f"{name!r} was not asked; Probe({', '.join(map(repr, self.names))}) knows what it names.")
        if not self.seen:
            raise ValueError("nothing was told yet: call the model with probe=… first.")
        with torch.no_grad():  # and not only detached: some compilers would still send zeros back through it
            rows = [getattr(seen, name).detach() for seen in self.seen]  # layers × (..., h, i)
            if len({row.shape for row in rows}) == 1:  # one pass over all layers, not one each
                return _of_heads(torch.stack(rows), name)
            return torch.stack([_of_heads(row.unsqueeze(0), name).squeeze(0) for row in rows])


def _of_heads(rows: Tensor, name: str) -> Tensor:
    """One number a head, (layers, h), of rows (layers, ..., h, i)."""
    others = [n for n in range(1, rows.ndim) if n != rows.ndim - 2]
    return rows.amax(others) if name == "max_score" else rows.mean(others)


class _Attention(nn.Module):
    """What both layers share: projections into heads, the score, and W_o."""

    def __init__(
        self, dim: int, memory: int, heads: int, kv_heads: int | None, key_size: int | None, value_size: int | None,
        score: Any, bias: bool, output: bool, parameters: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, both at least 1; {heads} and {kv_heads} came.")
        if not parameters:
            _refuse_parameters(heads, kv_heads, key_size, value_size, score, bias)
        if key_size is None:
            if dim % heads:
                raise ValueError(f"dim {dim} does not split into {heads} heads of one size; say key_size=....")
            key_size = dim // heads
        value_size = key_size if value_size is None else value_size
        if min(dim, memory, key_size, value_size) < 1:
            raise ValueError(
                "dim, key_size and value_size must be at least 1; "
                f"{min(dim, memory)}, {key_size} and {value_size} came."
            )
        self.dim, self.heads, self.kv_heads = dim, heads, kv_heads
        self.key_size, self.value_size = key_size, value_size
        self.query = nn.Linear(dim, heads * key_size, bias) if parameters else nn.Identity()
        self.key = nn.Linear(memory, kv_heads * key_size, bias) if parameters else nn.Identity()
        self.value = nn.Linear(memory, kv_heads * value_size, bias) if parameters else nn.Identity()
        self.output = nn.Linear(heads * value_size, dim, bias) if output and parameters else nn.Identity()
        # Without W_q and W_k there is nothing to keep small: the basic form has the bare product.
        self.score = as_scoring(score or ("scaled_dot" if parameters else "dot"), heads, key_size)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(-2, -3)  # ... h t d

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, align: str | None, probe: Probe | None
    ) -> Tensor:
        """Attention of heads, (..., h, i, e); what `regard.record` overhears."""
        if probe is None:
            return attend(q, k, v, score=self.score(), mask=mask, align=align)
        seen = weights(q, k, score=self.score(), mask=mask, align=align).see(*probe.names, values=v)
        probe.seen.append(seen)
        return seen.y

    def _joined(self, y: Tensor) -> Tensor:
        return self.output(y.transpose(-2, -3).flatten(-2))  # ... t dim

    def extra_repr(self) -> str:
        shared = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        return f"{self.dim}, heads={self.heads}{shared}, key_size={self.key_size}, value_size={self.value_size}"


class SelfAttention(_Attention):
    """Every word looks at every word: y = softmax(score(x W_q, x W_k)) x W_v, then W_o; (..., t, dim) in and out.

    SelfAttention(dim, parameters=False)                   the basic form: softmax(x xᵀ) x
    SelfAttention(dim, key_size=64, output=False)          the six steps of one head: q, k, v, score, softmax, sum
    SelfAttention(dim, heads=8)                            multi-head attention
    SelfAttention(dim, heads=8, kv_heads=2)               heads share keys and values in groups

    key_size, value_size   of one head; dim // heads and key_size where not given
    score                  as in `regard.weights`, or "additive", "bilinear" with parameters of their own;
                           "scaled_dot" where not given, "dot" without parameters
    positions              "rotary", "sinusoidal", "learned", or an object of `regard.nn`
    causal                 a word sees itself and what came before it
    bias, output           whether the projections have a bias, and whether there is a W_o

    >>> layer = SelfAttention(16, heads=4)
    >>> x = torch.randn(2, 5, 16)
    >>> layer(x).shape, layer.weights(x).shape
    (torch.Size([2, 5, 16]), torch.Size([2, 4, 5, 5]))
    """

    def __init__(
        self, dim: int, heads: int = 1, *, kv_heads: int | None = None, key_size: int | None = None,
        value_size: int | None = None, score: Any = None, positions: Any = None, causal: bool = False,
        bias: bool = False, output: bool = True, parameters: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, dim, heads, kv_heads, key_size, value_size, score, bias, output, parameters)
        if positions == "learned" and not parameters:
            raise ValueError('parameters=False leaves nothing to learn; positions="sinusoidal" or "rotary" have none.')
        self.positions = as_positions(positions, dim)
        if isinstance(self.positions, Rotary):
            self.positions.check(self.key_size)
        self.causal = causal

    def forward(self, x: Tensor, mask: Any = None, cache: Cache | None = None, probe: Probe | None = None) -> Tensor:
        """The output, (..., t, dim). The keys and values of a cache come first, and x's are added to it."""
        q, k, v = self._made(x, cache)
        y = self._joined(self._attended(q, k, v, *self._visible(mask, q, k), probe))
        if cache is not None:  # a call that failed has added nothing
            cache.k, cache.v = k, v
        return y

    def weights(self, x: Tensor, mask: Any = None, cache: Cache | None = None) -> Weights:
        """The weights that `forward` would use, (..., h, t, n); a cache is looked at and left as it is."""
        q, k, _ = self._made(x, cache)
        visible, align = self._visible(mask, q, k)
        return weights(q, k, score=self.score(), mask=visible, align=align)

    def see(self, x: Tensor, *names: str, mask: Any = None, cache: Cache | None = None, **more: Any) -> Statistics:
        """The output as `y` and statistics of its weights, in one fused pass; see `Weights.see`."""
        q, k, v = self._made(x, cache)
        visible, align = self._visible(mask, q, k)
        seen = weights(q, k, score=self.score(), mask=visible, align=align).see(*names, values=v, **more)
        if cache is not None:
            cache.k, cache.v = k, v
        return Statistics(**{**vars(seen), "y": self._joined(seen.y)})

    def _made(self, x: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x; keys and values of the cache and of x."""
        _check_input(x, self.dim, "x")
        start = 0 if cache is None else len(cache)
        if self.positions is not None:
            x = self.positions.add_to(x, start)
        q = self._split(self.query(x), self.heads)
        k, v = (self._split(f(x), self.kv_heads) for f in (self.key, self.value))
        if self.positions is not None:
            q, k = (self.positions.rotate(heads, start) for heads in (q, k))
        return (q, k, v) if cache is None else (q, *cache.append(k, v))

    def _visible(self, mask: Any, q: Tensor, k: Tensor) -> tuple[Mask | None, str | None]:
        """Who may look at whom, and how positions correspond: the last query stands at the last key."""
        i, j = q.shape[-2], k.shape[-2]
        visible = None if mask is None else as_mask(mask)
        if self.causal and i > 1:  # a single word at the end may look at all there is
            visible = causal() if visible is None else causal() & visible
        return visible, None if i == j else "end"

    @staticmethod
    def from_torch(mha: nn.MultiheadAttention, *, causal: bool = False) -> SelfAttention:
        """The same layer with the weights of an `nn.MultiheadAttention`, batch first."""
        from .torch_interop import self_attention

        return self_attention(mha, causal)

    def to_torch(self) -> nn.MultiheadAttention:
        """The same layer as an `nn.MultiheadAttention`, batch first; its causal mask is given at every call."""
        from .torch_interop import multihead

        return multihead(self)


class CrossAttention(_Attention):
    """Words look at the words of another sequence, the memory: queries of x, keys and values of the memory.

    memory_dim is the size of the memory's vectors where it is not dim. All else is as in SelfAttention.

    >>> layer = CrossAttention(16, heads=4)
    >>> layer(torch.randn(2, 5, 16), torch.randn(2, 9, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self, dim: int, heads: int = 1, *, memory_dim: int | None = None, kv_heads: int | None = None,
        key_size: int | None = None, value_size: int | None = None, score: Any = None, bias: bool = False,
        output: bool = True, parameters: bool = True,
    ) -> None:  # fmt: skip
        memory = dim if memory_dim is None else memory_dim
        if not parameters and memory != dim:
            raise ValueError(f"without parameters x and memory must have one size; {dim} and {memory} came.")
        super().__init__(dim, memory, heads, kv_heads, key_size, value_size, score, bias, output, parameters)
        self.memory_dim = memory

    def forward(
        self, x: Tensor, memory: Tensor | None, mask: Any = None, cache: Cache | None = None, probe: Probe | None = None
    ) -> Tensor:
        """The output, (..., t, dim). A cache is filled from the memory once; after that it is the same, or None."""
        q, k, v = self._made(x, memory, cache)
        y = self._joined(self._attended(q, k, v, None if mask is None else as_mask(mask), None, probe))
        _fill(cache, k, v, memory)
        return y

    def weights(self, x: Tensor, memory: Tensor | None, mask: Any = None, cache: Cache | None = None) -> Weights:
        """The weights that `forward` would use, (..., h, t, n)."""
        q, k, _ = self._made(x, memory, cache)
        return weights(q, k, score=self.score(), mask=mask)

    def see(
        self, x: Tensor, memory: Tensor | None, *names: str, mask: Any = None, cache: Cache | None = None, **more: Any
    ) -> Statistics:
        """The output as `y` and statistics of its weights, in one fused pass; see `Weights.see`."""
        q, k, v = self._made(x, memory, cache)
        seen = weights(q, k, score=self.score(), mask=mask).see(*names, values=v, **more)
        _fill(cache, k, v, memory)
        return Statistics(**{**vars(seen), "y": self._joined(seen.y)})

    def _made(self, x: Tensor, memory: Tensor | None, cache: Cache | None) -> tuple[Tensor, Tensor, Tensor]:
        _check_input(x, self.dim, "x")
        q = self._split(self.query(x), self.heads)
        if cache is not None and cache.k is not None and cache.v is not None:
            _check_memory(cache, memory)
            return q, cache.k, cache.v
        if memory is None:
            raise ValueError("cross-attention needs a memory: pass memory=..., or a cache that was filled from one.")
        _check_input(memory, self.memory_dim, "memory")
        k, v = (self._split(f(memory), self.kv_heads) for f in (self.key, self.value))
        return q, k, v

    @staticmethod
    def from_torch(mha: nn.MultiheadAttention) -> CrossAttention:
        """The same layer with the weights of an `nn.MultiheadAttention`, batch first."""
        from .torch_interop import cross_attention

        return cross_attention(mha)

    def to_torch(self) -> nn.MultiheadAttention:
        """The same layer as an `nn.MultiheadAttention`, batch first."""
        from .torch_interop import multihead

        return multihead(self)


def _check_input(x: Any, dim: int, name: str) -> None:
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != dim:
        came = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be (..., length, {dim}); {came} came.")


def _fill(cache: Cache | None, k: Tensor, v: Tensor, memory: Tensor | None) -> None:
    """Keys and values of a memory into an empty cache."""
    if cache is not None and cache.k is None:
        cache.k, cache.v, cache.memory = k, v, memory


def _check_memory(cache: Cache, memory: Tensor | None) -> None:
    """That a filled cache is not given another memory, which it would pass over in silence."""
    if memory is None or memory is cache.memory:
        return
    was = cache.memory
    alike = was is not None and (was.shape, was.dtype, was.device) == (memory.shape, memory.dtype, memory.device)
    if was is None or not alike or not torch.equal(memory, was):
        raise ValueError(
            "this cache was filled from another memory: pass memory=None to go on with that one, "
            "or an empty Cache() for the new one."
        )


def _refuse_parameters(
    heads: int, kv_heads: int, key_size: int | None, value_size: int | None, score: Any, bias: bool
) -> None:
    wants = [
        ("key_size and value_size", key_size is not None or value_size is not None),
        ("kv_heads", heads != kv_heads),
        (f"score={score!r}", isinstance(score, str) and score in ("additive", "bilinear")),
        ("bias=True", bias),
    ]
    if refused := [what for what, wanted in wants if wanted]:
        raise ValueError(f"parameters=False is attention of x itself; {refused[0]} needs parameters.")
