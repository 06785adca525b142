"""Questions about documents longer than the window: quality against the tokens that were read of them.

A document is read in one of four ways (`--reader`, see `qa_readers`), then the question is asked. The data are facts
planted in real text (`qa_planted`), TriviaQA with all its evidence, or a local file (`qa_data`); the scores are those
of TriviaQA's official script (`qa_scores`). The reader is not part of the protocol: it is what results are compared
by.

What was never read cannot be known. Of a fact planted r times, a reader that reads the fraction f of a document at
random places meets one copy with a chance of 1 - (1 - f)^r: `chance_seen`, the mean over the documents. `seen` is the
share of questions with a copy that was read in full, `answered_of_seen` the exact matches among these. A reader
that begins at the start and goes to the end meets what is planted there for sure: few `--depths` favour it.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from ctxext.data.documents import Document, documents_hash
from ctxext.evals import qa_scores
from ctxext.evals.qa_data import TRIVIAQA, Question, read_questions
from ctxext.evals.qa_planted import FILLER, FORMS, open_text, planted_questions
from ctxext.evals.qa_readers import CONFIDENCES, KEPT, READERS, QuestionReader
from ctxext.evaluation.base import Evaluation, Plan, Plot, Session, Summary, Unit, option
from ctxext.evaluation.bos import BOS_HELP, bos_token, check_bos_rule
from ctxext.evaluation.prompts import encode
from ctxext.reading.skip import POOLINGS

PLANTED = "planted"
# The options of each kind of data, with what None stands for.
HUB_OPTIONS = {"split": None, "data_id": None, "data_config": None, "data_revision": None}
DATA: dict[str, dict[str, Any]] = {
    PLANTED: {
        "fact": "passkey",
        "repeats": 1,
        "length": 8192,
        "depths": 5,
        "trials": 4,
        "distractors": 4,
        "seed": 0,
        "text": "sympy-source",
    },
    TRIVIAQA: {"limit": 200, **HUB_OPTIONS},
    "file": {"limit": 0},
}
ANSWER_TOKENS = 32  # where the answers' length is nobody's to know
ALL_READER_OPTIONS = tuple(dict.fromkeys(name for options in READERS.values() for name in options))
ALL_DATA_OPTIONS = tuple(dict.fromkeys(name for options in DATA.values() for name in options))
MEMORY_ONLY = ("top_k", "sinks")
POSITIVE = ("repeats", "length", "depths", "trials", "window", "context", "memory_size", "top_k", "max_new_tokens")
NOT_NEGATIVE = ("distractors", "limit", "skip_rate", "alpha", "sinks")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _unknown(name: str, given: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, allowed, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{_flag(name)} {given!r} is not known{hint}; allowed: {', '.join(allowed)}"


@dataclass(frozen=True, kw_only=True)
class QuestionAnswering(Evaluation):
    """Exact match and F1 of answers about long documents."""

    name: ClassVar[str] = "question-answering"
    description: ClassVar[str] = "questions about long documents: exact match and F1 against tokens read"

    data: str = option(PLANTED, "planted, triviaqa, or a .jsonl or .parquet file of questions", scored=False)
    reader: str = option("skip", f"how a document is read: {', '.join(READERS)}", scored=False)
    skip_rate: int | None = option(None, "skip: K, tokens; skips are multiples of it [default: 256]", scored=False)
    alpha: float | None = option(None, "skip: the skipping threshold, nats [default: 6]", scored=False)
    pooling: str | None = option(
        None, f"skip: of a window's losses: {', '.join(POOLINGS)} [default: mean]", scored=False
    )
    confidence: str | None = option(
        None, "skip: loss of the document's tokens, or of the model's own [default: document]", scored=False
    )
    window: int | None = option(
        None,
        "skip, in-order: tokens read at once [default: the model's window]; bm25: of a chunk [default: 1/4 context]",
        scored=False,
    )
    memory_size: int | None = option(None, "skip, in-order: tokens remembered [default: no memory]", scored=False)
    top_k: int | None = option(None, "with a memory: keys that a query reads [default: all]", scored=False)
    sinks: int | None = option(None, "with a memory: first tokens that are kept [default: 0]", scored=False)
    keep: str | None = option(None, f"truncate: {', '.join(KEPT)} of the document [default: start]", scored=False)
    context: int | None = option(
        None, "without a memory: tokens of document, question and answer [default: the model's window]", scored=False
    )
    max_new_tokens: int | None = option(
        None, "the most tokens of an answer [default: planted twice those of a right one, else 32]"
    )
    bos: str = option("auto", BOS_HELP.format(where="document's and question's start"))
    fact: str | None = option(None, f"planted: form of the facts: {', '.join(FORMS)} [default: passkey]")
    repeats: int | None = option(None, "planted: copies of the fact, r [default: 1]")
    length: int | None = option(None, "planted: tokens of a document [default: 8192]")
    depths: int | None = option(None, "planted: places of the fact, evenly spread from start to end [default: 5]")
    trials: int | None = option(None, "planted: documents at each depth [default: 4]")
    distractors: int | None = option(None, "planted: facts of other names in a document [default: 4]")
    seed: int | None = option(None, "planted: of everything that is drawn [default: 0]")
    text: str | None = option(
        None,
        f"planted: the text, a corpus by name, a file or folder, or {FILLER} [default: sympy-source]",
        scored=False,
    )
    limit: int | None = option(
        None, "use only the first questions; 0 uses all [default: triviaqa 200, file 0]", scored=False
    )
    split: str | None = option(None, "triviaqa: another split [default: validation]", scored=False)
    data_id: str | None = option(None, "triviaqa: another Hub repository, or a folder", scored=False)
    data_config: str | None = option(None, "triviaqa: another configuration", scored=False)
    data_revision: str | None = option(None, "triviaqa: another revision", scored=False)

    def __post_init__(self) -> None:
        wrong = [
            _unknown(name, getattr(self, name), allowed)
            for name, allowed in (
                ("reader", tuple(READERS)),
                ("pooling", POOLINGS),
                ("confidence", CONFIDENCES),
                ("keep", KEPT),
                ("fact", tuple(FORMS)),
            )
            if getattr(self, name) is not None and getattr(self, name) not in allowed
        ]
        for names, least in ((POSITIVE, 1), (NOT_NEGATIVE, 0)):
            given = [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]
            wrong += [f"{_flag(n)} {value} must be at least {least}" for n, value in given if not value >= least]
        if self.alpha is not None and math.isinf(self.alpha):
            wrong.append(f"--alpha {self.alpha} must be a number of nats")
        wrong += check_bos_rule(self.bos)
        wrong += self._useless() + self._impossible()
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def data_kind(self) -> str:
        """Return which of the kinds of data is read, a key of `DATA`."""
        return self.data if self.data in DATA and self.data != "file" else "file"

    def _useless(self) -> list[str]:
        """Return what is wrong with options that have no effect."""
        reader, data = READERS.get(self.reader, ALL_READER_OPTIONS), DATA[self.data_kind]
        given = [name for name in ALL_READER_OPTIONS if getattr(self, name) is not None]
        useless = [f"{_flag(name)} has no effect with --reader {self.reader}" for name in given if name not in reader]
        if "memory_size" in reader and self.memory_size is None:
            useless += [f"{_flag(name)} has no effect without --memory-size" for name in MEMORY_ONLY if name in given]
        if "memory_size" in reader and "memory_size" in given and "context" in given:
            useless.append("--context has no effect with --memory-size, which the question reads")
        given = [name for name in ALL_DATA_OPTIONS if getattr(self, name) is not None]
        useless += [f"{_flag(name)} has no effect with --data {self.data}" for name in given if name not in data]
        return [f"{message}: leave it out" for message in useless]

    def _impossible(self) -> list[str]:
        """Return what is wrong with options that are fine one by one."""
        wrong = []
        if self.memory_size is not None and (self.sinks or 0) >= self.memory_size > 0:
            wrong.append(f"--sinks {self.sinks} must be fewer than --memory-size {self.memory_size}")
        form = FORMS.get(self.fact or DATA[PLANTED]["fact"])
        if form is not None and (self.distractors or 0) > form.most_distractors:
            wrong.append(f"--distractors {self.distractors}: this fact has at most {form.most_distractors}")
        return wrong

    def _used(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return options with None replaced by what it stands for."""
        given = {name: getattr(self, name) for name in defaults if getattr(self, name) is not None}
        return {**defaults, **given}

    def protocol(self) -> dict[str, Any]:
        """Return what two results must share: the data and the decoding, not the reader that is compared."""
        scored = super().protocol()
        used = self._used(DATA[PLANTED]) if self.data_kind == PLANTED else {}
        planted = {name: used[name] for name in scored if name in used}
        shared = {"max_new_tokens": self.max_new_tokens or "auto", "bos": self.bos}
        return {"data": PLANTED if planted else "questions", **planted, **shared}

    def evaluated_length(self) -> int | None:
        """Return the longest sequence that is read at once, where an option says it."""
        lengths = [length for length in (self.context, self.window) if length is not None]
        return max(lengths) if lengths else None

    def plan(self, session: Session) -> Plan:
        """Read or make the questions, and check that all of them can be asked."""
        if self.reader == "bm25" and importlib.util.find_spec("bm25s") is None:
            raise ValueError("--reader bm25 needs bm25s, which is not installed: pip install 'ctxext[eval]'")
        if not getattr(session.tokenizer, "is_fast", False):
            raise ValueError("question-answering needs a fast tokenizer: one with a tokenizer.json")
        plan = Plan(units=[])
        questions = list(self._questions(session, plan))
        if not questions:
            raise ValueError(f"--data {self.data} has no question with a document: use other data")
        bos = bos_token(session.tokenizer, self.bos)
        reader = QuestionReader(
            kind=self.reader,
            options=self._used(READERS[self.reader]),
            max_new_tokens=self.max_new_tokens or self._answer_tokens(session, questions),
            bos=bos,
        )
        reader.check(session, questions)
        session.memo["reader"] = reader
        assert plan.corpus is not None
        texts = (Document(q.id, "\0".join((q.document, q.prompt, *q.answers))) for q in questions)
        plan.corpus |= {"hash": documents_hash(texts), "documents": len(questions)}
        plan.notes += self._notes(session, reader)
        plan.units = [Unit(question.id, float(len(question.document)), question) for question in questions]
        return plan

    def _questions(self, session: Session, plan: Plan) -> Iterator[Question]:
        """Yield the questions; describe them in `plan`."""
        used = self._used(DATA[self.data_kind])
        if self.data_kind == PLANTED:
            corpus = open_text(used.pop("text"), used["length"])
            plan.corpus = {"name": PLANTED, "source": corpus.source}
            yield from planted_questions(session.tokenizer, corpus, form=used.pop("fact"), **used)
            return
        limit = used.pop("limit")
        plan.corpus = {"name": self.data, "source": {"kind": "hub" if self.data == TRIVIAQA else "local", **used}}
        found = (question for question in read_questions(self.data, **used) if _has_document(question, plan))
        yield from islice(found, limit or None)

    def _answer_tokens(self, session: Session, questions: Sequence[Question]) -> int:
        """Return the most tokens of an answer where no option says it."""
        if self.data_kind != PLANTED:
            return ANSWER_TOKENS
        return 2 * max(len(encode(session.tokenizer, f" {question.answers[0]}")) for question in questions)

    def _notes(self, session: Session, reader: QuestionReader) -> list[str]:
        bos = "none" if reader.bos is None else reader.bos
        return [
            reader.describe(session.model),
            f"at most {reader.max_new_tokens} tokens of an answer, greedy; begin-of-sequence token {bos}",
            f"an answer is {self._answer_rule()}; `contains` searches all that was written",
        ]

    def _answer_rule(self) -> str:
        if self.data_kind != PLANTED:
            return "the first line that is not empty"
        return f"the first {FORMS[self._used(DATA[PLANTED])['fact']].answer}"

    def score(self, session: Session, unit: Unit) -> dict[str, Any]:
        """Read one document, ask its question and score the answer."""
        question: Question = unit.work
        reading = session.memo["reader"].read(session, question)
        planted = question.depth is not None
        pattern = FORMS[self._used(DATA[PLANTED])["fact"]].pattern if planted else None
        said = qa_scores.prediction(reading.generation, pattern)
        score: dict[str, Any] = {
            "exact_match": qa_scores.best(qa_scores.exact_match, said, question.answers),
            "f1": qa_scores.best(qa_scores.f1, said, question.answers),
            "contains": qa_scores.best(qa_scores.contains, reading.generation, question.answers),
            "tokens_read": reading.tokens_read,
            "document_tokens": reading.document_tokens,
            "share_read": reading.share,
            "windows": reading.windows,
            "prediction": said,
            "generation": reading.generation,
            "answers": list(question.answers),
        }
        if question.depth is not None:
            score["depth"] = 100 * question.depth
            score["copies_seen"] = sum(reading.has_read(*statement) for statement in question.statements)
            score["chance_seen"] = chance_seen(reading.share, len(question.statements))
        return score

    def summarize(self, plan: Plan, scored: Sequence[Mapping[str, Any]]) -> Summary:
        """Average over the questions; of planted facts also say which were read, and which were found by depth."""
        names = ("exact_match", "f1", "contains")
        metrics: dict[str, Any] = {name: _mean(scored, name) for name in (*names, "share_read", "tokens_read")}
        plots = [
            Plot(
                id="question-answering",
                title="Quality against tokens read",
                x_label="tokens read of a document, on average",
                y_label="exact match",
                x=[metrics["tokens_read"]],
                y=[metrics["exact_match"]],
            )
        ]
        ids = [unit.id for unit in plan.units]
        items = {name: {i: float(unit[name]) for i, unit in zip(ids, scored, strict=True)} for name in names}
        details: dict[str, Any] = {
            "items": items,
            "questions": {i: dict(unit) for i, unit in zip(ids, scored, strict=True)},
        }
        if self.data_kind == PLANTED:
            seen = [unit for unit in scored if unit["copies_seen"]]
            metrics["seen"] = len(seen) / len(scored)
            metrics["answered_of_seen"] = _mean(seen, "exact_match") if seen else None
            metrics["chance_seen"] = _mean(scored, "chance_seen")
            details["found_by_depth"] = by_depth = _by_depth(scored)
            plots.append(
                Plot(
                    id="question-answering-by-depth",
                    title="Planted facts found, by depth",
                    x_label="depth in the document (%)",
                    y_label="exact match",
                    x=[row["depth"] for row in by_depth],
                    y=[row["found"] for row in by_depth],
                    kind="heat",
                )
            )
        tokens = sum(unit["document_tokens"] for unit in scored)
        return Summary(metrics=metrics, tokens_scored=tokens, details=details, plots=plots)


def chance_seen(share: float, repeats: int) -> float:
    """Return the chance to meet one of r copies when the share f of a document is read: 1 - (1 - f)^r."""
    return 1 - (1 - share) ** repeats


def _has_document(question: Question, plan: Plan) -> bool:
    """Say whether there is something to read; count in `plan` where there is not."""
    if question.document:
        return True
    plan.skipped["questions_without_a_document"] = plan.skipped.get("questions_without_a_document", 0) + 1
    return False


def _mean(scored: Sequence[Mapping[str, Any]], name: str) -> float:
    return math.fsum(unit[name] for unit in scored) / len(scored)


def _by_depth(scored: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return by depth in percent the shares of questions that were answered, and whose fact was read."""
    rows = []
    for depth in sorted({unit["depth"] for unit in scored}):
        group = [unit for unit in scored if unit["depth"] == depth]
        seen = sum(unit["copies_seen"] > 0 for unit in group) / len(group)
        rows.append({"depth": depth, "found": _mean(group, "exact_match"), "seen": seen, "questions": len(group)})
    return rows
