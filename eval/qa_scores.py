"""How an answer is scored: exact match and F1 of TriviaQA's official script (arXiv 1705.03551, section 5).

Both compare normalized texts, and of several accepted answers the best one counts. The script's quirks are kept:
underscores and punctuation (the quotes ‘ ’ ´ ` among it) become spaces before articles are removed, so that "A-ha" is
"ha" and "U.S.A." is "u s"; and two texts that are empty once normalized match exactly, with an F1 of 0.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_TO_SPACES = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and surplus whitespace."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_TO_SPACES)).split())


def exact_match(prediction: str, answer: str) -> float:
    """Return 1 if both are the same once normalized, else 0."""
    return float(normalize(prediction) == normalize(answer))


def f1(prediction: str, answer: str) -> float:
    """Return 2PR / (P + R) of the words that both have in common, as often as both have them."""
    said, wanted = normalize(prediction).split(), normalize(answer).split()
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def contains(generation: str, answer: str) -> float:
    """Return 1 if the answer's words stand in the generation, one after the other, once both are normalized."""
    wanted = normalize(answer)
    return float(bool(wanted) and f" {wanted} " in f" {normalize(generation)} ")


def best(score: Callable[[str, str], float], text: str, answers: Sequence[str]) -> float:
    """Return the score with the accepted answer that gives the highest."""
    return max(score(text, answer) for answer in answers)


def prediction(generation: str, pattern: str | None) -> str:
    """Return the part of what a model wrote that counts as its answer.

    Args:
        generation: All of it.
        pattern: A regular expression, whose first match is the answer; None takes the first line that is not empty.
    """
    if pattern is not None:
        found = re.search(pattern, generation)
        return found.group() if found else ""
    return next((line.strip() for line in generation.splitlines() if line.strip()), "")
