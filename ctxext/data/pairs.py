"""Documents with their summaries: GovReport and other pairs on the Hub, local files, and an offline corpus.

The offline corpus `docstrings` is the pinned sympy wheel: a module's source without its docstring is the document, and
the module's docstring is the summary. Its splits are those of `sympy-source`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ctxext.data.offline import SPLITS, sympy_source
from ctxext.data.rows import read_rows, rows_location
from ctxext.data.sources import Source

DOCSTRINGS = "docstrings"


@dataclass(frozen=True, kw_only=True)
class PairCorpus:
    """What is known of a corpus of pairs.

    Attributes:
        split: The split that evaluations read.
        document_column: The column of the document; None in a corpus that has no columns.
        summary_column: The column of the summary.
        min_summary_words: Pairs with fewer words in the summary are skipped: there is nothing to compare with.
    """

    split: str | None = None
    document_column: str | None = "document"
    summary_column: str | None = "summary"
    min_summary_words: int = 1


PAIR_CORPORA: dict[str, PairCorpus] = {
    "govreport": PairCorpus(split="test", document_column="report"),
    DOCSTRINGS: PairCorpus(split="held-out", document_column=None, summary_column=None, min_summary_words=20),
}


@dataclass(frozen=True)
class Pair:
    """A document and its summary, with an id that is unique and stable within its corpus."""

    id: str
    document: str
    summary: str


@dataclass(frozen=True)
class Pairs:
    """An opened corpus of pairs.

    Attributes:
        name: What users call it.
        source: Where its text comes from, in words that go into a result.
        read: Starts at the first pair each time.
        min_summary_words: See `PairCorpus`; `read` yields every pair, so that the short ones can be counted.
    """

    name: str
    source: dict[str, Any]
    read: Callable[[], Iterator[Pair]]
    min_summary_words: int

    def is_long_enough(self, pair: Pair) -> bool:
        """Say whether a pair's summary is long enough, and its document is not empty."""
        return bool(pair.document.strip()) and len(pair.summary.split()) >= self.min_summary_words


def open_pairs(source: Source) -> Pairs:
    """Open a corpus of pairs; nothing is read yet.

    Args:
        source: A source of kind `summary`: `govreport`, `docstrings`, another Hub repository by its `data_id`, or a
            local `.jsonl`, `.jsonl.zst`, `.json` or `.parquet` file.

    Raises:
        ValueError: If there is no such source, or an option cannot take effect.
    """
    if source.data == DOCSTRINGS and source.data_id is None:
        return _open_docstrings(source)
    known = PAIR_CORPORA.get(source.data, PairCorpus())
    columns = (
        source.document_column or known.document_column or "document",
        source.summary_column or known.summary_column or "summary",
    )
    location = rows_location(source)
    where: dict[str, Any] = {"kind": "local", "name": Path(source.data).name}
    if "data_files" not in location:
        where = {
            "kind": "hub",
            "name": source.data,
            "id": location["path"],
            "config": location.get("name"),
            "revision": location.get("revision"),
            "split": location["split"],
        }
    described = {**where, "document_column": columns[0], "summary_column": columns[1]}
    return Pairs(where["name"], described, partial(_row_pairs, source, columns), known.min_summary_words)


def _open_docstrings(source: Source) -> Pairs:
    useless = [
        name
        for name in ("document_column", "summary_column", "data_config", "data_revision")
        if getattr(source, name) is not None
    ]
    if useless:
        raise ValueError(
            f"{', '.join(useless)} cannot take effect with the data {DOCSTRINGS!r}: it is read from this machine and "
            "has no columns"
        )
    split = source.split or "train"
    if split not in SPLITS:
        raise ValueError(f"{DOCSTRINGS} has no split {split!r}; allowed: {', '.join(SPLITS)}")
    described = {"kind": "offline", "name": DOCSTRINGS, "split": split, "comparable": True}
    return Pairs(DOCSTRINGS, described, partial(docstring_pairs, split), PAIR_CORPORA[DOCSTRINGS].min_summary_words)


def _row_pairs(source: Source, columns: tuple[str, str]) -> Iterator[Pair]:
    for name, row in read_rows(source):
        document, summary = (
            _text(row, column, option, name)
            for column, option in zip(columns, ("document_column", "summary_column"), strict=True)
        )
        yield Pair(name, document, summary)


def _text(row: Mapping[str, Any], column: str, option: str, where: str) -> str:
    value = row.get(column)
    if isinstance(value, str):
        return value
    found = f"holds {type(value).__name__}, not text, in" if column in row else "has no"
    dashed = option.replace("_", "-")
    raise ValueError(f"{where} {found} column {column!r}; it has {', '.join(row)}: state {option} (--{dashed})")


def docstring_pairs(split: str) -> Iterator[Pair]:
    """Yield every module of the pinned sympy wheel with its docstring, in path order.

    Args:
        split: `held-out` (one in ten, for evaluation), `train` or `all`.

    Raises:
        ValueError: If sympy is not the pinned wheel.
    """
    for document in sympy_source(split):
        source, docstring = split_docstring(document.text)
        yield Pair(document.id, source, docstring)


def split_docstring(source: str) -> tuple[str, str]:
    """Return a Python module's source without its docstring, and the docstring without its indentation.

    All else stays as it is, character by character. A module without a docstring gives its source and "".

    Raises:
        SyntaxError: If the source is not Python.
    """
    module = ast.parse(source)
    docstring = ast.get_docstring(module)
    if docstring is None:
        return source, ""
    statement = module.body[0]
    assert statement.end_lineno is not None and statement.end_col_offset is not None, "ast.parse states the ends"
    # ast counts UTF-8 bytes, and lines that end where bytes.splitlines ends them.
    lines = source.encode("utf-8").splitlines(keepends=True)
    first, last = statement.lineno - 1, statement.end_lineno - 1
    before = b"".join(lines[:first]) + lines[first][: statement.col_offset]
    after = lines[last][statement.end_col_offset :] + b"".join(lines[last + 1 :])
    # The rest of the docstring's own line: a semicolon would end no statement, and an empty line would betray it.
    rest = re.sub(rb"\A[ \t]*;?[ \t]*(?:\r\n|\r|\n)?", b"", after)
    return (before + rest).decode("utf-8"), docstring
