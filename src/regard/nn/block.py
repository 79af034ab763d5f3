"""A transformer block: attention, then a feed-forward network, each on a residual branch with norm and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor, nn

from ..core.types import MaskLike
from .attention import CrossAttention, SelfAttention
from .cache import Cache
from .options import ActivationName, AttentionOptions, NormName, check_layer_options, typed_as
from .probe import Probe

__all__ = ["Block", "FeedForward", "make_norm"]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


class FeedForward(nn.Module):
    """y = f(x W_in) W_out for every token; "swiglu" computes (silu(x W_in) · x W_gate) W_out.

    Args:
        dim: Size of the input and output vectors.
        hidden: Width of the hidden layer. Default: ``4 · dim``, and 8/3 of dim with a gate, which has a third matrix.
        activation: "gelu", "gelu_tanh" (GPT-2's approximation), "relu", "silu" or "swiglu".
        bias: Whether the linear maps have a bias.
        dropout: Share of the hidden layer's numbers dropped while training.

    Example:
        >>> FeedForward(16, activation="swiglu")(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self, dim: int, hidden: int | None = None, *, activation: ActivationName = "gelu", bias: bool = True,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        gated = activation == "swiglu"
        name = "silu" if gated else activation
        if name not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, swiglu; got {activation!r}.")
        # A gate is a third matrix: two thirds of the width give the same number of parameters.
        hidden = hidden or (round(8 * dim / 3 / 8) * 8 or 8 if gated else 4 * dim)
        self.inner = nn.Linear(dim, hidden, bias)
        self.gate = nn.Linear(dim, hidden, bias) if gated else None
        self.activation = ACTIVATIONS[name]()
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(hidden, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to every token.

        Args:
            x: Input ``(..., dim)``.

        Returns:
            Output ``(..., dim)``.

        Example:
            >>> FeedForward(16)(torch.randn(5, 16)).shape
            torch.Size([5, 16])
        """
        hidden = self.activation(self.inner(x))
        return self.outer(self.dropout(hidden if self.gate is None else hidden * self.gate(x)))

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Block(nn.Module):
    """x + dropout(attention(norm(x))), the same with cross-attention where `cross`, and with the feed-forward network.

    Args:
        dim: Size of the vectors.
        heads: Number of attention heads.
        hidden: Width of the feed-forward network. Default: as in `FeedForward`.
        activation: As in `FeedForward`.
        norm: "layer" or "rms".
        norm_first: False puts the norms after the sums, as in the first Transformer.
        dropout: Share of the residual branches' numbers dropped while training.
        hidden_dropout: The same of the feed-forward network's hidden layer.
        bias: Whether linear maps and norms have a bias.
        cross: Whether there is a cross-attention between the two.
        attention: Further arguments of `SelfAttention`: kv_heads, score, positions, causal, …. Cross-attention gets
            the same, without positions and causal.

    Example:
        >>> Block(16, heads=4, causal=True)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self, dim: int, heads: int = 1, *, hidden: int | None = None, activation: ActivationName = "gelu",
        norm: NormName = "layer", norm_first: bool = True, dropout: float = 0.0, hidden_dropout: float = 0.0,
        bias: bool = True, cross: bool = False, **attention: Unpack[AttentionOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        check_layer_options(self, attention, AttentionOptions)
        self.attention = SelfAttention(dim, heads, bias=bias, **attention)
        self.attention_norm = make_norm(norm, dim, bias)
        own = ("positions", "causal")
        cross_options: dict[str, Any] = {name: value for name, value in attention.items() if name not in own}
        self.cross = CrossAttention(dim, heads, bias=bias, **cross_options) if cross else None
        self.cross_norm = make_norm(norm, dim, bias) if cross else None
        self.feed_forward = FeedForward(dim, hidden, activation=activation, bias=bias, dropout=hidden_dropout)
        self.feed_forward_norm = make_norm(norm, dim, bias)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def cache(self) -> list[Cache]:
        """Empty caches for `forward`: one of self-attention, and one of cross-attention where there is one.

        Returns:
            One or two caches.

        Example:
            >>> len(Block(16, cross=True).cache())
            2
        """
        return [Cache()] if self.cross is None else [Cache(), Cache()]

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: MaskLike | None = None,
        memory_mask: MaskLike | None = None, cache: list[Cache] | None = None, probe: Probe | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the block.

        Args:
            x: Input ``(..., t, dim)``.
            memory: What cross-attention attends to, ``(..., n, dim)``.
            mask: Mask of self-attention.
            memory_mask: Mask of cross-attention.
            cache: Caches from `cache()`, for generation.
            probe: Collects statistics of both attentions.

        Returns:
            Output ``(..., t, dim)``.

        Raises:
            ValueError: A memory or its mask was passed to a block without cross-attention.

        Example:
            >>> block = Block(16, heads=4, cross=True)
            >>> block(torch.randn(2, 5, 16), torch.randn(2, 9, 16)).shape
            torch.Size([2, 5, 16])
        """
        if self.cross is None and (memory is not None or memory_mask is not None):
            raise ValueError(
                "memory and memory_mask are for cross-attention, and this block has none: build it with cross=True. "
                "A mask of self-attention is passed as mask=."
            )
        own, other = (None, None) if cache is None else (cache[0], cache[-1])
        x = self._branch(x, self.attention_norm, lambda h: self.attention(h, mask, own, probe))
        if (cross := self.cross) is not None and self.cross_norm is not None:
            x = self._branch(x, self.cross_norm, lambda h: cross(h, memory, memory_mask, other, probe))
        return self._branch(x, self.feed_forward_norm, self.feed_forward)

    if TYPE_CHECKING:

        @typed_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def _branch(self, x: Tensor, norm: nn.Module, inner: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x + self.dropout(inner(norm(x)))
        return norm(x + self.dropout(inner(x)))

    @staticmethod
    def from_torch(layer: nn.TransformerEncoderLayer, *, causal: bool = False) -> Block:
        """A block with the weights of an `nn.TransformerEncoderLayer`; equal outputs in eval mode.

        Args:
            layer: The layer: only its weights and options are read.
            causal: Whether the new block is causal.

        Returns:
            The block, on the device and in the type of `layer`.

        Example:
            >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
            >>> x = torch.randn(2, 5, 16)
            >>> torch.allclose(Block.from_torch(layer)(x), layer(x), atol=1e-5)
            True
        """
        from .torch_interop import block

        return block(layer, causal)

    def to_torch(self) -> nn.TransformerEncoderLayer:
        """This block as an `nn.TransformerEncoderLayer`, batch first; pass it a causal mask at every call.

        Returns:
            The layer, on the same device and in the same type.

        Raises:
            ValueError: The block has something that layer lacks: cross-attention, a gate, RMS norms, ….

        Example:
            >>> layer = Block(16, heads=4, causal=True).eval().to_torch()
            >>> mask = torch.nn.Transformer.generate_square_subsequent_mask(5)
            >>> layer(torch.randn(2, 5, 16), src_mask=mask, is_causal=True).shape
            torch.Size([2, 5, 16])
        """
        from .torch_interop import encoder_layer

        return encoder_layer(self)


def make_norm(kind: NormName, dim: int, bias: bool) -> nn.Module:
    """A norm by name: "layer" or "rms"."""
    if kind == "layer":
        return nn.LayerNorm(dim, bias=bias)
    if kind == "rms":
        return nn.RMSNorm(dim, eps=1e-6)
    raise ValueError(f'norm must be "layer" or "rms"; got {kind!r}.')
