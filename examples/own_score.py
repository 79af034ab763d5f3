"""Is a word's own score the highest? With vectors of one length always; with lengths that differ, or W_q and W_k, not.

x_i · x_j ≤ |x_i| |x_j|: among vectors of one length none is more alike to x_i than x_i itself. A vector that is longer
by a factor r and at an angle with cos > 1/r beats it. With W_q and W_k a word is nothing special to itself.

    python examples/own_score.py [folder for the plot]
"""

import sys
from pathlib import Path

import torch

from regard.nn import SelfAttention


def share_of_own(layer, x):
    """How many rows have their largest weight on themselves."""
    with torch.no_grad():
        index = layer.weights(x).peak().indices  # ... i
    return (index == torch.arange(x.shape[-2])).float().mean().item()


def sentences(count, words, dim, spread):
    """Random directions; lengths exp(spread · normal)."""
    x = torch.nn.functional.normalize(torch.randn(count, words, dim), dim=-1)
    return x * dim**0.5 * (spread * torch.randn(count, words, 1)).exp()


def main(out=None, quick=False):
    """Print and return the share of rows whose own score is the highest, by spread of the lengths and by size."""
    torch.manual_seed(0)
    count, words = (20, 16) if quick else (200, 16)
    spreads = [0.0, 0.5, 1.0, 2.0] if quick else [0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0]
    basic, trained = {}, {}
    for dim in (4, 16, 64):
        x = [sentences(count, words, dim, spread) for spread in spreads]
        basic[dim] = [share_of_own(SelfAttention(dim, parameters=False), part) for part in x]
        trained[dim] = [share_of_own(SelfAttention(dim), part) for part in x]
    print("share of words whose own score is the highest; chance is", round(1 / words, 3))
    for dim in basic:
        one, spread, learned = basic[dim][0], basic[dim][-1], trained[dim][0]
        print(f"size {dim:3d}: one length {one:.2f}, lengths spread {spread:.2f}, with W_q and W_k {learned:.2f}")
    if out is not None:
        draw(spreads, basic, trained, 1 / words, Path(out) / "own_score.png")
    return spreads, basic, trained


def draw(spreads, basic, trained, chance, path):
    """The share against the spread."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for dim, colour in zip(basic, ("tab:green", "tab:blue", "tab:purple"), strict=True):
        axis.plot(spreads, basic[dim], "o-", color=colour, label=f"x · x, size {dim}")
        axis.plot(spreads, trained[dim], "o:", color=colour, label=f"with W_q and W_k, size {dim}")
    axis.axhline(chance, color="grey", lw=1, label="chance")
    axis.set(xlabel="spread of the vectors' lengths (σ of log |x|)", ylabel="own score is the highest", ylim=(0, 1.03))
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
