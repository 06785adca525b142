"""The options of an evaluation that reads a corpus, and the corpus they choose."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from ctxext.data.corpora import CORPORA, Corpus, open_corpus
from ctxext.data.documents import documents_hash
from ctxext.evaluation.base import Evaluation, Plan, option
from ctxext.evaluation.windows import evenly_spaced

Row = TypeVar("Row")


def naming(read: Callable[[], Iterator[Row]], data: str) -> Iterator[Row]:
    """Yield what `read` does; an error that does not name what was read, as those of libraries, is made to.

    Raises:
        ValueError: if it cannot be read, with `data` in the message.
    """
    try:
        yield from read()
    except ConnectionError as error:
        raise ValueError(f"--data {data} cannot be read: {error}; check the network, or give a local file") from error
    except (ValueError, OSError) as error:
        if Path(data).name in str(error):
            raise
        raise ValueError(f"--data {data} cannot be read: {error}") from error


def check_data(data: str, read: Callable[[], Iterator[Any]]) -> None:
    """Read the first row of some data, so that what is not there is refused before a checkpoint is loaded.

    Raises:
        ValueError: if there is none, or it cannot be read.
    """
    path = Path(data).expanduser()
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError(f"--data {data} is an empty file: use other data")
    if next(read(), None) is None:
        what = "has no .txt file" if path.is_dir() else "has no document"
        raise ValueError(f"--data {data} {what}: use other data")


def open_named(data: str, *, column: str | None = None, **options: str | None) -> Corpus:
    """Open a corpus as `open_corpus` does, with every error of reading it naming `data`.

    Raises:
        ValueError: if there is none of that name, or an option cannot take effect.
    """
    path = Path(data).expanduser()
    if column is not None and data not in CORPORA and (path.is_dir() or path.suffix == ".txt"):
        raise ValueError(f"--column cannot take effect with the data {data!r}: text files have no columns")
    corpus = open_corpus(data, column=column, **options)
    return replace(corpus, read=partial(naming, corpus.read, data))


@dataclass(frozen=True, kw_only=True)
class CorpusEvaluation(Evaluation):
    """An evaluation of text; none of these options is part of the protocol, for the result has the corpus' hash."""

    data: str = option(
        "sympy-source", "a corpus by name, or a .txt, .jsonl, .jsonl.zst, .parquet file or a folder", scored=False
    )
    split: str | None = option(None, "another split of the corpus", scored=False)
    column: str | None = option(None, "the column that holds the text", scored=False)
    data_id: str | None = option(None, "another Hub repository for the corpus", scored=False)
    data_config: str | None = option(None, "another configuration of the Hub repository", scored=False)
    data_revision: str | None = option(None, "another revision of the Hub repository", scored=False)

    def open_corpus(self) -> Corpus:
        """Return the corpus.

        Raises:
            ValueError: if there is none of that name, or an option cannot take effect.
        """
        return open_named(
            self.data,
            split=self.split,
            column=self.column,
            data_id=self.data_id,
            data_config=self.data_config,
            data_revision=self.data_revision,
        )

    def check(self) -> None:
        """Read the corpus' first document."""
        check_data(self.data, self.open_corpus().documents)

    def spaced_segments(self, tokenizer: Any, plan: Plan, length: int, count: int) -> list[list[int]]:
        """Return segments of documents, spread evenly over all tokens that have `length` tokens before them.

        Args:
            tokenizer: of the model; no begin-of-sequence token is put before a segment.
            plan: is told the corpus, and the documents that are too short.
            length: tokens of a segment before its last one.
            count: segments.

        Returns:
            `count` lists of `length + 1` tokens.

        Raises:
            ValueError: if the corpus has fewer such tokens.
        """
        corpus = self.open_corpus()
        kept, documents = [], []
        longest = 0
        for document in corpus.documents():
            ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
            longest = max(longest, len(ids))
            if len(ids) <= length:
                plan.skipped["documents_too_short"] = plan.skipped.get("documents_too_short", 0) + 1
                continue
            kept.append(document)
            documents.append(ids)
        stops = list(accumulate(len(ids) - length for ids in documents))  # places where a segment can end
        total = stops[-1] if stops else 0
        if total < count:
            raise ValueError(
                f"{self.data} has {total} tokens with {length} before them; {count} segments are wanted (its longest "
                f"document has {longest} tokens): use a shorter length, fewer --segments or more data"
            )
        plan.corpus = {
            "name": corpus.name,
            "source": corpus.source,
            "hash": documents_hash(kept),
            "documents": len(kept),
            "tokens": sum(map(len, documents)),
        }
        segments = []
        for place in evenly_spaced(total, count):
            row = bisect_right(stops, place)
            start = place - (stops[row - 1] if row else 0)
            segments.append(documents[row][start : start + length + 1])
        return segments
