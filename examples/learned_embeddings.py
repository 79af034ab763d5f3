"""What embeddings become when a task decides: an article ends with low products, a noun and its verb with high ones.

Basic self-attention has no parameters: all that is learned is one vector a word. The task is to guess the verb that
was covered up in "the cat … on the street". The guess is attention's output at the gap times every word's vector, so
the vectors must bring out what tells the verb, the noun, and drown out what does not, the article.

    python examples/learned_embeddings.py [folder for the plot]
"""

import sys
from pathlib import Path

import torch
from torch import nn

from regard.nn import SelfAttention

PAIRS = {"cat": "walks", "dog": "barks", "bird": "flies", "fish": "swims"}
ARTICLES, OTHERS, PLACES = ["the", "a"], ["on", "over", "near"], ["street", "house", "river"]
WORDS = [*ARTICLES, *PAIRS, *PAIRS.values(), *OTHERS, *PLACES, "…"]


def sentences(count):
    """Sentences with the verb covered, and the verb."""
    numbers, verbs = [], []
    for _ in range(count):
        noun, first, second, between, place = (
            group[int(torch.randint(len(group), ()))] for group in (list(PAIRS), ARTICLES, ARTICLES, OTHERS, PLACES)
        )
        numbers.append([WORDS.index(word) for word in (first, noun, "…", between, second, place)])
        verbs.append(WORDS.index(PAIRS[noun]))
    return torch.tensor(numbers), torch.tensor(verbs)


def train(steps, dim=12):
    """One vector a word, by back-propagation; returns them."""
    torch.manual_seed(0)
    table = nn.Embedding(len(WORDS), dim)
    nn.init.normal_(table.weight, std=0.5)
    attention = SelfAttention(dim, parameters=False)
    optimizer = torch.optim.AdamW(table.parameters(), 0.03, weight_decay=0.1)
    for _ in range(steps):
        x, verbs = sentences(64)
        loss = nn.functional.cross_entropy(attention(table(x))[:, 2] @ table.weight.T, verbs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return table.weight.detach(), loss.item()


def main(out=None, quick=False):
    """Print and return the products of a noun with its verb, with other verbs, and of articles with all words."""
    x, loss = train(150 if quick else 500)
    products = x @ x.T
    at = {word: n for n, word in enumerate(WORDS)}
    nouns, verbs = [at[noun] for noun in PAIRS], [at[verb] for verb in PAIRS.values()]
    own = products[nouns, verbs].mean().item()
    other = products[nouns][:, verbs][~torch.eye(len(PAIRS), dtype=torch.bool)].mean().item()
    rest = [n for n in range(len(WORDS)) if n not in (at["the"], at["a"])]
    article = products[[at["the"], at["a"]]][:, rest].mean().item()
    print(f"loss {loss:.3f} (chance {torch.tensor(4.0).log():.3f})")
    print(f"noun · its verb {own:+.2f}   noun · another's verb {other:+.2f}   article · others {article:+.2f}")
    if out is not None:
        draw(products, Path(out) / "learned_embeddings.png")
    return own, other, article, loss


def draw(products, path):
    """All products."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.6, 5.8), layout="constrained")
    top = products.abs().max().item()
    shown = axis.imshow(products.tolist(), cmap="RdBu_r", vmin=-top, vmax=top)
    axis.set_xticks(range(len(WORDS)), WORDS, rotation=70)
    axis.set_yticks(range(len(WORDS)), WORDS)
    axis.set_title("products of learned vectors")
    figure.colorbar(shown)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
