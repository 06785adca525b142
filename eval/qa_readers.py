"""Four ways to read a long document before a question is asked: skipping, in order, its ends only, the best chunks.

The question comes last, the answer is greedy, and an answer ends at the same tokens in all of them. `skip` and
`in-order` read window by window (`ctxext.reading.reader`); with a memory, the question reads that, without one it
stands behind the last tokens read. `truncate` and `bm25` hand the model one prompt with as much of the document as
fits into its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.evals.qa_data import Question
from ctxext.evaluation.base import Session
from ctxext.evaluation.prompts import answer, encode
from ctxext.reading.skip import SkipPolicy

POLICY_OPTIONS = {"skip_rate": 256, "alpha": 6.0, "pooling": "mean", "confidence": "document"}
MEMORY_OPTIONS = {"memory_size": None, "top_k": None, "sinks": 0}
# The options of each reader, with what None stands for; window and context then follow from the model.
READERS: dict[str, dict[str, Any]] = {
    "skip": {**POLICY_OPTIONS, "window": None, "context": None, **MEMORY_OPTIONS},
    "in-order": {"window": None, "context": None, **MEMORY_OPTIONS},
    "truncate": {"keep": "start", "context": None},
    "bm25": {"window": None, "context": None},
}
CONFIDENCES = ("document", "model")
KEPT = ("start", "end", "middle-out")
CHUNKS_IN_CONTEXT = 4  # of the default size


@dataclass(frozen=True)
class Reading:
    """What was read of a document, and the answer.

    Attributes:
        generation: All that the model wrote.
        tokens_read: Tokens of the document that the model was given.
        document_tokens: All of them.
        read: The characters from and to which each part that was read runs, ascending; parts that touch are one.
        windows: Parts that were read one after the other.
    """

    generation: str
    tokens_read: int
    document_tokens: int
    read: tuple[tuple[int, int], ...]
    windows: int

    @property
    def share(self) -> float:
        """Return the share of the document that was read; cut into windows, it may have a token more or less."""
        return min(1.0, self.tokens_read / self.document_tokens)

    def has_read(self, start: int, end: int) -> bool:
        """Say whether the characters from `start` to `end` were all read."""
        return any(first <= start and end <= last for first, last in self.read)


@dataclass(frozen=True, kw_only=True)
class QuestionReader:
    """Reads documents and answers questions, in one of the ways above.

    Attributes:
        kind: Which, a key of `READERS`.
        options: Of that reader, None where the model decides.
        max_new_tokens: The most tokens of an answer.
        bos: The token before a document and before a question; None for none.
    """

    kind: str
    options: dict[str, Any]
    max_new_tokens: int
    bos: int | None

    def context(self, model: Any) -> int:
        """Return the tokens of a prompt and its answer together."""
        return int(self.options["context"] or model.config.max_position_embeddings)

    def window(self, model: Any) -> int:
        """Return the tokens of a window, or the most of a chunk."""
        share = CHUNKS_IN_CONTEXT if self.kind == "bm25" else 1
        longest = self.context(model) if self.kind == "bm25" else model.config.max_position_embeddings
        return int(self.options["window"] or max(1, longest // share))

    @property
    def remembers(self) -> bool:
        """Whether there is a memory."""
        return self.options.get("memory_size") is not None

    def describe(self, model: Any) -> str:
        """Return how a model reads with it, in words."""
        said = {name: value for name, value in self.options.items() if name not in ("context", *MEMORY_OPTIONS)}
        if "window" in said:
            said["window"] = self.window(model)
        if self.remembers:
            said |= {name: self.options[name] for name in MEMORY_OPTIONS} | {"top_k": self.options["top_k"] or "all"}
        else:
            said["context"] = self.context(model)
        words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in said.items())
        if self.remembers or "memory_size" not in self.options:
            return f"reader {self.kind}: {words}"
        return f"reader {self.kind}: {words}, no memory: the question stands behind the last tokens read"

    def check(self, session: Session, questions: Sequence[Question]) -> None:
        """Refuse what cannot be read, before anything is.

        Raises:
            ValueError: If a window is too long, the model can have no memory, or a question leaves no room.
        """
        if self.kind in ("skip", "in-order"):
            self._open(session).close()
        context, model = self.context(session.model), session.model
        longest = max(len(encode(session.tokenizer, question.prompt)) for question in questions)
        room = self._room(session, longest)
        if room < 1:
            raise ValueError(
                f"a question of {longest} tokens and an answer of {self.max_new_tokens} leave no room for a document "
                f"in the context of {context} tokens: use a smaller --max-new-tokens, or a longer --context"
            )
        if self.kind == "bm25" and self.window(model) > room:
            raise ValueError(
                f"--window {self.window(model)} is too large a chunk for the context of {context} tokens, which has "
                f"room for {room} beside question and answer: use a smaller --window"
            )

    def read(self, session: Session, question: Question) -> Reading:
        """Read a question's document and answer it."""
        encoded = session.tokenizer(
            question.document, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        if self.kind in ("skip", "in-order"):
            return self._read_windows(session, question, len(ids))
        room = self._room(session, len(encode(session.tokenizer, question.prompt)))
        if self.kind == "truncate":
            parts = kept_parts(len(ids), room, self.options["keep"])
        else:
            chunks = cut_chunks(question.document, offsets, self.window(session.model))
            parts = best_chunks(question, chunks, offsets, room)
        kept = [token for start, stop in parts for token in ids[start:stop]]
        lead = [] if self.bos is None else [self.bos]
        prompt = [*lead, *kept, *encode(session.tokenizer, question.prompt)]
        (generation,) = answer(session, [prompt], self.max_new_tokens)
        read = tuple((offsets[start][0], offsets[stop - 1][1]) for start, stop in parts)
        return Reading(generation, len(kept), len(ids), read, len(parts))

    def _room(self, session: Session, prompt_tokens: int) -> int:
        """Return the document's tokens that fit into the context beside a question and its answer."""
        return self.context(session.model) - self.max_new_tokens - prompt_tokens - (self.bos is not None)

    def _open(self, session: Session) -> Any:
        """Return the reader of windows; it changes the model until it is closed."""
        from ctxext.reading.memory import MemoryConfig
        from ctxext.reading.reader import DocumentReader

        options, memory, policy = self.options, None, SkipPolicy()
        if self.kind == "skip":
            policy = SkipPolicy(rate=options["skip_rate"], threshold=options["alpha"], pooling=options["pooling"])
        if self.remembers:
            memory = MemoryConfig(size=options["memory_size"], top_k=options["top_k"], sinks=options["sinks"])
        return DocumentReader(
            session.model,
            session.tokenizer,
            policy=policy,
            window=self.window(session.model),
            memory=memory,
            confidence=options.get("confidence", "document"),
            context=self.context(session.model),
            bos=self.bos,
        )

    def _read_windows(self, session: Session, question: Question, document_tokens: int) -> Reading:
        with self._open(session) as reader:
            windows = list(reader.read(question.document))
            generation = reader.ask(question.prompt, self.max_new_tokens)
            read = joined([(w.start, w.end if w.skipped else w.next) for w in windows])
            return Reading(generation, reader.tokens_read, document_tokens, read, len(windows))


def joined(parts: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ascending parts with those that touch made one."""
    whole: list[tuple[int, int]] = []
    for start, end in parts:
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((start, end))
    return tuple(whole)


def kept_parts(tokens: int, room: int, keep: str) -> list[tuple[int, int]]:
    """Return which tokens of a document are kept, as pairs of the first and the one behind the last.

    Args:
        tokens: Of the document.
        room: How many to keep.
        keep: `start`, `end`, or `middle-out`: both ends, the start getting the odd token.
    """
    if tokens <= room:
        return [(0, tokens)]
    first = {"start": room, "end": 0, "middle-out": room - room // 2}[keep]
    return [part for part in ((0, first), (tokens - (room - first), tokens)) if part[0] < part[1]]


def cut_chunks(text: str, offsets: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return a document in chunks of whole lines, at most `size` tokens each; longer lines are cut.

    Args:
        text: The document.
        offsets: From and to which character each token runs.
        size: The most tokens of a chunk.

    Returns:
        The first token of each chunk, and the one behind its last.
    """
    starts = {i for i, (at, _) in enumerate(offsets) if at > 0 and "\n" in text[at - 1 : at + 1]} | {len(offsets)}
    chunks, begin = [], 0
    while begin < len(offsets):
        furthest = min(begin + size, len(offsets))
        whole = (at for at in range(furthest, begin, -1) if at in starts)
        stop = next(whole, furthest)
        chunks.append((begin, stop))
        begin = stop
    return chunks


def best_chunks(
    question: Question, chunks: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]], room: int
) -> list[tuple[int, int]]:
    """Return the chunks that BM25 ranks highest for a question, as many as fit, in the document's order.

    Args:
        question: Its `query` is what is searched for.
        chunks: First token, and the one behind the last.
        offsets: From and to which character each token runs.
        room: The most tokens of all of them; a chunk that no longer fits is left out, and the next one tried.
    """
    texts = [question.document[offsets[start][0] : offsets[stop - 1][1]] for start, stop in chunks]
    scores = bm25_scores(question.query, texts)
    taken = []
    for number in sorted(range(len(chunks)), key=lambda number: -scores[number]):
        start, stop = chunks[number]
        if stop - start <= room:
            room -= stop - start
            taken.append(chunks[number])
    return list(joined(sorted(taken)))


def bm25_scores(query: str, texts: Sequence[str]) -> list[float]:
    """Return how well each text answers a query (BM25 of Lucene, k1 1.5, b 0.75; English stop words left out)."""
    import bm25s

    words, wanted = (bm25s.tokenize(list(of), return_ids=False, show_progress=False) for of in (texts, [query]))
    known = {word for text in words for word in text}
    searched = [word for word in wanted[0] if word in known]
    if not searched:
        return [0.0] * len(texts)
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    return [float(score) for score in index.get_scores(searched)]
