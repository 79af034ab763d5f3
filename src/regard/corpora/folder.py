"""The folder of a corpus run, which a kill at any moment leaves resumable.

    run.json          what is run on what: settings, checksums of the model's parameters and of the documents
    part-000012.json  the tally of a chunk of documents, until all chunks are there
    corpus.json       the tally of all documents

Every file is written atomically and carries a checksum. Ranks share the folder and nothing else: each writes the parts
of its own chunks. The first rank alone writes run.json, merges the parts once all are there, and removes what is left;
the others wait for what it writes, so no rank ever takes a file away that another one writes or reads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .._io import atomic_write, partial_files
from ..learn.checkpoint import read_json, seal
from .tally import Tally

__all__ = ["FORMAT", "RunFolder", "is_corpus", "read_result"]

FORMAT = "regard corpus 1"
RUN, RESULT, PART = "run.json", "corpus.json", "part-{:06}.json"

#: Seconds between two looks for the parts of other ranks.
POLL = 0.2


def is_corpus(folder: Path) -> bool:
    """Whether a folder holds a corpus run, complete or begun."""
    return (folder / RESULT).is_file() or (folder / RUN).is_file()


class RunFolder:
    """The files of one run.

    Args:
        path: The folder; created if it does not exist.
        settings: What determines the result.
        chunks: Number of parts.
        rank: The rank of this process; the first begins and finishes the run.
        timeout: Seconds without a new file before waiting for other ranks ends.

    Raises:
        ValueError: The folder holds a run with other settings, or something else.
        TimeoutError: The first rank did not begin the run.
    """

    def __init__(self, path: Path, settings: dict[str, Any], chunks: int, rank: int, timeout: float) -> None:
        self.path, self.settings, self.chunks, self.rank, self.timeout = path, settings, chunks, rank, timeout
        path.mkdir(parents=True, exist_ok=True)
        run = path / RUN
        if rank == 0 and not run.exists():
            if any(not file.name.startswith(".") for file in path.iterdir()):
                raise ValueError(
                    f"{path} must be empty or hold a corpus run; it holds something else. Choose another --out."
                )
            _write(run, {"settings": settings})
        self._wait_for(lambda: [] if run.exists() else [RUN])
        _check_settings(path, _read(run)["settings"], settings)

    def is_done(self, chunk: int) -> bool:
        return (self.path / PART.format(chunk)).exists()

    def save_part(self, chunk: int, tally: Tally) -> None:
        _write(self.path / PART.format(chunk), {"chunk": chunk, "tally": tally.to_json()})

    def is_complete(self) -> bool:
        return (self.path / RESULT).exists()

    def missing(self, share: range | None = None) -> list[int]:
        """Chunks without a part, of a share or of all; none once the result is there."""
        # Parts are removed after the result was written, so its existence is asked last.
        chunks = [n for n in (range(self.chunks) if share is None else share) if not self.is_done(n)]
        return [] if self.is_complete() else chunks

    def finish(self) -> None:
        """Wait for the parts of all ranks; the first rank merges them into the result, the others wait for it.

        Raises:
            TimeoutError: No part, or no result, came for `timeout` seconds.
        """
        self._wait_for(lambda: [PART.format(n) for n in self.missing()])
        if self.rank != 0:
            self._wait_for(lambda: [] if self.is_complete() else [RESULT])
            return
        if not self.is_complete():
            tally = merged(self._parts(), self.settings["examples"])
            _write(self.path / RESULT, {"settings": self.settings, "tally": tally.to_json()})
        for n in range(self.chunks):
            (self.path / PART.format(n)).unlink(missing_ok=True)
        # All ranks have written what they write: temporary files are those of writers that were killed.
        for name in (RUN, RESULT, PART.format(0).replace("000000", "*")):
            for partial in partial_files(self.path / name):
                partial.unlink(missing_ok=True)

    def _parts(self) -> Iterator[Tally]:
        for n in range(self.chunks):
            yield Tally.from_json(_read(self.path / PART.format(n))["tally"])

    def _wait_for(self, missing_files: Callable[[], list[str]]) -> None:
        """Wait until other ranks have written the files that are missing."""
        missing, since = missing_files(), time.monotonic()
        while missing:
            time.sleep(POLL)
            now = missing_files()
            if now != missing:
                missing, since = now, time.monotonic()
            elif time.monotonic() - since > self.timeout:
                raise TimeoutError(
                    f"{len(missing)} files of other ranks did not come within {self.timeout:g} s, the first is "
                    f"{missing[0]}. Run the same command again: it continues from the parts in {self.path}."
                )


def merged(parts: Iterator[Tally], examples: int) -> Tally:
    """The tally of all parts."""
    tally = Tally(examples)
    for part in parts:
        tally = tally.merge(part)
    return tally


def read_result(folder: Path) -> tuple[dict[str, Any], Tally]:
    """Settings and tally of a complete run."""
    path = folder if folder.is_file() else folder / RESULT
    if not path.exists():
        state = "is not complete: run the same command again" if (folder / RUN).exists() else f"holds no {RESULT}"
        raise FileNotFoundError(f"{folder} must hold a complete corpus run; it {state}.")
    content = _read(path)
    return content["settings"], Tally.from_json(content["tally"])


def _write(path: Path, content: dict[str, Any]) -> None:
    # Through JSON first: a checksum is that of the values as they are read again, where tuples are lists.
    plain = json.loads(json.dumps({"format": FORMAT, **content}))
    atomic_write(path, [json.dumps(seal(plain), ensure_ascii=True, sort_keys=True).encode()])


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} must be a file of the format {FORMAT!r}; it is not.")
    if seal(content)["checksum"] != content.get("checksum"):
        raise ValueError(f"{path} is damaged or was edited: its checksum differs. Delete it to compute it again.")
    return content


def _check_settings(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in json.loads(json.dumps(new)).items():
        if old.get(name) != value:
            raise ValueError(
                f"{path} was begun with another {name}: {old.get(name)!r:.60}, got {value!r:.60}. Choose another "
                "folder, or the same settings to continue."
            )
