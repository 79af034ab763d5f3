"""Watch attention while it trains, and stop its scores from exploding with QK-clip.

A learning rate that is too high drives the scores of some heads up until softmax is saturated and learning dies.
`regard.watch` gives the entropy and the largest score of every head as plain numbers for any logger, and warns.
QK-clip acts on them: where a head's largest score exceeds the limit, its rows of W_q and W_k shrink.

    python examples/training_monitor.py
"""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.losses import qk_clip
from regard.recorder import AttentionWarning


class Attention(nn.Module):
    """Four heads of causal self-attention."""

    def __init__(self, size=32, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers that guess the next symbol."""

    def __init__(self, symbols=16, size=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(symbols, size), nn.Parameter(torch.randn(24, size) * 0.1)
        self.layers = nn.ModuleList(Attention(size) for _ in range(2))
        self.head = nn.Linear(size, symbols)

    def forward(self, text):
        x = self.embed(text) + self.place[: text.shape[1]]
        for attention in self.layers:
            x = x + attention(x)
        return self.head(x)


def train(clip, steps=80, limit=100.0, every=1):
    """Train with a learning rate that is too high; returns the largest score and the lowest entropy of every step."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    history = []
    with regard.watch(model, every=every, explode=limit) as watching:
        for _ in range(steps):
            start = torch.randint(0, 16, (32, 1))
            text = (start + torch.arange(24) * 3) % 16
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not watching.fresh:
                continue
            history.append((max_of(watching, "max_score"), -max_of(watching, "entropy_share", sign=-1)))
            if clip:
                for name, numbers in watching.layers.items():
                    layer = model.get_submodule(name)
                    qk_clip(layer.query, layer.key, numbers["max_score"], limit)
        log = watching.numbers()  # {"layers.0/entropy_share/0": 0.93, ...}
    return history, log


def max_of(watching, what, sign=1):
    return max(sign * value for name, value in watching.numbers().items() if f"/{what}/" in name)


def main():
    """Print and return the largest score of the run without and with QK-clip."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", AttentionWarning)
        free, _ = train(clip=False)
        clipped, log = train(clip=True)
    print("without QK-clip, largest score:", round(max(score for score, _ in free), 1))
    print("with QK-clip,    largest score:", round(max(score for score, _ in clipped), 1))
    print("first warning:", warned[0].message if warned else None)
    print("a row for the logger:", dict(list(log.items())[:3]))
    return free, clipped, [str(one.message) for one in warned]


if __name__ == "__main__":
    main()
