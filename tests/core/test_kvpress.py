"""Scores of cached keys are those that kvpress computes, by its own code: `make test-libraries` installs it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard
import regard.kv
from support.kvpress_code import FOLDER, llama_attention, press

pytestmark = pytest.mark.skipif(FOLDER is None, reason="needs kvpress: make test-libraries")


@pytest.mark.parametrize(("h", "g", "t", "d", "window"), [(4, 2, 40, 8, 8), (8, 2, 130, 16, 64), (4, 4, 97, 8, 16)])
def test_scores_are_those_of_kvpress(h: int, g: int, t: int, d: int, window: int) -> None:
    layer = llama_attention(h, g, d)
    x, keys = torch.randn(2, t, h * d), torch.randn(2, g, t, d)
    unrotated = {"position_embeddings": (torch.ones(2, t, d), torch.zeros(2, t, d))}
    with torch.no_grad():
        W = regard.weights(layer.q_proj(x).view(2, t, h, d).transpose(1, 2), keys, mask=regard.causal())

        def score(file: str, name: str, weights: Tensor | None = None, **options: int) -> Tensor:
            return press(file, name)(**options).score(layer, x, keys, keys, weights, unrotated)

        # The observing window scores more than everything else, there by 1: only its place matters.
        snapkv = score("snapkv_press", "SnapKVPress", window_size=window)[..., :-window]
        torch.testing.assert_close(regard.kv.snapkv(W, window)[..., :-window], snapkv)
        torch.testing.assert_close(regard.kv.tova(W)[..., :-1], score("tova_press", "TOVAPress")[..., :-1])
        torch.testing.assert_close(
            regard.kv.h2o(W), score("observed_attention_press", "ObservedAttentionPress", W.dense())
        )
