"""The optimizers of a run: AdamW, and Muon for the matrices inside the blocks with AdamW for everything else.

Muon moves a matrix by the orthogonal matrix that is nearest to its averaged gradient: every direction is moved by the
same amount, also those in which the gradient is small. It takes about as many multiplications as a small batch does,
and learns more in a step (`bench/LOG.md`). Reference: Jordan et al., "Muon", 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .settings import Settings

__all__ = ["Muon", "averaging_decay", "make_optimizer", "orthogonal", "zero_state"]

MOMENTUM = 0.95
#: Muon's learning rate as a multiple of AdamW's: its steps have a fixed size, whatever the gradient.
RATE = 20 / 3


def make_optimizer(settings: Settings, weights: Mapping[str, Tensor]) -> torch.optim.AdamW | Muon:
    """The optimizer of a run; weight decay is for matrices alone."""
    inner = {p for name, p in weights.items() if p.ndim == 2 and "blocks." in name and settings.optimizer == "muon"}
    rest = [p for p in weights.values() if p not in inner]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.99), fused=True)
    return Muon([p for p in weights.values() if p in inner], adamw, settings.weight_decay) if inner else adamw


def zero_state(optimizer: torch.optim.AdamW | Muon, p: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before its first step."""
    if isinstance(optimizer, Muon) and any(p is matrix for matrix in optimizer.matrices):
        return {"momentum": torch.zeros_like(p)}
    return {
        "step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)
    }  # fmt: skip


def averaging_decay(ema: float, step: int) -> float:
    """The decay of the moving average of the weights at a step: it averages the last fifth of the steps at most."""
    return min(ema, (1 + step) / (6 + step))


class Muon:
    """Muon for some matrices, AdamW for the others; used as an optimizer of PyTorch is.

    Args:
        matrices: Parameters that Muon moves, each (rows, columns).
        adamw: Moves all others.
        weight_decay: Of the matrices.
    """

    def __init__(self, matrices: list[Tensor], adamw: torch.optim.AdamW, weight_decay: float) -> None:
        self.matrices, self.adamw, self.weight_decay = matrices, adamw, weight_decay
        self.group: dict[str, Any] = {"params": matrices, "lr": adamw.param_groups[0]["lr"]}
        self.param_groups = [*adamw.param_groups, self.group]
        self.state = adamw.state  # AdamW leaves alone what is of no parameter of its own

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        self.adamw.zero_grad(set_to_none)
        for p in self.matrices:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move all parameters by their gradients."""
        self.adamw.step()
        rate = RATE * self.group["lr"]
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for p in self.matrices:
            by_shape.setdefault(p.shape, []).append(p)
        for (rows, columns), alike in by_shape.items():  # a few launches for each shape, not for each matrix
            gradients = [p.grad for p in alike if p.grad is not None]
            for p in alike:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum"] for p in alike]
            torch._foreach_mul_(momenta, MOMENTUM)
            torch._foreach_add_(momenta, gradients)
            moves = torch._foreach_add(gradients, momenta, alpha=MOMENTUM)  # one step ahead, as Nesterov's
            # A tall matrix has longer columns: the same move of its outputs takes a larger one of the matrix.
            size = rate * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(alike, 1 - rate * self.weight_decay)
            torch._foreach_add_(alike, list(orthogonal(torch.stack(moves)).unbind()), alpha=-size)


def orthogonal(x: Tensor, iterations: int = 5) -> Tensor:
    """Nearly the orthogonal factor of every matrix (..., rows, columns): singular values become 0.7 to 1.2.

    Newton-Schulz iterations of a polynomial of fifth degree, whose coefficients are chosen to raise small singular
    values quickly rather than to end at one exactly.
    """
    wide = x.mT if x.shape[-2] > x.shape[-1] else x
    y = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    y = y.bfloat16() if y.is_cuda else y  # its rounding is small beside 0.7 to 1.2
    for _ in range(iterations):
        square = y @ y.mT
        y = 3.4445 * y + (-4.7750 * square + 2.0315 * square @ square) @ y
    return (y.mT if x.shape[-2] > x.shape[-1] else y).to(x.dtype)
