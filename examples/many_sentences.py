"""Does the head that ties "it" to "animal" do so in a thousand sentences?

One sentence is an anecdote. Here are pairs: "The animal didn't cross the street because it was too tired" and the same
with "too wide", where "it" is the street; with other animals, places, verbs and adjectives. Every head of
all-MiniLM-L6-v2 is asked how much of its look "it" gives to the animal and to the place, and the answers come with an
interval: pairs are drawn again a thousand times, with replacement (the bootstrap).

    pip install ".[look]" matplotlib
    python examples/many_sentences.py [folder for the plot and the figures] [number of sentences]
"""

import json
import random
import sys
from pathlib import Path

import torch

import regard
from regard.look.loading import load_model

#: Words that are one token each; the first adjectives go with an animal, the second with a place.
ANIMALS, PLACES, VERBS, TIRED, WIDE = map(
    str.split,
    (
        "animal cat dog horse cow sheep goat pig mouse rabbit fox wolf bear lion tiger elephant monkey camel bird duck",
        "street road river bridge field forest mountain hill valley desert lake park garden path square tunnel beach",
        "cross leave enter reach climb pass visit like",
        "tired hungry scared lazy ill weak afraid busy nervous sick old slow",
        "wide long deep steep dangerous narrow dark wet crowded noisy far rocky",
    ),
)

#: Positions of the words in "[CLS] the animal didn ' t cross the street because it was too tired [SEP]".
ANIMAL, PLACE, IT, LENGTH = 2, 8, 10, 15


def pairs(count, seed=0):
    """Sentences in pairs: in the first "it" is the animal, in the second the place."""
    draw = random.Random(seed)
    for _ in range(count):
        start = f"The {draw.choice(ANIMALS)} didn't {draw.choice(VERBS)} the {draw.choice(PLACES)} because it was too "
        yield start + draw.choice(TIRED), start + draw.choice(WIDE)


@torch.no_grad()
def looks(sentences, batch=50):
    """How much "it" looks at the animal and at the place, in every head: (sentence, layer, head, 2)."""
    loaded, rows = load_model(), []
    for start in range(0, len(sentences), batch):
        ids = torch.cat(
            [loaded.ids(one) for one in sentences[start : start + batch]]
        )  # every word is one token: one length
        assert ids.shape[1] == LENGTH
        with regard.record(loaded.model) as seen:
            loaded.model(input_ids=ids)
        rows.append(torch.stack([seen[n][:, :, IT, [ANIMAL, PLACE]] for n in range(len(seen.layers))], 1))
    return torch.cat(rows)


def interval(values, draws=1000, seed=0):
    """The mean over the first axis, and the ends of its 95 % bootstrap interval, (3, ...)."""
    generator = torch.Generator().manual_seed(seed)
    means = []
    for _ in range(draws):
        chosen = torch.randint(len(values), (len(values),), generator=generator)
        means.append(values[chosen].mean(0))
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975], dtype=values.dtype), 0)
    return torch.stack([values.mean(0), low, high])


def main(out=None, quick=False, count=1000):
    """Print what head 3, 1 does and which head tells the two cases apart, and return the weights and the figures."""
    texts = list(pairs(12 if quick else count // 2))
    w = looks([text for pair in texts for text in pair]).double().unflatten(0, (-1, 2))  # pair, case, layer, head, 2
    figures = {"sentences": 2 * len(texts)}
    for case, name in enumerate(("it is the animal", "it is the place")):
        animal, place = w[:, case, 3, 1].T
        figures[f"{name}: weight on the animal"] = interval(animal)
        figures[f"{name}: weight on the place"] = interval(place)
        figures[f"{name}: prefers the animal"] = interval((animal > place).double())
    # How much more "it" looks at the animal when it is the animal than when it is the place: zero for a mere habit.
    moved = interval((w[:, 0] - w[:, 1])[..., 0])  # 3, layer, head
    figures["moved by the last word"] = moved[:, 3, 1]
    order = moved[0].flatten().argsort(descending=True)[:2]
    figures["moved most"], figures["moved second most"] = ([*divmod(int(n), 12)] for n in order)
    figures |= {name: x.tolist() for name, x in figures.items() if isinstance(x, torch.Tensor)}
    print("layer 3, head 1, mean with 95 % interval:")
    for name, values in figures.items():
        numbers = values if isinstance(values, list) else [values]
        print(f"  {name}:", *(f"{x:.3f}" if isinstance(x, float) else x for x in numbers))
    if out is not None:
        draw(w, *moved.flatten(1), Path(out) / "many_sentences.png")
        (Path(out) / "many_sentences.json").write_text(json.dumps(figures, indent=1) + "\n")
    return w, figures


def draw(w, mean, low, high, path):
    """The weights of head 3, 1 in every sentence; and of all heads, what the last word moves, with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for case, name in enumerate(("it is the animal", "it is the place")):
        left.scatter(*w[:, case, 3, 1].T.tolist(), s=6, alpha=0.5, label=name)
    left.plot([0, 1], [0, 1], color="grey", lw=0.8)
    left.set(xlabel="weight from it to the animal", ylabel="to the place", title="layer 3, head 1", aspect="equal")
    left.legend(fontsize=8)
    order = mean.argsort().tolist()
    right.errorbar(
        range(len(order)), mean[order], yerr=torch.stack([mean - low, high - mean])[:, order], fmt="o", ms=2.5, lw=0.8
    )
    right.axhline(0, color="grey", lw=0.8)
    right.set(xlabel="the 72 heads, in order", ylabel="weight", title="more on the animal when it is the animal")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None, count=int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
