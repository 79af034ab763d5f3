"""Scores of cached keys are those that kvpress computes, by its own code: `make test-libraries` installs it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
import regard.kv

FOLDER = importlib.util.find_spec("kvpress")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="needs kvpress: make test-libraries")


def press(file: str, name: str) -> Any:
    """A press, without the package's own imports: they want older versions of what it does not use here."""
    import transformers

    assert FOLDER is not None
    root = Path(str(FOLDER.origin)).parent
    for package, folder in (("kvpress", root), ("kvpress.presses", root / "presses")):
        if package not in sys.modules or not getattr(sys.modules[package], "bare", False):
            module: Any = ModuleType(package)
            module.__path__, module.bare = [str(folder)], True
            sys.modules[package] = module
    if not hasattr(transformers, "QuantizedCache"):
        transformers.QuantizedCache = type("QuantizedCache", (), {})  # type: ignore[attr-defined]
    return getattr(importlib.import_module(f"kvpress.presses.{file}"), name)


@pytest.mark.parametrize(("h", "g", "t", "d", "window"), [(4, 2, 40, 8, 8), (8, 2, 130, 16, 64), (4, 4, 97, 8, 16)])
def test_scores_are_those_of_kvpress(h: int, g: int, t: int, d: int, window: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

    layer = LlamaAttention(
        LlamaConfig(hidden_size=h * d, num_attention_heads=h, num_key_value_heads=g, head_dim=d), layer_idx=0
    )
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
