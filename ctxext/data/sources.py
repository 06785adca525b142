"""Where training text comes from: one source of several, as a config states it."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

KINDS = ("text", "completion", "chat", "summary")
_HUB_OPTIONS = ("data_id", "data_config", "data_revision")


class Source(BaseModel):
    """One source of training data.

    Attributes:
        data: A corpus by name, or a `.txt`, `.jsonl`, `.jsonl.zst`, `.parquet` file or a folder of `.txt` files.
        kind: `text` (loss on every token), `completion` (a prompt and its completion, loss on the completion),
            `chat` (messages through the tokenizer's chat template, loss on the assistant's turns) or `summary` (a
            document in the prompt of `ctxext eval summarization` and its summary, loss on the summary).
        weight: Its share of the tokens, relative to the other sources.
        split: The split to read; `train` by default where the corpus has splits.
        column: `text`: the column that holds the text.
        messages_column: `chat`: the column with a list of `{role, content}`.
        prompt_column: `completion`, or `chat` in place of messages: the column of the user's words.
        completion_column: The column of the answer.
        document_column: `summary`: the column of the document, by default the corpus' own or `document`.
        summary_column: `summary`: the column of the summary, by default the corpus' own or `summary`.
        document_tokens: `summary`: read only the first tokens of each document; all by default.
        summary_tokens: `summary`: learn only the first tokens of each summary; all by default.
        min_tokens: Documents with fewer tokens are left out and counted.
        max_tokens: Stop reading once so many tokens are kept; needed where a corpus is too large to keep whole.
        upsample_above: Documents of at least so many tokens come `upsample_times` times in each pass.
        upsample_times: See `upsample_above`; the source's share of all tokens stays its weight.
        data_id: Another Hub repository than the registered one.
        data_config: Another configuration of the Hub repository.
        data_revision: Another revision of the Hub repository.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str
    kind: Literal["text", "completion", "chat", "summary"] = "text"
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    split: str | None = None
    column: str | None = None
    messages_column: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None
    document_column: str | None = None
    summary_column: str | None = None
    document_tokens: int | None = Field(default=None, gt=0)
    summary_tokens: int | None = Field(default=None, gt=0)
    min_tokens: int = Field(default=0, ge=0)
    max_tokens: int | None = Field(default=None, gt=0)
    upsample_above: int | None = Field(default=None, gt=0)
    upsample_times: int = Field(default=1, ge=1)
    data_id: str | None = None
    data_config: str | None = None
    data_revision: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [*self._column_problems(), *self._upsample_problems()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _column_problems(self) -> list[str]:
        pair = {"prompt_column", "completion_column"}
        by_kind = {
            "text": {"column"},
            "completion": pair,
            "chat": {"messages_column", *pair},
            "summary": {"document_column", "summary_column", "document_tokens", "summary_tokens"},
        }
        given = {name for names in by_kind.values() for name in names if self._has(name)}
        allowed = by_kind[self.kind]
        problems = [f"{name} has no effect with kind {self.kind!r}" for name in sorted(given - allowed)]
        if len(given & pair) == 1:
            problems.append("prompt_column and completion_column go together: give both")
        elif self.kind == "completion" and not given & pair:
            problems.append("kind 'completion' needs prompt_column and completion_column")
        elif self.kind == "chat" and pair <= given and "messages_column" in given:
            problems.append("give messages_column, or prompt_column and completion_column, not both")
        return problems

    def _upsample_problems(self) -> list[str]:
        if (self.upsample_above is None) != (self.upsample_times == 1):
            return ["upsample_above and upsample_times (at least 2) go together: give both or neither"]
        return []

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    @property
    def keeps_documents_whole(self) -> bool:
        """Whether a document is never split over two packs: its answer would lose its question."""
        return self.kind != "text"

    def reading_options(self) -> dict[str, Any]:
        """Return the options that choose what is read, as `open_corpus` takes them."""
        names = ("split", "column", *_HUB_OPTIONS)
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
