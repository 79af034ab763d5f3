"""A similarity cannot tie a subject to its object unless it makes them one; W_q and W_k can.

"The cat sat on the mat": cat and mat are to look at each other, everybody else at itself. With scores x_i · x_j that
would need x_c·x_m > x_c·x_c and x_c·x_m > x_m·x_m, but 2 x_c·x_m = |x_c|² + |x_m|² − |x_c − x_m|²: at best the two
vectors become the same, each gets half of the weight, and whatever is like one is like the other: a kitten, which is
like a cat and stays so, looks at the mat as well. With q = x W_q and
k = x W_k scores are not symmetric, and the vectors can stay as they are.

    python examples/subject_object.py [folder for the plot]
"""

import sys
from pathlib import Path

import torch
from torch import nn

from regard.nn import SelfAttention

WORDS = ["the", "cat", "sat", "on", "mat", "kitten"]
CAT, MAT, KITTEN = (WORDS.index(word) for word in ("cat", "mat", "kitten"))
NEAR = 0.2  # how far a kitten is from a cat, in every direction
GOAL = torch.tensor([MAT if n == CAT else CAT if n == MAT else n for n in range(len(WORDS))])


def train(basic, steps, dim=16):
    """Learn who looks at whom: only the vectors where `basic`, else only W_q and W_k. Returns vectors and weights."""
    torch.manual_seed(1)
    free = nn.Parameter(nn.functional.normalize(torch.randn(len(WORDS) - 1, dim), dim=-1) * 2)
    aside = NEAR * torch.randn(dim)
    layer = SelfAttention(dim, parameters=False) if basic else SelfAttention(dim, output=False)

    def vectors():
        return torch.cat([free, free[CAT, None] + aside])  # a kitten is like a cat, whatever becomes of the cat

    learned = [free] if basic else [layer.query.weight, layer.key.weight]
    optimizer = torch.optim.Adam(learned, 0.02)
    for _ in range(steps):
        loss = -layer.weights(vectors())[0].dense().gather(-1, GOAL[:, None]).log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = vectors().detach()
    return x, layer.weights(x)[0].detach().label(WORDS)


def main(out=None, quick=False):
    """Print and return the weights of both, and how alike cat and mat have become."""
    runs = {name: train(name == "basic", 150 if quick else 600) for name in ("basic", "W_q, W_k")}
    for name, (x, w) in runs.items():
        alike = nn.functional.cosine_similarity(x[CAT], x[MAT], dim=0).item()
        tie, bystander = w["cat", "mat"].item(), w["kitten", "mat"].item()
        print(f"{name:10s} cat → mat {tie:.2f}, kitten → mat {bystander:.2f}, cos(cat, mat) {alike:+.2f}")
    if out is not None:
        draw(runs, Path(out) / "subject_object.png")
    return runs


def draw(runs, path):
    """Both matrices."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8.5, 4), layout="constrained")
    for axis, (name, (x, w)) in zip(axes, runs.items(), strict=True):
        axis.imshow(w.dense().tolist(), cmap="Blues", vmin=0, vmax=1)
        axis.set_xticks(range(len(WORDS)), WORDS, rotation=60)
        axis.set_yticks(range(len(WORDS)), WORDS)
        alike = nn.functional.cosine_similarity(x[CAT], x[MAT], dim=0)
        what = "basic: vectors learned" if name == "basic" else "W_q and W_k learned, vectors as they were"
        axis.set_title(f"{what}\ncos(cat, mat) = {alike:+.2f}", fontsize=10)
        for row, column in ((CAT, MAT), (MAT, CAT)):
            axis.add_patch(plt.Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="tab:orange", lw=2))
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
