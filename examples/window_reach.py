"""A window of width w reaches w × depth: what lies further away cannot matter, what lies nearer does.

Every layer sees w words to each side; stacked, news travels w words a layer. Shown by gradients: which inputs change
the output of the word in the middle.

    python examples/window_reach.py [folder for the plot]
"""

import sys
from pathlib import Path

import torch

import regard
from regard.nn import Encoder


def influence(width, depth, words, dim=16):
    """How much each input moves the output in the middle: |gradient|, (words)."""
    torch.manual_seed(0)
    model = Encoder(dim, heads=2, layers=depth).double()
    x = torch.randn(1, words, dim, dtype=torch.float64, requires_grad=True)
    middle = words // 2
    y = model(x, mask=regard.window(width, width))
    return torch.autograd.grad((y[0, middle] * torch.randn(dim, dtype=torch.float64)).sum(), x)[0][0].norm(dim=-1)


def main(out=None, quick=False):
    """Print and return the farthest word that matters, for every width and depth."""
    words = 65 if quick else 129
    widths, depths = ((2, 4), (1, 2, 4)) if quick else ((2, 4, 8), (1, 2, 3, 4, 6))
    moves, reach = {}, {}
    for width in widths:
        for depth in depths:
            moved = influence(width, depth, words)
            moves[width, depth] = moved
            reach[width, depth] = int((moved.nonzero().flatten() - words // 2).abs().max())
            print(f"width {width}, {depth} layers: reaches {reach[width, depth]} words, w × depth = {width * depth}")
    if out is not None:
        draw(moves, widths[0], depths, words, Path(out) / "window_reach.png")
    return reach


def draw(moves, width, depths, words, path):
    """The influence of every word, a line a depth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    for n, depth in enumerate(depths):
        moved = moves[width, depth]
        colour = plt.get_cmap("viridis")(n / len(depths))
        places = [p for p in range(words) if moved[p] > 0]
        axis.semilogy(
            [p - words // 2 for p in places], moved[places].tolist(), "o-", ms=3, color=colour, label=f"{depth} layers"
        )
        axis.axvline(width * depth, color=colour, ls=":", lw=1)
    axis.set(xlabel="distance to the word looked at", ylabel="|gradient|", title=f"window({width}, {width})")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
