"""RULER's tasks (arXiv 2404.06654, section 3 and appendix A to D): what each hides, asks and counts as right.

The prompts' words are the paper's (appendix D). The words, numbers, texts and questions are our own, so a score is to
be compared with ours, not with the paper's tables.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxext.evals.ruler_words import compound_words, letters, uuid_text
from ctxext.evaluation.prompts import NOISE, PIECES_AT_ONCE, Haystack, TooLongError, encode, encode_all, fill

ONE_HEAD = (
    "A special magic {value} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {value} afterwards.\n"
)
MANY_HEAD = (
    "Some special magic {value}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {value}s afterwards.\n"
)
ONE_TAIL = (
    "\nWhat is the special magic {value} for {query} mentioned in the provided text? "
    "The special magic {value} for {query} mentioned in the provided text is"
)
MANY_TAIL = (
    "\nWhat are all the special magic {value}s for {query} mentioned in the provided text? "
    "The special magic {value}s for {query} mentioned in the provided text are"
)
NEEDLE = "One of the special magic {value}s for {key} is: {magic}.\n"
VT_HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
VT_TAIL = (
    "\nQuestion: Find all variables that are assigned the value {query} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {count} variables are assigned the value {query}, they are:"
)
HOPS = 4


@dataclass(frozen=True)
class Sample:
    """One prompt and what it asks for.

    Attributes:
        ids: the prompt's tokens; with the answer's they are at most as many as the length.
        expected: the strings that the metric looks for.
        room: tokens kept free for the answer.
    """

    ids: list[int]
    expected: tuple[str, ...]
    room: int


class Numbered:
    """The tokens of a piece for the numbers 1, 2, 3, ..., made as far as they are needed; indices start at 0."""

    def __init__(self, tokenizer: Any, form: str) -> None:
        """Prepare the pieces that `form`, with `{}` for the number, gives."""
        self.tokenizer = tokenizer
        self.form = form
        self.made: list[list[int]] = []

    def __getitem__(self, index: int) -> list[int]:
        if index >= len(self.made):
            wanted = range(len(self.made) + 1, index + PIECES_AT_ONCE + 1)
            self.made += encode_all(self.tokenizer, [self.form.format(number) for number in wanted])
        return self.made[index]

    def tokens(self, start: int, stop: int) -> int:
        """Return how many tokens the pieces with the indices `start` to `stop - 1` take."""
        return sum(len(self[index]) for index in range(start, stop))


@dataclass
class Materials:
    """What the tasks make their prompts of.

    Attributes:
        tokenizer: the model's.
        bos: the begin-of-sequence token in a list, or an empty list.
        noise: repeated sentences, at least as long as the longest prompt.
        text: a corpus, at least as long as the longest prompt; None if no task needs it.
        questions: what the question answering tasks ask, by task.
        numberings: the pieces that only differ in a number, by their form.
    """

    tokenizer: Any
    bos: list[int]
    noise: Haystack
    text: Haystack | None = None
    questions: Mapping[str, Any] = field(default_factory=dict)
    numberings: dict[str, Numbered] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Tokenize one piece, with no special token."""
        return encode(self.tokenizer, text)

    def numbered(self, form: str) -> Numbered:
        """Return the pieces that `form`, with `{}` for the number, gives."""
        return self.numberings.setdefault(form, Numbered(self.tokenizer, form))


Build = Callable[[Materials, int, random.Random, int], Sample]


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        kind: the category: retrieval, tracing, aggregation or qa.
        build: makes sample number `index` of prompts of `length` tokens: `build(materials, length, draw, index)`. It
            raises `TooLongError` if the sample does not fit.
        any_of: whether one of the expected strings is enough (RULER's `string_match_part`).
        needs_text: whether it hides in a corpus.
    """

    kind: str
    build: Build
    any_of: bool = False
    needs_text: bool = False

    def score(self, answer: str, expected: Sequence[str]) -> float:
        """Return RULER's score of an answer, 0 to 1: the share of the expected strings in it, case ignored."""
        hits = [text.lower() in answer.lower() for text in expected]
        return float(any(hits)) if self.any_of else sum(hits) / len(hits)


def assemble(
    materials: Materials,
    length: int,
    ends: tuple[str, str],
    answer: tuple[tuple[str, ...], str, int],
    body: Callable[[int], list[int]],
) -> Sample:
    """Put a prompt together.

    Args:
        materials: what prompts are made of.
        length: tokens of the prompt and its answer together.
        ends: the text before and after the body.
        answer: the expected strings, the text of a full answer, and the tokens that RULER lets a model generate. More
            are kept free where the tokenizer needs more for the full answer.
        body: gives at most so many tokens.

    Raises:
        TooLongError: if head, tail and answer take more than `length` tokens, or the body does not fit between them.
    """
    expected, full, usual = answer
    head, tail = (materials.encode(text) for text in ends)
    room = max(usual, len(materials.encode(full)) + 1)
    space = length - room - len(materials.bos) - len(head) - len(tail)
    if space < 0:
        raise TooLongError(f"the question and the room for its answer alone take {length - space} tokens")
    ids = materials.bos + head + body(space) + tail
    assert len(ids) + room <= length, f"{len(ids)} + {room} tokens are more than {length}"
    return Sample(ids, expected, room)


@dataclass(frozen=True, kw_only=True)
class NeedleTask:
    """A needle in a haystack (appendix B of the paper: what the eight tasks are made of).

    Attributes:
        haystack: `noise`, `text`, or `needles` for a text of nothing but other needles.
        key: `word` or `uuid`, what a needle is called by.
        value: `number` (seven digits) or `uuid`.
        keys: keys that are hidden.
        values: values that each key has.
        queries: keys that are asked for.
    """

    haystack: str = "text"
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def _key(self, draw: random.Random) -> str:
        return compound_words(draw, 1)[0] if self.key == "word" else uuid_text(draw)

    def _needle(self, draw: random.Random, key: str) -> tuple[str, str]:
        """Return a needle's sentence and its value."""
        magic = str(draw.randrange(10**6, 10**7)) if self.value == "number" else uuid_text(draw)
        return NEEDLE.format(value=self.value, key=key, magic=magic), magic

    def __call__(self, materials: Materials, length: int, draw: random.Random, index: int) -> Sample:
        """Return one sample; the keys asked for are the first ones hidden, at random depths."""
        names: dict[str, None] = {}
        while len(names) < self.keys:
            names[self._key(draw)] = None
        needles = [(name, *self._needle(draw, name)) for name in names for _ in range(self.values)]
        asked = list(names)[: self.queries]
        expected = tuple(magic for name, _, magic in needles if name in asked)
        head, tail = (ONE_HEAD, ONE_TAIL) if len(expected) == 1 else (MANY_HEAD, MANY_TAIL)
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        said = [sentence for _, sentence, _ in needles]
        return assemble(
            materials,
            length,
            (head.format(value=self.value), tail.format(value=self.value, query=query)),
            (expected, " " + ", ".join(expected), 128),
            lambda space: self._hide(materials, said, set(names), draw, space),
        )

    def _hide(
        self, materials: Materials, said: Sequence[str], names: set[str], draw: random.Random, space: int
    ) -> list[int]:
        if self.haystack != "needles":
            haystack = materials.noise if self.haystack == "noise" else materials.text
            assert haystack is not None, "the evaluation reads the corpus for every task that needs it"
            return haystack.hide([(draw.random(), materials.encode("\n" + text)) for text in said], space)[0]

        def other() -> str:
            name = self._key(draw)
            while name in names:
                name = self._key(draw)
            return self._needle(draw, name)[0]

        needles = [materials.encode(text) for text in said]
        left = space - sum(map(len, needles))
        if left < 0:
            raise TooLongError(f"the needles take {space - left} tokens, {space} are left for them")
        lines = [ids for _, ids in fill(materials.tokenizer, other, left)]
        for ids in needles:
            lines.insert(draw.randint(0, len(lines)), ids)
        return [token for ids in lines for token in ids]


def _chain(draw: random.Random, size: int) -> tuple[list[str], str, list[str]]:
    """Return a chain of assignments: the names, the value, and the statements in order."""
    names = letters(draw, HOPS + 1, size, string.ascii_uppercase)
    value = str(draw.randrange(10**4, 10**5))
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    return names, value, [f"\nVAR {name} = {source}\n" for name, source in zip(names, sources, strict=True)]


def track_variables(materials: Materials, length: int, draw: random.Random, index: int) -> Sample:
    """Return a sample of variable tracking: one chain of four hops in noise, after one solved example."""
    names, value, said = _chain(draw, 3)
    solved = VT_TAIL.format(query=value, count=len(names)) + " " + " ".join(names) + "\n\n"
    example = VT_HEAD + "".join(NOISE + text for text in said) + NOISE + solved
    while True:
        names, value, said = _chain(draw, 5)
        if value not in example:
            break
    depths = sorted(draw.random() for _ in said)
    return assemble(
        materials,
        length,
        (example + VT_HEAD, VT_TAIL.format(query=value, count=len(names))),
        (tuple(names), " " + ", ".join(names), 30),
        lambda space: materials.noise.hide(list(zip(depths, map(materials.encode, said), strict=True)), space)[0],
    )
