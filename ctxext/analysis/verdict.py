"""The Sandwich paper's verdict: a model extrapolates when its training length covers its receptive field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ctxext.evaluation.paired import CONFIDENCE, MAX_EXPONENT, resampled_sums

# Perplexity may rise by so much beyond the training length and still count as "at least the same".
TOLERANCE = 0.02


def decide(low: float, high: float, limit: float) -> bool | None:
    """Return whether a quantity is at most `limit`, by its interval; None where the interval holds the limit."""
    return True if high <= limit else False if low > limit else None


def perplexity_ratio(long: Sequence[float], short: Sequence[float], tokens: int) -> tuple[float, float, float]:
    """Return perplexity after a long reading over that after a short one, with its 95% interval.

    Args:
        long: each segment's summed loss in nats, read at the evaluated length.
        short: the same tokens' losses, read at the training length.
        tokens: scored in each segment.

    Returns:
        The ratio, and the ends of its paired percentile bootstrap interval over segments (the ratio itself, twice, for
        a single segment).
    """
    differences = (np.array(long) - np.array(short))[:, None] / tokens
    ratio = math.exp(min(float(differences.mean()), MAX_EXPONENT))
    if len(differences) < 2:
        return ratio, ratio, ratio
    means = resampled_sums(differences)[:, 0] / len(differences)
    low, high = np.exp(np.minimum(np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]), MAX_EXPONENT))
    return ratio, float(low), float(high)


def verdict(
    train_length: int | None,
    length: int,
    erf: int,
    erf_interval: tuple[int, int] | None,
    perplexity: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Judge one model (arXiv 2212.10356, section 5.1).

    Args:
        train_length: tokens that the model was trained with, or None.
        length: tokens that it read here.
        erf: its empirical receptive field, tokens.
        erf_interval: of the field; None for a single segment.
        perplexity: `ratio` and `ratio_interval` of `perplexity_ratio`; None where nothing was read beyond the
            training length.

    Returns:
        `covered`: whether the training length covers the field; `extrapolated`: whether perplexity is at most
        `TOLERANCE` higher at `length`; `agrees`: whether both are the same, as the paper finds. Each None where an
        interval does not decide, or there is nothing to judge. `words` says it in one sentence.
    """
    answer: dict[str, Any] = {"covered": None, "extrapolated": None, "agrees": None}
    if train_length is None:
        return {**answer, "words": "the checkpoint states no training length: give --train-length"}
    if train_length >= length:
        return {**answer, "words": f"read within its training length of {train_length}: nothing to extrapolate to"}
    assert perplexity is not None, "a model that read beyond its training length was scored there"
    lowest, highest = erf_interval or (erf, erf)
    low, high = perplexity["ratio_interval"]
    answer["covered"] = decide(lowest, highest, train_length)
    answer["extrapolated"] = decide(low, high, 1 + TOLERANCE)
    if None not in (answer["covered"], answer["extrapolated"]):
        answer["agrees"] = answer["covered"] == answer["extrapolated"]
    return {**answer, "words": _words(answer, train_length, length, erf, perplexity)}


def _words(answer: dict[str, Any], train_length: int, length: int, erf: int, perplexity: Mapping[str, Any]) -> str:
    covers = {True: "covers", False: "does not cover", None: "may or may not cover"}[answer["covered"]]
    did = {True: "extrapolates", False: "does not extrapolate", None: "may or may not extrapolate"}
    says = {True: "as the paper says", False: "against what the paper says", None: "which decides nothing"}
    low, high = perplexity["ratio_interval"]
    return (
        f"training length {train_length} {covers} the ERF of {erf}; perplexity at {length} is "
        f"{perplexity['ratio']:.3f} ({low:.3f}..{high:.3f}) times that at {train_length}: it "
        f"{did[answer['extrapolated']]}, {says[answer['agrees']]}"
    )
