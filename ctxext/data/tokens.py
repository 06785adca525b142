"""Tokenized documents in a folder: written once, mapped into memory by every process that trains on them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxext.checkpoint.files import read_json, whole_folder, write_json
from ctxext.checkpoint.source import cache_folder
from ctxext.data.corpora import CORPORA, HubCorpus, OfflineCorpus, open_corpus
from ctxext.data.pairs import DOCSTRINGS, open_pairs
from ctxext.data.rows import read_rows, rows_location
from ctxext.data.sources import Source
from ctxext.data.supervised import encode_row, encode_summary

FORMAT = 1
_DOCUMENTS_AT_ONCE = 64
RULES = ("auto", "always", "never")


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """How documents become tokens: [BOS] text [EOS], each at a document's true start and end only.

    Attributes:
        bos: `auto` (if the tokenizer has one), `always` or `never`.
        eos: As `bos`.
        longest_whole: Tokens of the longest prompt with completion, or conversation; longer ones are left out and
            counted, for cutting one would lose its question or its answer.
    """

    bos: str = "auto"
    eos: str = "auto"
    longest_whole: int = 2**40

    def ends(self, tokenizer: Any) -> tuple[int | None, int | None]:
        """Return the tokens to put before and after a document, each None for none.

        Raises:
            ValueError: If a rule is unknown, or asks for a token that the tokenizer does not have.
        """
        found: list[int | None] = []
        for name in ("bos", "eos"):
            rule, token = getattr(self, name), getattr(tokenizer, f"{name}_token_id")
            if rule not in RULES:
                raise ValueError(f"{name} is {rule!r}; it must be one of {', '.join(RULES)}")
            if rule == "always" and token is None:
                raise ValueError(f"{name} is 'always', but this tokenizer has no {name} token; use 'auto' or 'never'")
            found.append(None if rule == "never" else token)
        return found[0], found[1]


@dataclass(frozen=True)
class TokenStore:
    """The tokens of one source.

    Attributes:
        source: Where they come from.
        folder: Where they lie.
        meta: Counts, hashes and rules, as `meta.json` has them.
        tokens: `(tokens,)` uint32, all documents one after the other.
        offsets: `(documents + 1,)` int64, where each document starts.
        counted: `(tokens,)` uint8, 1 where the loss counts a token; None if it counts all.
    """

    source: Source
    folder: Path
    meta: dict[str, Any]
    tokens: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]
    counted: npt.NDArray[np.uint8] | None

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each document, `(documents,)`."""
        return np.diff(self.offsets)

    def document_id(self, index: int) -> str:
        """Return the id of a document in its corpus."""
        with (self.folder / "documents.jsonl").open("r", encoding="utf-8") as lines:
            return str(json.loads(next(islice(lines, index, None))))


def store_folder(source: Source, tokenizer: Any, rules: TokenRules, cache: Path | None = None) -> Path:
    """Return where the tokens of a source lie: its name tells what they depend on, so that no change goes unseen."""
    bos, eos = rules.ends(tokenizer)
    what = {
        "format": FORMAT,
        "source": source.model_dump(exclude={"weight", "upsample_above", "upsample_times"}),
        "file": file_identity(source),
        "tokenizer": tokenizer_hash(tokenizer),
        "bos": bos,
        "eos": eos,
        "longest_whole": rules.longest_whole if source.keeps_documents_whole else None,
    }
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in Path(source.data).name)
    return (cache or cache_folder() / "tokens") / f"{name}-{digest[:16]}"


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a sha256 over what decides how a tokenizer turns text and conversations into tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True),
        json.dumps([tokenizer.bos_token_id, tokenizer.eos_token_id]),
        str(getattr(tokenizer, "chat_template", None)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def file_identity(source: Source) -> list[Any] | str | None:
    """Return path, size and time of change of a local source's files, or the manifest's hash of a shipped corpus."""
    registered = source.data in CORPORA or source.data == DOCSTRINGS
    if registered or source.data_id is not None:
        from ctxext.data.offline import MANIFEST_PATH

        shipped = source.data in ("sympy-source", DOCSTRINGS)
        return str(read_json(MANIFEST_PATH)["corpus_hash"]) if shipped else None
    path = Path(source.data).expanduser().resolve()
    files = sorted(file for file in path.rglob("*.txt")) if path.is_dir() else [path]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.exists()]


def open_store(source: Source, tokenizer: Any, rules: TokenRules, cache: Path | None = None) -> TokenStore:
    """Return the tokens of a source, read and tokenized on first use.

    Args:
        source: What to read.
        tokenizer: A tokenizer of transformers.
        rules: How documents become tokens.
        cache: The folder that holds token folders; by default one in ctxext's cache.

    Raises:
        ValueError: If the source cannot be read, or leaves no document.
    """
    folder = store_folder(source, tokenizer, rules, cache)
    if not (folder / "meta.json").exists():
        _write_store(folder, source, tokenizer, rules)
    meta = read_json(folder / "meta.json")
    counted = folder / "counted.bin"
    return TokenStore(
        source=source,
        folder=folder,
        meta=meta,
        tokens=np.memmap(folder / "tokens.bin", dtype=np.uint32, mode="r"),
        offsets=np.load(folder / "offsets.npy"),
        counted=np.memmap(counted, dtype=np.uint8, mode="r") if counted.exists() else None,
    )


Encoded = tuple[str, list[int], list[bool] | None]


def _encoded(source: Source, tokenizer: Any, rules: TokenRules) -> Iterator[Encoded]:
    """Yield id, tokens and, for supervised kinds, what counts, of every document of a source."""
    bos, eos = rules.ends(tokenizer)
    if source.kind == "summary":
        pairs = open_pairs(source)
        for pair in pairs.read():
            summary = pair.summary if pairs.is_long_enough(pair) else ""
            ids, counted = encode_summary(pair.document, summary, source, tokenizer, bos=bos, eos=eos)
            yield pair.id, ids, counted
        return
    if source.kind != "text":
        for name, row in read_rows(source):
            ids, counted = encode_row(row, source, tokenizer, name, bos=bos, eos=eos)
            yield name, ids, counted
        return
    options = source.reading_options()
    registered = CORPORA.get(source.data)
    if isinstance(registered, OfflineCorpus | HubCorpus):
        options.setdefault("split", "train")
    documents = iter(open_corpus(source.data, **options).documents())
    head, tail = [[] if token is None else [token] for token in (bos, eos)]
    while batch := list(islice(documents, _DOCUMENTS_AT_ONCE)):
        texts = [document.text for document in batch]
        for document, ids in zip(batch, tokenize(tokenizer, texts), strict=True):
            yield document.id, head + ids + tail, None


def tokenize(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the tokens of each text, none added."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def least_tokens(source: Source) -> int:
    """Return the fewest tokens of a document worth keeping; one token predicts nothing."""
    registered = CORPORA.get(source.data)
    corpus = registered.min_tokens if isinstance(registered, HubCorpus) else 0
    return max(2, source.min_tokens, corpus)


def _write_store(folder: Path, source: Source, tokenizer: Any, rules: TokenRules) -> None:
    check_source(source)
    kept = _Kept(source, rules)
    with whole_folder(folder, force=True) as partial:
        with (
            (partial / "tokens.bin").open("wb") as tokens,
            (partial / "counted.bin").open("wb") as counted,
            (partial / "documents.jsonl").open("w", encoding="utf-8") as names,
        ):
            for name, ids, marks in kept.choose(_encoded(source, tokenizer, rules)):
                data = np.asarray(ids, dtype=np.uint32).tobytes()
                kept.digest.update(data)
                tokens.write(data)
                if marks is not None:
                    counted.write(np.asarray(marks, dtype=np.uint8).tobytes())
                names.write(json.dumps(name) + "\n")
        if not source.keeps_documents_whole:
            (partial / "counted.bin").unlink()
        if len(kept.offsets) == 1:
            raise ValueError(f"data {source.data!r} leaves no document to train on: {kept.why_empty()}")
        np.save(partial / "offsets.npy", np.asarray(kept.offsets, dtype=np.int64))
        write_json(partial / "meta.json", kept.meta(tokenizer))


class _Kept:
    """Which documents are kept, and the count of those that are not."""

    def __init__(self, source: Source, rules: TokenRules) -> None:
        self.source, self.rules = source, rules
        self.offsets = [0]
        self.skipped: dict[str, int] = {}
        self.longest = 0
        self.digest = hashlib.sha256()

    def choose(self, documents: Iterable[Encoded]) -> Iterator[Encoded]:
        """Yield the documents to keep, until there are enough tokens."""
        for name, ids, marks in documents:
            self.longest = max(self.longest, len(ids))
            reason = self._reason(ids, marks)
            if reason is not None:
                self.skipped[reason] = self.skipped.get(reason, 0) + 1
                continue
            self.offsets.append(self.offsets[-1] + len(ids))
            yield name, ids, marks
            if self.source.max_tokens is not None and self.offsets[-1] >= self.source.max_tokens:
                return

    def _reason(self, ids: list[int], marks: list[bool] | None) -> str | None:
        """Return why a document is left out, or None."""
        if len(ids) < least_tokens(self.source):
            return "documents_too_short"
        if marks is not None and len(ids) > self.rules.longest_whole:
            return "examples_longer_than_a_pack"
        if marks is not None and not any(marks[1:]):
            return "examples_without_an_answer"
        return None

    def why_empty(self) -> str:
        """Return what to do about a source that leaves nothing."""
        return (
            f"left out {self.skipped or 'none'}, the longest has {self.longest} tokens; at least "
            f"{least_tokens(self.source)} are wanted (min_tokens)"
        )

    def meta(self, tokenizer: Any) -> dict[str, Any]:
        """Return what is worth knowing about the tokens."""
        return {
            "format": FORMAT,
            "source": self.source.model_dump(exclude_defaults=True),
            "tokenizer": tokenizer_hash(tokenizer),
            "bos": self.rules.ends(tokenizer)[0],
            "eos": self.rules.ends(tokenizer)[1],
            "documents": len(self.offsets) - 1,
            "tokens": self.offsets[-1],
            "longest": self.longest,
            "skipped": self.skipped,
            "sha256": self.digest.hexdigest(),
        }


def check_source(source: Source, *, streaming: bool = False) -> None:
    """Find what is wrong with a source without reading it.

    Args:
        source: The source.
        streaming: Whether nothing of it is kept on the disk.

    Raises:
        ValueError: If it names nothing that is there, or a corpus on the Hub without a bound that is to be kept.
    """
    if isinstance(CORPORA.get(source.data), HubCorpus) and source.max_tokens is None and not streaming:
        raise ValueError(
            f"data {source.data!r} is a corpus on the Hub; state max_tokens, the tokens of it to keep on this disk "
            "(steps x sequences a step x length covers a run without repetition)"
        )
    if source.kind == "text":
        open_corpus(source.data, **source.reading_options())
    elif source.kind == "summary":
        open_pairs(source)
    else:
        rows_location(source)
