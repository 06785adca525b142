"""Documents of real text with a fact in them that is asked for, planted once or several times, and others like it.

A document has a number of tokens of the model's own tokenizer, to within `TOLERANCE` for each statement: a document is
text, and where a statement begins and ends a tokenizer may cut otherwise than within the text. Statements stand
between two lines: one copy of the fact at the stated depth, the other copies and the distractors at line breaks drawn
at random, evenly over the document.
"""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ctxext.data.corpora import Corpus, open_corpus
from ctxext.data.documents import Document
from ctxext.evals.passkey import KEY_SENTENCE, LARGEST_KEY, QUESTION, SMALLEST_KEY
from ctxext.evals.qa_data import Question
from ctxext.evals.retrieval_variants import ANIMALS, CITIES, COLOURS, Needle
from ctxext.evals.ruler_words import NOUNS
from ctxext.evaluation.prompts import NOISE, encode, encode_all
from ctxext.reading.text import LazyText

FILLER = "noise"
TOLERANCE = 2  # tokens for each statement
_TRIES = 4  # at the right length: what one cut changes is known only after it


@dataclass(frozen=True)
class Fact:
    """What is planted and asked for; statements begin and end with a line break."""

    statement: str
    distractors: tuple[str, ...]
    prompt: str
    answer: str


def passkey(draw: random.Random, distractors: int) -> Fact:
    """Return a pass key, and keys of other names."""
    key, *others = map(str, draw.sample(range(SMALLEST_KEY, LARGEST_KEY + 1), 1 + distractors))
    named = tuple(
        f"\nThe {name} key is {other}. Remember it. {other} is the {name} key.\n"
        for name, other in zip(draw.sample(NOUNS, distractors), others, strict=True)
    )
    return Fact(KEY_SENTENCE.format(key=key), named, QUESTION, key)


def needle(draw: random.Random, distractors: int) -> Fact:
    """Return the animal on a city's flag, and others on those of other cities."""
    city, *cities = draw.sample(CITIES, 1 + distractors)
    pairs = draw.sample([f"{colour} {animal}" for colour in COLOURS for animal in ANIMALS], 1 + distractors)
    said = [
        f"\nThe animal on the flag of {of} is a {pair}.\n" for of, pair in zip([city, *cities], pairs, strict=True)
    ]
    prompt = f"\nWhich animal is on the flag of {city}? The animal on the flag of {city} is a"
    return Fact(said[0], tuple(said[1:]), prompt, pairs[0])


@dataclass(frozen=True)
class Form:
    """A form of facts.

    Attributes:
        make: Makes one, with a number of distractors.
        pattern: What in a model's words counts as an answer; the first one does.
        answer: The same in words.
        most_distractors: As many as there are other names.
    """

    make: Callable[[random.Random, int], Fact]
    pattern: str
    answer: str
    most_distractors: int


FORMS = {
    "passkey": Form(passkey, r"\d+", "number", len(NOUNS)),
    "needle": Form(needle, Needle.pattern, "colour and animal", len(CITIES) - 1),
}


@dataclass(frozen=True)
class Stretch:
    """Running text, and where each of its tokens starts and ends in it, in characters."""

    text: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @cached_property
    def breaks(self) -> list[int]:
        """The characters with which a line starts."""
        return [0, *(found.end() for found in re.finditer("\n", self.text))]

    def place(self, depth: float, tokens: int) -> int:
        """Return the last line's start at or before `depth` (0 to 1) of the first `tokens` tokens, in characters."""
        if depth >= 1:
            return self.ends[tokens - 1]
        return self.breaks[bisect.bisect_right(self.breaks, self.starts[int(depth * tokens)]) - 1]


def open_text(name: str, length: int) -> Corpus:
    """Return the text to plant in: a corpus, or `noise`, the filler sentences of the passkey over and over.

    Args:
        name: `noise`, a corpus by name, or a file or folder.
        length: Tokens of a document.

    Raises:
        ValueError: If there is no such corpus.
    """
    if name != FILLER:
        return open_corpus(name)
    lines = length // 10 + 1  # a line has more than ten words
    return Corpus(FILLER, {"kind": "generated", "name": FILLER}, lambda: iter([Document(FILLER, NOISE * lines)]))


def read_stretches(tokenizer: Any, corpus: Corpus, count: int, length: int) -> list[Stretch]:
    """Return stretches of `length` tokens of a corpus, one behind the other: `count`, or as many as it has.

    Raises:
        ValueError: If it has not one.
    """
    found: list[Stretch] = []
    left, enough = "", length
    documents = corpus.documents()
    more = True
    while more and len(found) < count:
        document = next(documents, None)
        more = document is not None
        left += document.text.rstrip("\n") + "\n" if document is not None else ""
        while len(found) < count and (len(left) >= enough or not more):
            tokens = LazyText(left, tokenizer).take(length)
            if len(tokens) < length:
                enough = len(left) * 5 // 4  # many short documents are not tokenized again with each one
                break
            end = tokens[-1].end
            found.append(Stretch(left[:end], tuple(t.start for t in tokens), tuple(t.end for t in tokens)))
            left, enough = left[end:].partition("\n")[2], length
    if not found:
        raise ValueError(
            f"{corpus.name} holds fewer tokens than the --length {length} of a document: "
            "use a smaller length, or a larger corpus with --text"
        )
    return found


def plant(tokenizer: Any, stretch: Stretch, statements: Sequence[tuple[float, str]], length: int) -> tuple[str, Any]:
    """Return a text of about `length` tokens with statements in it.

    Args:
        tokenizer: The model's.
        stretch: At least `length` tokens.
        statements: Pairs of depth (0 to 1, of the text without statements) and text.
        length: Tokens of text and statements together.

    Returns:
        The text, and the characters from and to which each statement runs in it, without its line breaks.

    Raises:
        ValueError: If the statements leave no room, or the tokens cannot be had to within `TOLERANCE`.
    """
    taken = sum(map(len, encode_all(tokenizer, [text for _, text in statements])))
    tokens = length - taken
    if tokens < 1:
        raise ValueError(f"--length {length} is too short: the statements alone take {taken} tokens")
    for _ in range(_TRIES):
        text, spans = _assemble(stretch, statements, tokens)
        over = len(encode(tokenizer, text)) - length
        if over == 0:
            break
        tokens = min(max(1, tokens - over), len(stretch.ends))
    if abs(over) > TOLERANCE * len(statements):
        raise ValueError(
            f"a document of {length} tokens comes out {over:+d} of them: this tokenizer cuts text otherwise than at "
            "line breaks, which this evaluation needs"
        )
    return text, spans


def _assemble(
    stretch: Stretch, statements: Sequence[tuple[float, str]], tokens: int
) -> tuple[str, list[tuple[int, int]]]:
    places = [stretch.place(depth, tokens) for depth, _ in statements]
    spans = [(0, 0)] * len(statements)
    text, done = "", 0
    for index in sorted(range(len(statements)), key=lambda index: places[index]):
        statement = statements[index][1]
        text += stretch.text[done : places[index]]
        done = places[index]
        start = len(text) + len(statement) - len(statement.lstrip("\n"))
        spans[index] = (start, start + len(statement.strip("\n")))
        text += statement
    return text + stretch.text[done : stretch.ends[tokens - 1]], spans


def planted_questions(
    tokenizer: Any,
    corpus: Corpus,
    *,
    form: str,
    repeats: int,
    length: int,
    depths: int,
    trials: int,
    distractors: int,
    seed: int,
) -> list[Question]:
    """Return a question for each depth and trial; the documents of a trial are made of the same stretch of text.

    Args:
        tokenizer: A fast tokenizer.
        corpus: Of the real text.
        form: Of the facts, a name in `FORMS`.
        repeats: r, copies of the fact.
        length: Tokens of a document.
        depths: Places of the fact, evenly spread from the start to the end (the middle for one).
        trials: Documents at each depth.
        distractors: Facts of the same form about other names.
        seed: Of what is drawn.

    Raises:
        ValueError: If the corpus or the length is too short.
    """
    stretches = read_stretches(tokenizer, corpus, trials, length)
    questions = []
    for number in range(depths):
        depth = 0.5 if depths == 1 else number / (depths - 1)
        for trial in range(trials):
            draw = random.Random(f"{seed}/{depth:.6f}/{trial}")
            fact = FORMS[form].make(draw, distractors)
            anywhere = [*[fact.statement] * (repeats - 1), *fact.distractors]
            statements = [(depth, fact.statement), *((draw.random(), text) for text in anywhere)]
            text, spans = plant(tokenizer, stretches[trial % len(stretches)], statements, length)
            name = f"depth={100 * depth:.2f}%/{trial}"
            copies = tuple(spans[:repeats])
            questions.append(Question(name, text, fact.prompt, fact.prompt, (fact.answer,), depth, copies))
    return questions
