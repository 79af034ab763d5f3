"""`attn_implementation="regard"` for transformers models: `register` adds it, `statistics` collects its results."""

from .. import _lazy
from ..recorder.hooks.transformers import register, statistics

__all__ = ["register", "statistics"]

_lazy.publish(__name__)
