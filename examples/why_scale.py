"""Why scores are divided by √d_k: without it softmax saturates as d_k grows, and gradients starve.

Queries and keys of independent numbers with variance 1 have products with variance d_k. Divided by √d_k they keep
variance 1, whatever the size.

    python examples/why_scale.py [folder for the plot]
"""

import sys
from pathlib import Path

import torch

import regard

SCORES = ("dot", "scaled_dot")


def measure(score, size, words=64, heads=32):
    """Largest weight of a row, entropy as a share of its most, and how much of a gradient reaches the scores."""
    q, k = (torch.randn(heads, words, size) for _ in range(2))
    v = torch.randn(heads, words, 16)
    bias = torch.zeros(heads, words, words, requires_grad=True)  # its gradient is that of the scores
    named = {"dot": regard.Dot(), "scaled_dot": regard.ScaledDot()}[score]
    seen = regard.weights(q, k, score=named.bias(bias)).see("peak", "entropy", values=v)
    seen.y.backward(torch.randn_like(seen.y))
    most = torch.tensor(float(words)).log()
    return seen.peak.values.mean().item(), (seen.entropy.mean() / most).item(), bias.grad.abs().sum(-1).median().item()


def main(out=None, quick=False):
    """Print and return the three numbers for every size and both scores."""
    torch.manual_seed(0)
    sizes = [4, 64, 1024] if quick else [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    measured = {score: [measure(score, size, heads=8 if quick else 32) for size in sizes] for score in SCORES}
    print("d_k    largest weight       entropy / most      gradient of the scores")
    for n, size in enumerate(sizes):
        pairs = "".join(f"{measured['dot'][n][m]:9.3f} {measured['scaled_dot'][n][m]:9.3f} " for m in range(3))
        print(f"{size:5d}{pairs}   (unscaled, scaled)")
    if out is not None:
        draw(sizes, measured, Path(out) / "why_scale.png")
    return sizes, measured


def draw(sizes, measured, path):
    """Three curves against d_k."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    titles = ("largest weight of a row", "entropy, as a share of its most", "gradient that reaches the scores")
    for m, (axis, title) in enumerate(zip(axes, titles, strict=True)):
        for score, colour in (("dot", "tab:orange"), ("scaled_dot", "tab:blue")):
            label = "q · k" if score == "dot" else "q · k / √d_k"
            axis.plot(sizes, [row[m] for row in measured[score]], "o-", color=colour, label=label)
        axis.set(xscale="log", xlabel="d_k", title=title, ylim=(0, None))
    axes[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
