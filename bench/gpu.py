"""Speed of the triton engine on this GPU: `make bench-gpu` writes bench/results/gpu.json.

Every figure is a ratio to a peer in the same run. The peer of plain attention is the fastest backend that PyTorch's
`scaled_dot_product_attention` has for the shape (named in `against`), not its default, which is half as fast on Hopper.
Beside each time stands the error of the result: ‖y − y64‖ / ‖y64‖ of one head against float64, with the peer's own.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import regard

from .rows import RESULTS, Row, row, table

SHAPES = [(4, 16, 4096, 128), (2, 16, 16384, 128), (4, 32, 4096, 64), (1, 16, 16384, 64)]
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
QUICK = "--quick" in sys.argv
COMPILING = False  # in the processes that only fill the compilers' caches
ROWS: list[dict] = []
BEGIN = time.time()


def draw(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def timed(run, ms: int = 60) -> list[float]:
    if COMPILING:
        run()
        return [1.0]
    return do_bench(run, warmup=ms // 3, rep=ms, return_mode="all")


def note(
    what: str, shape, against: str, ours: list[float], theirs: float | None, must, goal, better="lower", error=None
):
    """One row: samples are our times over the peer's median, or milliseconds where there is no peer."""
    if theirs is None:
        samples = ours
    elif better == "lower":
        samples = [o / theirs for o in ours]
    else:
        samples = [theirs / o for o in ours]
    samples = samples[:: -(-len(samples) // 50)]  # of all turns alike
    figure: Row = row(what, shape, against, samples, must, goal, better, torch.cuda.get_device_name())
    ROWS.append({**asdict(figure), "error": error, "ms": statistics.median(ours)})
    print(f"{time.time() - BEGIN:5.0f}s {what:44s} {shape!s:28s} {figure.ratio:8.3f} {figure.verdict():8s} {statistics.median(ours):8.3f} ms {error or ''}", flush=True)  # fmt: skip


def best_backend(run, ms: int = 30) -> str:
    """The backend of SDPA that is fastest for what is run."""
    times = {}
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend), contextlib.suppress(RuntimeError):
            times[name] = statistics.median(timed(run, ms))
    return min(times, key=times.get)


def in_turns(ours, theirs, backend: str | None = None, ms: int = 160, turns: int = 8) -> tuple[list[float], float]:
    """Our times, and the peer's median; in turns, for a GPU that is hot is slow for both."""
    mine, peer = [], []
    for _ in range(turns):
        with sdpa_kernel(BACKENDS[backend]) if backend else contextlib.nullcontext():
            peer += timed(theirs, ms // turns)
        mine += timed(ours, ms // turns)
    return mine, statistics.median(peer)


def scores(q: Tensor, k: Tensor, causal: bool, window: int | None = None) -> Tensor:
    """Of the last 256 rows of one head, in float64: q (256, d), k (t, d)."""
    s = q @ k.mT / math.sqrt(q.shape[-1])
    far = torch.arange(len(k), device=s.device) - torch.arange(len(k) - 256, len(k), device=s.device)[:, None]
    hidden = (far > 0) & causal if window is None else (far > 0) | (far <= -window)
    return s.masked_fill(hidden, -torch.inf)


def off(figure: Tensor, truth: Tensor) -> float:
    """Relative error of the last 256 rows of one head."""
    return float(f"{float((figure[0, 0, -256:].double() - truth).norm() / truth.norm()):.2e}")


def error_of(y: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None) -> float:
    q, k, v = q[0, 0, -256:].double(), k[0, 0].double(), v[0, 0].double()
    return off(y, scores(q, k, causal, window).softmax(-1) @ v)


def error_of_gradient(
    dq: Tensor, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, de: Tensor | None, causal: bool
) -> float:
    """Of queries, by the output and, with `de`, by entropy and lse."""
    rows = q.detach()[0, 0, -256:].double().requires_grad_()
    s, dy = scores(rows, k.detach()[0, 0].double(), causal), dy[0, 0, -256:].double()
    total = ((s.softmax(-1) @ v.detach()[0, 0].double()) * dy).sum()
    if de is not None:
        lse = s.logsumexp(-1)
        entropy = lse - (s.softmax(-1) * s.clamp(min=-1e9)).sum(-1)  # what is hidden counts 0, and has no slope
        total = total + ((lse + entropy) * de[0, 0, -256:].double()).sum()
    return off(dq, torch.autograd.grad(total, rows)[0])


def plain(shape: tuple[int, ...], causal: bool) -> None:
    b, h, t, d = shape
    q, k, v = draw(*shape), draw(*shape), draw(*shape)
    mask = regard.causal() if causal else None
    name = [*shape, "causal" if causal else "full"]

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    backend = best_backend(sdpa)
    against = f"SDPA y alone ({backend})"

    def ask(*names, **more):
        return lambda: regard.weights(q, k, mask=mask, engine="triton").see(*names, values=v, **more)

    statistics_of_rows = ask("lse", "max_score", "entropy")
    with sdpa_kernel(BACKENDS[backend]):
        theirs = error_of(sdpa(), q, k, v, causal)
    columns = ask("lse", "max_score", "entropy", "received", pool=(64, 64))
    largest = ask("lse", "max_score", "entropy", "received", pool=(64, 64), topk=8)
    for what, run, must, goal in (
        ("y + lse + max + entropy", statistics_of_rows, 1.2, 1.0),
        ("+ received + pool 64²", columns, 1.7, 1.5),
        ("+ top-8", largest, 2.9, 2.0),
    ):
        error = {"ours": error_of(run().y, q, k, v, causal), "theirs": theirs}
        note(what, name, against, *in_turns(run, sdpa, backend), must, goal, error=error)
    x = draw(*shape)

    def sdpa_of_one() -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=causal)

    def ours_of_one():
        return regard.weights(x, mask=mask, engine="triton").see("entropy", values=x)

    backend = best_backend(sdpa_of_one)
    with sdpa_kernel(BACKENDS[backend]):
        theirs = error_of(sdpa_of_one(), x, x, x, causal)
    error = {"ours": error_of(ours_of_one().y, x, x, x, causal), "theirs": theirs}
    pair = in_turns(ours_of_one, sdpa_of_one, backend)
    note("basic self-attention + entropy", name, f"SDPA(x, x, x) ({backend})", *pair, 1.05, 0.9, error=error)


def natural(shape: tuple[int, ...], causal: bool) -> None:
    """One question after the other, as code is written that does not know of `see`: a pass remembers what it has for nothing."""
    q, k, v = draw(*shape), draw(*shape), draw(*shape)
    mask = regard.causal() if causal else None

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def four() -> regard.Weights:
        W = regard.weights(q, k, mask=mask, engine="triton")
        W @ v, W.lse(), W.max_score(), W.entropy()
        return W

    name, backend = [*shape, "causal" if causal else "full"], best_backend(sdpa)
    against = f"SDPA y alone ({backend})"
    note("W @ v; lse; max_score; entropy", name, against, *in_turns(four, sdpa, backend), 1.15, 1.0)
    note("the same; received", name, against, *in_turns(lambda: four().received(), sdpa, backend), 1.85, 1.65)


def host(times: int = 30, turns: int = 9) -> None:
    """What the host takes for one short question more than for PyTorch's attention, the device not waited for."""
    shape = (8, 12, 512, 64)
    q, k, v = draw(*shape), draw(*shape), draw(*shape)
    mask = regard.causal()

    def microseconds(run) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begin) / times * 1e6

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def rows():
        return regard.weights(q, k, mask=mask, engine="triton").see("lse", "max_score", "entropy", values=v)

    for _ in range(5):
        rows(), theirs()
    above = [microseconds(rows) - microseconds(theirs) for _ in range(turns)]
    note("host, y + lse + max + entropy: µs more", [*shape, "causal"], "SDPA, eager", above, None, 50, 20)


def training(shape: tuple[int, ...], causal: bool) -> None:
    q, k, v = (draw(*shape, grad=True) for _ in range(3))
    dy, mask = draw(*shape), regard.causal() if causal else None
    de = torch.randn(shape[:3], device="cuda")

    def theirs():
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=causal), (q, k, v), dy)

    def ours():
        seen = regard.weights(q, k, mask=mask, engine="triton").see("lse", "entropy", values=v)
        return torch.autograd.grad((seen.y, seen.entropy, seen.lse), (q, k, v), (dy, de, de))

    backend = best_backend(theirs)
    with sdpa_kernel(BACKENDS[backend]):
        error = {"theirs": error_of_gradient(theirs()[0], q, k, v, dy, None, causal)}
    error["ours"] = error_of_gradient(ours()[0], q, k, v, dy, de, causal)
    name = [*shape, "causal" if causal else "full"]
    note("forward + backward, row statistics (deterministic)", name, f"SDPA forward + backward ({backend})", *in_turns(ours, theirs, backend), 1.12, 1.0, error=error)  # fmt: skip


def flex(shape: tuple[int, ...], causal: bool) -> None:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    q, k, v = draw(*shape), draw(*shape), draw(*shape)
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, shape[2], shape[2]) if causal else None
    torch._dynamo.reset()  # beyond eight shapes it would no longer compile
    compiled = torch.compile(flex_attention)
    mask = regard.causal() if causal else None

    def theirs():
        return compiled(q, k, v, block_mask=block, return_aux=AuxRequest(lse=True, max_scores=True))

    def ours():
        return regard.weights(q, k, mask=mask, engine="triton").see("lse", "max_score", "entropy", values=v)

    name = [*shape, "causal" if causal else "full"]
    error = {"ours": error_of(ours().y, q, k, v, causal), "theirs": error_of(theirs()[0], q, k, v, causal)}
    note(
        "y + lse + max + entropy", name, "FlexAttention with lse + max", *in_turns(ours, theirs), 0.9, 0.7, error=error
    )


def additive() -> None:
    b, h, t, d, a = 1, 8, 4096, 64, 64
    q, k, v = draw(b, h, t, d), draw(b, h, t, d), draw(b, h, t, d)
    A, B, u = draw(d, a) / 8, draw(d, a) / 8, draw(a)

    def eager_block(p, r, u, v):
        return torch.tanh(p.unsqueeze(-2) + r.unsqueeze(-3)).matmul(u.unsqueeze(-1)).squeeze(-1).softmax(-1) @ v

    def eager(step):
        p, r = q @ A, k @ B
        return lambda: torch.cat([step(p[:, :, n : n + 64], r, u, v) for n in range(0, t, 64)], 2)

    score = regard.Additive(A, B, u)
    run = lambda: regard.weights(q, k, score=score, engine="triton").see("lse", "entropy", values=v)  # noqa: E731
    y = run().y
    truth = eager_block((q[:, :, :64].double() @ A.double()), k.double() @ B.double(), u.double(), v.double())
    rough = eager_block(q[:, :, :64] @ A, k @ B, u, v)

    def off_by(y: Tensor) -> float:
        return float(f"{float((y[:, :, :64].double() - truth).norm() / truth.norm()):.2e}")

    error = {"ours": off_by(y), "theirs": off_by(rough)}
    shape = [b, h, t, d, "a = 64"]
    ours, theirs = in_turns(run, eager(eager_block), ms=640)
    note("additive forward", shape, "eager in blocks", ours, theirs, 10, None, "higher", error)
    if not QUICK:
        compiled = torch.compile(eager_block)
        error = {"ours": error["ours"], "theirs": off_by(compiled(q[:, :, :64] @ A, k @ B, u, v))}
        pair = in_turns(run, eager(compiled), ms=320)
        note("additive forward", shape, "torch.compile", *pair, 2.5, None, "higher", error)
    clock, sms = 1.755e9, torch.cuda.get_device_properties(0).multi_processor_count
    limit = b * h * t * t * a / (16 * sms * clock) * 1e3
    note(
        "additive forward, share of the tanh limit",
        shape,
        f"{limit:.2f} ms at 16 tanh a clock",
        ours,
        limit,
        None,
        0.5,
        "higher",
    )
    additive_gradients(q, k, v, (A, B, u), limit)


def additive_gradients(q: Tensor, k: Tensor, v: Tensor, parameters: tuple[Tensor, ...], limit: float) -> None:
    """Forward and backward against blockwise; and against the tangents of one forward, and of scores and slopes once more."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *parameters)]
    dy = draw(*v.shape)

    def step(engine: str, tensors: list[Tensor] = leaves) -> list[Tensor]:
        score = regard.Additive(*tensors[3:])
        seen = regard.weights(tensors[0], tensors[1], score=score, engine=engine).see("entropy", values=tensors[2])
        return list(torch.autograd.grad((seen.y, seen.entropy.sum()), tensors, (dy.to(seen.y.dtype), None)))

    exact = step("blockwise", [x.detach().double().requires_grad_() for x in leaves])
    errors = {
        name: max(
            float((mine.double() - right).norm() / right.norm())
            for mine, right in zip(step(engine), exact, strict=True)
        )
        for name, engine in (("ours", "triton"), ("theirs", "blockwise"))
    }
    error = {name: float(f"{x:.2e}") for name, x in errors.items()}
    shape = [*q.shape, "a = 64"]
    ours, theirs = in_turns(lambda: step("triton"), lambda: step("blockwise"), ms=640, turns=2)
    note("additive forward + backward", shape, "blockwise", ours, theirs, 8, None, "higher", error)
    note("additive forward + backward, share of the tanh limit", shape, f"{3 * limit:.2f} ms at 16 tanh a clock", ours, 3 * limit, None, 0.5, "higher")  # fmt: skip


def window() -> None:
    shape = (1, 8, 65536, 128)
    q, k, v = draw(*shape), draw(*shape), draw(*shape)

    def theirs():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def ours():
        return regard.weights(q, k, mask=regard.window(1023, 0), engine="triton").see(
            "lse", "max_score", "entropy", values=v
        )

    backend = best_backend(theirs)
    with sdpa_kernel(BACKENDS[backend]):
        error = {"theirs": error_of(theirs(), q, k, v, True)}
    error["ours"] = error_of(ours().y, q, k, v, True, 1024)
    pair = in_turns(ours, theirs, backend)
    note("window 1024, y + lse + max + entropy", [*shape], f"SDPA causal ({backend})", *pair, 0.06, 0.04, error=error)


def packed() -> None:
    """Documents of 128 to 1,920 tokens side by side, each causal, as models are trained on them; the mask is made once."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    shape, sizes = (1, 16, 16384, 128), torch.arange(128, 2048, 256)
    q, k, v = draw(*shape), draw(*shape), draw(*shape)
    ids = torch.arange(16, device="cuda").repeat_interleave(sizes.repeat(2).cuda())
    block = create_block_mask(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), None, None, shape[2], shape[2])
    mask = regard.documents(ids) & regard.causal()
    torch._dynamo.reset()  # beyond eight shapes it would no longer compile
    compiled = torch.compile(flex_attention)

    def theirs():
        return compiled(q, k, v, block_mask=block, return_aux=AuxRequest(lse=True, max_scores=True))

    def ours():
        return regard.weights(q, k, mask=mask, engine="triton").see("lse", "max_score", "entropy", values=v)

    last = [x[:, :, -int(sizes[-1]) :] for x in (ours().y, theirs()[0], q, k, v)]
    error = {"ours": error_of(last[0], *last[2:], True), "theirs": error_of(*last[1:], True)}
    against = "FlexAttention with lse + max"
    note("16 packed documents, y + lse + max + entropy", [*shape], against, *in_turns(ours, theirs), None, None, error=error)  # fmt: skip


def million() -> None:
    def ask(t: int) -> tuple[int, float]:
        q, k, v = (draw(1, 1, t, 128) for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_allocated(), time.time()
        regard.weights(q, k, engine="triton").see("lse", "max_score", "entropy", "mean_distance", "received", pool=(64, 64), topk=8, values=v)  # fmt: skip
        torch.cuda.synchronize()
        return before, begin

    ask(2**18)  # compiles
    before, begin = ask(2**20)
    seconds, above = time.time() - begin, torch.cuda.max_memory_allocated() - before
    note("one head, all statistics: seconds", [1, 1, 2**20, 128], "", [seconds], None, None, None)
    note("one head, all statistics: GB above the inputs", [1, 1, 2**20, 128], "4 GB", [above / 1e9], 1.0, 4.0, None)


def save() -> None:
    """After every job: a run that is interrupted leaves what it has."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(ROWS, indent=1, ensure_ascii=False) + "\n"
    (RESULTS / "gpu.json").write_text(text)
    if os.environ.get("OUT"):
        with open(os.path.join(os.environ["OUT"], "gpu.json"), "w") as file:
            file.write(text)


def main(patience: float = 150.0) -> None:
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    kinds = ("plain", "training") if QUICK else ("plain", "training", "flex")
    jobs = [(f, (s, c)) for f in kinds for s in SHAPES for c in (False, True)] + [("additive", ()), ("window", ())]
    jobs += [] if QUICK else [("packed", ())]
    # Every compiler's work is done first, many at a time: what is timed then finds it on disk.
    pool = multiprocessing.get_context("spawn").Pool(14)
    pool.map_async(compiled, jobs).wait(patience)
    pool.terminate()
    print(f"{time.time() - BEGIN:5.0f}s compiled", flush=True)
    timed_only = [("natural", (s, c)) for s in (SHAPES[0], SHAPES[2]) for c in (False, True)]
    for job in [*jobs, *timed_only, ("host", ()), ("million", ())]:
        tried(*job)
        save()
    print(table([Row(**{n: x for n, x in r.items() if n in Row.__dataclass_fields__}) for r in ROWS]))


def compiled(job) -> None:
    global COMPILING
    COMPILING = True
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        tried(*job)


def tried(job: str, args: tuple) -> None:
    try:
        with torch.set_grad_enabled(job == "training"):
            globals()[job](*args)
    except Exception as error:
        print(f"{job}{args} failed: {type(error).__name__} {str(error)[:300]}", flush=True)
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
