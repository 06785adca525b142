"""The effective length of a model: how far its score holds up (arXiv 2404.06654, section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ctxext.evaluation.result import Result

# The score of Llama-2-7B at 4096 tokens, which RULER asks a length to exceed.
RULER_THRESHOLD = 85.6
LENGTH_OPTIONS = ("length", "lengths")


def effective_length(scores: Mapping[int, float], threshold: float = RULER_THRESHOLD) -> int:
    """Return the largest tested length up to which every tested length scores above the threshold.

    A model that fails at a length and recovers beyond it does not get the longer one.

    Args:
        scores: mean score by length in tokens, in the threshold's unit.
        threshold: what a score must exceed.

    Returns:
        The length in tokens; 0 if the shortest one already fails.

    Raises:
        ValueError: if there is no score.
    """
    if not scores:
        raise ValueError("an effective length needs the score of at least one length")
    effective = 0
    for length in sorted(scores):
        if not scores[length] > threshold:
            break
        effective = length
    return effective


def weighted_averages(scores: Mapping[int, float]) -> tuple[float, float]:
    """Return the means over lengths whose weights rise and fall linearly with the length's rank (RULER's wAvg).

    Args:
        scores: mean score by length in tokens.

    Returns:
        The mean with weights 1, 2, 3, ... from the shortest length on (inc), and from the longest on (dec).
    """
    ascending = [scores[length] for length in sorted(scores)]
    total = len(ascending) * (len(ascending) + 1) / 2
    rising = sum(rank * score for rank, score in enumerate(ascending, 1)) / total
    falling = sum(rank * score for rank, score in enumerate(reversed(ascending), 1)) / total
    return rising, falling


def protocol_but_length(protocol_id: str) -> str:
    """Return a protocol id without its length: equal for results that differ in length only."""
    head, _, words = protocol_id.partition(":")
    return f"{head}:{','.join(word for word in words.split(',') if word.split('=')[0] not in LENGTH_OPTIONS)}"


def check_one_model(results: Sequence[Result], what: str) -> None:
    """Refuse results that differ in more than the length.

    Raises:
        ValueError: if evaluation, protocol (but for the length) or checkpoint differ, or there is no result.
    """
    if not results:
        raise ValueError(f"{what} needs at least one result")
    protocols = sorted({protocol_but_length(result.protocol_id) for result in results})
    checkpoints = {str(result.checkpoint["hash"]): str(result.checkpoint["name"]) for result in results}
    wrong = []
    if len(protocols) > 1:
        wrong.append(f"they have {len(protocols)} protocols, of which only the length may differ: {protocols}")
    if len(checkpoints) > 1:
        wrong.append(f"they are of {len(checkpoints)} checkpoints: {', '.join(checkpoints.values())}")
    if wrong:
        raise ValueError(f"{what} cannot be taken from these results: {'; '.join(wrong)}")


def scores_by_length(results: Sequence[Result]) -> dict[int, float]:
    """Return the mean score by length of one model from results that differ in length only.

    Args:
        results: of an evaluation that states `score_by_length` among its details, such as `ruler`.

    Raises:
        ValueError: if they differ in more, one has no such scores, or two give the same length another score.
    """
    check_one_model(results, "scores by length")
    scores: dict[int, float] = {}
    for result in results:
        if "score_by_length" not in result.details:
            raise ValueError(f"a result of {result.evaluation} has no score by length; results of ruler have")
        for length, score in result.details["score_by_length"].items():
            if scores.setdefault(int(length), score) != score:
                raise ValueError(
                    f"two results score {scores[int(length)]} and {score} at {length} tokens: leave one out"
                )
    return dict(sorted(scores.items()))
