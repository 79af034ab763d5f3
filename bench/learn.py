"""What training with regard reaches: `python -m bench.learn WHAT DATA OUT [setting=value …]` writes bench/results/learn.json.

    cpu         Tiny Shakespeare, characters, 4 layers of 128, with Muon, on a CPU
    gpu         the same with 6 layers of 384 on a GPU
    multi30k    Multi30k English → German with at most 3 M parameters, judged on the validation set (needs sacrebleu)
    large       the same with the size that learns most in ten minutes of a GPU
    seconds     1,000 sentences translated by the first of these translators, from the start of the command
    nanogpt     tokens a second, against nanoGPT's train.py as it is: nanogpt=FOLDER is a clone
    step        one training step with row statistics on, against the same model on PyTorch's attention under torch.compile

The first four train the seeds 0 to 2 side by side, as processes on one device, and their row has the mean and each seed.
`limit=540` saves all of them after so many seconds; the same command goes on. Other settings to try, as lr=5e-4, only
tell what comes of them. DATA is a folder with tinyshakespeare.txt and multi30k.{train,val}.{en,de}. Losses and BLEU are
given as ratios to the published figures they are held against; the figures themselves stand in `what`.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regard.learn import Trained, checkpoint, open_model
from regard.learn.generate import Beam, bleu
from regard.nn import LanguageModel, Probe

from .rows import RESULTS, Row, cpu_name, read, row, table

SEEDS = range(3)
#: Of the length, chosen on the validation set: label smoothing makes short translations likely.
PENALTY = 1.3
SENTENCES = 1000
#: Steps of nanoGPT's script between two lines that it prints, and those before the first that counts: they compile.
LOG_EVERY, FIRST_COUNTED = 100, 200


@dataclass(frozen=True)
class Task:
    """A row of three runs: their settings, and the figures that the mean is held against."""

    kind: str
    name: str
    settings: dict[str, Any]
    peer: str
    anchor: float
    must: float
    goal: float | None

    def files(self, data: Path) -> list[str]:
        if self.kind == "lm":
            return ["lm", str(data / "tinyshakespeare.txt")]
        train, val = ([str(data / f"multi30k.{part}.{name}") for name in ("en", "de")] for part in ("train", "val"))
        return ["translate", *train, "--validation", *val]


NANOGPT = {
    "steps": 5000, "batch": 64, "layers": 6, "heads": 6, "dim": 384, "context": 256, "dropout": 0.2, "compile": True,
}  # fmt: skip
TRANSLATOR = {"steps": 5500, "optimizer": "muon", "warmup": 200, "compile": True, "eval_every": 500}
TINY_TRANSFORMER = "published tiny Transformer on test 2016, lower-cased: 41.0", 41.0
TASKS = {
    "cpu": Task(
        "lm", "Tiny Shakespeare on a CPU", {"optimizer": "muon", "device": "cpu"}, "nanoGPT: 1.88", 1.88, 1.62, 1.60
    ),
    "gpu": Task(
        "lm", "Tiny Shakespeare on a GPU",
        NANOGPT | {"attention_dropout": 0.2, "optimizer": "muon", "lr": 2e-3, "weight_decay": 1.0, "ema": 0.999, "eval_every": 500},
        "nanoGPT: 1.4697", 1.4697, 1.43, 1.42,
    ),
    "multi30k": Task("translate", "Multi30k English → German", TRANSLATOR, *TINY_TRANSFORMER, 41.5, None),
    "large": Task(
        "translate", "Multi30k English → German in ten minutes",
        TRANSLATOR | {"steps": 10_000, "dim": 256, "dropout": 0.4}, *TINY_TRANSFORMER, 42.0, 43.5,
    ),
}  # fmt: skip


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


# Runs of several seeds.


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as words of the command line."""
    words: list[str] = []
    for name, value in settings.items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def train(task: Task, data: Path, out: Path, settings: dict[str, Any], limit: float) -> bool:
    """Train all seeds side by side, or go on with them; whether they are finished."""
    out.mkdir(parents=True, exist_ok=True)
    began, runs = time.monotonic(), []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if settings.get("device") == "cpu" else None
    for seed in SEEDS:
        started = checkpoint.is_checkpoint(out / str(seed))
        words = ["--resume"] if started else flags({**settings, "seed": seed})
        command = [sys.executable, "-m", "regard", "learn", *task.files(data), "--out", str(out / str(seed)), *words]
        with (out / f"{seed}.log").open("a") as log:
            runs.append(subprocess.Popen(command, stderr=log, env=environment))
    for run in runs:
        try:
            run.wait(max(1.0, limit - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            for other in runs:
                other.send_signal(signal.SIGINT)  # to each once: a second one would not wait for the step
            break
    codes = [run.wait() for run in runs]
    spent = seconds_of(out) + time.monotonic() - began
    (out / "seconds").write_text(f"{spent:.1f}")
    for seed, code in enumerate(codes):
        last = (out / f"{seed}.log").read_text().strip().splitlines()[-1:]
        if code not in (0, 130, -signal.SIGINT):  # the last, where Python itself was still starting
            raise SystemExit(f"seed {seed}: {' '.join(last)}")
        print(f"seed {seed}: {'finished' if code == 0 else 'stopped'}; {' '.join(last)}")
    return not any(codes)


def seconds_of(out: Path) -> float:
    """Time that all runs took together so far, with their starts and reports."""
    path = out / "seconds"
    return float(path.read_text()) if path.exists() else 0.0


def shape_of(s: Any) -> str:
    layers = f"{s.layers} + {s.layers}" if s.__class__.__name__.startswith("Translate") else str(s.layers)
    context = f"context {s.context}, " if hasattr(s, "context") else ""
    return f"{layers} layers, {s.heads} heads, {s.dim}, {context}{s.steps} steps of {s.batch}, {s.optimizer}"


def row_of(task: Task, figures: list[float], trained: Trained, what: str, out: Path, search: str = "") -> Row:
    """The row of three seeds: their mean counts, and each is a sample."""
    digits = 4 if task.kind == "lm" else 2
    spread = (
        f"three seeds {min(figures):.{digits}f} to {max(figures):.{digits}f}, side by side in {seconds_of(out):.0f} s"
    )
    better, goal = "lower" if task.kind == "lm" else "higher", task.goal and round(task.goal / task.anchor, 4)
    device = cpu_name() if trained.settings.device == "cpu" else device_name()
    samples = [figure / task.anchor for figure in figures]
    result = row(
        f"{task.name}: {what}, {spread}, {count(trained.model)}", shape_of(trained.settings) + search, task.peer,
        samples, round(task.must / task.anchor, 4), goal, better, device,
    )  # fmt: skip
    result.ratio = round(statistics.mean(samples), 4)
    return result


def losses(task: Task, out: Path) -> Row:
    """Validation loss over the whole last tenth of the text."""
    final = [float(checkpoint.read_tensors(out / str(seed) / checkpoint.MODEL)[1]["val_loss"]) for seed in SEEDS]
    trained = open_model(out / "0")
    return row_of(task, final, trained, f"validation loss {statistics.mean(final):.4f}", out)


def judged(task: Task, data: Path, out: Path) -> Row:
    """BLEU of translators on the validation set; the published figure is of a test set that is not here."""
    source, target = ((data / f"multi30k.val.{name}").read_text().splitlines() for name in ("en", "de"))
    scores = []
    for seed in SEEDS:
        trained = open_model(out / str(seed), "cuda" if torch.cuda.is_available() else "cpu")
        written = trained.translate_all(source, Beam(5, PENALTY))
        (out / str(seed) / "val.translated.de").write_text("\n".join(written) + "\n")
        scores.append(bleu(written, target))
    lower, cased = ([score[name] for score in scores] for name in ("lower", "cased"))
    signature = scores[0]["lower_signature"].replace("|", ", ")
    what = f"validation BLEU {statistics.mean(lower):.2f} lower-cased, {statistics.mean(cased):.2f} cased ({signature})"
    return row_of(task, lower, trained, what, out, f", beam 5, penalty {PENALTY}")


def runs_of(name: str, data: Path, out: Path, tried: dict[str, Any], limit: float) -> None:
    task, folder = TASKS[name], out / " ".join([name, *flags(tried)])
    if not train(task, data, folder, task.settings | tried, limit):
        raise SystemExit("not finished: the same command goes on.")
    figures = losses(task, folder) if task.kind == "lm" else judged(task, data, folder)
    if tried:  # a trial, which leaves the measured row alone
        print(figures.what, figures.shape, tried)
    else:
        put([figures])


# The speed of training and of translating.


def translated(data: Path, folder: Path) -> Row:
    """Seconds of `regard translate` for 1,000 sentences, beam 5, from the start of the command."""
    sentences = folder.parent / "sentences.en"
    lines = (data / "multi30k.val.en").read_text().splitlines()[:SENTENCES]
    sentences.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "regard", "translate", str(folder), "--file", str(sentences)]
    samples = []
    for _ in range(3):
        began = time.perf_counter()
        written = subprocess.run([*command, "--penalty", str(PENALTY)], check=True, capture_output=True).stdout
        samples.append(time.perf_counter() - began)
        assert len(written.splitlines()) == len(lines)
    trained = open_model(folder)
    what = f"translating {len(lines):,} sentences, beam 5, from the start of the command: seconds"
    return row(
        what, shape_of(trained.settings), count(trained.model), samples, 8.0, 4.0, device=device_name()
    )  # fmt: skip


def rate(lines: Iterable[str], tokens: int) -> Iterator[float]:
    """Tokens a second between two lines "iter N: …" of nanoGPT's script, by the time of their arrival."""
    before = None
    for text in lines:
        if text.startswith("iter "):
            step, now = int(text.split()[1].rstrip(":")), time.perf_counter()
            if before is not None:
                yield (step - before[0]) * tokens / (now - before[1])
            before = (step, now) if step >= FIRST_COUNTED else None


def prepare(folder: Path, text: str) -> None:
    """Write what nanoGPT's data/shakespeare_char/prepare.py writes, which needs a library that downloads the text."""
    alphabet = sorted(set(text))
    ids = array("H", map({character: n for n, character in enumerate(alphabet)}.__getitem__, text))
    split = int(len(ids) * 0.9)
    (folder / "train.bin").write_bytes(ids[:split].tobytes())
    (folder / "val.bin").write_bytes(ids[split:].tobytes())
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(alphabet)}))


def their_rate(folder: Path, data: Path, settings: dict[str, Any]) -> float:
    """Tokens a second of nanoGPT's train.py, as it is."""
    prepare(folder / "data" / "shakespeare_char", (data / "tinyshakespeare.txt").read_text())
    theirs = {
        "max_iters": settings["steps"], "lr_decay_iters": settings["steps"], "batch_size": settings["batch"], "n_layer": settings["layers"],
        "n_head": settings["heads"], "n_embd": settings["dim"], "block_size": settings["context"],
        "dropout": settings["dropout"], "compile": settings["compile"], "eval_interval": 10**9, "eval_iters": 1,
        "log_interval": LOG_EVERY, "out_dir": str(folder / "out"), "device": settings["device"],
        "dtype": "bfloat16" if settings["device"] == "cuda" else "float32",
    }  # fmt: skip
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py"]
    command += [f"--{name}={value}" for name, value in theirs.items()]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        rates = list(rate(run.stdout, settings["batch"] * settings["context"]))
    if run.returncode or not rates:
        raise SystemExit("nanoGPT's train.py failed: its message stands above.")
    return statistics.median(rates)


def our_rate(data: Path, out: Path, settings: dict[str, Any]) -> float:
    """Tokens a second of `regard learn lm`, with the reports of every head."""
    command = [sys.executable, "-m", "regard", "learn", "lm", str(data / "tinyshakespeare.txt"), "--out", str(out)]
    subprocess.run([*command, *flags(settings)], check=True, capture_output=True)
    rows = [r for r in checkpoint.read_history(out) if r["step"] > FIRST_COUNTED and "tokens_per_second" in r]
    return statistics.median(r["tokens_per_second"] for r in rows)


def throughput(folder: Path, data: Path, out: Path, tried: dict[str, Any], rounds: int = 3) -> Row:
    """Both by turns, each from its own start; the same model on both sides."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    same = {"architecture": "gpt2", "positions": "learned", "device": device, "steps": 800, "eval_every": 10**6}
    same |= {"attention_dropout": NANOGPT["dropout"]}  # theirs drops there, too
    settings = NANOGPT | same | {name: type((NANOGPT | same)[name])(value) for name, value in tried.items()}
    ours, theirs = [], []
    for n in range(rounds):
        theirs.append(their_rate(folder, data, settings))
        ours.append(our_rate(data, out / f"rate {n} {time.time_ns()}", settings))
    samples = [a / b for a, b in zip(ours, theirs, strict=True)]
    how = ", torch.compile and flash attention" if settings["compile"] else ""
    return row(
        f"training on a GPU: {statistics.median(ours) / 1e6:.2f} million tokens a second",
        f"{settings['batch']}×{settings['context']}, {settings['layers']} layers, {settings['heads']} heads, {settings['dim']}, "
        f"dropout {settings['dropout']}",
        f"nanoGPT's train.py{how}, {statistics.median(theirs) / 1e6:.2f} million", samples, 1.0, 1.3, "higher", device_name(),
    )  # fmt: skip


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
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    what, data = sys.argv[1], Path(sys.argv[2])
    words = {"True": True, "False": False}
    pairs = [pair.split("=", 1) for pair in sys.argv[3:] if "=" in pair]
    tried: dict[str, Any] = {name: words.get(value, value) for name, value in pairs}
    where = [name for name in sys.argv[3:] if "=" not in name]
    limit, folder = float(tried.pop("limit", "inf")), Path(tried.pop("nanogpt", ""))
    if what == "step":
        put([steps()])
        put([steps(mode="reduce-overhead")])
        return
    if len(where) != 1:
        raise SystemExit(f"a folder OUT for the runs is needed, to go on with; got {where}.")
    out = Path(where[0])
    if what in TASKS:
        runs_of(what, data, out, tried, limit)
    elif what == "seconds":
        put([translated(data, out / "multi30k" / "0")])
    elif what == "nanogpt":
        figures = throughput(folder, data, out, tried)
        print(figures.what, figures.against, figures.samples) if tried else put([figures])
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
