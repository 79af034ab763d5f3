"""What a corpus run costs: `python -m bench.corpus` writes bench/results/corpus.json, on a GPU corpus_gpu.json.

Every figure is a ratio to the plain forward passes of the same model over the same sequences: all statistics of
`regard.corpus` where the model keeps PyTorch's attention, and with `attn_implementation="regard"`. On a GPU the model is
a Llama of 1 B parameters in bfloat16 at 8,192 tokens, its weights drawn at random; on a CPU, or with `--tiny`, a small one
of the same proportions. CPUs are compared by CPU time of one thread, so that other processes do not matter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import regard
from regard.integrations.transformers import register

from .rows import Row, ratios, row, write

#: Llama 3.2 1B: 16 layers of 32 heads, 4 of which share keys.
FULL = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
TINY = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip


def llama(shape: dict[str, Any], attention: str, device: str) -> Any:
    """A Llama with random weights, the same for every attention."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, attn_implementation=attention)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()


def sequences(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Random tokens, each half of a sequence said twice, so that heads may look back at it."""
    torch.manual_seed(1)
    halves = torch.randint(vocabulary, (count, length // 2))
    return torch.cat([halves, halves], 1).tolist()


def plain(model: Any, documents: list[list[int]], batch: int) -> None:
    """The forward passes that a corpus run makes, and nothing else."""
    device = next(model.parameters()).device
    with torch.no_grad():
        for start in range(0, len(documents), batch):
            model(torch.tensor(documents[start : start + batch], device=device))


def clock_of(device: str) -> Callable[[], float]:
    if device != "cuda":
        return time.process_time

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return clock


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most that PyTorch had allocated on the GPU while something ran."""
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def compared(options: argparse.Namespace) -> list[Row]:
    device, shape = options.device, TINY if options.tiny else FULL
    documents = sequences(options.documents, options.length, shape["vocab_size"])
    machine = torch.cuda.get_device_name() if device == "cuda" else ""
    size = f"{shape['num_hidden_layers']}×{shape['num_attention_heads']}×{options.length}×64, batch {options.batch}"
    own, ours = llama(shape, "sdpa", device), llama(shape, "regard", device)

    def forward(model: Any = own) -> None:
        plain(model, documents, options.batch)

    def run(model: Any) -> Callable[[], Any]:
        return lambda: regard.corpus(model, documents, length=options.length, batch=options.batch)

    figures = []
    for what, work, must, goal in (
        ("corpus, the model's own attention", run(own), 1.5, None),
        ('corpus, attn_implementation="regard"', run(ours), None, 1.25),
        ('forward passes alone, attn_implementation="regard"', lambda: forward(ours), None, None),
    ):
        bounds = (must, goal) if device == "cuda" and not options.tiny else (None, None)
        samples = ratios(work, forward, options.repeats, clock_of(device))
        figures.append(row(what, size, "the plain forward passes", samples, *bounds, device=machine))
        if device == "cuda":
            memory = [peak_bytes(work) / peak_bytes(forward)]
            figures.append(
                row(f"{what}: peak memory", size, "the plain forward passes", memory, None, None, device=machine)
            )
    return figures


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if gpu else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", default=not gpu, help="a small model, as on a CPU")
    parser.add_argument("--length", type=int, help="tokens of a sequence (default 8192; of a small model 2048)")
    parser.add_argument("--documents", type=int, default=4 if gpu else 1, help="sequences in all")
    parser.add_argument("--batch", type=int, default=1, help="sequences that run together (default 1)")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each figure (default 5)")
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    options.length = options.length or (2048 if options.tiny else 8192)
    if options.device == "cpu":
        torch.set_num_threads(1)
    register()
    figures = compared(options)
    if options.dry:
        print(*(f"{r.what}: {r.ratio} {r.samples}" for r in figures), sep="\n")
    else:
        write("corpus_gpu" if options.device == "cuda" else "corpus", figures)


if __name__ == "__main__":
    main()
