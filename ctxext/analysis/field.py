"""The empirical receptive field of arXiv 2212.10356, section 5.1, from gradient norms alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ctxext.evaluation.paired import CONFIDENCE, resampled_sums

Floats = NDArray[np.float64]

ERF_THRESHOLD = 0.99
RESAMPLES = 2000
COLUMNS_AT_ONCE = 4096


def cumulative_gradient(norms: Floats) -> Floats:
    """Return the share of the gradient that falls on the most recent tokens.

    With g_m the gradient of a prediction with respect to input embedding m and s_m = ||g_m|| / sum_n ||g_n||, it is
    c_m = sum_{n >= m} s_n.

    Args:
        norms: ||g_m|| in order of position, `(segments, length)`; each row has one above 0.

    Returns:
        `(segments, length)`: column k - 1 is the share of the k most recent tokens; the last column is 1.
    """
    totals = np.cumsum(norms[:, ::-1], axis=1)
    return totals / totals[:, -1:]


def empirical_receptive_field(curve: Floats, threshold: float = ERF_THRESHOLD) -> int:
    """Return the smallest number of most recent tokens whose share of the gradient reaches the threshold.

    Args:
        curve: shares, ascending, `(length,)`, as from `cumulative_gradient` (its mean over segments).
        threshold: above 0 and below 1.
    """
    return int(np.searchsorted(curve, threshold, side="left")) + 1


def bootstrap(curves: Floats, thresholds: tuple[float, ...]) -> tuple[Floats, dict[float, tuple[int, int]]] | None:
    """Return how sure mean curve and receptive fields are: percentile bootstrap over segments.

    Args:
        curves: `(segments, length)` of `cumulative_gradient`.
        thresholds: of the receptive fields.

    Returns:
        Lower and upper end of the 95% interval of the mean curve, `(2, length)`, and of the field at each threshold,
        tokens; None for a single segment.
    """
    count, length = curves.shape
    if count < 2:
        return None
    quantiles = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    below = np.zeros((len(thresholds), RESAMPLES), dtype=np.int64)
    bands = []
    for start in range(0, length, COLUMNS_AT_ONCE):  # the seed is the same for all, and so are the draws
        means = resampled_sums(curves[:, start : start + COLUMNS_AT_ONCE], RESAMPLES) / count
        bands.append(np.quantile(means, quantiles, axis=0))
        for row, threshold in enumerate(thresholds):
            below[row] += (means < threshold).sum(axis=1)
    ends = np.quantile(below + 1, quantiles, axis=1, method="nearest").T
    fields = {value: (int(low), int(high)) for value, (low, high) in zip(thresholds, ends, strict=True)}
    return np.concatenate(bands, axis=1), fields
