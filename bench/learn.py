"""What training with regard reaches: `python -m bench.learn WHAT DATA [OUT] [setting=value …]` writes bench/results/learn.json.

    cpu        Tiny Shakespeare, characters, 4 layers of 128, with Muon, on this CPU: three seeds, their mean and spread
    gpu        the same with 6 layers of 384 on a GPU; with settings to try, as lr=5e-4, it only tells what comes of them
    multi30k   Multi30k English → German on a GPU (needs sacrebleu to be judged)
    translate  judge a translator that was trained before: its folder is DATA/ende
    step       one training step with row statistics on, against the same model on PyTorch's attention under torch.compile

DATA is a folder with tinyshakespeare.txt and multi30k.{train,val}.{en,de}. Losses and BLEU are given as ratios to the
published figures they are held against; the figures themselves stand in `what`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from regard.learn import lm, open_model, translate
from regard.learn.generate import Beam, bleu
from regard.learn.progress import PlainProgress
from regard.nn import LanguageModel, Probe

from .rows import RESULTS, Row, cpu_name, read, row, table

NANOGPT_GPU, NANOGPT_CPU, TINY_TRANSFORMER = 1.4697, 1.88, 41.0

SHAKESPEARE = {
    "steps": 5000, "batch": 64, "layers": 6, "heads": 6, "dim": 384, "context": 256, "dropout": 0.2, "lr": 1e-3,
    "weight_decay": 5.0, "ema": 0.999, "compile": True,
}  # fmt: skip
MULTI30K = {"optimizer": "muon", "compile": True}
#: Of the length, chosen on the validation set: label smoothing makes short translations likely.
PENALTY = 1.3


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def count(model: nn.Module) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"


def put(figures: list[Row]) -> None:
    """Rows of the same task are replaced, the others stay."""
    path = RESULTS / "learn.json"
    old = read("learn") if path.exists() else []
    fresh = {r.what.split(":")[0] for r in figures}
    rows = [r for r in old if r.what.split(":")[0] not in fresh] + figures
    path.write_text(json.dumps([asdict(r) for r in rows], indent=1, ensure_ascii=False) + "\n")
    print(table(rows))


def shakespeare(data: Path, out: Path, anchor: float, must: float, goal: float, **settings) -> Row:
    """Validation loss over the whole last tenth of the text."""
    result = lm(data / "tinyshakespeare.txt", out, progress=PlainProgress(), **settings)
    trained = open_model(out)
    s = trained.settings
    where = "GPU" if s.dim > 128 else "CPU"
    shape = f"{s.layers} layers, {s.heads} heads, {s.dim}, context {s.context}, {s.steps} steps of {s.batch}"
    what = f"Tiny Shakespeare on a {where}: validation loss {result.best:.4f}, {count(trained.model)}"
    return row(
        what,
        shape,
        f"nanoGPT: {anchor}",
        [result.best / anchor],
        round(must / anchor, 4),
        round(goal / anchor, 4),
        device=device_name(),
    )


def seeds(data: Path, out: Path, anchor: float, must: float, goal: float, **settings) -> Row:
    """The same of seeds 0 to 2: a sample each."""
    runs = [
        lm(data / "tinyshakespeare.txt", out / str(n), progress=PlainProgress(), seed=n, **settings) for n in range(3)
    ]
    return seeds_row([run.best for run in runs], open_model(out / "0"), anchor, must, goal)


def seeds_row(losses: list[float], trained, anchor: float, must: float, goal: float) -> Row:
    s, mean = trained.settings, statistics.mean(losses)
    spread = f"{min(losses):.4f} to {max(losses):.4f}"
    shape = (
        f"{s.layers} layers, {s.heads} heads, {s.dim}, context {s.context}, {s.steps} steps of {s.batch}, {s.optimizer}"
    )
    what = f"Tiny Shakespeare on a CPU: validation loss {mean:.4f}, three seeds {spread}, {count(trained.model)}"
    ratios = [loss / anchor for loss in losses]
    return row(
        what,
        shape,
        f"nanoGPT: {anchor}",
        ratios,
        round(must / anchor, 4),
        round(goal / anchor, 4),
        device=device_name(),
    )


def judged(data: Path, folder: Path) -> Row:
    """BLEU of a translator on the validation set; the published figure is of a test set that is not here."""
    trained = open_model(folder)
    lines = [(data / f"multi30k.val.{language}").read_text().splitlines() for language in ("en", "de")]
    written = trained.translate_all(lines[0], Beam(5, PENALTY))
    (folder / "val.translated.de").write_text("\n".join(written) + "\n")
    scores = bleu(written, lines[1])
    s = trained.settings
    what = (
        f"Multi30k English → German: validation BLEU {scores['lower']:.2f} lower-cased, {scores['cased']:.2f} cased, "
        f"{count(trained.model)} ({scores['lower_signature'].replace('|', ', ')})"
    )
    shape = f"{s.layers} + {s.layers} layers, {s.heads} heads, {s.dim}, {s.steps} steps of {s.batch}, beam 5, penalty {PENALTY}"
    against = f"published tiny Transformer on test 2016, lower-cased: {TINY_TRANSFORMER}"
    ratio = scores["lower"] / TINY_TRANSFORMER
    return row(what, shape, against, [ratio], round(41.5 / TINY_TRANSFORMER, 4), None, "higher", device_name())


# One training step.


class OnSDPA(nn.Module):
    """The attention of a layer of regard.nn on PyTorch's own, with the same parameters."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, mask=None, cache=None, probe=None):
        q, k, v = self.layer._qkv(x, None)
        return self.layer._merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def training_step(model: LanguageModel, ids: torch.Tensor, names: tuple[str, ...], mode: str):
    """A whole step: forward, loss, backward, clipping, AdamW; the forward and backward compiled."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    @torch.compile(mode=mode)
    def loss_of(x, y):
        probe = Probe(*names) if names else None
        with torch.autocast(x.device.type, torch.bfloat16):
            logits = model(x, probe=probe)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        return loss, [probe.heads(name) for name in names]

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        loss, figures = loss_of(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss, figures

    return step


def steps(small: bool = False, mode: str = "default") -> Row:
    """Ours with lse, entropy and largest score of every row in every layer; theirs with the output alone.

    In the mode "reduce-overhead" both are replayed as CUDA graphs, which leaves the time of the GPU alone.
    """
    from .rows import ratios

    device = "cuda" if torch.cuda.is_available() else "cpu"
    b, t, layers, heads, dim = (2, 32, 2, 2, 32) if small else (64, 256, 6, 6, 384)
    shape = {
        "dim": dim,
        "heads": heads,
        "layers": layers,
        "context": t,
        "dropout": 0.2,
        "norm": "rms",
        "bias": False,
        "activation": "swiglu",
    }
    ids = torch.randint(65, (b, t + 1), device=device)
    ours, theirs = (LanguageModel(65, **shape).to(device) for _ in range(2))
    for block in theirs.body.blocks:
        block.attention = OnSDPA(block.attention)
    runs = training_step(ours, ids, ("lse", "max_score", "entropy"), mode), training_step(theirs, ids, (), mode)

    def timed(run):
        def go():
            for _ in range(10):
                run()
            if device == "cuda":
                torch.cuda.synchronize()

        return go

    go = [timed(run) for run in runs]
    samples = ratios(go[0], go[1], 2 if small else 40)  # the host is noisy
    import time

    begin = time.perf_counter()
    go[1]()
    ms = (time.perf_counter() - begin) * 100
    graphs = ", as CUDA graphs" if mode != "default" else ""
    what = f"training step with row statistics on{graphs}: {ms * statistics.median(samples):.2f} ms"
    against = f"the same model on scaled_dot_product_attention, torch.compile{graphs}, {ms:.2f} ms"
    return row(
        what, f"{b}×{t}, {layers} layers, {heads} heads, {dim}", against, samples, 1.2, 1.0, device=device_name()
    )


def main() -> None:
    what, data = sys.argv[1], Path(sys.argv[2])
    overrides = dict(pair.split("=", 1) for pair in sys.argv[3:] if "=" in pair)
    where = [name for name in sys.argv[3:] if "=" not in name]
    out = Path(where[0] if where else tempfile.mkdtemp())
    if what == "step":
        put([steps()])
        put([steps(mode="reduce-overhead")])
    elif what == "cpu":
        put([seeds(data, out, NANOGPT_CPU, 1.62, 1.60, device="cpu", optimizer="muon")])
    elif what == "gpu":
        settings = SHAKESPEARE | {name: type(SHAKESPEARE[name])(value) for name, value in overrides.items()}
        figures = shakespeare(data, out / "bard", NANOGPT_GPU, 1.48, 1.45, **settings)
        if overrides:  # a trial, which leaves the measured row alone
            print(figures.what, overrides)
        else:
            put([figures])
    elif what == "multi30k":
        files = [data / f"multi30k.{part}.{language}" for part in ("train", "val") for language in ("en", "de")]
        translate(*files[:2], out / "ende", validation=tuple(files[2:]), progress=PlainProgress(), **MULTI30K)
        put([judged(data, out / "ende")])
    elif what == "translate":
        put([judged(data, data / "ende")])
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
