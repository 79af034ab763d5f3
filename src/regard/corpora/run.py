"""`regard.corpus`: the statistics of every head over many documents."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import __version__
from ..learn.checkpoint import exclusive_lock
from ..recorder import RefusedWarning, record
from .documents import Chunk, open_documents, survey
from .folder import RunFolder, merged
from .models import CorpusModel, TokenizerLike, as_corpus_model, device_of
from .profile import Profile, profile, sent_to_host, targets_of
from .result import Corpus, load_corpus
from .tally import Tally

if TYPE_CHECKING:
    from ..look.loading import LoadedModel

__all__ = ["CorpusProgress", "corpus"]

#: Tokens of a sequence where neither the model nor the caller says how many.
LENGTH = 1024
#: Layers whose numbers are sent to the host by one copy: those of the last pass are added up while others are measured.
SENT_TOGETHER = 4


class CorpusProgress(NamedTuple):
    """How far a run is.

    Attributes:
        done: Chunks of this rank that are done, those of earlier runs included.
        chunks: Chunks of this rank.
        tokens: Tokens that this run has read.
        seconds: Since it began.

    Example:
        >>> regard.corpora.CorpusProgress(3, 12, 3000, 2.0).tokens
        3000
    """

    done: int
    chunks: int
    tokens: int
    seconds: float


def corpus(
    model: str | Path | LoadedModel | nn.Module | None,
    data: str | os.PathLike[str] | Sequence[str] | Sequence[Sequence[int]],
    out: str | os.PathLike[str] | None = None,
    *,
    tokenizer: TokenizerLike | None = None,
    field: str = "text",
    length: int | None = None,
    batch: int = 8,
    examples: int = 8,
    redact: bool = False,
    device: str | torch.device | None = None,
    progress: Callable[[CorpusProgress], None] | None = None,
    timeout: float = 3600.0,
) -> Corpus:
    """Statistics of every head of a model over a corpus: exact sums, in any split over processes and runs.

    Under torchrun every rank takes its share of the documents; the result is the same for any number of ranks. A run
    that was interrupted or killed continues where it stopped when it is started again with the same arguments.

    Args:
        model: A folder, a name of the Hugging Face hub, an opened model, or a module that takes ids ``(b, t)``. None:
            the bundled model.
        data: A text file with one document a line, a .jsonl file, a folder of .txt files with one document each, or a
            list of texts or of token ids.
        out: The folder of the run, which all ranks see. Default: nothing is written, and nothing can be resumed.
        tokenizer: For a module: a tokenizer of transformers or tokenizers, or a function from a text to ids.
        field: Of a .jsonl object: the text.
        length: Tokens of a sequence; longer documents are cut into several. Default and limit: as many as the model
            takes, 1,024 where it does not say.
        batch: Sequences of equal length that run together at most.
        examples: Strongest ties that are stored of every head, one a document.
        redact: Store positions alone, and no text of the documents.
        device: Where a model that is opened by name runs. Default: on a GPU, if there is one.
        progress: Called after every chunk of documents.
        timeout: Seconds to wait for another rank's next file before a `TimeoutError`.

    Returns:
        The `Corpus`, the same on every rank.

    Raises:
        ValueError: The data hold no document, or the folder holds another run.

    Example:
        >>> from regard.nn import LanguageModel
        >>> model = LanguageModel(9, dim=8, layers=2, heads=2)
        >>> seen = regard.corpus(model, [[1, 2, 3, 1, 2, 3], [4, 5, 6, 7]])
        >>> seen.documents, seen.tokens, len(seen.heads)
        (2, 10, 4)
    """
    for name, number, least in (("length", length, 2), ("batch", batch, 1), ("examples", examples, 0)):
        if number is not None and (not isinstance(number, int) or number < least):
            raise ValueError(f"{name} must be a whole number >= {least}; got {number!r}.")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function of a CorpusProgress; got {progress!r}.")
    rank, ranks = _ranks()
    if out is None and ranks > 1:
        raise ValueError(f"a corpus run over {ranks} ranks needs a folder that all of them see: out=.")
    reader = as_corpus_model(model, tokenizer, device)
    longest = min([n for n in (length, reader.limit) if n], default=LENGTH)
    documents = open_documents(data, field)
    surveyed = survey(documents)
    settings = {
        "regard": __version__, "model": reader.name, "parameters": reader.checksum(), "data": documents.name,
        "checksum": surveyed.checksum, "documents": surveyed.documents, "length": longest, "batch": batch,
        "examples": examples, "redact": redact, "chunk": surveyed.cut,
    }  # fmt: skip
    share = range(rank, surveyed.chunks, ranks)
    if out is None:
        with _evaluation(reader.module):
            parts = (tally for _, tally in _tallies(reader, documents.chunks(), settings))
            return Corpus(settings, merged(_reported(parts, len(share), progress), examples))
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, and --out names the folder of a run: choose another --out.")
    path.mkdir(parents=True, exist_ok=True)
    # The other ranks of this run share the folder, so the first one alone holds the lock.
    with exclusive_lock(path) if rank == 0 else contextlib.nullcontext(), _evaluation(reader.module):
        folder = RunFolder(path, settings, surveyed.chunks, rank, timeout)
        todo = set(folder.missing(share))
        chunks = (chunk for chunk in documents.chunks() if chunk.number in todo)
        saved = (_saved(folder, *part) for part in _tallies(reader, chunks, settings))
        for _ in _reported(saved, len(share), progress, len(share) - len(todo)):
            pass
        folder.finish()
    return load_corpus(path)


def _ranks() -> tuple[int, int]:
    """This process's rank and their number: of the process group, or of torchrun."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _reported(parts: Iterator[Tally], chunks: int, progress: Any, done: int = 0) -> Iterator[Tally]:
    began, tokens = time.monotonic(), 0
    for part in parts:
        done, tokens = done + 1, tokens + part.rows
        if progress is not None:
            progress(CorpusProgress(done, chunks, tokens, time.monotonic() - began))
        yield part


def _saved(folder: RunFolder, chunk: Chunk, tally: Tally) -> Tally:
    folder.save_part(chunk.number, tally)
    return tally


class _Sequence(NamedTuple):
    document: int
    start: int
    source: str
    ids: list[int]


class _MeasuredPass(NamedTuple):
    """A few numbers of every layer of one pass, on their way to the host."""

    sequences: list[_Sequence]
    targets: Tensor
    names: list[str]
    heads: list[int]
    parts: list[Callable[[], list[Profile]]]  # some layers each


def _tallies(reader: CorpusModel, chunks: Iterable[Chunk], settings: dict[str, Any]) -> Iterator[tuple[Chunk, Tally]]:
    """The sums of every chunk, in order.

    The numbers of a pass are added up while a device computes the next pass, so that it never waits for the host.
    """
    behind: deque[tuple[Chunk, Tally, _MeasuredPass | None]] = deque()  # no pass: the chunk is complete

    def finished(left: int) -> Iterator[tuple[Chunk, Tally]]:
        while len(behind) > left:
            chunk, tally, measured = behind.popleft()
            if measured is None:
                yield chunk, tally
            else:
                _add(tally, reader, measured, settings["redact"])

    for chunk in chunks:
        tally = Tally(settings["examples"], documents=len(chunk.documents))
        for sequences in _batches(reader, chunk, settings):
            behind.append((chunk, tally, _measure(tally, reader, sequences)))
            yield from finished(1)
        behind.append((chunk, tally, None))
    yield from finished(0)


def _batches(reader: CorpusModel, chunk: Chunk, settings: dict[str, Any]) -> Iterator[list[_Sequence]]:
    """Sequences that run together: within a chunk alone, since rounding in a model depends on them."""
    by_length: dict[int, list[_Sequence]] = {}
    for document in chunk.documents:
        ids = reader.ids(document.content)
        for start in range(0, len(ids), settings["length"]):
            piece = ids[start : start + settings["length"]]
            by_length.setdefault(len(piece), []).append(_Sequence(document.number, start, document.source, piece))
    for _, sequences in sorted(by_length.items()):
        for start in range(0, len(sequences), settings["batch"]):
            yield sequences[start : start + settings["batch"]]


def _add(tally: Tally, reader: CorpusModel, measured: _MeasuredPass, redact: bool) -> None:
    """Add the numbers of one pass, once they have arrived."""
    excerpts = None if redact else [reader.tokens_of(sequence.ids) for sequence in measured.sequences]
    places = [(sequence.document, sequence.start, sequence.source) for sequence in measured.sequences]
    parts = (part() for part in measured.parts)
    tally.add(measured.names, measured.heads, parts, measured.targets, places, excerpts)


def _measure(tally: Tally, reader: CorpusModel, sequences: list[_Sequence]) -> _MeasuredPass:
    """Run the model over sequences of equal length. Nothing is read from a device: it never waits for the host."""
    ids = torch.tensor([sequence.ids for sequence in sequences], device="cpu")
    device, length = device_of(reader.module), ids.shape[1]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RefusedWarning)  # named in the result
        with record(reader.module) as seen:
            reader.module(_sent(ids, device))
    tally.refused |= dict(seen.refused)
    layers = []
    for layer in seen.layers:
        if layer.kind == "self" and layer.shape[2:] == (length, length):
            layers.append(layer)
        else:
            tally.refused[layer.name] = "its rows and keys are not the tokens of one text"
    if not layers:
        why = next(iter(tally.refused.values()), "it has no self-attention")
        raise ValueError(f"{reader.name} has no attention that can be counted: {why}.")
    targets = targets_of(ids)
    on_device = _sent(targets, device)
    parts = [
        sent_to_host([profile(layer.weights, on_device) for layer in layers[n : n + SENT_TOGETHER]])
        for n in range(0, len(layers), SENT_TOGETHER)
    ]
    names, heads = [layer.name for layer in layers], [layer.shape[1] for layer in layers]
    return _MeasuredPass(sequences, targets, names, heads, parts)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, which the host does not wait for."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@contextlib.contextmanager
def _evaluation(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode: dropout would make every run another one."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
