"""Statistics of every head over many documents, exact in any split: `regard.corpus`, `regard.load_corpus`.

`documents` reads the data, `models` the texts, `profile` measures a pass, `exact` and `tally` add it up, `folder` holds
the files, `run` is the run, `result` has its tables, `command` the verb of the command line.
"""

from typing import TYPE_CHECKING

from .._lazy import lazy_getattr

if TYPE_CHECKING:
    from .result import CorpusDistance, CorpusExample, CorpusHead, CorpusPosition
    from .run import CorpusProgress

__all__ = ["CorpusDistance", "CorpusExample", "CorpusHead", "CorpusPosition", "CorpusProgress"]

__getattr__ = lazy_getattr(
    __name__,
    {
        "result": ("CorpusDistance", "CorpusExample", "CorpusHead", "CorpusPosition"),
        "run": ("CorpusProgress",),
    },
)
