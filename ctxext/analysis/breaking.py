"""Where a model breaks: the first position from which its loss stays above what it is inside the window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctxext.evaluation.effective import effective_length
from ctxext.evaluation.paired import CONFIDENCE, RESAMPLES, resampled_sums

THRESHOLD = 0.5

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Band:
    """Means over documents with the ends of their 95% intervals, `(buckets,)` each; no ends for a single document."""

    mean: Floats
    low: Floats | None
    high: Floats | None


def band(values: Floats) -> Band:
    """Return means over documents by bucket, and their percentile bootstrap intervals.

    Args:
        values: one row for each document, `(documents, buckets)`.
    """
    mean = values.mean(axis=0)
    if len(values) < 2:
        return Band(mean, None, None)
    drawn = resampled_sums(values, RESAMPLES) / len(values)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return Band(mean, low, high)


@dataclass(frozen=True)
class Breaking:
    """What is said of a model's loss beyond its window.

    Attributes:
        inside: mean loss in the second half of the window, nats per token.
        beyond: mean loss beyond the window.
        excess: each document's loss minus its own loss in the second half of the window, nats per token, by bucket.
        break_position: tokens before the first prediction of the first bucket beyond the window from which the lower
            end of `excess` (its mean, for a single document) stays above the threshold to the last; None if it does
            not.
        effective: the end of the last bucket, in tokens, before the first one beyond the window that is above the
            threshold in the same sense, whatever follows it; the window if that bucket is the first.
    """

    inside: float
    beyond: float
    excess: Band
    break_position: int | None
    effective: int


def breaking(losses: Floats, edges: Sequence[int], window: int, threshold: float = THRESHOLD) -> Breaking:
    """Find where a model breaks, each document compared with itself.

    The reference is the second half of the window: there a prediction has about as much context as the model was
    trained to use, so that neither the first tokens' high loss nor a document's own difficulty counts as breaking.

    Args:
        losses: mean loss in nats per token, `(documents, buckets)`.
        edges: ascending bucket edges, `(buckets + 1,)`, with `window // 2` and `window` among them.
        window: the model's original window in tokens.
        threshold: nats per token above the reference that count as broken.
    """
    widths = np.diff(edges)
    starts = np.array(edges[:-1])
    inside = (starts >= window // 2) & (starts < window)
    assert inside.any() and window in edges, "the edges must hold the window and its half"
    reference = losses[:, inside] @ widths[inside] / widths[inside].sum()
    excess = band(losses - reference[:, None])
    sure = excess.mean if excess.low is None else excess.low
    beyond = starts >= window
    later = losses[:, beyond] @ widths[beyond] / widths[beyond].sum()
    broken = (sure > threshold) & beyond
    healthy = np.flatnonzero(~broken)
    first = int(healthy[-1]) + 1 if len(healthy) else 0
    position = int(starts[first]) if first < len(starts) else None
    scores = {int(stop): -float(value) for stop, value in zip(edges[1:], sure, strict=True) if stop > window}
    held = effective_length(scores, -threshold) if scores else 0
    return Breaking(float(reference.mean()), float(later.mean()), excess, position, max(held, window))
