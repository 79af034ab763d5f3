"""The loss of a sparse-attention indexer by the triton kernels on a GPU, judged by float64: small cases, full tiles, long rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import regard
from regard.engines.triton import indexer_pass
from regard.losses import index_weights, indexer
from support.indexer_cases import CASES, ROUNDOFF, IndexerCase, judged

TYPES = list(ROUNDOFF)
CAUSAL = regard.causal()
LONG = {
    "16 heads": IndexerCase((16, 16), 128, 4, 64, 1, (1024, 1024), CAUSAL),
    "groups, odd": IndexerCase((8, 2), 64, 4, 64, 2, (777, 777), CAUSAL),
    "window": IndexerCase((4, 4), 128, 4, 64, 1, (1000, 1000), regard.window(200, 17)),
    "no mask": IndexerCase((4, 4), 128, 8, 128, 2, (513, 513)),
    "wide heads": IndexerCase((2, 1), 256, 4, 128, 1, (600, 600), CAUSAL),
    "alibi and a sink": IndexerCase((4, 2), 128, 4, 64, 1, (512, 512), CAUSAL, score="alibi"),
    "large scores": IndexerCase((4, 4), 128, 4, 64, 1, (1024, 1024), CAUSAL, times=1000.0),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_and_gradients_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    judged(CASES[name], dtype, "cuda", times=3)  # computed, recorded, replayed


@pytest.mark.parametrize("strip", [2**25, 2**18])
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("dtype", TYPES)
def test_long_rows_are_those_of_float64(
    name: str, dtype: torch.dtype, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer_pass, "STRIP", strip)
    judged(LONG[name], dtype, "cuda")


@pytest.mark.parametrize("dtype", TYPES)
def test_the_error_is_at_most_twice_that_of_plain_pytorch(dtype: torch.dtype) -> None:
    case = dataclasses.replace(LONG["16 heads"], heads=(8, 8))
    leaves = [x.to("cuda", dtype) for x in case.leaves()]
    exact, plain = (_plain([x.to(t) for x in leaves]) for t in (torch.float64, dtype))
    leaves = [x.requires_grad_(n > 1) for n, x in enumerate(leaves)]
    loss = indexer(regard.weights(*leaves[:2], mask=CAUSAL), index_weights(*leaves[2:], CAUSAL))
    mine = [loss.detach(), *torch.autograd.grad(loss, leaves[2:])]
    for got, theirs, right in zip(mine, plain, exact, strict=True):
        errors = [float((x.double() - right).norm() / right.norm()) for x in (got, theirs)]
        assert errors[0] <= 2 * errors[1] + 2e-7, errors


def _plain(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The textbook's loss and gradients in the type of its inputs."""
    q, k, *index = leaves
    index = [x.requires_grad_() for x in index]
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device="cuda").triu(1)
    p = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1).sum(1)
    p = p / p.sum(-1, keepdim=True)
    scores = (index[2].mT.unsqueeze(-1) * (index[0] @ index[1].unsqueeze(1).mT).relu()).sum(1)
    log_q = scores.masked_fill(hidden, -torch.inf).log_softmax(-1)
    log_p = p.clamp(min=torch.finfo(p.dtype).tiny).log()
    loss = torch.where(hidden, 0, p * (log_p - log_q)).sum(-1).mean()
    return [loss.detach(), *torch.autograd.grad(loss, index)]


def test_the_loss_has_the_same_bits_twice_and_waits_for_the_gpu_nowhere() -> None:
    case = IndexerCase((8, 8), 128, 4, 64, 1, (2048, 2048), CAUSAL)
    leaves = [x.to("cuda", torch.bfloat16).requires_grad_(n > 1) for n, x in enumerate(case.leaves())]
    runs = []
    for _ in range(3):
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = indexer(regard.weights(*leaves[:2], mask=CAUSAL), index_weights(*leaves[2:], CAUSAL))
            runs.append([loss.detach(), *torch.autograd.grad(loss, leaves[2:])])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
