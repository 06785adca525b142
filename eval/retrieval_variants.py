"""What each variant of the retrieval evaluation hides and asks: one small class for each, all of the same form."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ctxext.evals.passkey import HEADER, KEY_SENTENCE, QUESTION
from ctxext.evals.ruler_words import NOUNS, compound_words, uuid_text
from ctxext.evaluation.prompts import Haystack, TooLongError, encode, fill, noise_tokens

UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
CITIES = "Lisbon Oslo Cairo Lima Quito Nairobi Hanoi Osaka Perth Dublin Zagreb Tunis Havana Bergen Porto Riga".split()
COLOURS = (
    "red blue green yellow purple silver golden black white grey brown pink crimson scarlet violet bronze".split()
)
ANIMALS = (
    "badger camel dolphin donkey eagle falcon heron jaguar lizard monkey otter panther raven tiger turtle wolf".split()
)


@dataclass(frozen=True)
class Trial:
    """One prompt.

    Attributes:
        ids: its tokens, exactly as many as asked for.
        expected: what a right answer holds; one of them, except where all keys are asked for.
        position: the token at which what is asked for is stated.
    """

    ids: list[int]
    expected: tuple[str, ...]
    position: int


@dataclass(frozen=True)
class Hidden:
    """A trial in words: what is hidden, the first statement at the wanted depth and the others anywhere."""

    statements: tuple[str, ...]
    question: str
    expected: tuple[str, ...]


class Variant(ABC):
    """Makes the prompts of a variant.

    Class attributes:
        defaults: the options that it uses, each with the value that None stands for.
        pattern: what in an answer counts as one; only the first counts, except where all keys are asked for.
        header: how each prompt starts.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    pattern: ClassVar[str] = r"\d+"
    header: ClassVar[str] = HEADER

    def __init__(self, tokenizer: Any, length: int, bos: int | None, options: Mapping[str, Any], text: Sequence[int]):
        """Prepare prompts of `length` tokens that start with `bos` and hide in `text`, or in noise if it is empty."""
        self.tokenizer = tokenizer
        self.length = length
        self.options = options
        self.bos = [] if bos is None else [bos]
        self.start = self.bos + encode(tokenizer, self.header)
        self.haystack = Haystack(tokenizer, text or noise_tokens(tokenizer, length))

    def prefix(self) -> list[int]:
        """Return the tokens that a prompt starts with as far as nothing is hidden."""
        return (self.start + self.haystack.ids)[: self.length]

    @abstractmethod
    def hidden(self, draw: random.Random) -> Hidden:
        """Return what one trial hides."""

    def pieces(self, draw: random.Random) -> tuple[Hidden, list[list[int]], list[int]]:
        """Return what one trial hides, its statements and its question as tokens.

        Raises:
            TooLongError: if they do not fit.
        """
        hidden = self.hidden(draw)
        statements = [encode(self.tokenizer, text) for text in hidden.statements]
        question = encode(self.tokenizer, hidden.question)
        least = len(self.start) + sum(map(len, statements)) + len(question)
        if least > self.length:
            raise TooLongError(f"header, statements and question take {least} tokens")
        return hidden, statements, question

    def check(self, draw: random.Random) -> None:
        """Raise `TooLongError` if the trial that `draw` gives does not fit."""
        self.pieces(draw)

    def trial(self, depth: float, draw: random.Random) -> Trial:
        """Return one prompt whose first statement lies at `depth` (0 to 1) of the text."""
        hidden, statements, question = self.pieces(draw)
        depths = [depth, *(draw.random() for _ in statements[1:])]
        room = self.length - len(self.start) - len(question)
        body, places = self.haystack.hide(list(zip(depths, statements, strict=True)), room)
        return Trial(self.start + body + question, hidden.expected, len(self.start) + places[0])

    def found(self, answer: str, expected: Sequence[str]) -> float:
        """Return which share of the expected was answered."""
        if len(expected) > 1:
            named = set(re.findall(self.pattern, answer))
            return sum(key in named for key in expected) / len(expected)
        first = re.search(self.pattern, answer)
        return float(first is not None and first.group() == expected[0])


def _keys(draw: random.Random, digits: int, count: int) -> list[str]:
    """Return `count` different keys, none of which starts with a zero."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[str(draw.randrange(10 ** (digits - 1), 10**digits))] = None
    return list(keys)


class Digits(Variant):
    """The passkey with more digits."""

    defaults = {"digits": 20}

    def hidden(self, draw: random.Random) -> Hidden:
        """State one key."""
        (key,) = _keys(draw, self.options["digits"], 1)
        return Hidden((KEY_SENTENCE.format(key=key),), QUESTION, (key,))


class Several(Variant):
    """Several named keys; one of them is asked for, or all."""

    defaults = {"digits": 5, "keys": 4, "ask": "one"}

    def hidden(self, draw: random.Random) -> Hidden:
        """State the keys; the first one is asked for, or lies at the wanted depth where all are."""
        keys = _keys(draw, self.options["digits"], self.options["keys"])
        names = compound_words(draw, len(keys))
        said = [
            f"\nThe pass key of {name} is {key}. Remember it. {key} is the pass key of {name}.\n"
            for name, key in zip(names, keys, strict=True)
        ]
        if self.options["ask"] == "all":
            return Hidden(tuple(said), "\nWhat are all the pass keys? The pass keys are", tuple(keys))
        question = f"\nWhat is the pass key of {names[0]}? The pass key of {names[0]} is"
        return Hidden(tuple(said), question, (keys[0],))


class Distractors(Variant):
    """The passkey among keys of other names, stated in the same words."""

    defaults = {"digits": 5, "distractors": 8}

    def hidden(self, draw: random.Random) -> Hidden:
        """State the pass key and the others."""
        keys = _keys(draw, self.options["digits"], 1 + self.options["distractors"])
        names = ["pass", *draw.sample(NOUNS, self.options["distractors"])]
        said = [
            f"\nThe {name} key is {key}. Remember it. {key} is the {name} key.\n"
            for name, key in zip(names, keys, strict=True)
        ]
        return Hidden(tuple(said), QUESTION, (keys[0],))


class Needle(Variant):
    """A sentence that does not belong there, in real text."""

    defaults = {"data": "sympy-source"}
    pattern = rf"\b(?:{'|'.join(COLOURS)}) (?:{'|'.join(ANIMALS)})\b"
    header = "There is a sentence about a city hidden inside the following text. I will ask you about it.\n\n"

    def hidden(self, draw: random.Random) -> Hidden:
        """State the needle."""
        city, animal = draw.choice(CITIES), f"{draw.choice(COLOURS)} {draw.choice(ANIMALS)}"
        needle = f"\nThe animal on the flag of {city} is a {animal}.\n"
        question = f"\nWhich animal is on the flag of {city}? The animal on the flag of {city} is a"
        return Hidden((needle,), question, (animal,))


class KeyValue(Variant):
    """A JSON object of random UUIDs that fills the prompt (the task of arXiv 2307.03172, section 3)."""

    pattern = UUID
    header = "\nExtract the value of the given key from the JSON object below.\n\nJSON data:\n{\n"

    def hidden(self, draw: random.Random) -> Hidden:
        """Return the least that a prompt must hold: the pair that is asked for, another one, and the question."""
        key, value = uuid_text(draw), uuid_text(draw)
        question = f'\n}}\n\nKey: "{key}"\nCorresponding value:'
        return Hidden((f'"{key}": "{value}",\n', _pair(draw)), question, (value,))

    def trial(self, depth: float, draw: random.Random) -> Trial:
        """Return an object whose pair number `depth` (0 to 1, from first to last) is asked for.

        What is left over, less than a pair, is filled with noise before the task.
        """
        hidden, statements, question = self.pieces(draw)
        room = self.length - len(self.start) - len(question) - len(statements[0])
        pairs = list(fill(self.tokenizer, lambda: _pair(draw), room))
        at = round(depth * len(pairs))
        pairs.insert(at, (hidden.statements[0], statements[0]))
        last = pairs[-1][0].removesuffix(",\n")
        pieces = [ids for _, ids in pairs[:-1]] + [encode(self.tokenizer, last)]
        body = [token for ids in pieces for token in ids]
        left = self.length - len(self.start) - len(body) - len(question)
        task = self.start[len(self.bos) :]
        position = len(self.start) + left + sum(map(len, pieces[:at]))
        return Trial(self.bos + self.haystack.ids[:left] + task + body + question, hidden.expected, position)


def _pair(draw: random.Random) -> str:
    return f'"{uuid_text(draw)}": "{uuid_text(draw)}",\n'


VARIANTS: dict[str, type[Variant]] = {
    "digits": Digits,
    "several": Several,
    "distractors": Distractors,
    "key_value": KeyValue,
    "needle": Needle,
}
