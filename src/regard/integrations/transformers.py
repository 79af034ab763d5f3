"""`attn_implementation="regard"` for transformers models: `register` adds it, `statistics` collects its results."""

from ..recorder.hooks.transformers import register, statistics

__all__ = ["register", "statistics"]
