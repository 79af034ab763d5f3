"""The losses of regard.losses at work: each trains queries and keys directly, and what it is for happens.

    python examples/losses_at_work.py

`docs/pictures.py` draws the curves.
"""

import torch

import regard
from regard import losses

HEADS, WORDS, SIZE, STEPS = 2, 16, 8, 60


def train(parameters, loss, measure, after=lambda: None, lr=0.1):
    """Descend a loss for some steps; returns what is measured before each of them."""
    optimizer, history = torch.optim.Adam(parameters, lr), []
    for _ in range(STEPS):
        with torch.no_grad():
            history.append(float(measure()))
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        after()
    return torch.tensor(history)


def alignment(measure, floor=None, clip=None):
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

    return train([q, k], loss, lambda: measure(regard.weights(q, k)), shrink)


def distillation():
    """MiniLM: a student follows a teacher that is eight times as wide."""
    torch.manual_seed(1)
    teacher = [torch.randn(HEADS, WORDS, 8 * SIZE) for _ in "qk"]
    student = [torch.randn(HEADS, WORDS, SIZE, requires_grad=True) for _ in "qk"]
    return train(student, lambda: losses.distillation(teacher, student), lambda: losses.distillation(teacher, student))


def aligned_weight(weights):
    return weights.offset_mass(0).mean()


def mean_entropy(weights):
    return weights.entropy().mean()


def largest_score(weights):
    return weights.max_score().max()


def main():
    """Print where every curve starts and ends; returns {what: {name: curve}}."""
    curves = {
        "guided alignment: weight on its cell": {"mean": alignment(aligned_weight)},
        "entropy floor at 1: mean entropy": {
            "without": alignment(mean_entropy),
            "with": alignment(mean_entropy, floor=1.0),
        },
        "QK-clip at 4: largest score": {
            "without": alignment(largest_score),
            "with": alignment(largest_score, clip=4.0),
        },
        "distillation: KL to the teacher": {"loss": distillation()},
    }
    for what, lines in curves.items():
        for name, line in lines.items():
            print(f"{what:46} {name:8} {line[0]:6.3f} → {line[-1]:6.3f}")
    return curves


if __name__ == "__main__":
    main()
