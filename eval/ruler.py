"""RULER's tasks at one length or several, and the effective length (arXiv 2404.06654).

Prompts are generated for the model's own tokenizer: prompt and room for the answer together never take more than the
length, and fill it as far as whole lines, words or documents allow. A sample that does not fit is not cut but left out
and counted. Scores are RULER's: the share of the expected strings in the answer, case ignored (for question answering,
whether one of them is there), in percent; the mean gives every task the same weight.
"""

from __future__ import annotations

import difflib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ctxext.data.corpora import Corpus
from ctxext.data.documents import Document, documents_hash
from ctxext.evals.ruler_lists import common_words, frequent_words
from ctxext.evals.ruler_qa import QuestionTask, read_questions
from ctxext.evals.ruler_tasks import Materials, NeedleTask, Sample, Task, track_variables
from ctxext.evaluation.base import Evaluation, Plan, Plot, Session, Summary, Unit, option
from ctxext.evaluation.bos import BOS_HELP, bos_token, check_bos_rule
from ctxext.evaluation.corpus import check_data, open_named
from ctxext.evaluation.effective import RULER_THRESHOLD, effective_length, weighted_averages
from ctxext.evaluation.prompts import Haystack, TooLongError, answer, corpus_tokens, noise_tokens

DEFAULT_LENGTH, DEFAULT_DATA = 4096, "sympy-source"
FULL_SAMPLES = 500
# A task whose first samples are all too long for a length is refused at it.
TRIED_TO_FIT = 20


def _needle(**shape: Any) -> Task:
    made = NeedleTask(**shape)
    return Task("retrieval", made, needs_text=made.haystack == "text")


# Appendix B of the paper.
TASKS: dict[str, Task] = {
    "niah_single_1": _needle(haystack="noise"),
    "niah_single_2": _needle(),
    "niah_single_3": _needle(value="uuid"),
    "niah_multikey_1": _needle(keys=4),
    "niah_multikey_2": _needle(haystack="needles"),
    "niah_multikey_3": _needle(haystack="needles", key="uuid", value="uuid"),
    "niah_multivalue": _needle(values=4),
    "niah_multiquery": _needle(keys=4, queries=4),
    "vt": Task("tracing", track_variables),
    "cwe": Task("aggregation", common_words),
    "fwe": Task("aggregation", frequent_words),
    "qa_1": Task("qa", QuestionTask("qa_1"), any_of=True),
    "qa_2": Task("qa", QuestionTask("qa_2"), any_of=True),
}
QA_TASKS = tuple(name for name, task in TASKS.items() if task.kind == "qa")


@dataclass(frozen=True)
class Job:
    """Some samples of one task at one length."""

    task: str
    length: int
    indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Ruler(Evaluation):
    """RULER's tasks and the effective length."""

    name: ClassVar[str] = "ruler"
    description: ClassVar[str] = "RULER's retrieval, tracing, aggregation and question tasks; effective length"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "ruler": {"samples": FULL_SAMPLES, "tasks": "all", "threshold": RULER_THRESHOLD}
    }

    length: int | None = option(None, f"tokens of a prompt and its answer together [default: {DEFAULT_LENGTH}]")
    lengths: str | None = option(None, "several lengths in one go, for instance 4096,8192,16384, in place of --length")
    tasks: str = option("all", f"all, or some of {', '.join(TASKS)}, comma-separated")
    samples: int = option(20, f"of each task at each length ({FULL_SAMPLES} in the paper)")
    threshold: float = option(RULER_THRESHOLD, "what the mean score (percent) of an effective length must exceed")
    seed: int = option(0, "of everything that is random")
    bos: str = option("auto", BOS_HELP.format(where="prompt's start"))
    data: str = option(DEFAULT_DATA, "text to hide in: a corpus by name, or a file or folder", scored=False)
    split: str | None = option(None, "another split of the corpus", scored=False)
    column: str | None = option(None, "the column that holds the text", scored=False)
    qa_1: str | None = option(None, "questions of qa_1: a SQuAD-style .json or .jsonl file", scored=False)
    qa_2: str | None = option(None, "questions of qa_2, in RULER those of several hops", scored=False)

    def __post_init__(self) -> None:
        wrong = [*self._wrong_lengths(), *self._wrong_tasks(), *check_bos_rule(self.bos)]
        if self.samples < 1:
            wrong.append(f"--samples {self.samples} must be at least 1")
        if not 0 <= self.threshold <= 100:
            wrong.append(f"--threshold {self.threshold} is a percentage: it must lie between 0 and 100")
        if wrong:
            raise ValueError("; ".join(wrong))

    def _wrong_lengths(self) -> list[str]:
        if self.length is not None and self.lengths is not None:
            return ["--length and --lengths exclude each other: leave one out"]
        try:
            lengths = self.tested_lengths()
        except ValueError:
            return [f"--lengths {self.lengths!r} must be numbers such as 4096,8192"]
        if min(lengths) < 1 or len(set(lengths)) < len(lengths):
            return [f"the lengths {', '.join(map(str, lengths))} must be different and at least 1"]
        return []

    def _wrong_tasks(self) -> list[str]:
        wrong = []
        for name in self._named_tasks():
            if name not in TASKS:
                close = difflib.get_close_matches(name, TASKS, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else "."
                wrong.append(f"--tasks has no {name!r}{hint} Allowed: all, {', '.join(TASKS)}")
        if self.tasks != "all":
            named = self._named_tasks()
            for name in QA_TASKS:
                flag = f"--{name.replace('_', '-')}"
                if name in named and getattr(self, name) is None:
                    wrong.append(f"--tasks {name} needs questions: give {flag} FILE")
                if name not in named and getattr(self, name) is not None:
                    wrong.append(f"{flag} has no effect: --tasks leaves {name} out")
        return wrong + self._useless_text(wrong)

    def _useless_text(self, wrong: Sequence[str]) -> list[str]:
        """Return what is wrong with options that choose a text, where no (known) task hides anything in text."""
        if wrong or self._needs_text():
            return []
        given = {"data": self.data != DEFAULT_DATA, "split": self.split, "column": self.column}
        return [f"--{name} has no effect: no task of --tasks {self.tasks} reads text" for name in given if given[name]]

    def _named_tasks(self) -> list[str]:
        return list(TASKS) if self.tasks == "all" else [name.strip() for name in self.tasks.split(",")]

    def tested_lengths(self) -> list[int]:
        """Return the lengths in tokens, ascending."""
        if self.lengths is None:
            return [DEFAULT_LENGTH if self.length is None else self.length]
        return sorted(int(word) for word in self.lengths.split(","))

    def tested_tasks(self) -> list[str]:
        """Return the tasks in RULER's order, without those that have no questions."""
        named = self._named_tasks()
        return [name for name in TASKS if name in named and (name not in QA_TASKS or getattr(self, name) is not None)]

    def _needs_text(self) -> bool:
        return any(TASKS[name].needs_text for name in self.tested_tasks())

    def _open(self) -> Corpus:
        return open_named(self.data, split=self.split, column=self.column)

    def check(self) -> None:
        """Read the first document of the text, and the questions."""
        if self._needs_text():
            check_data(self.data, self._open().documents)
        for name in QA_TASKS:
            if name in self.tested_tasks():
                read_questions(Path(getattr(self, name)))

    def protocol(self) -> dict[str, Any]:
        """Return the options that change the score, lengths and tasks spelt out."""
        rest = {
            name: value for name, value in super().protocol().items() if name not in ("length", "lengths", "tasks")
        }
        lengths = "+".join(map(str, self.tested_lengths()))
        return {"lengths": lengths, "tasks": "+".join(self.tested_tasks()), **rest}

    def evaluated_length(self) -> int | None:
        """Return the longest length: prompt and answer together."""
        return max(self.tested_lengths())

    def plan(self, session: Session) -> Plan:
        """Read text and questions, check that every task fits every length, and batch the samples."""
        bos = bos_token(session.tokenizer, self.bos)
        plan = Plan(units=[])
        plan.notes.append(f"begin-of-sequence token {'none' if bos is None else bos} at the prompt's start")
        left_out = [name for name in self._named_tasks() if name not in self.tested_tasks()]
        if left_out:
            plan.notes.append(f"left out for want of questions (--qa-1, --qa-2): {', '.join(left_out)}")
        if self.samples < FULL_SAMPLES:
            plan.notes.append(f"reduced: {self.samples} samples of each task (RULER: {FULL_SAMPLES})")
        materials = self._materials(session, bos, plan)
        session.memo["materials"] = materials
        self._check_fit(materials)
        for length, name in itertools.product(self.tested_lengths(), self.tested_tasks()):
            for indices in _batches(self._samples_of(materials, name), session.batch_size):
                unit = f"{length}/{name}/{indices[0]}-{indices[-1]}"
                plan.units.append(Unit(unit, float(length * len(indices)), Job(name, length, indices)))
        return plan

    def _materials(self, session: Session, bos: int | None, plan: Plan) -> Materials:
        """Gather what prompts are made of; state in `plan` what was read."""
        tokenizer, longest = session.tokenizer, max(self.tested_lengths())
        noise = Haystack(tokenizer, noise_tokens(tokenizer, longest))
        materials = Materials(tokenizer, [] if bos is None else [bos], noise)
        documents: list[Document] = []
        sources: list[dict[str, Any]] = []
        tokens = 0
        if self._needs_text():
            corpus = self._open()
            ids, documents = corpus_tokens(tokenizer, corpus, longest)
            materials.text = Haystack(tokenizer, ids)
            sources.append(corpus.source)
            tokens = len(ids)
        questions = {}
        for name in (name for name in QA_TASKS if name in self.tested_tasks()):
            questions[name] = read_questions(Path(getattr(self, name)))
            random.Random(f"{self.seed}/{name}").shuffle(questions[name].questions)
            documents = [*documents, questions[name].document()]
            sources.append({"kind": "questions", "name": questions[name].path.name})
            if len(questions[name].questions) < self.samples:
                plan.notes.append(
                    f"{name}: all {len(questions[name].questions)} questions of the file, one sample each"
                )
        materials.questions = questions
        if documents:
            plan.corpus = {
                "name": "+".join(source["name"] for source in sources),
                "source": sources[0] if len(sources) == 1 else {"kind": "joined", "parts": sources},
                "hash": documents_hash(documents),
                "documents": len(documents),
                "tokens": tokens,
            }
        return materials

    def _samples_of(self, materials: Materials, name: str) -> int:
        """Return how many samples a task has: no more than there are questions."""
        return min(self.samples, len(materials.questions[name].questions)) if name in QA_TASKS else self.samples

    def _sample(self, materials: Materials, name: str, length: int, index: int) -> Sample:
        draw = random.Random(f"{self.seed}/{name}/{length}/{index}")
        return TASKS[name].build(materials, length, draw, index)

    def _check_fit(self, materials: Materials) -> None:
        """Refuse lengths at which a task has no sample that fits: means over other tasks are no comparison."""
        wrong = []
        for length, name in itertools.product(self.tested_lengths(), self.tested_tasks()):
            for index in range(min(TRIED_TO_FIT, self._samples_of(materials, name))):
                try:
                    self._sample(materials, name, length, index)
                    break
                except TooLongError as error:
                    reason = error
            else:
                wrong.append(f"{name} at {length} tokens: {reason}")
        if wrong:
            raise ValueError(
                f"too short for some tasks ({'; '.join(wrong)}): use a longer --length, or --tasks without them"
            )

    def score(self, session: Session, unit: Unit) -> dict[str, Any]:
        """Answer a few samples of one task; those of equal length are read as one batch."""
        job: Job = unit.work
        materials: Materials = session.memo["materials"]
        samples: dict[int, Sample] = {}
        for index in job.indices:
            try:
                samples[index] = self._sample(materials, job.task, job.length, index)
            except TooLongError:
                continue
        rows: list[dict[str, Any]] = []
        for indices in _equally_long(samples, session.batch_size):
            texts = answer(session, [samples[index].ids for index in indices], samples[indices[0]].room)
            for index, text in zip(indices, texts, strict=True):
                sample = samples[index]
                rows.append(
                    {
                        "index": index,
                        "score": TASKS[job.task].score(text, sample.expected),
                        "prompt_tokens": len(sample.ids),
                        "room": sample.room,
                        "expected": list(sample.expected),
                        "answer": text,
                    }
                )
        rows.sort(key=lambda row: row["index"])
        return {
            "task": job.task,
            "length": job.length,
            "too_long": len(job.indices) - len(samples),
            "samples": rows,
        }

    def summarize(self, plan: Plan, scored: Sequence[Mapping[str, Any]]) -> Summary:
        """Average over samples, then tasks, then lengths."""
        found: dict[int, dict[str, list[float]]] = {}
        for unit in scored:
            scores = found.setdefault(unit["length"], {}).setdefault(unit["task"], [])
            scores += [100 * row["score"] for row in unit["samples"]]
        by_task = {
            length: {name: _mean(scores) for name, scores in tasks.items()} for length, tasks in sorted(found.items())
        }
        by_length = {length: _mean(list(tasks.values())) for length, tasks in by_task.items()}
        too_long = sum(unit["too_long"] for unit in scored)
        if too_long:
            plan.skipped["samples_too_long"] = too_long
        rows = [(unit, row) for unit in scored for row in unit["samples"]]
        details = {
            "score_by_length": {str(length): score for length, score in by_length.items()},
            "scores": {str(length): tasks for length, tasks in by_task.items()},
            "items": {f"{unit['length']}/{unit['task']}/{row['index']}": 100 * row["score"] for unit, row in rows},
            "answers": [dict(unit) for unit in scored],
        }
        return Summary(
            metrics=self._metrics(by_task, by_length),
            tokens_scored=sum(row["prompt_tokens"] for _, row in rows),
            details=details,
            plots=[_curve(by_length)],
            notes=[f"score by length: {', '.join(f'{length}: {by_length[length]:.1f}' for length in by_length)}"],
        )

    def _metrics(self, by_task: Mapping[int, Mapping[str, float]], by_length: Mapping[int, float]) -> dict[str, Any]:
        metrics: dict[str, Any] = {
            "score": _mean(list(by_length.values())),
            "effective_length": effective_length(by_length, self.threshold),
        }
        if len(by_length) > 1:
            metrics["weighted_inc"], metrics["weighted_dec"] = weighted_averages(by_length)
        for name in self.tested_tasks():
            metrics[name] = _mean([tasks[name] for tasks in by_task.values()])
        return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _batches(count: int, size: int) -> Iterator[tuple[int, ...]]:
    for start in range(0, count, size):
        yield tuple(range(start, min(start + size, count)))


def _equally_long(samples: Mapping[int, Sample], size: int) -> Iterator[Sequence[int]]:
    """Yield the indices of samples with equally long prompts and as much room for answers, at most `size` at once."""

    def tokens(index: int) -> tuple[int, int]:
        return len(samples[index].ids), samples[index].room

    for _, group in itertools.groupby(sorted(samples, key=tokens), key=tokens):
        indices = list(group)
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def _curve(by_length: Mapping[int, float]) -> Plot:
    return Plot(
        id="ruler",
        title="RULER: mean score by length",
        x_label="prompt and answer (tokens)",
        y_label="mean score (%)",
        x=list(by_length),
        y=list(by_length.values()),
        mark_window=True,
    )
