"""Two heads learn to look at different things.

Each position must tell two words: the one before it, and the first of the sequence. One head has one set of weights
and would have to mix them; two heads share the work, and nobody told them how.

    python examples/two_heads.py [folder for the plot]
"""

import sys
from pathlib import Path

import torch
from torch import nn

from regard.nn import Learned, SelfAttention

SYMBOLS, LENGTH = 12, 10


class Model(nn.Module):
    """One layer of attention and two answers."""

    def __init__(self, heads, dim=32):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, dim)
        self.attention = SelfAttention(dim, heads, key_size=16, causal=True, positions=Learned(LENGTH, dim))
        self.before, self.first = nn.Linear(dim, SYMBOLS), nn.Linear(dim, SYMBOLS)

    def forward(self, ids):
        y = self.attention(self.embed(ids))
        return self.before(y), self.first(y)


def train(heads, steps):
    """Returns the loss of the last steps and the mean weights of every head, (heads, t, t)."""
    torch.manual_seed(0)
    model = Model(heads)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        ids = torch.randint(SYMBOLS, (64, LENGTH))
        before, first = (answer[:, 2:].flatten(0, 1) for answer in model(ids))  # from where the two are different words
        wanted = ids[:, 1:-1].flatten(), ids[:, :1].expand(-1, LENGTH - 2).flatten()
        loss = nn.functional.cross_entropy(before, wanted[0]) + nn.functional.cross_entropy(first, wanted[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        weights = model.attention.weights(model.embed(torch.randint(SYMBOLS, (64, LENGTH)))).dense().mean(0)
    return sum(losses[-20:]) / 20, weights


def main(out=None, quick=False):
    """Print and return how much every head looks at the word before and at the first."""
    steps = 300 if quick else 1000
    one, _ = train(1, steps)
    two, weights = train(2, steps)
    rows = torch.arange(2, LENGTH)
    looks = [(w[rows, rows - 1].mean().item(), w[rows, 0].mean().item()) for w in weights]
    print(f"loss with one head {one:.3f}, with two {two:.3f}")
    for n, (before, first) in enumerate(looks):
        print(f"head {n}: {before:.2f} on the word before, {first:.2f} on the first")
    if out is not None:
        draw(weights, Path(out) / "two_heads.png")
    return one, two, looks


def draw(weights, path):
    """Both heads, each in its colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.9), layout="constrained")
    for n, (axis, colour) in enumerate(zip(axes, ("Oranges", "RdPu"), strict=True)):
        axis.imshow(weights[n].tolist(), cmap=colour, vmin=0, vmax=1)
        axis.set(title=f"head {n}", xlabel="looked at", ylabel="position")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
