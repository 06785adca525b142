"""The effective length of a model: how far its score holds up (arXiv 2404.06654, section 4)."""

from __future__ import annotations

from collections.abc import Mapping

# The score of Llama-2-7B at 4096 tokens, which RULER asks a length to exceed.
RULER_THRESHOLD = 85.6


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
