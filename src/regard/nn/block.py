"""A block: attention, then a feed-forward network for every word; each on a residual branch with a norm and dropout.

Imports `attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .attention import Cache, CrossAttention, Probe, SelfAttention

__all__ = ["Block", "FeedForward", "norm_of"]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}


class FeedForward(nn.Module):
    """y = f(x W_in) W_out, for every word alone; "swiglu" multiplies what f lets through with a second x W_gate."""

    def __init__(self, dim: int, hidden: int | None = None, *, activation: str = "gelu", bias: bool = True) -> None:
        super().__init__()
        gated = activation == "swiglu"
        name = "silu" if gated else activation
        if name not in ACTIVATIONS:
            raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, swiglu; {activation!r} came.")
        # A gate is a third matrix: two thirds of the width keep the number of parameters.
        hidden = hidden or (round(8 * dim / 3 / 8) * 8 or 8 if gated else 4 * dim)
        self.inner = nn.Linear(dim, hidden, bias)
        self.gate = nn.Linear(dim, hidden, bias) if gated else None
        self.activation = ACTIVATIONS[name]()
        self.outer = nn.Linear(hidden, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.activation(self.inner(x))
        return self.outer(inside if self.gate is None else inside * self.gate(x))


class Block(nn.Module):
    """x + dropout(attention(norm(x))), with cross-attention in between where `cross`, then the same with feed-forward.

    hidden      width of the feed-forward network; 4 · dim where not given
    norm        "layer" or "rms"; norm_first=False puts it after the sum, as the first Transformer had it
    dropout     on the residual branches, while training
    attention   what else SelfAttention takes: kv_heads, score, positions, causal, …; cross-attention takes the same,
                but for positions and causal, which the memory does not have

    >>> Block(16, heads=4, causal=True)(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self, dim: int, heads: int = 1, *, hidden: int | None = None, activation: str = "gelu", norm: str = "layer",
        norm_first: bool = True, dropout: float = 0.0, bias: bool = True, cross: bool = False, **attention: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention = SelfAttention(dim, heads, bias=bias, **attention)
        self.attention_norm = norm_of(norm, dim, bias)
        other = {name: value for name, value in attention.items() if name not in ("positions", "causal")}
        self.cross = CrossAttention(dim, heads, bias=bias, **other) if cross else None
        self.cross_norm = norm_of(norm, dim, bias) if cross else None
        self.feed_forward = FeedForward(dim, hidden, activation=activation, bias=bias)
        self.feed_forward_norm = norm_of(norm, dim, bias)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def cache(self) -> list[Cache]:
        """Empty caches: of self-attention, and of cross-attention where there is one."""
        return [Cache()] if self.cross is None else [Cache(), Cache()]

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Any = None, memory_mask: Any = None,
        cache: list[Cache] | None = None, probe: Probe | None = None,
    ) -> Tensor:  # fmt: skip
        own, other = (None, None) if cache is None else (cache[0], cache[-1])
        x = self._branch(x, self.attention_norm, lambda h: self.attention(h, mask, own, probe))
        if (cross := self.cross) is not None and self.cross_norm is not None:
            x = self._branch(x, self.cross_norm, lambda h: cross(h, memory, memory_mask, other, probe))
        return self._branch(x, self.feed_forward_norm, self.feed_forward)

    def _branch(self, x: Tensor, norm: nn.Module, inner: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x + self.dropout(inner(norm(x)))
        return norm(x + self.dropout(inner(x)))

    @staticmethod
    def from_torch(layer: nn.TransformerEncoderLayer, *, causal: bool = False) -> Block:
        """The same block with the weights of an `nn.TransformerEncoderLayer`, batch first."""
        from .torch_interop import block

        return block(layer, causal)

    def to_torch(self) -> nn.TransformerEncoderLayer:
        """The same block as an `nn.TransformerEncoderLayer`, batch first; its causal mask is given at every call:

        layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(t), is_causal=True)
        """
        from .torch_interop import encoder_layer

        return encoder_layer(self)


def norm_of(kind: str, dim: int, bias: bool) -> nn.Module:
    """A norm by name."""
    if kind == "layer":
        return nn.LayerNorm(dim, bias=bias)
    if kind == "rms":
        return nn.RMSNorm(dim, eps=1e-6)
    raise ValueError(f'norm is "layer" or "rms"; {kind!r} came.')
