"""RULER's aggregation tasks (arXiv 2404.06654, section 3): common words of a list, frequent words of a coded text."""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ctxext.evals.ruler_tasks import Materials, Sample, assemble
from ctxext.evals.ruler_words import letters, made_up_words
from ctxext.evaluation.prompts import PIECES_AT_ONCE, TooLongError, encode_all

CWE_HEAD = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_TAIL = (
    "\nQuestion: What are the 10 most common words in the above list? "
    "Answer: The top 10 words that appear most often in the list are:"
)
FWE_HEAD = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words.\n"
)
FWE_TAIL = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
)
COMMON = 10
# The frequency of the word of rank k falls as k ** -2.
ZETA = math.pi**2 / 6
DOTS = "...."
TOKENS_PER_CODED_WORD = 50


@dataclass(frozen=True)
class ListShape:
    """How often the common and the other words appear in a list, and in the solved example before it."""

    often: int
    rarely: int
    example_often: int
    example_rarely: int
    example_others: int


LONG_LIST = ListShape(30, 3, 10, 3, 30)
SHORT_LIST = ListShape(6, 1, 3, 1, 10)
LONG_FROM = 4096


def numbered(words: Sequence[str]) -> str:
    """Return words as a numbered list in one line."""
    return "".join(f" {number}. {word}" for number, word in enumerate(words, 1))


def common_words(materials: Materials, length: int, draw: random.Random, index: int) -> Sample:
    """Return a sample of common words extraction: a list of words, ten of them more frequent, after a solved example.

    As in RULER, lists of at least 4096 tokens repeat the common words 30 times and the others three times, shorter
    ones six times and once.
    """
    shape = LONG_LIST if length >= LONG_FROM else SHORT_LIST
    words = made_up_words(draw)
    shown = list(itertools.islice(words, COMMON + shape.example_others))
    entries = shown[:COMMON] * shape.example_often + shown[COMMON:] * shape.example_rarely
    draw.shuffle(entries)
    example = f"{CWE_HEAD}{numbered(entries)}{CWE_TAIL}{numbered(shown[:COMMON])}\n\n"
    common = list(itertools.islice(words, COMMON))
    return assemble(
        materials,
        length,
        (example + CWE_HEAD, CWE_TAIL),
        (tuple(common), numbered(common), 120),
        lambda space: _word_list(materials, shape, common, words, draw, space),
    )


def _word_list(
    materials: Materials,
    shape: ListShape,
    common: Sequence[str],
    others: Iterator[str],
    draw: random.Random,
    space: int,
) -> list[int]:
    """Return a numbered list of the common words and as many others as fit into `space` tokens.

    Numbers and words are tokenized apart, so that the order of the words does not change the length.
    """
    numbers = materials.numbered(" {}.")
    words = [
        ids for ids in encode_all(materials.tokenizer, [f" {word}" for word in common]) for _ in range(shape.often)
    ]
    used = sum(map(len, words)) + numbers.tokens(0, len(words))
    if used > space:
        raise TooLongError(f"the common words take {used} tokens, {space} are left for them")
    while True:
        texts = [f" {word}" for word in itertools.islice(others, PIECES_AT_ONCE)]
        for ids in encode_all(materials.tokenizer, texts):
            used += shape.rarely * len(ids) + numbers.tokens(len(words), len(words) + shape.rarely)
            if used > space or not texts:
                draw.shuffle(words)
                return [token for number, word in enumerate(words) for token in numbers[number] + word]
            words += [ids] * shape.rarely


def zeta_counts(words: int, vocabulary: int) -> list[int]:
    """Return how often the word of each rank appears among about `words` words: `words * k**-2 / zeta(2)`, cut."""
    return [int(words * rank**-2 / ZETA) for rank in range(1, vocabulary + 1)]


def frequent_words(materials: Materials, length: int, draw: random.Random, index: int) -> Sample:
    """Return a sample of frequent words extraction: coded words with zeta-distributed frequencies (exponent 2).

    The most frequent one is noise, four dots; the next three are asked for.
    """
    coded = letters(draw, max(4, length // TOKENS_PER_CODED_WORD), 6, string.ascii_lowercase)
    expected = tuple(coded[:3])
    return assemble(
        materials,
        length,
        (FWE_HEAD, FWE_TAIL),
        (expected, " " + ", ".join(expected), 50),
        lambda space: _coded_text(materials, [DOTS, *coded], draw, space),
    )


def _coded_text(materials: Materials, ranked: Sequence[str], draw: random.Random, space: int) -> list[int]:
    """Return words whose frequency falls with their rank, as many as fit into `space` tokens, shuffled."""
    pieces = encode_all(materials.tokenizer, [f" {word}" for word in ranked])

    def tokens(words: int) -> int:
        return sum(count * len(ids) for count, ids in zip(zeta_counts(words, len(ranked)), pieces, strict=True))

    fits, too_many = 0, space + 2
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if tokens(middle) <= space else (fits, middle)
    counts = zeta_counts(fits, len(ranked))
    # Ranks 2 to 4 are asked for, so the next one must be rarer.
    if counts[3] <= counts[4]:
        raise TooLongError(f"{space} tokens are too few for three words that are more frequent than the rest")
    text = [ids for ids, count in zip(pieces, counts, strict=True) for _ in range(count)]
    draw.shuffle(text)
    return [token for ids in text for token in ids]
