"""Questions about documents: TriviaQA from the Hub, and local files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ctxext.data.corpora import CORPORA, HubCorpus
from ctxext.data.rows import read_rows, rows_location
from ctxext.data.sources import Source

TRIVIAQA = "triviaqa"
PROMPT = "\n\nQuestion: {question}\nAnswer:"
# Where TriviaQA keeps the text of its evidence.
EVIDENCE = (("entity_pages", "wiki_context"), ("search_results", "search_context"))
# Where a row is from, in words; its id; its columns.
Rows = Iterator[tuple[str, str, Mapping[str, Any]]]
FORMATS = (".jsonl", ".parquet")
_EXPECTED = "rows need question, answers (a list of texts; or answer) and document (or documents, a list of texts)"


@dataclass(frozen=True)
class Question:
    """A question about a document.

    Attributes:
        id: Unique and stable within its data.
        document: The text to read.
        prompt: What stands behind the document, as text.
        query: What to search the document for.
        answers: Those accepted.
        depth: Where the document states the answer, 0 (start) to 1 (end); None where nobody planted it.
        statements: The characters from and to which each statement of the planted answer runs.
    """

    id: str
    document: str
    prompt: str
    query: str
    answers: tuple[str, ...]
    depth: float | None = None
    statements: tuple[tuple[int, int], ...] = ()


def read_questions(
    data: str,
    *,
    split: str | None = None,
    data_id: str | None = None,
    data_config: str | None = None,
    data_revision: str | None = None,
) -> Iterator[Question]:
    """Yield the questions of a data set, streamed; one without any text to read has an empty document.

    Args:
        data: `triviaqa`, or a `.jsonl` or `.parquet` file whose rows have `question`, `answers` (or `answer`) and
            `document` (or `documents`, which are joined), or TriviaQA's columns.
        split: Another split of the Hub repository.
        data_id: Another Hub repository, or a folder of files like its.
        data_config: Another configuration of the Hub repository.
        data_revision: Another revision of the Hub repository.

    Raises:
        ValueError: If there is no such data, or a row lacks something; it names the file and the line.
    """
    if data == TRIVIAQA:
        known = CORPORA[TRIVIAQA]
        assert isinstance(known, HubCorpus)
        source = Source(
            data=data,
            split=split or known.split,
            data_id=data_id,
            data_config=data_config,
            data_revision=data_revision,
        )
        rows = _rows(source, rows_location(source)["path"])
    else:
        rows = _file_rows(data)
    for where, row_id, row in rows:
        yield _question(row, row_id, where)


def _rows(source: Source, name: str) -> Rows:
    for row_id, row in read_rows(source):
        yield f"{name}, row {row_id.rpartition(':')[2]},", row_id, row


def _file_rows(data: str) -> Rows:
    path = Path(data).expanduser()
    if not path.is_file():
        raise ValueError(f"--data {data!r} is neither planted, nor {TRIVIAQA}, nor a file ({' or '.join(FORMATS)})")
    if path.suffix not in FORMATS:
        raise ValueError(f"cannot read questions from {path}: allowed are {' and '.join(FORMATS)}")
    return _json_lines(path) if path.suffix == ".jsonl" else _rows(Source(data=str(path)), str(path))


def _json_lines(path: Path) -> Rows:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number},"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON ({error.msg}): one object per line is expected") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where} holds {type(row).__name__}, not an object: {_EXPECTED}")
            yield where, f"{path.name}:{number}", row


def _question(row: Mapping[str, Any], row_id: str, where: str) -> Question:
    """Return the question of a row.

    Raises:
        ValueError: If something is missing or no text.
    """
    question, answers, document = row.get("question"), _answers(row), _document(row)
    wrong = []
    if not (isinstance(question, str) and question.strip()):
        wrong.append("question")
    if not (answers and all(isinstance(answer, str) for answer in answers)):
        wrong.append("answers")
    if not (document is not None and all(isinstance(part, str) for part in document)):
        wrong.append("document")
    if wrong:
        raise ValueError(f"{where} has no {' and no '.join(wrong)} that is text: {_EXPECTED}")
    assert isinstance(question, str) and document is not None
    text = "\n\n".join(part for part in document if part.strip())
    return Question(row_id, text, PROMPT.format(question=question.strip()), question, tuple(answers))


def _answers(row: Mapping[str, Any]) -> Sequence[Any]:
    """Return the accepted answers; of TriviaQA the normalized aliases, as its official script takes them."""
    value = row.get("answers", row.get("answer"))
    if isinstance(value, Mapping):
        value = value.get("normalized_aliases") or value.get("aliases")
    if isinstance(value, str):
        return [value] if value.strip() else []
    return value if isinstance(value, Sequence) else []


def _document(row: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the parts of a row's document; None if it has none."""
    if "document" in row:
        return [row["document"]]
    if "documents" in row:
        return row["documents"] if isinstance(row["documents"], list) else None
    if not any(name in row for name, _ in EVIDENCE):
        return None
    return list(chain.from_iterable(_evidence(row.get(name), column) for name, column in EVIDENCE))


def _evidence(pages: Any, column: str) -> list[Any]:
    """Return a column of what `datasets` gives as lists by column, and files as a list of rows."""
    if isinstance(pages, Mapping):
        return list(pages.get(column) or [])
    return [page.get(column) for page in pages or []]
