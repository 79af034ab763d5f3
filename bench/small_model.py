"""Train the model that the package brings: `python -m bench.small_model [FOLDER] [steps=N] [device=cpu]`, minutes.

A BERT-like encoder reads generated sentences (`bench/sentences.py`). It learns to fill in hidden words, and to say at
every pronoun which noun it stands for. Both are read off one output, the product with the table of words. What is
written is a folder for `regard.learn.small_model`: the tokenizer, and the weights in float16 with a checksum each and
the figures of the sentences that were held back. Without FOLDER it is the package's own.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn

import regard
from regard.learn.small_model import FOLDER, SHAPE, save_small_model
from regard.nn import TextEncoder

from .sentences import PAIRS, Sentence, is_held_back, sentence, winograd

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(5)
IGNORED = -100  # cross_entropy's mark of a token without a target
BATCH, RATE, WARMUP, HIDDEN_SHARE = 64, 2e-3, 200, 0.15


def make_tokenizer() -> Tokenizer:
    """Words and pieces of words, lower-cased; every ASCII letter is a piece, so that any English word can be read."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    draw = random.Random("tokenizer")
    texts = [sentence(draw).text for _ in range(30_000)]
    letters = [chr(n) for n in range(33, 127)]
    # A letter inside a word is a piece of its own, ##a: it is learned from words in which it stands there.
    texts += ["".join(pair) for pair in itertools.product("abcdefghijklmnopqrstuvwxyz0123456789", repeat=2)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=1400, special_tokens=list(SPECIAL), initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return tokenizer


def encoded(tokenizer: Tokenizer, sentences: list[Sentence]) -> tuple[list[list[int]], list[dict[int, int]]]:
    """Token ids of each sentence, and the position of every pronoun's first token with that of its noun."""
    ids, references = [], []
    for one, text in zip(sentences, tokenizer.encode_batch([one.text for one in sentences]), strict=True):
        at = {start: n for n, (start, end) in enumerate(text.offsets) if end > start}
        ids.append(text.ids)
        references.append({at[pronoun[0]]: at[noun[0]] for pronoun, noun in one.references})
    return ids, references


def batch(tokenizer: Tokenizer, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids with some hidden, targets, and lengths; a function of the step alone."""
    draw = random.Random(step)
    count = draw.choice((1, 1, 1, 2, 3))  # sentences that follow each other
    texts = [[sentence(draw) for _ in range(count)] for _ in range(BATCH)]
    rows, targets = [], []
    for parts in texts:
        row, target = [CLS], [IGNORED]
        for ids, references in zip(*encoded(tokenizer, parts), strict=True):
            inner = ids[1:-1]
            hidden = {n for n in range(len(inner)) if draw.random() < HIDDEN_SHARE}
            wanted = [inner[n] if n in hidden else IGNORED for n in range(len(inner))]
            for pronoun, noun in references.items():
                if not {pronoun - 1, noun - 1} & hidden:
                    wanted[pronoun - 1] = inner[noun - 1]
            row += [MASK if n in hidden else token for n, token in enumerate(inner)]
            target += wanted
        rows.append([*row, SEP][: SHAPE["context"]])
        targets.append([*target, IGNORED][: SHAPE["context"]])
    longest = max(map(len, rows))
    padded = [[row + [fill] * (longest - len(row)) for row in side] for side, fill in ((rows, PAD), (targets, IGNORED))]
    return torch.tensor(padded[0]), torch.tensor(padded[1]), torch.tensor([len(row) for row in rows])


def train(tokenizer: Tokenizer, steps: int, device: str) -> TextEncoder:
    """AdamW with warm-up and cosine; progress on stderr."""
    torch.manual_seed(0)
    model = TextEncoder(tokenizer.get_vocab_size(), **SHAPE)
    nn.init.normal_(model.words.weight, std=0.05)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.05, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * n / steps)) + 0.01)
    )
    for step in range(steps):
        ids, targets, lengths = (tensor.to(device) for tensor in batch(tokenizer, step))
        y = model(ids, regard.padding(lengths))[targets != IGNORED]
        loss = nn.functional.cross_entropy(y @ model.words.weight.T, targets[targets != IGNORED])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}: loss {loss:.3f}", file=sys.stderr, flush=True)
    return model.cpu().eval()


def pairs(count: int, held_back: bool) -> list[Sentence]:
    """Sentences of pairs whose nouns were held back, or of pairs that were trained on; both sentences of each."""
    draw, chosen = random.Random(f"pairs {held_back}"), []
    while len(chosen) < count:
        both = winograd(draw, draw.randrange(len(PAIRS)))
        if is_held_back(both[0].text) == held_back:
            chosen += both
    return chosen


@torch.no_grad()
def judged(model: TextEncoder, tokenizer: Tokenizer, count: int = 400) -> dict[str, str]:
    """How often the right noun is named at the pronoun, and how often the most telling head prefers it.

    The head is chosen by pairs that were trained on, and judged by pairs that were held back.
    """

    def ties(sentences: list[Sentence]) -> tuple[float, Tensor]:
        named, preferred = 0, 0
        for one in sentences:
            text = tokenizer.encode(one.text)
            at = {start: n for n, (start, end) in enumerate(text.offsets) if end > start}
            (pronoun, noun), other = one.references[0], one.other
            i, right, wrong = at[pronoun[0]], at[noun[0]], at[other[0]]
            with regard.record(model) as seen:
                y = model(torch.tensor([text.ids]))
            logits = y[0, i] @ model.words.weight.T
            named += int(logits[text.ids[right]] > logits[text.ids[wrong]])
            w = torch.stack([seen[n][0, :, i, [right, wrong]] for n in range(len(seen.layers))])  # layer, head, 2
            preferred = preferred + (w[..., 0] > w[..., 1]).float()
        return named / len(sentences), preferred / len(sentences)

    (_, trained), (named, preferred) = ties(pairs(count, False)), ties(pairs(count, True))
    layer, head = divmod(int(trained.argmax()), trained.shape[1])
    return {
        "named": f"{named:.3f}", "preferred": f"{preferred[layer, head]:.3f}", "layer": str(layer), "head": str(head),
        "sentences": str(count),
    }  # fmt: skip


def main() -> None:
    arguments = dict(part.split("=") for part in sys.argv[1:] if "=" in part)
    folder = Path(next((part for part in sys.argv[1:] if "=" not in part), FOLDER))
    steps = int(arguments.get("steps", 2500))
    tokenizer = make_tokenizer()
    model = train(tokenizer, steps, arguments.get("device", "cuda" if torch.cuda.is_available() else "cpu"))
    save_small_model(folder, model, tokenizer.to_str(), {})
    figures = {**judged(model, tokenizer), "steps": str(steps)}
    save_small_model(folder, model, tokenizer.to_str(), figures)
    print(figures)


if __name__ == "__main__":
    main()
