"""Questions about complete rows, and two matrices: errors at most twice those of plain PyTorch in float32.

Every sequence of a batch is a seed of its own. The errors of all seeds together, as a root mean square, are held against
those of plain PyTorch; half an ulp of the answers themselves, 2⁻²⁴, is no error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import regard

SEEDS, HEADS, ROWS, KEYS = 12, 4, 9, 14
CELLS = (torch.arange(ROWS)[:, None] * 5 + torch.arange(KEYS) * 3) % 4 == 0
#: One row sees nothing.
VISIBLE = (torch.arange(ROWS)[:, None] * 3 + torch.arange(KEYS) * 2) % 5 != 1
VISIBLE[3] = False


class Outcomes(NamedTuple):
    """By the textbook: scores, and the weights of all keys and of a sink with their logarithms, 0 where hidden."""

    s: Tensor
    p: Tensor
    log_p: Tensor

    @property
    def w(self) -> Tensor:
        return self.p[..., :KEYS]


def outcomes(s: Tensor, sink: Tensor | None = None) -> Outcomes:
    s = s.masked_fill(~VISIBLE, -torch.inf)
    every = s if sink is None else torch.cat([s, sink[..., None, None].expand(*s.shape[:-1], 1)], -1)
    sees = every.detach().amax(-1, keepdim=True) > -torch.inf
    there = every.detach() > -torch.inf
    every = torch.where(sees, every, 0)
    p, log_p = every.softmax(-1), every.log_softmax(-1)
    return Outcomes(s, torch.where(there, p, 0), torch.where(there, log_p, 0))


def heads(p: Tensor) -> Tensor:
    return p.unflatten(1, (2, -1)).mean(2)


def kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return (p * (log_p - log_q)).sum(-1)


def log(p: Tensor) -> Tensor:
    return torch.where(p > 0, p, 1).log()


def js(x: Outcomes, y: Outcomes) -> Tensor:
    middle = torch.logaddexp(x.log_p, y.log_p) - math.log(2)
    return (kl(x.p, x.log_p, middle) + kl(y.p, y.log_p, middle)) / 2


def log_mass(x: Outcomes) -> Tensor:
    cells = CELLS & VISIBLE
    sees = cells.any(-1)
    return torch.where(sees, torch.where(cells | ~sees[:, None], x.log_p[..., :KEYS], -torch.inf).logsumexp(-1), 0)


def variance(x: Outcomes) -> Tensor:
    far = (torch.arange(ROWS)[:, None] + KEYS - ROWS - torch.arange(KEYS)).abs()
    return (x.w * (far - (x.w * far).sum(-1, keepdim=True)) ** 2).sum(-1)


Ask = Callable[[regard.Weights, regard.Weights], Tensor]
#: What the library is asked, and its formula.
QUESTIONS: dict[str, tuple[Ask, Callable[[Outcomes, Outcomes], Tensor]]] = {
    "kl": (lambda A, B: A.kl(B), lambda x, y: kl(x.p, x.log_p, y.log_p)),
    "cross_entropy": (lambda A, B: A.cross_entropy(B), lambda x, y: -(x.p * y.log_p).sum(-1)),
    "js": (lambda A, B: A.js(B), js),
    "overlap": (lambda A, B: A.overlap(B), lambda x, y: torch.minimum(x.p, y.p).sum(-1)),
    "total_variation": (lambda A, B: A.total_variation(B), lambda x, y: (x.p - y.p).abs().sum(-1) / 2),
    "kl of heads": (
        lambda A, B: A.reduce_heads("mean", groups=2).kl(B.reduce_heads("mean", groups=2)),
        lambda x, y: kl(heads(x.p), log(heads(x.p)), log(heads(y.p))),
    ),
    "entropy of heads": (
        lambda A, B: A.reduce_heads("mean", groups=2).entropy(), lambda x, y: -(heads(x.p) * log(heads(x.p))).sum(-1),
    ),
    "recall": (lambda A, B: A.recall(CELLS), lambda x, y: (x.w * CELLS).sum(-1)),
    "log_mass": (lambda A, B: A.log_mass(CELLS).masked_fill(~(CELLS & VISIBLE).any(-1), 0), lambda x, y: log_mass(x)),
    "variance": (lambda A, B: A.distance_variance(), lambda x, y: variance(x)),
    "max": (lambda A, B: A.pool_blocks(3, 7, by="max"), lambda x, y: x.w.unflatten(-1, (2, 7)).unflatten(-3, (3, 3)).amax((-1, -3))),
    "lse": (
        lambda A, B: A.pool_blocks(ROWS, KEYS, by="lse"), lambda x, y: x.s.flatten(-2).logsumexp(-1)[..., None, None],
    ),
    "dense": (lambda A, B: A.dense(), lambda x, y: x.w),
    "row": (lambda A, B: A.row(2), lambda x, y: x.w[..., 2, :]),
    "rows of heads": (lambda A, B: A.reduce_heads("mean", groups=2)[1:8, :], lambda x, y: heads(x.w)[..., 1:8, :]),
    "scores": (lambda A, B: A.scores.dense().masked_fill(~VISIBLE, 0), lambda x, y: x.s.masked_fill(~VISIBLE, 0)),
}  # fmt: skip


def answers(matrices: list[regard.Weights] | list[Outcomes], leaves: list[Tensor], question: str) -> list[Tensor]:
    """A question's answer and the gradients of a fixed combination of its numbers."""
    x = QUESTIONS[question][isinstance(matrices[0], Outcomes)](*matrices)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad((x * weights.to(x.dtype)).sum(), leaves, allow_unused=True)
    return [x.detach(), *(g for g in grads if g is not None)]


def hold(
    question: str,
    inputs: list[Tensor],
    library: Callable[[list[Tensor]], list[regard.Weights]],
    textbook: Callable[[list[Tensor]], list[Outcomes]],
) -> None:
    results = []
    for dtype, make in ((torch.float64, textbook), (torch.float32, textbook), (torch.float32, library)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        results.append(answers(make(leaves), leaves, question))
    for n, (exact, plain, ours) in enumerate(zip(*results, strict=True)):
        assert ours.isfinite().all()
        off, theirs, size = (x.double().square().mean().sqrt().item() for x in (ours - exact, plain - exact, exact))
        assert size > 0
        what = f"gradient {n}" if n else "the answer"
        assert off <= 2 * max(theirs, 2**-24 * size), (
            f"{what} is {off / theirs:.3g} times as far off as plain PyTorch's"
        )


def per_query_head(k: Tensor) -> Tensor:
    return k.repeat_interleave(2, 1)


def near(*tensors: Tensor) -> list[Tensor]:
    return [x + 0.05 * torch.randn_like(x) for x in tensors]


@pytest.mark.parametrize("question", QUESTIONS)
def test_gaussian_errors_of_clusters_far_from_the_origin(question: str, strips: None) -> None:
    size, sigma = 5, 0.5
    centres = 30 * torch.randn(SEEDS, 2, 4, size)
    q, k = (
        centres.repeat_interleave(h // 2, 1)[:, :, torch.arange(n) % 4] + torch.randn(SEEDS, h, n, size) / size**0.5
        for h, n in ((HEADS, ROWS), (2, KEYS))
    )

    def library(x: list[Tensor]) -> list[regard.Weights]:
        score = regard.Gaussian(sigma)
        return [regard.weights(*x[n : n + 2], score=score, mask=VISIBLE, align="end") for n in (0, 2)]

    def textbook(x: list[Tensor]) -> list[Outcomes]:
        pairs = ((x[n].unsqueeze(-2), per_query_head(x[n + 1]).unsqueeze(-3)) for n in (0, 2))
        return [outcomes(-(a - b).square().sum(-1) / (2 * sigma**2)) for a, b in pairs]

    hold(question, [q, k, *near(q, k)], library, textbook)


@pytest.mark.parametrize("times", [1.0, 10.0])
@pytest.mark.parametrize("question", [name for name in QUESTIONS if name != "lse"])
def test_errors_beside_a_sink(question: str, times: float) -> None:
    size = 16
    q, k = times * torch.randn(SEEDS, HEADS, ROWS, size), torch.randn(SEEDS, 2, KEYS, size)
    sink = times + torch.randn(SEEDS, HEADS)

    def library(x: list[Tensor]) -> list[regard.Weights]:
        sides = (x[n : n + 3] for n in (0, 3))
        return [regard.weights(a, b, score=regard.ScaledDot().sink(z), mask=VISIBLE, align="end") for a, b, z in sides]

    def textbook(x: list[Tensor]) -> list[Outcomes]:
        return [outcomes(x[n] @ per_query_head(x[n + 1]).mT / math.sqrt(size), x[n + 2]) for n in (0, 3)]

    hold(question, [q, k, sink, *near(q, k, sink)], library, textbook)


@pytest.mark.parametrize("question", ["kl", "overlap", "kl of heads", "entropy of heads", "recall"])
def test_rows_that_see_a_sink_alone_leave_its_small_gradients(question: str) -> None:
    """Such a row gives the sink 1 − 1; rows where it weighs 1e-9 are added up beside it."""
    q, k = torch.randn(1, HEADS, ROWS, 4), torch.randn(1, 2, KEYS, 4)
    sink = torch.full((HEADS,), -20.0)
    grads = []
    for dtype in (torch.float32, torch.float64):
        z = sink.to(dtype).requires_grad_()
        score = regard.ScaledDot().sink(z)
        A, B = (
            regard.weights(x.to(dtype), k.to(dtype), score=score, mask=VISIBLE, align="end") for x in (q, q.flip(2))
        )
        grads.append(torch.autograd.grad(QUESTIONS[question][0](A, B).sum(), z)[0])
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=1e-4, atol=0)
