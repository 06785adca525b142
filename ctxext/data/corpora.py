"""The registry of corpora: names as data, local files as equals, every Hub id open to override."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ctxext.data import offline
from ctxext.data.documents import Document, read_local, row_text


@dataclass(frozen=True, kw_only=True)
class OfflineCorpus:
    """A corpus that is on every machine; `splits` are cut by document id."""

    description: str
    split: str = "held-out"
    comparable: bool = True


@dataclass(frozen=True, kw_only=True)
class HubCorpus:
    """A corpus on the Hugging Face Hub, streamed with `datasets`.

    `confirmed` is False where the id was taken from memory or a paper and no public code was seen to use it; every
    field can be overridden from the command line. `min_tokens` is the shortest document the corpus' users keep.
    """

    description: str
    id: str
    split: str
    config: str | None = None
    column: str = "text"
    revision: str | None = None
    data_files: str | None = None
    min_tokens: int = 0
    confirmed: bool = True


CORPORA: dict[str, OfflineCorpus | HubCorpus] = {
    "sympy-source": OfflineCorpus(description="sources of the pinned sympy 1.14.0 wheel: 1532 files, 26 MB, offline"),
    "python-stdlib": OfflineCorpus(
        description="the running interpreter's own sources, offline; not comparable across machines", comparable=False
    ),
    "python-docs": OfflineCorpus(
        description="Python's language reference, half a megabyte of prose, offline", split="all", comparable=False
    ),
    "pile": HubCorpus(
        description="the Pile without Books3 and other removed parts",
        id="monology/pile-uncopyrighted",
        split="test",
    ),
    "pg19": HubCorpus(description="books before 1919: 28602/50/100", id="emozilla/pg19", split="test"),
    "proof-pile": HubCorpus(
        description="mathematics: papers, formal proofs, textbooks",
        id="hoskinson-center/proof-pile",
        revision="refs/convert/parquet",
        split="test",
        confirmed=False,
    ),
    "c4-4k": HubCorpus(
        description="C4, documents of at least 4000 tokens",
        id="allenai/c4",
        config="en",
        split="validation",
        min_tokens=4000,
    ),
    "arxiv": HubCorpus(
        description="RedPajama's sample, arXiv part",
        id="togethercomputer/RedPajama-Data-1T-Sample",
        data_files="arxiv_sample.jsonl",
        split="train",
        confirmed=False,
    ),
    "github": HubCorpus(
        description="RedPajama's sample, GitHub part",
        id="togethercomputer/RedPajama-Data-1T-Sample",
        data_files="github_sample.jsonl",
        split="train",
        confirmed=False,
    ),
    "openwebtext2": HubCorpus(
        description="web pages linked from Reddit", id="segyges/OpenWebText2", split="train", confirmed=False
    ),
    "govreport": HubCorpus(
        description="reports of the United States government",
        id="ccdv/govreport-summarization",
        config="document",
        split="test",
        column="report",
    ),
    "triviaqa": HubCorpus(
        description="TriviaQA, all evidence of a question concatenated",
        id="mandarjoshi/trivia_qa",
        config="rc",
        split="validation",
        column="entity_pages.wiki_context,search_results.search_context",
    ),
}


@dataclass(frozen=True)
class Corpus:
    """An opened corpus: where its text comes from, in words that go into a result, and a way to read it.

    `source` states name, id, split, column and the like; `read` starts at the first document each time.
    """

    name: str
    source: dict[str, Any]
    read: Callable[[], Iterator[Document]]
    min_tokens: int = 0

    def documents(self) -> Iterator[Document]:
        """Yield the documents from the first."""
        return self.read()


def _refuse(name: str, given: dict[str, str | None], why: str) -> None:
    useless = [f"--{option.replace('_', '-')}" for option, value in given.items() if value is not None]
    if useless:
        raise ValueError(f"{', '.join(useless)} cannot take effect with the data {name!r}: {why}")


def _hub_documents(corpus: HubCorpus) -> Iterator[Document]:
    from datasets import load_dataset

    arguments: dict[str, Any] = {"name": corpus.config, "revision": corpus.revision, "data_files": corpus.data_files}
    given = {key: value for key, value in arguments.items() if value is not None}
    rows = load_dataset(corpus.id, split=corpus.split, streaming=True, **given)
    for number, row in enumerate(rows):
        yield Document(f"{corpus.split}:{number}", row_text(row, corpus.column, f"{corpus.id} row {number}"))


def _hub_commit(corpus: HubCorpus) -> str | None:
    """Return the commit that a Hub corpus is read at; None if the Hub does not say (the corpus hash still does)."""
    from huggingface_hub import HfApi

    if "/" not in corpus.id:  # one of datasets' own readers, not a repository
        return None
    try:
        return HfApi().dataset_info(corpus.id, revision=corpus.revision, timeout=10).sha
    except Exception:  # offline, no route, no such repository: reading the corpus says what is wrong, if anything is
        return None


def _open_hub(name: str, corpus: HubCorpus, overrides: dict[str, str | None]) -> Corpus:
    if overrides["id"] is not None:
        # A foreign repository shares neither revision, config nor files with the one it replaces.
        corpus = replace(corpus, revision=None, config=None, data_files=None)
    corpus = replace(corpus, **{key: value for key, value in overrides.items() if value is not None})  # type: ignore[arg-type]
    source = {
        "kind": "hub",
        "name": name,
        "id": corpus.id,
        "config": corpus.config,
        "revision": corpus.revision,
        "commit": _hub_commit(corpus),
        "data_files": corpus.data_files,
        "split": corpus.split,
        "column": corpus.column,
    }
    return Corpus(name, source, partial(_hub_documents, corpus), corpus.min_tokens)


def _open_offline(name: str, corpus: OfflineCorpus, split: str | None) -> Corpus:
    chosen = split or corpus.split
    if chosen not in offline.SPLITS:
        raise ValueError(f"{name} has no split {chosen!r}; allowed: {', '.join(offline.SPLITS)}")
    source: dict[str, Any] = {"kind": "offline", "name": name, "split": chosen, "comparable": corpus.comparable}
    return Corpus(name, source, offline.reader(name, chosen))


def open_corpus(
    data: str,
    *,
    split: str | None = None,
    column: str | None = None,
    data_id: str | None = None,
    data_config: str | None = None,
    data_revision: str | None = None,
) -> Corpus:
    """Open a corpus by its registered name, or a local file or folder by its path.

    Args:
        data: a name in `CORPORA`, or a path (`.txt`, `.jsonl`, `.jsonl.zst`, `.parquet`, a folder of `.txt`).
        split: another split than the corpus' evaluation split; offline corpora have `held-out`, `train` and `all`.
        column: the column that holds the text, for Hub corpora and files with columns.
        data_id: another Hub repository than the registered one.
        data_config: another configuration of the Hub repository.
        data_revision: another revision of the Hub repository.

    Raises:
        ValueError: if the name is unknown and no such file exists, or an option cannot take effect.
    """
    hub_options = {"data_id": data_id, "data_config": data_config, "data_revision": data_revision}
    registered = CORPORA.get(data)
    if isinstance(registered, HubCorpus):
        overrides = {
            "id": data_id,
            "config": data_config,
            "revision": data_revision,
            "split": split,
            "column": column,
        }
        return _open_hub(data, registered, overrides)
    if isinstance(registered, OfflineCorpus):
        _refuse(data, {**hub_options, "column": column}, "it is read from this machine and has no columns")
        return _open_offline(data, registered, split)
    path = Path(data).expanduser()
    if not path.exists():
        close = difflib.get_close_matches(data, CORPORA, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"no corpus and no file is called {data!r}{hint} Corpora: {', '.join(CORPORA)}; or give a path"
        )
    _refuse(data, {**hub_options, "split": split}, "it is a local file")
    chosen = column or "text"
    source = {"kind": "local", "name": path.name, "column": chosen}
    return Corpus(path.name, source, partial(read_local, path, chosen))
