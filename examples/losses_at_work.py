"""The losses of regard.losses at work: each trains queries and keys directly, and what it is for happens.

    python examples/losses_at_work.py

`docs/pictures.py` draws the curves.
"""

import torch

import regard
from regard import losses

HEADS, WORDS, SIZE, STEPS = 2, 16, 8, 60
TEXT, SELECTED = 64, 8  # of the indexer


def train(parameters, loss, measure, after=lambda: None):
    """Descend a loss for some steps; returns a curve of everything that is measured before each of them."""
    optimizer, history = torch.optim.Adam(parameters, lr=0.1), []
    for _ in range(STEPS):
        with torch.no_grad():
            history.append([float(x) for x in measure()])
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        after()
    return torch.tensor(history).unbind(-1)


def alignment(floor=None, clip=None):
    """Guided alignment, word i to word i; with a floor under the entropy, or QK-clip after every step."""
    torch.manual_seed(0)
    q, k = (torch.randn(HEADS, WORDS, SIZE, requires_grad=True) for _ in "qk")

    def loss():
        W = regard.weights(q, k)
        aligned = losses.alignment(W, lambda i, j: i == j)
        return aligned if floor is None else aligned + 4 * losses.entropy_floor(W, floor)

    @torch.no_grad()
    def shrink():
        if clip is not None:
            factors = losses.clip_factors(regard.weights(q, k), clip).sqrt()[:, None, None]
            q.mul_(factors)
            k.mul_(factors)

    def measure():
        W = regard.weights(q, k)
        return W.offset_mass(0).mean(), W.entropy().mean(), W.max_score().max()

    return train([q, k], loss, measure, shrink)


def distillation():
    """MiniLM: a student follows a teacher that is eight times as wide."""
    torch.manual_seed(1)
    teacher = [torch.randn(HEADS, WORDS, 8 * SIZE) for _ in "qk"]
    student = [torch.randn(HEADS, WORDS, SIZE, requires_grad=True) for _ in "qk"]

    def loss():
        return losses.distillation(teacher, student)

    return train(student, loss, lambda: [loss()])[0]


def indexer(topk=None):
    """Sparse attention: an indexer of two heads learns which keys the four heads of a teacher look at together."""
    torch.manual_seed(2)
    q, k = 1.5 * torch.randn(4, TEXT, 16), torch.randn(4, TEXT, 16)
    teacher = regard.weights(q, k, mask=regard.causal())
    mean = teacher.reduce_heads("mean", groups=1)
    best = mean.topk(SELECTED).values.sum(-1).mean()
    parameters = [torch.randn(shape, requires_grad=True) for shape in ((2, TEXT, SIZE), (TEXT, SIZE), (TEXT, 2))]

    def loss():
        return losses.indexer(teacher, losses.index_weights(*parameters, regard.causal()), topk)

    def measure():
        selected = losses.index_weights(*parameters, regard.causal()).topk(SELECTED).indices
        return loss(), mean.gather(selected).sum(-1).mean(), best

    return train(parameters, loss, measure)


def main():
    """Print where every curve starts and ends; returns {what: {name: curve}}."""
    aligned, entropy, score = alignment()
    index, selected, best = indexer()
    curves = {
        "guided alignment: weight on its cell": {"mean": aligned},
        "entropy floor at 1: mean entropy": {"without": entropy, "with": alignment(floor=1.0)[1]},
        "QK-clip at 4: largest score": {"without": score, "with": alignment(clip=4.0)[2]},
        "distillation: KL to the teacher": {"loss": distillation()},
        "indexer: KL from the summed heads": {"all keys": index, "its 8 keys": indexer(SELECTED)[0]},
        "indexer: weight on 8 of 64 keys": {"selected": selected, "the best": best},
    }
    for what, lines in curves.items():
        for name, line in lines.items():
            print(f"{what:38} {name:12} {line[0]:6.3f} → {line[-1]:6.3f}")
    return curves


if __name__ == "__main__":
    main()
