"""The presses of kvpress, by its own code: `make test-libraries` installs it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = importlib.util.find_spec("kvpress")


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


def llama_attention(h: int, g: int, d: int) -> Any:
    """A layer of Llama, from whose projection the presses take queries."""
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

    config = LlamaConfig(hidden_size=h * d, num_attention_heads=h, num_key_value_heads=g, head_dim=d)
    return LlamaAttention(config, layer_idx=0)
