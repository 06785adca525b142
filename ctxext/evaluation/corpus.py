"""The options of an evaluation that reads a corpus, and the corpus they choose."""

from __future__ import annotations

from dataclasses import dataclass

from ctxext.data.corpora import Corpus, open_corpus
from ctxext.evaluation.base import Evaluation, option


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
        return open_corpus(
            self.data,
            split=self.split,
            column=self.column,
            data_id=self.data_id,
            data_config=self.data_config,
            data_revision=self.data_revision,
        )
