"""Writing with a trained model: sampling token by token, beam search, and how good a translation is (BLEU).

Imports nothing of this room.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Beam", "beam_search", "bleu", "sample"]


@torch.no_grad()
def sample(
    model: Any, ids: Tensor, count: int, *, temperature: float = 0.8, top: int | None = None, seed: int | None = None
) -> Iterator[int]:
    """`count` further tokens after ids (1, t), one by one; temperature 0 takes the likeliest."""
    chance = torch.Generator()
    if seed is None:
        chance.seed()  # not torch.seed(), which would change the caller's chance
    else:
        chance.manual_seed(seed)
    context = model.context
    cache, fresh = model.cache(), ids[:, -context:]
    past = fresh
    for _ in range(count):
        if len(cache[0][0]) + fresh.shape[1] > context:
            # The window is full: keep its later half, read anew, so that this happens once in many tokens.
            cache, fresh = model.cache(), past[:, -max(1, context // 2) :]
        logits = model(fresh, cache)[0, -1].float().cpu()
        number = _drawn(logits, temperature, top, chance)
        yield number
        fresh = torch.tensor([[number]], device=ids.device)
        past = torch.cat([past, fresh], 1)[:, -context:]


def _drawn(logits: Tensor, temperature: float, top: int | None, chance: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    if top is not None and top < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top).values[-1], -torch.inf)
    # The largest is 0 and stays 0, however cold it is: nothing overflows upwards.
    relative = (logits - logits.max()).double() / temperature
    return int(torch.multinomial(relative.softmax(-1), 1, generator=chance))


@dataclass(frozen=True)
class Beam:
    """How a translation is searched: `width` beginnings at a time, judged by log p / length^`penalty`."""

    width: int = 5
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"a beam is at least 1 wide; {self.width} came.")
        if not (math.isfinite(self.penalty) and abs(self.penalty) <= 10):
            raise ValueError(f"a penalty is a number from -10 to 10; {self.penalty} came.")


@torch.no_grad()
def beam_search(model: Any, source: Tensor, start: int, end: int, beam: Beam) -> list[list[int]]:
    """The best target of every source (n, s), without start and end.

    A sentence is done when nothing that goes on is better, at its length so far, than the best that ended, or when it
    has become as long as it may. From then on nothing changes it: its neighbours in the batch may need longer.
    """
    n, width = len(source), beam.width
    room = math.inf if model.max_positions is None else model.max_positions
    longest = [min(2 * length + 10, room) for length in model.lengths(source).tolist()]
    memory, visible = model.encode(source.repeat_interleave(width, 0))
    caches = model.decoder.cache()
    tokens = torch.full((n, width, 1), start, device=source.device)
    scores = torch.full((n, width), -torch.inf, device=source.device)
    scores[:, 0] = 0.0  # all beams of a sentence begin alike: one of them counts
    first = torch.arange(n, device=source.device)[:, None] * width
    best: list[tuple[float, list[int]]] = [(-torch.inf, [])] * n
    open_ones = set(range(n))
    for length in itertools.count(1):
        logits = model.decode(tokens[:, :, -1].reshape(-1, 1), memory, visible, caches)[:, -1]
        log_p = logits.float().log_softmax(-1).view(n, width, -1)
        log_p[:, :, [model.PAD, start]] = -torch.inf
        total = scores[:, :, None] + log_p
        # Of 2 · width candidates at most width end, so width go on.
        found, place = total.flatten(1).topk(2 * width)
        origin, word = place // log_p.shape[-1], place % log_p.shape[-1]
        over = word == end
        _finish(best, open_ones, tokens, found, origin, over, length, beam)
        going, order = found.masked_fill(over, -torch.inf).topk(width)
        origin, word = origin.gather(1, order), word.gather(1, order)
        tokens = torch.cat([tokens.gather(1, origin[..., None].expand(-1, -1, length)), word[..., None]], 2)
        scores = going
        hope = (going[:, 0] / length**beam.penalty).tolist()
        for sentence in list(open_ones):
            score = best[sentence][0]
            if score >= hope[sentence] or length >= longest[sentence]:
                open_ones.remove(sentence)
                if score == -torch.inf:  # nothing ended in time: what is likeliest so far
                    best[sentence] = score, tokens[sentence, 0, 1:].tolist()
        if not open_ones:
            break
        for cache in caches:
            cache[0].reorder((first + origin).flatten())  # the memory's keys are alike for all beams of a sentence
    return [words for _, words in best]


def _finish(
    best: list[Any], open_ones: set[int], tokens: Tensor, found: Tensor, origin: Tensor, over: Tensor, length: int,
    beam: Beam,
) -> None:  # fmt: skip
    """Take note of candidates that end here, among the first `width` of open sentences, if they are the best so far."""
    over = over[:, : beam.width] & found[:, : beam.width].isfinite()
    for sentence, rank in over.nonzero().tolist():
        score = float(found[sentence, rank]) / length**beam.penalty
        if sentence in open_ones and score > best[sentence][0]:
            best[sentence] = score, tokens[sentence, origin[sentence, rank], 1:].tolist()


def bleu(written: list[str], wanted: list[str]) -> dict[str, float]:
    """BLEU by sacrebleu, cased and lower-cased, and its signature."""
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ImportError("BLEU is computed by sacrebleu: pip install 'regard[learn]'.") from None
    if len(written) != len(wanted):
        raise ValueError(f"{len(written)} translations and {len(wanted)} references came; one each is needed.")
    scores: dict[str, Any] = {}
    for name, lower in (("cased", False), ("lower", True)):
        metric = BLEU(lowercase=lower)
        scores[name] = metric.corpus_score(written, [wanted]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores
