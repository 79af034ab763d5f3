"""Configurations of the triton engine, and a judge for each: in the interpreter and on a real GPU alike.

A case names a score, a mask, what is asked, a type, lengths and sizes. It is laid out once as a `Problem`; the same
problem in float64 through `blockwise` is the truth, so what is judged is the kernels, not the rounding of a projection
before them. Every answer has a bound of its own, element by element (reliability: a maximum over a tensor misses a
dropped key, a mean misses a wrong row).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import regard
from regard.core.autograd import compute_with_autograd
from regard.core.block import MatrixBlock
from regard.core.problem import Problem
from regard.core.pytree import flatten, unflatten
from regard.core.stats import Request, Tiling, lse_of
from regard.engines import get_engine, replay

ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}

SCORES = ("dot", "scaled_dot", "cosine", "gaussian", "bilinear", "bias", "key bias", "alibi", "softcap", "all", "sink", "additive")  # fmt: skip
MASKS = ("none", "causal", "window", "padding", "documents", "dense", "or", "not", "interleaved", "nothing")
REQUESTED = (
    ("y", "lse", "max_score", "entropy"),
    ("y", "norm", "entropy", "received"),
    ("norm", "received", "pool"),
    ("y", "norm", "mean_distance", "mass", "argmax"),
    ("norm", "z", "entropy"),
    ("norm", "topk_scores", "topk_indices", "received", "y"),
)
#: (i, j, align): lengths that fill no tile, one tile, or one and a bit.
LENGTHS = (
    (1, 1, None),
    (17, 17, None),
    (63, 63, None),
    (111, 130, "end"),
    (130, 111, "start"),
    (64, 64, None),
    (1, 63, "end"),
)
#: (b, h, g, d, e)
SIZES = ((1, 2, 1, 16, 16), (2, 2, 2, 8, 24), (1, 4, 2, 40, 8), (2, 1, 1, 64, 32))


@dataclass(frozen=True)
class KernelCase:
    score: str
    mask: str
    wanted: tuple[str, ...]
    dtype: torch.dtype
    lengths: tuple[int, int, str | None]
    sizes: tuple[int, int, int, int, int]
    times: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        i, j, _ = self.lengths
        wanted = "+".join(self.wanted)
        return f"{self.score}-{self.mask}-{wanted}-{str(self.dtype)[6:]}-{i}x{j}-{'.'.join(map(str, self.sizes))}-x{self.times:g}-{self.seed}"  # fmt: skip


#: For the interpreter, which is slow: of choices that reach the same lines of the kernels, one.
FEWER_SCORES = ("scaled_dot", "gaussian", "bias", "alibi", "softcap", "all", "sink", "additive")
FEWER_MASKS = ("none", "causal", "window", "padding", "documents", "dense", "or", "nothing")
FEWER_LENGTHS = ((1, 1, None), (17, 17, None), (63, 63, None), (64, 64, None), (111, 130, "end"))


def pairwise(dtypes: tuple[torch.dtype, ...], seed: int = 0) -> list[KernelCase]:
    """Few cases in which every pair of choices meets at least once."""
    choices = [FEWER_SCORES, FEWER_MASKS, REQUESTED, dtypes, FEWER_LENGTHS, SIZES, (1.0, 3.0)]
    rng = random.Random(seed)
    open_pairs = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(choices)), 2)
        for x in range(len(choices[a]))
        for y in range(len(choices[b]))
    }
    cases = []
    while open_pairs:
        a, x, b, y = min(open_pairs)
        best: tuple[int, list[int]] = (-1, [])
        for _ in range(30):
            picks = [rng.randrange(len(c)) for c in choices]
            picks[a], picks[b] = x, y
            won = sum(
                (m, picks[m], n, picks[n]) in open_pairs for m, n in itertools.combinations(range(len(choices)), 2)
            )
            best = max(best, (won, picks))
        picks = best[1]
        open_pairs -= {(m, picks[m], n, picks[n]) for m, n in itertools.combinations(range(len(choices)), 2)}
        cases.append(KernelCase(*[c[p] for c, p in zip(choices, picks, strict=True)], seed=len(cases)))
    return cases


#: A few rows over many keys: one row, heads that share keys in groups of a power of two and not, more rows than a tile.
FEW_ROWS = (
    (1, 1, None),
    (1, 63, "end"),
    (1, 130, "end"),
    (5, 70, "end"),
    (17, 17, None),
    (3, 40, "start"),
    (40, 96, "end"),
)
SHARED_KEYS = (
    (1, 4, 1, 16, 16),
    (2, 6, 2, 8, 24),
    (1, 6, 1, 40, 8),
    (2, 2, 2, 64, 32),
    (1, 5, 1, 16, 16),
    (1, 4, 4, 16, 16),
)
REQUESTED_OF_FEW_ROWS = (
    ("y", "lse", "max_score", "entropy"),
    ("y", "norm", "entropy", "received"),
    ("y", "norm", "mean_distance", "mass", "argmax"),
    ("norm", "topk_scores", "topk_indices", "received", "y"),
    ("norm", "received", "topk_scores", "topk_indices"),
)


def of_few_rows(dtypes: tuple[torch.dtype, ...], count: int = 64) -> list[KernelCase]:
    """Cases for the kernels that split the keys, drawn so that every choice comes up in turn."""
    rng = random.Random(0)
    scores, masks = [s for s in FEWER_SCORES if s != "additive"], FEWER_MASKS
    return [
        KernelCase(scores[n % len(scores)], rng.choice(masks), REQUESTED_OF_FEW_ROWS[n % len(REQUESTED_OF_FEW_ROWS)], dtypes[n % len(dtypes)],
             rng.choice(FEW_ROWS), rng.choice(SHARED_KEYS), rng.choice((1.0, 3.0)), seed=n)
        for n in range(count)
    ]  # fmt: skip


def at_random(seed: int, dtypes: tuple[torch.dtype, ...], longest: int = 300) -> KernelCase:
    """One configuration out of all, lengths and sizes too."""
    rng = random.Random(seed)
    i = rng.choice([1, rng.randint(2, 65), rng.randint(2, longest)])
    j = rng.choice([i, rng.randint(1, longest), rng.randint(1, 8 * longest) if i <= 64 else i])
    g = rng.choice([1, 2, 3])
    sizes = (rng.choice([1, 2, 3]), g * rng.choice([1, 2, 4, 7]), g, 8 * rng.choice([1, 2, 3, 5, 8, 9, 10, 12, 16, 20, 24, 32]), 8 * rng.choice([1, 2, 4, 7, 8, 16, 32]))  # fmt: skip
    align = None if i == j else rng.choice(["start", "end"])
    return KernelCase(rng.choice(SCORES), rng.choice(MASKS), rng.choice(REQUESTED), rng.choice(dtypes), (i, j, align), sizes, rng.choice([0.3, 1.0, 3.0]), seed)  # fmt: skip


def problem_of(case: KernelCase, device: str = "cpu") -> tuple[Problem, Request]:
    """The problem and the request of a case."""
    make = torch.Generator().manual_seed(case.seed)
    (i, j, align), (b, h, g, d, e) = case.lengths, case.sizes

    def draw(*shape: int, times: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=make) * times).to(case.dtype).to(device)

    def heads(h: int, n: int, e: int, times: float = 1.0) -> Tensor:
        """Every third one with its heads within positions."""
        x = draw(b, h, n, e, times=times)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if case.seed % 3 == 1 else x

    q, k = heads(h, i, d, case.times), heads(g, j, d, case.times)
    score = _score(case.score, draw, h, d, i, j)
    mask = _mask(case.mask, b, i, j, make, device)
    W = regard.weights(q, k, score=score, mask=mask, align=align or "start")
    extra: dict[str, Any] = {}
    if "y" in case.wanted:
        extra["v"] = heads(g, j, e)
    if "z" in case.wanted:
        extra["u"] = heads(h, i, e)
    if "mass" in case.wanted:
        extra["keys"] = (torch.rand(j, generator=make) > 0.5).float().to(device)
    if "pool" in case.wanted:
        extra["tiling"] = (
            Tiling(3, 5, i // 5, i, j // 7, j) if case.seed % 2 else Tiling(max(1, i // 32), 4, 0, i, 0, j)
        )
    if "topk_scores" in case.wanted:
        extra["topk"] = 1 + case.seed % 9
    return W._factors.problem(), Request(case.wanted, **extra)


def _score(name: str, draw: Any, h: int, d: int, i: int, j: int) -> Any:
    makers = {
        "dot": lambda: regard.ScaledDot(1.0 / d),
        "scaled_dot": regard.ScaledDot,
        "cosine": lambda: regard.Cosine(3.0),
        "gaussian": lambda: regard.Gaussian(2.0 + d**0.5),
        "bilinear": lambda: regard.Bilinear(draw(d, d, times=1 / d)),
        "bias": lambda: regard.ScaledDot().bias(draw(h, i, j)),
        "key bias": lambda: regard.ScaledDot().bias(draw(1, j)),
        "alibi": lambda: regard.ScaledDot().alibi(draw(h).abs() / 8),
        "softcap": lambda: regard.ScaledDot().softcap(2.0),
        "all": lambda: (
            regard.ScaledDot().bias(draw(i, 1)).softcap(3.0).alibi(draw(h) / 8).bias(draw(h, i, j)).sink(draw(h))
        ),
        "sink": lambda: regard.ScaledDot().sink(draw(h)),
        "additive": lambda: regard.Additive(draw(d, 6, times=d**-0.5), draw(d, 6, times=d**-0.5), draw(6)),
    }
    return makers[name]()


def _mask(name: str, b: int, i: int, j: int, make: torch.Generator, device: str) -> Any:
    lengths = torch.randint(0, j + 1, (b,), generator=make)
    ids = torch.randint(0, 4, (b, j), generator=make).sort(1).values
    makers = {
        "none": lambda: None,
        "causal": regard.causal,
        "window": lambda: regard.window(9, 3),
        "padding": lambda: regard.padding(lengths),
        "documents": lambda: regard.documents(ids) & regard.causal(),
        "dense": lambda: (torch.rand(b, 1, i, j, generator=make) > 0.6).to(device),
        "or": lambda: regard.window(5, 0) | regard.padding(lengths // 4),
        "not": lambda: ~regard.window(7, 2),
        "interleaved": lambda: regard.documents(torch.randint(0, 3, (b, j), generator=make)),
        "nothing": lambda: regard.causal() & ~regard.causal(),
    }
    return makers[name]()


def judged(case: KernelCase, device: str = "cpu", gradients: bool = True) -> None:
    """Ask the triton engine and float64; every answer and every gradient within its bound."""
    problem, request = problem_of(case, device)
    gradients = gradients and not case.wanted[-1].startswith("top")
    for _ in range(2 if device == "cuda" else 0):  # the second time it is noted down, the third time that is done again
        _answers(problem, request, "triton", gradients)
    results, grads = _answers(problem, request, "triton", gradients)
    double = change_all((problem, request), lambda t: t.double() if t.is_floating_point() else t)
    truth, true_grads = _answers(*double, "blockwise", gradients)
    bounds = _bounds(*double, truth, case.dtype)
    for name in dict.fromkeys(("lse", *(name for name in request.names if name != "norm"))):
        _compare(f"{case}: {name}", results[name], truth[name], bounds[name])
    if "topk_weights" in results:
        right = _weights_of_top(truth)
        _compare(
            f"{case}: topk_weights",
            results["topk_weights"],
            right,
            right * (bounds["topk_scores"] + bounds["lse"][..., None]) + 1e-6,
        )
    u = ROUNDOFF[case.dtype]
    # Of a distance, what reaches q and k through its two biases comes apart or within dq and dk: their sums are judged.
    parts, grads, true_grads = true_grads, _complete(double[0], grads), _complete(double[0], true_grads)
    for n, (mine, right, part) in enumerate(zip(grads, true_grads, parts, strict=True)):
        if right is None:
            continue
        assert mine is not None, f"{case}: gradient {n} is missing"
        size = max(float(x.abs().max()) for x in (right, part, right - part)) if right.numel() else 0.0
        slack = (8 * u + 2e-5 * (1 + case.times**2)) * (right.abs() + size) + 1e-5
        # A gradient comes in the type of its tensor: beyond its largest number stands inf.
        largest = torch.finfo(mine.dtype).max
        mine, right = mine.double().clamp(-largest, largest), right.clamp(-largest, largest)
        _compare(f"{case}: gradient {n} of {tuple(right.shape)}", mine, right, slack)


def _complete(double: Problem, grads: list[Any]) -> list[Any]:
    """Gradients of a problem, those of its similarity's own biases as parts of dq and dk."""
    if not double.similarity_kernel.own_modifiers or not grads:
        return grads
    own = [modifier.operand for modifier in double.modifiers[: double.similarity_kernel.own_modifiers]]
    of_own = [torch.zeros_like(x) if g is None else g for x, g in zip(own, grads[2:], strict=False)]
    return double.with_own_grads([*grads[:2], *of_own, *grads[2 + len(own) :]], torch.float64)


def _weights_of_top(answers: dict[str, Tensor]) -> Tensor:
    lse = answers["lse"] if "lse" in answers else lse_of(answers["norm"])
    return torch.where(answers["topk_indices"] >= 0, (answers["topk_scores"] - lse.unsqueeze(-1)).exp(), 0)


def count_wrong_topk_of_long_rows(dtypes: tuple[torch.dtype, ...], device: str = "cpu", tile: int = 32) -> int:
    """The largest of long rows, by networks and by candidates: as they come, with ties, and where all keys are equal.

    Returns how many are wrong.
    """
    from regard.engines.triton import topk_pass

    wrong, most = 0, topk_pass.MAX_IN_NETWORK
    wanted = ((8 if device == "cuda" else 2, "none"), (3, "causal"), (1, "window"))
    for networks, (n, mask), kind, dtype in itertools.product(
        (True, False), wanted, ("plain", "ties", "equal"), dtypes
    ):
        lengths = (40, (2 * n + 2) * tile, "end")
        problem, _ = problem_of(KernelCase("scaled_dot", mask, ("norm",), dtype, lengths, (1, 2, 1, 16, 16)), device)
        if kind != "plain":
            q, k = (x.round() if kind == "ties" else torch.ones_like(x) for x in (problem.q, problem.k))
            problem = dataclasses.replace(problem, q=q, k=k)
        request = Request(("topk_scores", "topk_indices", "norm"), topk=n)
        topk_pass.MAX_IN_NETWORK = most if networks else 0
        topk_pass.MAX_LIST_BYTES = 1 if kind == "ties" else 2**30  # one block of rows at a time, or all together
        replay.TAPES.clear()
        results = compute_with_autograd(problem, request, get_engine("triton"), {}, False)
        double = change_all(problem, lambda t: t.double() if t.is_floating_point() else t)
        truth = compute_with_autograd(double, request, get_engine("blockwise"), {}, False)
        same = kind == "plain" or torch.equal(results["topk_indices"], truth["topk_indices"])
        truth["topk_weights"] = _weights_of_top(truth)
        close = (
            torch.allclose(results[n].double(), truth[n], rtol=1e-4, atol=1e-5) for n in ("topk_scores", "topk_weights")
        )
        if not same or not all(close):
            wrong += 1
            print(f"top {n}, networks: {networks}, {mask}, {kind}, {dtype}: {results} for {truth}")
    topk_pass.MAX_IN_NETWORK = most
    return wrong


def judged_where_keys_are_equal(dtype: torch.dtype, device: str = "cpu") -> None:
    """Of equal keys the lower comes first: where one is listed, all before it are, also if a larger score displaced some."""
    from regard.engines.triton import topk_pass

    # Quarters: their products are exact, so equal keys have equal scores whatever the order a BLAS adds them in.
    q, k = ((4 * torch.randn(1, 2, n, 16, device=device)).round().div(4).to(dtype) for n in (70, 77))
    k[:, :, 5:9] = k[:, :, 4:5]
    most = topk_pass.MAX_IN_NETWORK
    for topk_pass.MAX_IN_NETWORK in (0, most):
        results = regard.weights(q, k, engine="triton").topk(8).indices
        for n in range(5, 9):
            assert bool((~(results == n).any(-1) | (results == n - 1).any(-1)).all()), (
                f"key {n} is listed before one that is equal, networks of {topk_pass.MAX_IN_NETWORK}"
            )


def judged_by_parts(device: str = "cpu", size: int = 24) -> None:
    """float32 whose products go by parts of 16 bits: components and rows far apart, huge scores, sinks, and infinities."""
    from regard.engines.triton import forward_pass, tile_config

    sizes = tile_config.PART_SIZES
    uses_parts, forward_pass.uses_parts = (
        forward_pass.uses_parts,
        lambda p, v: uses_parts(p, v) if device == "cuda" else p.product and p.fp32,
    )
    replay.TAPES.clear()
    try:
        tile_config.PART_SIZES = (8, 128)
        for mask, scale, lengths in (
            ("none", 1.0, (40, 70, "end")),
            ("causal", 30.0, (70, 70, None)),
            ("window", 1e-3, (33, 50, "end")),
        ):
            for similarity in ("scaled_dot", "sink"):
                case = KernelCase(similarity, mask, ("y", "lse", "max_score", "entropy"), torch.float32, lengths, (2, 4, 2, size, size - 8), scale)  # fmt: skip
                judged(case, device)
        q, k, v = (torch.randn(1, 2, n, size, device=device) for n in (40, 70, 70))
        q[..., 3] *= 1e4
        k[..., 3] *= 1e-4
        v[:, :, ::3] *= 1e5
        truth = regard.weights(q.double(), k.double(), engine="blockwise").see("lse", "entropy", values=v.double())
        plain = regard.weights(q.cpu(), k.cpu(), engine="blockwise").see("lse", "entropy", values=v.cpu())
        seen = regard.weights(q, k, engine="triton").see("lse", "entropy", values=v)
        for name in ("y", "lse", "entropy"):
            right = getattr(truth, name)
            mine, theirs = (float((getattr(x, name).to(right) - right).norm() / right.norm()) for x in (seen, plain))
            assert mine < 3 * theirs + 2e-7, (name, mine, theirs)
        # Scores near 10,000: columns, the largest and gradients divide by the norm of their own scores.
        huge = (q * 30).requires_grad_()
        W = regard.weights(huge, k, engine="triton")
        W.see("lse", values=v)
        for columns in (W.received(), W.see("lse", "received", values=v).received):
            assert (columns.sum(-1) - q.shape[2]).abs().max() < 1e-5 * q.shape[2], columns.sum(-1)
        with torch.no_grad():
            W = regard.weights(huge, k, engine="triton")
            W.see("lse", values=v)
            assert W.topk(3).values.max() <= 1 + 1e-6, W.topk(3).values.max()
        v[0, 0, 6, 1], k[0, 1, 3] = torch.inf, -torch.inf
        seen, plain = (regard.weights(q, k, engine=e).see("lse", values=v) for e in ("triton", "blockwise"))
        for mine, theirs in ((seen.y, plain.y), (seen.lse, plain.lse)):
            assert torch.equal(mine.isnan(), theirs.isnan())
            assert torch.equal(mine.isinf(), theirs.isinf())
    finally:
        tile_config.PART_SIZES, forward_pass.uses_parts = sizes, uses_parts
        replay.TAPES.clear()


def judged_with_many_columns(dtype: torch.dtype, device: str = "cpu", columns: int = 300) -> None:
    """More columns than a tile holds: of values, of what is sent back, of a pooled map, and their gradients."""
    q, k, v, u = (torch.randn(1, 2, n, size, device=device).to(dtype) for n, size in ((7, 16), (columns + 9, 16), (columns + 9, columns), (7, columns)))  # fmt: skip
    leaves = [x.requires_grad_() for x in (q, k, v, u)]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    answers = []
    for (q, k, v, u), engine in ((leaves, "triton"), (doubles, "blockwise")):
        W = regard.weights(q, k, engine=engine)
        seen = W.see("entropy", pool=(2, columns), values=v)
        results = (seen.y, seen.pool, W.mT @ u)
        total = sum((x.double() * torch.linspace(-1, 1, x.shape[-1], device=device)).sum() for x in results)
        answers.append([*results, *torch.autograd.grad(total, (q, k, v, u))])
    names = ("y", "pool", "z", "dq", "dk", "dv", "du")
    for name, mine, right in zip(names, *answers, strict=True):
        close = 3 * columns**0.5 * ROUNDOFF[dtype] * right.detach().abs().max()  # each adds up as many terms
        _compare(f"{columns} columns: {name}", mine.detach(), right.detach(), close)


def judged_with_maps_of_full_tiles(dtype: torch.dtype, device: str = "cpu", length: int = 128, d: int = 16) -> None:
    """Pooled maps whose tiles are whole blocks of rows, parts of one or neither: columns are summed by sixteens before they are
    stored, by fewer, or one by one."""
    q, k = (torch.randn(2, 2, length, d, device=device).to(dtype) for _ in range(2))
    n = length
    maps = (
        (4, 4), (2, 8), (4, n // 8), (2, 2, slice(n // 2, n), slice(n // 4, n)),
        (n // 8, n // 8), (n // 4, 3, slice(n // 2, n)), (n // 2, n), (5, 7), (n // 6, 3, slice(3, n - 5)), (1, 1, slice(7, 9)),
    )  # fmt: skip
    for mask in (None, regard.causal(), regard.window(length // 3, 8)):
        for pool in maps:
            seen = regard.weights(q, k, mask=mask, engine="triton").see("received", pool=pool)
            right = regard.weights(q.double(), k.double(), mask=mask, engine="blockwise").see("received", pool=pool)
            _compare(f"map {pool}, {mask!r}", seen.pool, right.pool, 1e-4 * right.pool + 1e-5)
            _compare(
                f"received beside a map {pool}, {mask!r}", seen.received, right.received, 1e-4 * right.received + 1e-5
            )


def judged_where_all_scores_are_huge(dtype: torch.dtype, device: str = "cpu") -> None:
    """A row with the same huge bias everywhere has even weights: in lse = m + log l the second part would be lost."""
    q = torch.zeros(1, 2, 37, 16, dtype=dtype, device=device)
    k, v = (torch.randn(1, 2, 70, 16, device=device).to(dtype).requires_grad_() for _ in range(2))
    for level in (-6e4, 6e4) if dtype == torch.float16 else (-1e4, -1e9, -1e20, 1e9):
        bias = torch.zeros(1, 1, 37, 1, dtype=dtype, device=device)
        bias[:, :, 5:9] = level
        W = regard.weights(q, k, score=regard.ScaledDot().bias(bias), engine="triton")
        even = torch.full(W.shape, 1 / 70, device=device)
        seen = W.see("received", "entropy", pool=(37, 1), values=v)
        for results, truth in (
            (W.dense(), even),
            (seen.received, even.sum(-2)),
            (seen.pool, torch.ones_like(seen.pool)),
        ):
            torch.testing.assert_close(results.detach(), truth, rtol=1e-4, atol=0)
        (dv,) = torch.autograd.grad(seen.y.float().sum(), v)
        torch.testing.assert_close(dv.float(), torch.full_like(dv, 37 / 70).float(), rtol=1e-2, atol=0)


def judged_where_numbers_are_nan(dtype: torch.dtype, device: str = "cpu") -> None:
    """What is nan stays nan, in the rows and columns that see it and nowhere else: a broken query is no row that sees nothing."""
    scores = (
        regard.ScaledDot(),
        regard.ScaledDot().alibi(torch.ones(2, device=device)),
        regard.ScaledDot().sink(torch.zeros(2, device=device)),
    )
    for score, broken, mask in itertools.product(
        scores, ("query", "key"), (None, regard.causal(), regard.window(3, 0))
    ):
        q, k, v = (torch.randn(1, 2, 37, 16, device=device).to(dtype) for _ in range(3))
        (q if broken == "query" else k)[0, 1, 5] = torch.nan
        seen, truth = (
            regard.weights(q, k, score=score, mask=mask, engine=engine).see(
                "lse", "max_score", "entropy", "mean_distance", "received", values=v
            )
            for engine in ("triton", "blockwise")
        )
        for name in ("y", "lse", "max_score", "entropy", "mean_distance", "received"):
            same = torch.equal(getattr(seen, name).isnan(), getattr(truth, name).isnan())
            assert same, f"{name} of a broken {broken}, {mask!r}, {dtype}"


def judged_where_rows_are_nan(dtype: torch.dtype, device: str = "cpu") -> None:
    """A row of nan gives its nan to the gradients of the keys that it sees, and to no other key of its tile."""
    cells = (torch.arange(37)[:, None] + torch.arange(37)).to(device) % 3 > 0
    for mask, broken in itertools.product((regard.causal(), regard.window(3, 2), cells), ("bias", "gradient")):
        nan = torch.zeros(1, 2, 37, 1, device=device, dtype=dtype)
        nan[0, 1, 5] = torch.nan
        spread = []
        for engine in ("triton", "blockwise"):
            generator = torch.Generator().manual_seed(0)
            q, k, v = (torch.randn(1, 2, 37, 16, generator=generator).to(device, dtype) for _ in range(3))
            rows, keys = (torch.zeros(1, 2, *shape, device=device, dtype=dtype) for shape in ((37, 1), (1, 37)))
            leaves = [x.requires_grad_() for x in (q, k, v, rows, keys)]
            score = regard.ScaledDot().bias(rows + nan if broken == "bias" else rows).bias(keys)
            seen = regard.weights(q, k, score=score, mask=mask, engine=engine).see("entropy", "lse", values=v)
            factor = 1 + nan[..., 0] if broken == "gradient" else 1
            loss = seen.y.float().sum() + ((seen.entropy + seen.lse) * factor).sum()
            spread.append([g.isnan() for g in torch.autograd.grad(loss, leaves)])
        for name, ours, right in zip(("q", "k", "v", "bias of rows", "bias of keys"), *spread, strict=True):
            assert torch.equal(ours, right), f"gradient of {name}, nan {broken}, {mask!r}, {dtype}"


def change_all(tree: Any, how: Any) -> Any:
    spec, tensors = flatten(tree)
    return unflatten(spec, [how(t) for t in tensors])


def _answers(problem: Problem, request: Request, engine: str, gradients: bool) -> tuple[dict[str, Tensor], list[Any]]:
    spec, tensors = flatten((problem, request))
    leaves = [t.detach().clone().requires_grad_(gradients and t.is_floating_point()) for t in tensors]
    problem, request = unflatten(spec, leaves)
    names = tuple(dict.fromkeys((*request.names, "norm", *(("argmax",) if "max_score" in request.names else ()))))
    answers = compute_with_autograd(
        problem, Request(**{**vars(request), "names": names}), get_engine(engine), {}, gradients
    )
    norm = answers.pop("norm")
    answers["lse"] = answers.get("lse", lse_of(norm))
    if not gradients:
        return answers, []
    make = torch.Generator().manual_seed(1)
    total: Any = 0.0
    for answer in answers.values():
        if answer.requires_grad:
            flow = torch.randn(answer.shape, generator=make, dtype=torch.float64).to(answer)
            total = total + (torch.where(answer.isfinite(), answer, 0) * flow).sum()
    if isinstance(total, float):
        return answers, []
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(total, wanted, allow_unused=True)
    return {n: a.detach() for n, a in answers.items()}, list(grads)


def _bounds(problem: Problem, request: Request, truth: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """How far each answer may be off, from the size of what went into it. `problem` is in float64."""
    _, h, i, j = problem.shape
    block = MatrixBlock(slice(0, i), slice(0, j), problem.offset, problem.q.device)
    with torch.no_grad():
        s = problem.scores(block)
        w = (s - torch.where(truth["lse"] == -torch.inf, 0, truth["lse"]).unsqueeze(-1)).exp()  # b h i j
        log_w = torch.where(w > 0, w, 1).log()
        q, k = problem.q.abs(), problem.k.abs().repeat_interleave(h // problem.k.shape[1], 1)
        d = q.shape[-1]
        size = (q @ k.mT).amax(-1) * abs(getattr(problem.similarity_kernel, "scale", 1.0)) if j else q.sum(-1) * 0
        size = size + torch.where(s.isfinite(), s.abs(), 0).amax(-1) if j else size
        if not hasattr(problem.similarity_kernel, "scale"):
            size = size + problem.similarity_kernel.v.abs().sum()
        u32, u = 2.0**-24, ROUNDOFF[dtype]
        off = u32 * (2 * d**0.5 * size + 2 * max(i, j) ** 0.5 + 16)  # of a log weight, for every row
        each = w * off.unsqueeze(-1)
        rough = w * (off.unsqueeze(-1) + u)  # where weights are rounded for a product
        results: dict[str, Any] = {
            "lse": off + u32 * 4 * torch.where(truth["lse"].isfinite(), truth["lse"].abs(), 0),
            "entropy": (w * (1 + log_w.abs())).sum(-1) * off * 4 + 1e-6,
            "received": each.sum(-2) * 2 + 1e-6,
        }
        results["max_score"] = results["topk_scores"] = results["lse"] + u32 * 8 * size
        if "topk_scores" in truth:
            results["topk_scores"] = results["lse"].unsqueeze(-1) + (u32 * 8 * size).unsqueeze(-1)
        if request.v is not None:
            v = request.v.repeat_interleave(h // request.v.shape[1], 1)
            results["y"] = u * truth["y"].abs() + rough @ v.abs() + 1e-7
        if request.u is not None:
            results["z"] = rough.mT @ request.u.abs() + 1e-6
        if request.keys is not None:
            results["mass"] = each.sum(-1) * 2 + 1e-6
        far = (block.i - block.j).abs()
        results["mean_distance"] = (each * far).sum(-1) * 2 + 1e-5
        if request.tiling is not None:
            results["pool"] = each.sum((-1, -2), keepdim=True) * 2 + 1e-5
        results["argmax"] = results["topk_indices"] = (s, off)
    return results


def _compare(what: str, results: Tensor, truth: Tensor, bound: Any) -> None:
    assert results.shape == truth.shape, f"{what}: {tuple(results.shape)} for {tuple(truth.shape)}"
    if truth.dtype == torch.int64:
        _same_places(what, results, truth, *bound)
        return
    results = results.double()
    assert not results.isnan().any(), f"{what}: {int(results.isnan().sum())} nan of {results.numel()}"
    endless = truth.isinf()
    assert torch.equal(results[endless], truth[endless]), f"{what}: infinities differ"
    off = torch.where(endless, 0, (results - torch.where(endless, 0, truth)).abs())
    bound = (
        torch.as_tensor(bound, device=off.device).expand_as(off)
        if not isinstance(bound, Tensor)
        else bound.expand_as(off)
    )
    worst = (off - bound).amax() if off.numel() else torch.tensor(0.0)
    if worst > 0:
        at = int((off - bound).flatten().argmax())
        raise AssertionError(
            f"{what}: {results.flatten()[at]:.7g} for {truth.flatten()[at]:.7g}, off {off.flatten()[at]:.3g}, allowed "
            f"{bound.flatten()[at]:.3g}; {int((off > bound).sum())} of {off.numel()} beyond"
        )


def _same_places(what: str, results: Tensor, truth: Tensor, s: Tensor, off: Tensor) -> None:
    """Indices may differ where their scores are equal but for rounding."""
    if results.ndim == 3:
        results, truth = results.unsqueeze(-1), truth.unsqueeze(-1)
    assert torch.equal(results < 0, truth < 0), f"{what}: keys where there are none"
    mine, right = (s.gather(-1, x.clamp(min=0)) for x in (results, truth))
    close = (mine - right).abs() <= 8 * off.unsqueeze(-1) * (1 + right.abs())
    assert bool((close | (results < 0)).all()), f"{what}: another key, with a lower score"
    for row in results.flatten(0, -2).tolist():
        there = [n for n in row if n >= 0]
        assert len(set(there)) == len(there), f"{what}: a key twice"
