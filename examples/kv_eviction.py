"""Which keys of a cache may go? H2O and SnapKV scores without eager attention.

A long context holds one digit among noise; at "?" the model must name it. After the context is read, nine tenths of
the KV cache are thrown away and it is asked once more. Which keys to keep is decided by what recorded attention says:

    H2O       keys that received most over all rows               weights.received()
    SnapKV    keys that the last rows look at, pooled along keys   weights[..., -window:, :]

Both need column sums of the attention matrix, which fused kernels do not give; here the model runs on its own ones.

    pip install ".[record]"
    python examples/kv_eviction.py
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import regard

DIGITS, NOISE, ASK, LENGTH = 8, 24, 32, 40


def contexts(batch, seed):
    """Noise with one digit in it, and "?" at the end."""
    numbers = torch.Generator().manual_seed(seed)
    text = torch.randint(DIGITS, DIGITS + NOISE, (batch, LENGTH), generator=numbers)
    digit = torch.randint(0, DIGITS, (batch,), generator=numbers)
    text[torch.arange(batch), torch.randint(0, LENGTH - 4, (batch,), generator=numbers)] = digit
    return torch.cat([text, torch.full((batch, 1), ASK)], 1), digit


def trained(steps=220):
    """A small language model that has learnt to answer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=ASK + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        text, digit = contexts(64, seed=step)
        twice = torch.cat([text, text[:, -1:]], 1)  # asked once and once more
        answers = model(twice).logits[:, -2:]
        loss = F.cross_entropy(answers.flatten(0, 1), digit.repeat_interleave(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def h2o(weights, groups):
    """What every key received from all rows, summed over the query heads that share it: (b, g, j)."""
    return weights.received().unflatten(1, (groups, -1)).sum(2)


def snapkv(weights, groups, window=4, kernel=3):
    """What the last rows look at, smoothed along the keys: (b, g, j)."""
    votes = weights[..., -window:, :].sum(-2)
    return F.avg_pool1d(votes, kernel, stride=1, padding=kernel // 2).unflatten(1, (groups, -1)).sum(2)


def keep_best(cache, scores, share):
    """Throw the keys of every layer away but for the best share of them."""
    for layer, score in zip(cache.layers, scores, strict=True):
        best = score.topk(max(1, int(share * score.shape[-1])), -1).indices.sort(-1).values  # b g n
        index = best.unsqueeze(-1).expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)


@torch.no_grad()
def accuracy(model, choose, share, batch=256):
    """How often the digit is still named when only a share of the cache is left."""
    text, digit = contexts(batch, seed=10_000)
    with regard.record(model) as seen:
        cache = model(text, use_cache=True).past_key_values
    groups = cache.layers[0].keys.shape[1]
    keep_best(cache, [choose(layer.weights, groups) for layer in seen.layers], share)
    position = torch.full((batch, 1), text.shape[1])
    answer = model(text[:, -1:], past_key_values=cache, position_ids=position, cache_position=position[0]).logits[:, -1]
    return (answer[:, :DIGITS].argmax(-1) == digit).float().mean().item()


def main(share=0.1):
    """Print and return how often each way to choose keeps the answer."""
    model = trained()
    ways = {
        "H2O": h2o,
        "SnapKV": snapkv,
        "at random": lambda weights, groups: torch.rand(weights.shape[0], groups, weights.shape[-1]),
    }
    accuracies = {
        "all keys": accuracy(model, h2o, 1.0),
        **{name: accuracy(model, way, share) for name, way in ways.items()},
    }
    for name, value in accuracies.items():
        print(f"{name:10} {value:.2f}")
    return accuracies


if __name__ == "__main__":
    main()
