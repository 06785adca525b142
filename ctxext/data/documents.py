"""A document, the hash of a list of them, and the readers of local files.

Local files are the equals of named corpora: a `.txt` file is one document, a folder is one document per `.txt` file
below it, and `.jsonl`, `.jsonl.zst` and `.parquet` files give one document per row.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARQUET_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Document:
    """One text with an id that is unique and stable within its corpus."""

    id: str
    text: str


def documents_hash(documents: Iterable[Document]) -> str:
    """Return the sha256 over the ids and texts of `documents`, in order: the identity of what was really read."""
    digest = hashlib.sha256()
    for document in documents:
        text_hash = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).hexdigest()
        digest.update(f"{text_hash}  {document.id}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def row_text(row: Mapping[str, Any], column: str, where: str) -> str:
    """Return the text of one row.

    Args:
        row: the row's values by column name.
        column: a column; `a.b` descends into nested columns, `a,b` joins several; lists are joined by blank lines.
        where: what to name in an error, for example `file.jsonl line 3`.

    Raises:
        ValueError: if the column is missing or holds no text.
    """
    parts: list[str] = []
    for name in column.split(","):
        value: Any = row
        for key in name.strip().split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise ValueError(f"{where} has no column {name.strip()!r}; it has {', '.join(row)}: pass --column")
            value = value[key]
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: column {name.strip()!r} holds {type(value).__name__}, not text: pass --column")
        parts.extend(texts)
    return "\n\n".join(parts)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from error


def _txt(path: Path, column: str) -> Iterator[Document]:
    yield Document(path.name, _read_text(path))


def _folder(path: Path, column: str) -> Iterator[Document]:
    for file in sorted(path.rglob("*.txt"), key=lambda file: file.relative_to(path).as_posix()):
        yield Document(file.relative_to(path).as_posix(), _read_text(file))


def _json_rows(lines: Iterable[str], path: Path, column: str) -> Iterator[Document]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON ({error.msg}): one object per line is expected") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} holds {type(row).__name__}, not an object with a {column!r} key")
        yield Document(f"{path.name}:{number}", row_text(row, column, where))


def _jsonl(path: Path, column: str) -> Iterator[Document]:
    with path.open(encoding="utf-8") as lines:
        yield from _json_rows(lines, path, column)


def _jsonl_zst(path: Path, column: str) -> Iterator[Document]:
    import zstandard

    with path.open("rb") as compressed:
        try:
            with zstandard.ZstdDecompressor().stream_reader(compressed, read_across_frames=True) as stream:
                yield from _json_rows(io.TextIOWrapper(stream, encoding="utf-8"), path, column)
        except zstandard.ZstdError as error:
            raise ValueError(f"{path} is not a zstandard file: {error}") from error


def _parquet(path: Path, column: str) -> Iterator[Document]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=PARQUET_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield Document(f"{path.name}:{number}", row_text(row, column, f"{path} row {number}"))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error


# Longest suffix first, because `.jsonl.zst` also ends in `.zst`.
READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".jsonl.zst": _jsonl_zst,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".txt": _txt,
}


def read_local(path: Path, column: str) -> Iterator[Document]:
    """Yield the documents of a local file or folder.

    Args:
        path: a `.txt`, `.jsonl`, `.jsonl.zst` or `.parquet` file, or a folder of `.txt` files.
        column: the column that holds the text, for the formats that have columns.

    Raises:
        ValueError: if the kind of file is not known, or its content is not what its name says.
    """
    if path.is_dir():
        yield from _folder(path, column)
        return
    reader = next((reader for suffix, reader in READERS.items() if path.name.endswith(suffix)), None)
    if reader is None:
        raise ValueError(f"cannot read {path}: allowed are {', '.join(READERS)} and a folder of .txt files")
    yield from reader(path, column)
