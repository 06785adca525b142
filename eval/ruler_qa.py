"""RULER's question answering (arXiv 2404.06654, section 3): the paragraphs that answer a question, among others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxext.data.documents import Document
from ctxext.evals.ruler_tasks import Materials, Sample, assemble
from ctxext.evaluation.prompts import TooLongError, encode_all

ORDER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
QA_HEAD = f"{ORDER}\n\nThe following are given documents.\n\n"
QA_TAIL = f"{ORDER}\n\nQuestion: {{query}} Answer:"


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, and the indices of the paragraphs that answer it."""

    text: str
    answers: tuple[str, ...]
    paragraphs: tuple[int, ...]


@dataclass
class QuestionSet:
    """The content of one file.

    Attributes:
        path: the file.
        paragraphs: every different paragraph.
        questions: in the file's order.
        tokens: of each paragraph with two line breaks after it, made on first use.
    """

    path: Path
    paragraphs: list[str]
    questions: list[Question]
    tokens: list[list[int]] = field(default_factory=list)

    def encoded(self, tokenizer: Any) -> list[list[int]]:
        """Return the tokens of every paragraph."""
        if not self.tokens:
            self.tokens = encode_all(tokenizer, [f"{text}\n\n" for text in self.paragraphs])
        return self.tokens

    def document(self) -> Document:
        """Return the content as one document, for the corpus hash."""
        return Document(self.path.name, self.path.read_text(encoding="utf-8"))


def _squad_rows(content: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the questions of SQuAD's own format, one flat row each."""
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield f"question {question.get('id', '?')}", {**question, "context": paragraph["context"]}


def _line_rows(text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"line {number}", line


def _answers(value: Any) -> tuple[str, ...]:
    """Return the answers of one row: strings, SQuAD's `{"text": ...}` objects, or `datasets`' lists of texts."""
    if isinstance(value, Mapping):
        value = value["text"]
    listed = [value] if isinstance(value, str) else value
    texts = [item["text"] if isinstance(item, Mapping) else item for item in listed]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("answers must be text")
    return tuple(dict.fromkeys(text for text in texts if text.strip()))


def read_questions(path: Path) -> QuestionSet:
    """Read questions with their paragraphs.

    Args:
        path: SQuAD's `.json`, or a `.jsonl` file whose rows have `question`, `context` (a paragraph, or a list of all
            paragraphs that the answer needs) and `answers` (a list of texts, or `{"text": [...]}`).

    Returns:
        The questions that have an answer.

    Raises:
        ValueError: if the file is missing, of another kind, or has no question with an answer.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a SQuAD-style .json or .jsonl file")
    where = "the file"
    paragraphs: dict[str, int] = {}
    questions: list[Question] = []
    try:
        text = path.read_text(encoding="utf-8")
        rows: Iterator[tuple[str, Any]] = _squad_rows(json.loads(text)) if path.suffix == ".json" else _line_rows(text)
        for place, given in rows:
            where = place
            row = json.loads(given) if isinstance(given, str) else given
            answers = _answers(row["answers"])
            gold = [row["context"]] if isinstance(row["context"], str) else list(row["context"])
            if not isinstance(row["question"], str) or not all(isinstance(item, str) for item in gold):
                raise TypeError("question and context must be text")
            places = tuple(paragraphs.setdefault(item, len(paragraphs)) for item in gold)
            if answers:
                questions.append(Question(row["question"], answers, places))
    except (KeyError, TypeError, ValueError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path}, {where}, is not SQuAD-style ({said}): rows need question, context and answers"
        ) from error
    if not questions:
        raise ValueError(f"{path} has no question with an answer")
    return QuestionSet(path, list(paragraphs), questions)


@dataclass(frozen=True)
class QuestionTask:
    """Question answering over one file of questions; `name` says which."""

    name: str

    def __call__(self, materials: Materials, length: int, draw: random.Random, index: int) -> Sample:
        """Return sample number `index`: a question that no other sample asks, at any length.

        Raises:
            TooLongError: if the paragraphs that answer it do not fit.
            ValueError: if all paragraphs of the file together are shorter than `length`.
        """
        chosen: QuestionSet = materials.questions[self.name]
        question = chosen.questions[index]
        return assemble(
            materials,
            length,
            (QA_HEAD, QA_TAIL.format(query=question.text)),
            (question.answers, " " + max(question.answers, key=len), 32),
            lambda space: self._documents(materials, chosen, question, draw, space),
        )

    def _documents(
        self, materials: Materials, chosen: QuestionSet, question: Question, draw: random.Random, space: int
    ) -> list[int]:
        tokens = chosen.encoded(materials.tokenizer)
        titles = materials.numbered("Document {}:\n")
        documents = list(question.paragraphs)
        left = space - sum(len(titles[number]) + len(tokens[place]) for number, place in enumerate(documents))
        if left < 0:
            raise TooLongError(f"the paragraphs of a question take {space - left} tokens, {space} are left for them")
        others = [place for place in range(len(tokens)) if place not in question.paragraphs]
        for place in draw.sample(others, len(others)):
            left -= len(titles[len(documents)]) + len(tokens[place])
            if left < 0:
                break
            documents.append(place)
        else:
            raise ValueError(
                f"the paragraphs of {chosen.path} take {space - left} tokens, fewer than the {space} to fill: "
                "use a smaller length or a file with more paragraphs"
            )
        draw.shuffle(documents)
        return [token for number, place in enumerate(documents) for token in titles[number] + tokens[place]]
