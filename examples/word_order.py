"""Attention sees a set: without positions word order is invisible, and both "the" get the same output.

Permute the words and the outputs are permuted the same way, whatever W_q, W_k and W_v are. Positions change that:
added to the words (sinusoidal, learned) or turned into queries and keys (rotary).

    python examples/word_order.py [folder for the plot]
"""

import sys
from pathlib import Path

import torch

from regard.nn import Learned, SelfAttention

SENTENCE = "the cat walks on the street".split()  # noqa: SIM905  a sentence reads as one
KINDS = (None, "rotary", "sinusoidal", "learned")


def measure(positions, dim=32):
    """How far the outputs of both "the" differ, and how far a permuted sentence is from the permuted output."""
    torch.manual_seed(0)
    vocabulary = sorted(set(SENTENCE))
    table = torch.randn(len(vocabulary), dim)
    layer = SelfAttention(dim, heads=4, positions=positions)
    if isinstance(layer.positions, Learned):
        torch.nn.init.normal_(layer.positions.table)  # as large as the words; training would see to that
    x = table[[vocabulary.index(word) for word in SENTENCE]]
    order = torch.tensor([5, 3, 0, 1, 4, 2])
    with torch.no_grad():
        y = layer(x)
        first, second = (n for n, word in enumerate(SENTENCE) if word == "the")
        size = y.norm(dim=-1).mean()
        both = ((y[first] - y[second]).norm() / size).item()
        moved = ((layer(x[order]) - y[order]).norm(dim=-1).max() / size).item()
        weights = layer.weights(x).dense().mean(0)
    return both, moved, weights


def main(out=None, quick=False):
    """Print and return both distances for every kind of positions."""
    measured = {kind: measure(kind) for kind in KINDS}
    print("positions    |y_the1 − y_the2|   |f(permuted x) − permuted f(x)|   (relative to |y|)")
    for kind, (both, moved, _) in measured.items():
        print(f"{kind or 'none':12s}{both:12.2e}{moved:24.2e}")
    if out is not None:
        draw(measured, Path(out) / "word_order.png")
    return measured


def draw(measured, path):
    """The weights without and with positions; the rows of both "the" are alike, or not."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(KINDS), figsize=(13, 3.6), layout="constrained")
    for axis, (kind, (both, _, weights)) in zip(axes, measured.items(), strict=True):
        axis.imshow(weights.tolist(), cmap="Blues", vmin=0)
        axis.set_xticks(range(len(SENTENCE)), SENTENCE, rotation=60)
        axis.set_yticks(range(len(SENTENCE)), SENTENCE)
        axis.set_title(f'positions: {kind or "none"}\n"the" and "the" differ by {both:.2g}')
        for row in (n for n, word in enumerate(SENTENCE) if word == "the"):
            axis.add_patch(plt.Rectangle((-0.5, row - 0.5), len(SENTENCE), 1, fill=False, edgecolor="tab:orange", lw=2))
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
