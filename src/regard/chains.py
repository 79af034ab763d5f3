"""Products of attention matrices over layers, and weights times gradients: relevance without a t × t matrix.

>>> import regard.chains
>>> layers = [regard.weights(torch.randn(4, 6, 8), mask=regard.causal()) for _ in range(3)]
>>> regard.chains.rollout_rows(layers, [5]).sum()  # all that the last row looks at, through three layers
tensor(1.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .core.arguments import as_number
from .core.broadcast import check_broadcast
from .core.indexing import as_int
from .core.rows.complete_rows import GradientProduct
from .core.scores.kinds import repeat_kv
from .core.scores.modifiers import need_floats
from .core.shared import called_by_all_ranks
from .core.tensor_kinds import readable_numbers
from .core.torch_state import is_tracing
from .core.weights import Weights, need_weights

__all__ = ["gradient_relevance", "rollout", "rollout_rows"]


@called_by_all_ranks
def rollout(
    layers: Sequence[Weights],
    x: Tensor,
    *,
    residual: float = 0.5,
    head_weights: Sequence[Tensor] | None = None,
    value_norms: Sequence[Tensor] | None = None,
) -> Tensor:
    """The product A_L ... A_1 x with A = residual I + (1 - residual) mean of the heads: attention rollout of values.

    Args:
        layers: Self-attention of each layer, the first first, each ``(..., h, t, t)``.
        x: ``(..., t, e)``, without a head axis: what stands at each input position.
        residual: Share of the residual stream, 0 to 1.
        head_weights: For each layer a weight of each head ``(h,)``, divided by their sum. Default: the mean.
        value_norms: For each layer the norm of the value of each key, ``(..., h, t)``: weights count by the length of
            what they add, w_ij |v_j|, and the rows of their mean are divided by their sums.

    Returns:
        ``(..., t, e)``, in linear memory, with gradients.

    >>> layers = [regard.weights(torch.zeros(2, 4, 8)) for _ in range(2)]
    >>> regard.chains.rollout(layers, torch.eye(4), residual=0.0)[0]  # nothing but attention to four keys alike
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    stack, residual = _square(layers, residual)  # type: ignore[assignment]  # a tensor with one number serves
    t = len(stack[0]._keys_here)
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-2] != t:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"rollout(x) takes a tensor (..., {t}, e), a row for each position; got {got}.")
    for layer, share, norms in zip(stack, *_of_layers(stack, head_weights, value_norms), strict=True):
        y = _mean_of_heads(torch.matmul(layer, _scaled(x.unsqueeze(-3), norms)), share)  # type: ignore[arg-type]
        x = residual * x + (1 - residual) * (y if norms is None else _divided(y, _row_sums(layer, share, norms)))
    return x


@called_by_all_ranks
def rollout_rows(
    layers: Sequence[Weights],
    rows: Sequence[int] | Tensor,
    *,
    residual: float = 0.5,
    head_weights: Sequence[Tensor] | None = None,
    value_norms: Sequence[Tensor] | None = None,
) -> Tensor:
    """Chosen rows of the product of `rollout`: which inputs these outputs look at, through all layers.

    Args:
        layers: As for `rollout`.
        rows: Positions in the last layer; negative ones count from the end.
        residual: As for `rollout`.
        head_weights: As for `rollout`.
        value_norms: As for `rollout`.

    Returns:
        ``(..., rows, t)``; each row sums to 1 unless a sink took a share.

    >>> layers = [regard.weights(torch.zeros(2, 3, 8), mask=regard.causal())]
    >>> regard.chains.rollout_rows(layers, [1])
    tensor([[0.2500, 0.7500, 0.0000]])
    >>> regard.chains.rollout_rows(layers, [1], value_norms=[torch.tensor([[3.0, 1.0, 1.0]] * 2)])
    tensor([[0.3750, 0.6250, 0.0000]])
    """
    stack, residual = _square(layers, residual)  # type: ignore[assignment]
    below = list(zip(stack, *_of_layers(stack, head_weights, value_norms), strict=True))
    numbers = _row_numbers(rows, stack[-1].shape[-1])
    u = _chosen(stack[-1], numbers)
    if not stack[-1]._shared:  # of the last layer these rows alone count: they cost what rows cost, not a pass
        top, share, norms = below.pop()
        spread = _mean_of_heads(_scaled(top[..., numbers, :].mT, norms), share)
        u = residual * u + (1 - residual) * (
            spread if norms is None else _divided(spread, spread.sum(-2, keepdim=True))
        )
    for layer, share, norms in reversed(below):
        from_rows = u if norms is None else _divided(u, _row_sums(layer, share, norms))
        outer = *layer.shape[:-2], *from_rows.shape[-2:]
        spread = torch.matmul(layer.mT, from_rows.unsqueeze(-3).expand(outer))  # type: ignore[arg-type]
        u = residual * u + (1 - residual) * _mean_of_heads(_scaled(spread, norms), share)
    return u.mT


def _chosen(weights: Weights, rows: Sequence[int]) -> Tensor:
    """One column for each of these rows, 1 at its place: (t, rows) of the positions that are here."""
    positions = torch.tensor(list(rows), device=weights.device)
    return (weights._rows_here[:, None] == positions % weights.shape[-1]).to(weights.dtype)


@called_by_all_ranks
def gradient_relevance(weights: Weights, dy: Tensor, v: Tensor, x: Tensor, *, positive: bool = True) -> Tensor:
    """(W * dy v^T) @ x by strips: weights times their gradients, applied to x, for every head.

    The gradient of an output's loss with respect to the weight w_ij is dy_i . v_j; its product with the weight is the
    relevance of Chefer et al. and of attribution by gradient x attention.

    Args:
        weights: Attention ``(..., h, i, j)``.
        dy: Gradient of a loss with respect to ``weights @ v``, ``(..., h, i, e)``.
        v: Values ``(..., h or kv heads, j, e)``.
        x: What the relevance is applied to, ``(..., j, c)`` or with a head axis.
        positive: Count positive products only.

    Returns:
        ``(..., h, i, c)``; take the mean over heads for the layer.

    >>> W, v, dy = regard.weights(torch.randn(2, 5, 4)), torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    >>> relevance = regard.chains.gradient_relevance(W, dy, v, torch.eye(5))
    >>> torch.allclose(relevance, (W.dense() * (dy @ v.mT)).clamp(min=0), atol=1e-6)
    True
    """
    need_weights(weights, "gradient_relevance(weights)")
    weights._need_entire("gradient_relevance")
    batch, h = weights._factors.batch, weights._factors.heads
    i, j = weights.shape[-2:]
    tensors = all(isinstance(t, Tensor) for t in (dy, v, x))
    head_axis = weights.shape[:-2] != batch
    if not tensors or not _fit(dy, v, x, (i, j), (h, weights._factors.k.shape[-3]) if head_axis else ()):
        got = [tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in (dy, v, x)]
        heads = f"{h}, " if head_axis else ""
        raise (ValueError if tensors else TypeError)(
            f"gradient_relevance takes dy (..., {heads}{i}, e), v (..., {'heads, ' if head_axis else ''}{j}, e) and "
            f"x (..., {j}, c); got {got[0]}, {got[1]} and {got[2]}."
        )

    own_heads, x_heads = (h,) if head_axis else (), (h,) if x.ndim == len(batch) + 3 else ()
    _check_factor(dy, dy.shape[:-1], (*batch, *own_heads, i), "dy", weights)
    _check_factor(v, v.shape[: -2 - len(own_heads)], batch, "v", weights)  # its heads may be those of keys
    _check_factor(x, x.shape[:-1], (*batch, *x_heads, j), "x", weights)

    def full(t: Tensor, heads: bool) -> Tensor:
        """(b, h|1, length, size), batch axes as one."""
        t = t if heads else t.unsqueeze(-3)
        return t.expand(*batch, *t.shape[-3:]).reshape(math.prod(batch), *t.shape[-3:])

    x = full(x, bool(x_heads))
    question = GradientProduct(full(dy, head_axis), repeat_kv(full(v, head_axis), h), x, positive)
    return weights._ask_rows(question)[0]


def _check_factor(t: Tensor, axes: Sequence[int], onto: Sequence[int], name: str, weights: Weights) -> None:
    need_floats(t, f"gradient_relevance({name})")
    check_broadcast(axes, onto, f"gradient_relevance({name}): axes", "those of the weights")
    if t.device != weights.device:
        raise ValueError(
            f"gradient_relevance({name}) is on {t.device} and the weights on {weights.device}; move one with .to()."
        )


def _fit(dy: Tensor, v: Tensor, x: Tensor, sizes: tuple[int, int], heads: tuple[int, ...]) -> bool:
    """Whether these are tensors of a matrix (i, j) with so many heads of queries and of keys; () for one head."""
    i, j = sizes
    if min(t.ndim for t in (dy, v, x)) < 2 or (dy.shape[-2], v.shape[-2], x.shape[-2]) != (i, j, j):
        return False
    if dy.shape[-1] != v.shape[-1]:
        return False
    return not heads or (min(dy.ndim, v.ndim) > 2 and dy.shape[-3] in (1, heads[0]) and v.shape[-3] in (1, *heads))


def _row_numbers(rows: Sequence[int] | Tensor, t: int) -> list[int]:
    listed = readable_numbers(rows, "rollout_rows(rows)").tolist() if isinstance(rows, Tensor) else rows
    numbers = [as_int(row) for row in listed] if isinstance(listed, Iterable) else [None]
    if any(row is None or not -t <= row < t for row in numbers):
        raise IndexError(f"rollout_rows(rows) takes a list of positions below {t}; got {rows!r}.")
    return [row % t for row in numbers if row is not None]


def _square(layers: Sequence[Weights], residual: float) -> tuple[list[Weights], float | Tensor]:
    """The layers and the share of the residual stream, checked."""
    if isinstance(layers, Weights):
        raise TypeError("a rollout takes a list of Weights, one a layer; got one Weights. Of one layer: [W].")
    if (share := as_number(residual)) is None or not 0 <= share <= 1:
        raise ValueError(f"residual is a share between 0 and 1; got {residual!r}.")
    layers = list(layers or ())
    if not layers:
        raise ValueError("a rollout needs at least one layer; got none.")
    for n, layer in enumerate(layers):
        need_weights(layer, f"layer {n} of a rollout")
        if layer._shared and layer.shape[-2] == layer.shape[-1] and not torch.equal(layer._rows_here, layer._keys_here):
            raise ValueError(
                "a rollout over ranks takes the same rows and keys on every rank; pass Shards(mesh, rows)."
            )
        t, first = layer.shape[-1], layers[0].shape
        if layer.ndim < 3 or (*layer.shape[:-3], *layer.shape[-2:]) != (*first[:-3], t, t) or first[-1] != t:
            raise ValueError(f"layer {n} of a rollout must be (..., h, t, t) as the others; got {tuple(layer.shape)}.")
    return layers, share


def _of_layers(
    layers: list[Weights], head_weights: Sequence[Tensor] | None, value_norms: Sequence[Tensor] | None
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Options of every layer, None where there are none."""
    options = (("head_weights", head_weights), ("value_norms", value_norms))
    for name, option in options:
        if option is not None and len(option) != len(layers):
            raise ValueError(f"{name} takes a tensor for each of {len(layers)} layers; got {len(option)}.")
    shares, norms = (_listed(option, len(layers)) for _, option in options)
    for n, (layer, share, norm) in enumerate(zip(layers, shares, norms, strict=True)):
        for name, of_layer in (("head_weights", share), ("value_norms", norm)):
            if isinstance(of_layer, Tensor):
                readable_numbers(of_layer, f"{name}[{n}]")
        h, t = layer.shape[-3], len(layer._keys_here) if layer._shared else layer.shape[-1]
        if share is not None and (
            not isinstance(share, Tensor) or share.shape != (h,) or not (is_tracing() or _divides(share.sum()))
        ):
            raise ValueError(
                f"head_weights of layer {n}: a tensor of {h} finite numbers whose sum is not 0; got {share}."
            )
        groups = layer._factors.k.shape[-3]
        if norm is not None and (
            not isinstance(norm, Tensor) or norm.ndim < 2 or norm.shape[-1] != t or norm.shape[-2] not in (1, groups, h)
        ):
            got = tuple(norm.shape) if isinstance(norm, Tensor) else type(norm).__name__
            raise ValueError(
                f"value_norms of layer {n}: a tensor (..., {h}, {t}), or of {groups} key heads; got {got}."
            )
    return shares, [
        x if x is None else repeat_kv(x.unsqueeze(-1), layer.shape[-3]).squeeze(-1)
        for x, layer in zip(norms, layers, strict=True)
    ]


def _divides(total: Tensor) -> bool:
    return bool((total != 0) & total.isfinite())


def _listed(option: Sequence[Tensor] | None, n: int) -> list[Tensor | None]:
    return [None] * n if option is None else [*option]


def _scaled(x: Tensor, norms: Tensor | None) -> Tensor:
    return x if norms is None else x * norms.unsqueeze(-1)


def _row_sums(layer: Weights, share: Tensor | None, norms: Tensor) -> Tensor:
    """Σ_j of the heads' mean of w_ij |v_j|, (..., t, 1)."""
    return _mean_of_heads(torch.matmul(layer, norms.unsqueeze(-1)), share)  # type: ignore[arg-type]


def _divided(x: Tensor, sums: Tensor) -> Tensor:
    """x / sums; a row without any weight stays as it is."""
    return x / torch.where(sums == 0, 1, sums)


def _mean_of_heads(y: Tensor, share: Tensor | None) -> Tensor:
    return y.mean(-3) if share is None else (y * (share / share.sum())[:, None, None]).sum(-3)
