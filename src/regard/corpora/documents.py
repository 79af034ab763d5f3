"""The documents of a corpus: lines of a text file, .txt files of a folder, texts of a .jsonl file, or a list in memory.

Documents are read twice, in order, and never held together: once to count them and to take their checksum, once to run
the model on them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .._io import decode

__all__ = ["Chunk", "Document", "DocumentReader", "Survey", "open_documents", "survey"]

#: Endings of files whose lines are no documents.
_OTHER_FORMATS = (".json", ".gz", ".bz2", ".xz", ".zst", ".zip", ".parquet", ".arrow")

#: A chunk ends with the document that brings it to this many letters (or token ids), or to this many documents.
CHUNK_SIZE, CHUNK_DOCUMENTS = 2**16, 256


class Document(NamedTuple):
    """A text, or token ids, and where it stands: a line of a file, or a file."""

    number: int
    source: str
    content: str | Sequence[int]


class Chunk(NamedTuple):
    """Adjacent documents: the unit of work of a rank, and of a file."""

    number: int
    documents: list[Document]


@dataclass(frozen=True)
class Survey:
    """The results of one reading of all documents."""

    documents: int
    chunks: int
    checksum: str
    cut: tuple[int, int]  # size and documents of a chunk, at most


class DocumentReader:
    """Documents that can be read again and again, in one order."""

    def __init__(self, name: str, read: Any) -> None:
        self.name, self._read = name, read

    def __iter__(self) -> Iterator[Document]:
        number = 0
        for source, content in self._read():
            if content if not isinstance(content, str) else content.strip():
                yield Document(number, source, content)
                number += 1

    def chunks(self) -> Iterator[Chunk]:
        """The documents in chunks. The cut depends on the documents alone, so every rank and every run has the same."""
        documents: list[Document] = []
        number = size = 0
        for document in self:
            documents.append(document)
            size += len(document.content)
            if size >= CHUNK_SIZE or len(documents) >= CHUNK_DOCUMENTS:
                yield Chunk(number, documents)
                documents, number, size = [], number + 1, 0
        if documents:
            yield Chunk(number, documents)


def open_documents(
    data: str | os.PathLike[str] | Sequence[str] | Sequence[Sequence[int]], field: str
) -> DocumentReader:
    """Documents of a file, of a folder or of a list.

    Args:
        data: A text file with one document a line, a .jsonl file with one object a line, a folder of .txt files with
            one document each, or a list of texts or of token ids.
        field: The field of a .jsonl object that holds its text.

    Raises:
        FileNotFoundError: There is no such file or folder.
        TypeError: A list holds something else.
        ValueError: The folder has no .txt file, or the file is of another kind.
    """
    if isinstance(data, Mapping | bytes) or not isinstance(data, str | os.PathLike | Iterable):
        raise TypeError(
            f"data must be a path, a list of texts or a list of lists of token ids; got {type(data).__name__}."
        )
    if not isinstance(data, str | os.PathLike):
        items = [_checked(item, n) for n, item in enumerate(data)]
        return DocumentReader("a list", lambda: ((f"item {n}", item) for n, item in enumerate(items)))
    path = Path(data)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.txt") if file.is_file())
        if not files:
            raise ValueError(f"{path} must hold .txt files, one document each; got none.")
        return DocumentReader(path.name, lambda: ((str(f.relative_to(path)), decode(f.read_bytes(), f)) for f in files))
    if not path.is_file():
        piped = path.exists() or str(path) == "-"
        state = "documents are read twice, which a pipe cannot be: save them first" if piped else "it does not exist"
        raise FileNotFoundError(f"{path} must be a text file, a .jsonl file or a folder of .txt files; {state}.")
    if path.suffix.lower() in _OTHER_FORMATS:
        raise ValueError(
            f"{path} must be a text file with a document a line, or a .jsonl file with an object a line; got a file "
            f"that ends in {path.suffix}. Unpack or convert it, or name it .jsonl if that is what it holds."
        )
    if path.suffix.lower() == ".jsonl":
        return DocumentReader(path.name, lambda: _objects(path, field))
    return DocumentReader(path.name, lambda: _lines(path))


def survey(documents: DocumentReader) -> Survey:
    """Count the documents and take their checksum."""
    digest, count, chunks = hashlib.sha256(), 0, 0
    for chunk in documents.chunks():
        chunks += 1
        count += len(chunk.documents)
        for document in chunk.documents:
            content = document.content
            data = (
                _encoded(document, documents.name) if isinstance(content, str) else json.dumps(list(content)).encode()
            )
            digest.update(len(data).to_bytes(8, "little") + data)
    if not count:
        raise ValueError(f"{documents.name} must hold at least one document; all of it is blank.")
    return Survey(count, chunks, digest.hexdigest(), (CHUNK_SIZE, CHUNK_DOCUMENTS))


def _encoded(document: Document, name: str) -> bytes:
    assert isinstance(document.content, str)
    try:
        return document.content.encode()
    except UnicodeEncodeError as error:  # of a \\ud83d without its other half in JSON, where a text was cut
        raise ValueError(
            f"{document.source} of {name} must be Unicode text; its character {error.start} is "
            f"{document.content[error.start]!a}, half of a pair. Leave it out."
        ) from None


def _checked(item: Any, n: int) -> Any:
    if isinstance(item, str):
        return item
    ids = item.tolist() if hasattr(item, "tolist") else item
    if isinstance(ids, list | tuple) and all(type(token) is int for token in ids):
        return ids
    raise TypeError(
        f"data must be a path, a list of texts or a list of lists of token ids; got item {n}: {item!r:.60}."
    )


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for n, line in enumerate(file, 1):
            yield f"line {n}", decode(line.rstrip(b"\r\n"), f"line {n} of {path}")


def _objects(path: Path, field: str) -> Iterator[tuple[str, str]]:
    for source, line in _lines(path):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{source} of {path} must be a JSON object: {error}.") from None
        text = item.get(field) if isinstance(item, dict) else None
        if not isinstance(text, str):
            got = ", ".join(map(repr, item)) if isinstance(item, dict) else type(item).__name__
            got = f"{type(text).__name__} there" if isinstance(item, dict) and field in item else got
            raise ValueError(
                f"{source} of {path} must be an object with a text under {field!r}; got {got:.120}. "
                "Another field is named with --field (field=)."
            )
        yield source, text
