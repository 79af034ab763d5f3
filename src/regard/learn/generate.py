"""Decoding with a trained model: sampling token by token, beam search, and BLEU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Beam", "beam_search", "bleu", "sample", "text_pieces"]

#: The sign that a decoder writes for bytes that are no character (yet).
INCOMPLETE = "\ufffd"
#: Tokens before a token that its text may depend on.
CONTEXT_TOKENS = 32


@torch.no_grad()
def sample(
    model: Any, ids: Tensor, count: int, *, temperature: float = 0.8, top: int | None = None, seed: int | None = None
) -> Iterator[int]:
    """Sample tokens of a language model, one by one.

    Args:
        model: A `regard.nn.LanguageModel` in eval mode.
        ids: The prompt ``(1, t)``.
        count: Number of tokens.
        temperature: 0 takes the likeliest token, 1 samples from the model's distribution.
        top: Sample among this many likeliest tokens only.
        seed: Seed of the samples. Default: random.

    Yields:
        Token ids.

    Example:
        >>> from regard.nn import LanguageModel
        >>> model = LanguageModel(11, dim=8, heads=2, layers=1).eval()
        >>> len(list(sample(model, torch.tensor([[1, 2]]), 5, seed=0)))
        5
    """
    generator = torch.Generator()
    if seed is None:
        generator.seed()  # not torch.seed(), which would change the caller's random state
    else:
        generator.manual_seed(seed)
    context = model.context
    cache, new = model.cache(), ids[:, -context:]
    past = new
    for _ in range(count):
        if len(cache[0][0]) + new.shape[1] > context:
            # The context is full: start again from its later half, so that this happens once in many tokens.
            cache, new = model.cache(), past[:, -max(1, context // 2) :]
        logits = model(new, cache)[0, -1].float().cpu()
        number = _sample_token(logits, temperature, top, generator)
        yield number
        new = torch.tensor([[number]], device=ids.device)
        past = torch.cat([past, new], 1)[:, -context:]


def _sample_token(logits: Tensor, temperature: float, top: int | None, generator: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    if top is not None and top < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top).values[-1], -torch.inf)
    # Relative to the maximum: dividing by a tiny temperature cannot overflow to +inf.
    relative = (logits - logits.max()).double() / temperature
    return int(torch.multinomial(relative.softmax(-1), 1, generator=generator))


def text_pieces(tokenizer: Any, prompt: list[int], numbers: Iterable[int]) -> Iterator[str]:
    """The text of tokens as they are written one by one, after that of the prompt.

    A token may be a part of a character, as a byte is: its text waits until the character is complete.

    Args:
        tokenizer: A tokenizer of the `tokenizers` library.
        prompt: Token ids that are written already.
        numbers: The ids that follow.

    Yields:
        Pieces that together are the text of all ids.

    Example:
        >>> from regard.learn.tokenizer import byte_level
        >>> list(text_pieces(byte_level(), list(b"a"), "ß!".encode()))
        ['a', 'ß', '!', '']
    """
    context: list[int] = []
    waiting: list[int] = []
    text = ""
    for new in itertools.chain([prompt], ([number] for number in numbers)):
        waiting += new
        text = tokenizer.decode(context + waiting)[len(tokenizer.decode(context)) :]
        if not text.endswith(INCOMPLETE):
            yield text
            context, waiting, text = (context + waiting)[-CONTEXT_TOKENS:], [], ""
    yield text


@dataclass(frozen=True)
class Beam:
    """Options of a beam search.

    Attributes:
        width: Number of hypotheses per sentence.
        penalty: Hypotheses are ranked by log p / length^penalty; a larger one favours longer sentences.

    Example:
        >>> Beam(width=4)
        Beam(width=4, penalty=1.0)
    """

    width: int = 5
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"a beam must be at least 1 wide; got {self.width}.")
        if not (math.isfinite(self.penalty) and abs(self.penalty) <= 10):
            raise ValueError(f"a penalty must be a number from -10 to 10; got {self.penalty}.")


@torch.no_grad()
def beam_search(model: Any, source: Tensor, start: int, end: int, beam: Beam) -> list[list[int]]:
    """Translate by beam search.

    A sentence is done when no open hypothesis can become better than the best that ended, or at 2 · source length + 10
    tokens. From then on it is frozen: other sentences of the batch may need more steps.

    Args:
        model: A `regard.nn.Translator` in eval mode.
        source: Token ids ``(n, s)``, padded with 0.
        start: Id of the start token.
        end: Id of the end token.
        beam: Width and length penalty.

    Returns:
        The best target of every sentence, without start and end.

    Example:
        >>> from regard.nn import Translator
        >>> model = Translator(12, dim=8, heads=2, layers=1).eval()
        >>> words = beam_search(model, torch.tensor([[5, 6, 7]]), 1, 2, Beam(3))
        >>> len(words), len(words[0]) <= 16
        (1, True)
    """
    n, width = len(source), beam.width
    limit = math.inf if model.max_positions is None else model.max_positions
    lengths = [min(2 * length + 10, limit) for length in model.lengths(source).tolist()]
    memory, visible = model.encode(source, copies=width)
    caches = model.decoder.cache()
    tokens = torch.full((n, width, 1), start, device=source.device)
    scores = torch.full((n, width), -torch.inf, device=source.device)
    scores[:, 0] = 0.0  # all hypotheses start equal: only the first counts
    first = torch.arange(n, device=source.device)[:, None] * width
    finished = _FinishedHypotheses.none(torch.tensor(lengths, device=source.device), max(lengths))
    for length in itertools.count(1):
        logits = model.decode(tokens[:, :, -1].reshape(-1, 1), memory, visible, caches)[:, -1]
        log_p = logits.float().log_softmax(-1).view(n, width, -1)
        log_p[:, :, model.PAD] = log_p[:, :, start] = -torch.inf
        total = scores[:, :, None] + log_p
        # At most width of 2 · width candidates end here, so that at least width continue.
        candidates, index = total.flatten(1).topk(2 * width)
        origin, word = index // log_p.shape[-1], index % log_p.shape[-1]
        ends = word == end
        finished.update(tokens, candidates, origin, ends, beam)
        scores, order = candidates.masked_fill(ends, -torch.inf).topk(width)
        origin, word = origin.gather(1, order), word.gather(1, order)
        tokens = torch.cat([tokens.gather(1, origin[..., None].expand(-1, -1, length)), word[..., None]], 2)
        finished.close(tokens, scores[:, 0], beam)
        if bool(finished.done.all()):  # the only sync with the device in a step
            break
        reordered = (first + origin).flatten()
        for cache in caches:
            cache[0].reorder(reordered)  # not cache[1]: all hypotheses of a sentence share its memory
    return finished.words()


@dataclass
class _FinishedHypotheses:
    """The best hypothesis of every sentence that ended so far, on the device: no step syncs with the host for it."""

    score: Tensor  # n, float64: log p / length^penalty; -inf before the first one ended
    tokens: Tensor  # n, longest: without start and end
    count: Tensor  # n: how many of these tokens count
    done: Tensor  # n: sentences that are frozen
    max_length: Tensor  # n

    @classmethod
    def none(cls, max_length: Tensor, longest: int) -> _FinishedHypotheses:
        n, device = len(max_length), max_length.device
        score = torch.full((n,), -torch.inf, dtype=torch.float64, device=device)
        tokens = torch.zeros(n, longest, dtype=torch.long, device=device)
        return cls(score, tokens, torch.zeros_like(max_length), torch.zeros_like(max_length).bool(), max_length)

    def update(self, tokens: Tensor, candidates: Tensor, origin: Tensor, ends: Tensor, beam: Beam) -> None:
        """Take hypotheses that end here, among the first `width` of each sentence, where they are the best so far."""
        ending = candidates[:, : beam.width].masked_fill(~ends[:, : beam.width], -torch.inf)
        score, rank = (ending.double() / tokens.shape[2] ** beam.penalty).max(1)
        better = ~self.done & (score > self.score)
        self._take(better, tokens, origin.gather(1, rank[:, None]))
        self.score = torch.where(better, score, self.score)

    def close(self, tokens: Tensor, likeliest: Tensor, beam: Beam) -> None:
        """Freeze sentences whose best ending no open hypothesis can beat, or that are at their longest."""
        length = tokens.shape[2] - 1
        # log p only falls: a hypothesis ranks highest if it keeps it up to the length that divides it by most.
        divisor = self.max_length.double() if beam.penalty > 0 else torch.full_like(self.score, length)
        ahead = likeliest.double() / divisor**beam.penalty
        new = ~self.done & ((self.score >= ahead) | (length >= self.max_length))
        # No hypothesis ended in time: take the likeliest.
        self._take(new & (self.score == -torch.inf), tokens, torch.zeros_like(self.count)[:, None])
        self.done = self.done | new

    def _take(self, chosen: Tensor, tokens: Tensor, hypothesis: Tensor) -> None:
        """Copy a hypothesis (n, 1) of the chosen sentences, without its start token."""
        length = tokens.shape[2] - 1
        words = tokens.gather(1, hypothesis[..., None].expand(-1, -1, length + 1))[:, 0, 1:]  # n length
        self.tokens[:, :length] = torch.where(chosen[:, None], words, self.tokens[:, :length])
        self.count = torch.where(chosen, length, self.count)

    def words(self) -> list[list[int]]:
        return [row[:count] for row, count in zip(self.tokens.tolist(), self.count.tolist(), strict=True)]


def bleu(written: list[str], references: list[str]) -> dict[str, Any]:
    """BLEU by sacrebleu.

    Args:
        written: Translations.
        references: One reference per translation.

    Returns:
        Scores "cased" and "lower", and sacrebleu's "cased_signature" and "lower_signature".

    Example:
        >>> same = ["Der Hund läuft über die Straße."]
        >>> round(bleu(same, same)["cased"])
        100
    """
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ImportError("BLEU is computed by sacrebleu: pip install 'regard[learn]'.") from None
    if len(written) != len(references):
        raise ValueError(f"{len(written)} translations and {len(references)} references: one each is needed.")
    scores: dict[str, Any] = {}
    for name, lower in (("cased", False), ("lower", True)):
        metric = BLEU(lowercase=lower)
        scores[name] = metric.corpus_score(written, [references]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores
