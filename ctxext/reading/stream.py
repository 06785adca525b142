"""Documents of corpora too large to tokenize beforehand: drawn as rows come to them, and dropped when those leave.

Every process streams a share of its own of each source through `datasets`: whole files where the processes divide
their number, every G-th document otherwise. Within a pass no document is read twice. What is kept is a block of
`buffer` documents a source as text, and the documents that rows are reading as tokens: a row takes the next document
of its process when it needs one, so that none is kept for a slower row, whatever the corpus' length.

`datasets` can say where it is in a corpus but not what is in its shuffle buffer. So the documents are shuffled block
by block, in an order that follows from the seed, and the files of a corpus anew in each pass: where a block begins and
how much of it was drawn is all there is to save, beside the documents being read.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ctxext.data import offline
from ctxext.data.corpora import CORPORA, open_corpus
from ctxext.data.documents import read_local, row_text
from ctxext.data.order import pass_order
from ctxext.data.rows import rows_location
from ctxext.data.sources import Source
from ctxext.data.supervised import encode_row
from ctxext.data.tokens import TokenRules, file_identity, least_tokens, tokenize, tokenizer_hash
from ctxext.reading.server import Documents, Tokens

logger = logging.getLogger(__name__)

_TOKENIZED_AT_ONCE = 16
_SEEDS_APART = 2**20  # passes of one seed before another's order of files comes round


@dataclass(frozen=True)
class _Document:
    """The tokens of a document, `(tokens,)` uint32, the last `question` of which ask and answer a question."""

    tokens: Tokens
    question: int = 0

    def packed(self) -> list[Any]:
        return [self.question, base64.b64encode(zlib.compress(self.tokens.astype("<u4").tobytes(), 1)).decode()]

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> _Document:
        question, text = packed
        return cls(np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<u4"), question)


@dataclass
class _At:
    """Where a source is: pass, block (since the run began), and what was drawn.

    `start` is the state of `datasets` before the block, None at a pass' beginning; `index` of the block's documents
    were drawn. `seen`, `kept` and `longest` (tokens) are of this pass, `tokens` of all.
    """

    number: int = 0
    block: int = 0
    start: dict[str, Any] | None = None
    index: int = 0
    seen: int = 0
    kept: int = 0
    longest: int = 0
    tokens: int = 0


@dataclass
class _Stream:
    """This process's share of one source, for ever; `number` is the source's."""

    source: Source
    number: int
    tokenizer: Any
    rules: TokenRules
    seed: int
    buffer: int
    rank: int
    processes: int
    at: _At = field(default_factory=_At)

    def __post_init__(self) -> None:
        self._bos, self._eos = self.rules.ends(self.tokenizer)
        self._least = least_tokens(self.source)
        self._documents = self._read()

    def __next__(self) -> _Document:
        return next(self._documents)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What tells whether the source has changed: its files' sizes and times, or its commit on the Hub."""
        return {"files": file_identity(self.source), "commit": self._where.get("commit")}

    @cached_property
    def _where(self) -> dict[str, Any]:
        return {} if self.source.kind != "text" else open_corpus(self.source.data, **_options(self.source)).source

    @cached_property
    def _rows(self) -> Any:
        return _open_rows(self.source, self._where)

    def check(self, identity: Mapping[str, Any]) -> None:
        """Raise a ValueError if the source is no longer what it was."""
        files = file_identity(self.source)
        if identity["files"] == files and identity["commit"] == self._where.get("commit"):
            return
        what = "vanished" if identity["files"] and not files else "changed"
        remedy = f"state data_revision: {identity['commit']}" if identity["commit"] else "put back what was there"
        raise ValueError(
            f"data {self.source.data!r} has {what} since this run began, so that it cannot go on with the documents "
            f"that it would have read: {remedy}, or begin anew in another output_dir"
        )

    def go_to(self, at: _At) -> None:
        """Go on from where a source was."""
        self.at, self._documents = at, self._read()

    def _read(self) -> Iterator[_Document]:
        while True:
            dataset = self._open()
            rows = iter(dataset)
            while block := list(islice(rows, self.buffer)):
                order = pass_order(np.arange(len(block), dtype=np.int64), self.seed, self.number, self.at.block)
                block = [block[index] for index in order[self.at.index :][::-1]]
                while block:
                    some = [block.pop() for _ in range(min(len(block), _TOKENIZED_AT_ONCE))]
                    for ids, question in self._encode(some):
                        self.at.index += 1
                        if self._keep(ids, question):
                            yield _Document(np.asarray(ids, dtype=np.uint32), question)
                self.at = dataclasses.replace(
                    self.at, block=self.at.block + 1, index=0, start=json.loads(json.dumps(dataset.state_dict()))
                )
            self._end_pass()

    def _open(self) -> Any:
        """Return this process's share of the source as a dataset, at the beginning of the block that is read."""
        from datasets.distributed import split_dataset_by_node

        self.check(self.identity)
        dataset = split_dataset_by_node(self._rows, self.rank, self.processes)  # a fresh one each time
        dataset.set_epoch(1 + self.seed * _SEEDS_APART + self.at.number)  # shuffles the files, before they are split
        if self.at.start is not None:
            dataset.load_state_dict(self.at.start)
        return dataset

    def _encode(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[int], int]]:
        """Yield the tokens of documents, and how many at their ends ask and answer a question."""
        where = f"a row of {self.source.data}"
        if self.source.kind != "text":
            for row in rows:
                ids, counted = encode_row(row, self.source, self.tokenizer, where, bos=self._bos, eos=self._eos)
                yield ids, sum(counted)
            return
        texts = [row_text(row, self._where.get("column", "text"), where) for row in rows]
        head, tail = [[] if token is None else [token] for token in (self._bos, self._eos)]
        for ids in tokenize(self.tokenizer, texts):
            yield head + ids + tail, 0

    def _keep(self, ids: Sequence[int], question: int) -> bool:
        """Count a document; return whether it is one to read."""
        kept = len(ids) >= self._least and (self.source.kind == "text" or question > 0)
        self.at.seen += 1
        self.at.longest = max(self.at.longest, len(ids))
        if kept:
            self.at.kept += 1
            self.at.tokens += len(ids)
        return kept

    def _end_pass(self) -> None:
        at = self.at
        if not at.kept:
            share = f" in the share of process {self.rank} of {self.processes}" if self.processes > 1 else ""
            raise ValueError(
                f"data {self.source.data!r} leaves no document to train on{share}: {at.seen} were read, the longest "
                f"has {at.longest} tokens; at least {self._least} are wanted (min_tokens)"
            )
        logger.info("%s: read %d of %d documents in pass %d", self.source.data, at.kept, at.seen, at.number + 1)
        self.at = _At(number=at.number + 1, block=at.block, tokens=at.tokens)


def _options(source: Source) -> dict[str, Any]:
    options = source.reading_options()
    return options if source.data not in CORPORA else {"split": "train", **options}


def _open_rows(source: Source, where: Mapping[str, Any]) -> Any:
    """Return the rows of a source as an iterable dataset; `where` is what `open_corpus` says of plain text."""
    from datasets import IterableDataset, load_dataset

    if where.get("kind") == "hub":
        revision = where["commit"] or where["revision"]
        options = {"name": where["config"], "revision": revision, "data_files": where["data_files"]}
        given = {key: value for key, value in options.items() if value is not None}
        return load_dataset(where["id"], split=where["split"], streaming=True, **given)
    if where.get("kind") == "offline":
        names = {"name": source.data, "split": where["split"]}
        return IterableDataset.from_generator(_offline_rows, gen_kwargs=names)
    path = Path(source.data).expanduser()
    if source.kind == "text" and (path.is_dir() or path.name.endswith(".txt")):
        paths = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not paths:
            raise ValueError(f"data {source.data!r} has no .txt files")
        names = {"paths": [str(path) for path in paths], "column": where["column"]}
        return IterableDataset.from_generator(_text_rows, gen_kwargs=names)
    return load_dataset(**rows_location(source), streaming=True)


def _offline_rows(name: str, split: str) -> Iterator[dict[str, str]]:
    for document in offline.reader(name, split)():
        yield {"text": document.text}


def _text_rows(paths: Sequence[str], column: str) -> Iterator[dict[str, str]]:
    for path in paths:
        for document in read_local(Path(path), column):
            yield {column: document.text}


class StreamedDocuments(Documents):
    """The documents of streamed sources, shuffled and mixed by weight, for ever, one at a time.

    The next document is always of the source that is furthest behind its share of the tokens, as in
    `ctxext.data.order.mixed_documents`. A number stands for the document drawn when it was first asked for, until it
    is left.

    Args:
        sources: Of kind `text` or `completion`.
        tokenizer: A tokenizer of transformers.
        rules: How documents become tokens.
        seed: Of the shuffling.
        buffer: Documents of a source that are shuffled among each other, and held as text.
        tokens: About how many tokens the sources have, where that is known.
        rank: This process.
        processes: All of them, each of which reads documents of its own.

    Raises:
        ValueError: If an argument is out of range, or a source is nothing that is there. While drawing: if a pass
            over a source leaves no document, or a local file has changed.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Any,
        rules: TokenRules,
        *,
        seed: int,
        buffer: int = 1000,
        tokens: int = 0,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        wrong = [] if buffer >= 1 else [f"buffer {buffer} must be at least 1 document"]
        kinds = {source.kind for source in sources} - {"text", "completion"}
        wrong += [f"a stream cannot have sources of kind {kind}: use text or completion" for kind in sorted(kinds)]
        if wrong:
            raise ValueError("; ".join(wrong))
        self.tokens = tokens
        self.streams = [
            _Stream(source, number, tokenizer, rules, seed, buffer, rank, processes)
            for number, source in enumerate(sources)
        ]
        self._tokens_hash = tokenizer_hash(tokenizer)
        self._read: dict[int, _Document] = {}  # by rows, now

    def __getitem__(self, number: int) -> Tokens:
        return self._document(number).tokens

    def question(self, number: int) -> int:
        """Return how many of a document's last tokens ask and answer a question about it; 0 for plain text."""
        return self._document(number).question

    def _document(self, number: int) -> _Document:
        if number not in self._read:
            stream = min(self.streams, key=lambda stream: (stream.at.tokens / stream.source.weight, stream.number))
            self._read[number] = next(stream)
        return self._read[number]

    def leave(self, number: int) -> None:
        """Drop a document, to which no row comes back."""
        self._read.pop(number, None)

    def digest(self) -> str:
        """Return what tells this run's documents from another's; whether files have changed is in the state."""
        what = [[stream.source.model_dump(), stream.rules.ends(stream.tokenizer)] for stream in self.streams]
        return hashlib.sha256(json.dumps([what, self._tokens_hash], sort_keys=True).encode()).hexdigest()

    def state(self) -> dict[str, Any]:
        """Return where every source is and the documents being read, as JSON."""
        return {
            "sources": [{"identity": stream.identity, "at": dataclasses.asdict(stream.at)} for stream in self.streams],
            "read": {str(number): document.packed() for number, document in self._read.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to where the documents were.

        Raises:
            ValueError: If a source has changed since, or is another one.
        """
        if len(state.get("sources", ())) != len(self.streams):
            raise ValueError("this state is not of these streamed sources: give the same ones, or begin anew")
        for stream, saved in zip(self.streams, state["sources"], strict=True):
            stream.check(saved["identity"])
        for stream, saved in zip(self.streams, state["sources"], strict=True):
            stream.go_to(_At(**saved["at"]))
        self._read = {int(number): _Document.unpacked(packed) for number, packed in state["read"].items()}
