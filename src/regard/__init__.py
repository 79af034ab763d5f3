"""regard: the attention matrix as an object you can index, multiply and question, and that is never stored.

The matrix: `weights` (a `Weights`) and `attend` (its output). Scores: `ScaledDot`, `Dot`, `Cosine`, `Gaussian`,
`Bilinear`, `Additive`, `Similarity`. Masks: `causal`, `window`, `padding`, `documents`.

Models: `record` and `load` (a `Recording`), `watch` while they train, `compare` two of them, `walk` through one word,
`corpus` and `load_corpus` for many documents. `cost` of a matrix whose sequence is split over GPUs.

Packages: `nn` (layers that train), `learn` (training), `look` (pictures), `kv` (which keys a cache keeps), `losses`,
`chains` (rollout), `patterns` (what heads do), `distributed`, `integrations.transformers`.

>>> q = torch.randn(8, 5, 64)  # heads, length, size
>>> W = regard.weights(q, mask=regard.causal())
>>> W.entropy().shape, (W @ q).shape, W[0, 3].shape
(torch.Size([8, 5]), torch.Size([8, 5, 64]), torch.Size([5]))
"""

from typing import TYPE_CHECKING

from ._lazy import lazy_getattr

if TYPE_CHECKING:
    from . import chains as chains
    from . import corpora as corpora
    from . import distributed as distributed
    from . import integrations as integrations
    from . import kv as kv
    from . import learn as learn
    from . import look as look
    from . import losses as losses
    from . import nn as nn
    from . import patterns as patterns
    from . import recorder as recorder
    from .core.api import attend, weights
    from .core.masks.kinds import Mask, causal, documents, padding, window
    from .core.results import Peak, Statistics, TopK
    from .core.rows.head_reduction import HeadReduction
    from .core.scores.kinds import Additive, Bilinear, Cosine, Dot, Gaussian, ScaledDot, Score, Similarity
    from .core.weights import Weights
    from .corpora.result import Corpus, load_corpus
    from .corpora.run import corpus
    from .distributed.cost import cost
    from .look.compare import compare
    from .look.walk import walk
    from .recorder import Recording, load, record, watch

__version__ = "0.1.0"

__all__ = [
    "Additive", "Bilinear", "Corpus", "Cosine", "Dot", "Gaussian", "HeadReduction", "Mask", "Peak", "Recording",
    "ScaledDot", "Score", "Similarity", "Statistics", "TopK", "Weights",
    "attend", "causal", "compare", "corpus", "cost", "documents", "load", "load_corpus", "padding", "record", "walk",
    "watch", "weights", "window",
]  # fmt: skip

__getattr__ = lazy_getattr(
    __name__,
    {
        "core.api": ("attend", "weights"),
        "core.rows.head_reduction": ("HeadReduction",),
        "core.masks.kinds": ("Mask", "causal", "documents", "padding", "window"),
        "core.results": ("Peak", "Statistics", "TopK"),
        "core.scores.kinds": ("Additive", "Bilinear", "Cosine", "Dot", "Gaussian", "ScaledDot", "Score", "Similarity"),
        "core.weights": ("Weights",),
        "corpora.result": ("Corpus", "load_corpus"),
        "distributed.cost": ("cost",),
        "corpora.run": ("corpus",),
        "look.compare": ("compare",),
        "look.walk": ("walk",),
        "recorder": ("Recording", "load", "record", "watch"),
    },
    ("chains", "corpora", "distributed", "integrations", "kv", "learn", "look", "losses", "nn", "patterns", "recorder"),
)
