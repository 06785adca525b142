"""Paired differences between two results over the same items: how much better, and how sure is it?

Two checkpoints that read the same documents share what makes a document hard, so their difference is known far better
than either score. The paired bootstrap (Efron and Tibshirani 1993, chapter 13; for translation, Koehn 2004) draws
as many items as there are, with replacement, the same for both, recomputes both scores and takes the 2.5% and 97.5%
quantiles of their difference. Documents are drawn, not tokens: the tokens of one document are not independent.

An evaluation takes part by what it keeps in `details`:

- `items`: `{id: score}`, whose plain mean is the first metric, or `{metric: {id: score}}` for several; higher is
  better. Ids are equal in every run of the same protocol on the same data.
- `documents`: `{id: {"nll": nats, "tokens": count}}`, for `loss` = sum of nll / sum of tokens and `perplexity` =
  exp(loss); lower is better.
- `distances`: `[{"k": tokens, "hits": count, "tried": count}, ...]` of retrieval, for `success`, one item by distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxext.evaluation.result import Result

RESAMPLES = 10_000
SEED = 0
CONFIDENCE = 0.95
# With fewer items the interval of a percentile bootstrap is too narrow to decide anything.
FEWEST_ITEMS = 10
# The most draw counts in memory at once.
COUNTS_AT_ONCE = 4_000_000
MAX_EXPONENT = 700.0

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A metric with what it is made of: its value is sum of totals / sum of weights, or the exponential of that.

    Attributes:
        metric: its name in the result.
        items: total and weight (above 0) by item id.
        unit: what an item is, in the plural.
        exponential: whether the metric is the exponential of the ratio.
        higher_is_better: the direction of the metric.
    """

    metric: str
    items: Mapping[str, tuple[float, float]]
    unit: str = "items"
    exponential: bool = False
    higher_is_better: bool = True

    def value(self, totals: Floats, weights: Floats) -> Floats:
        """Return the metric from sums of totals and of weights, any equal shapes."""
        ratio = totals / weights
        return np.exp(np.minimum(ratio, MAX_EXPONENT)) if self.exponential else ratio


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How another result differs from the first one in a metric.

    Attributes:
        metric: its name.
        difference: the other's value minus the first's.
        interval: lower and upper end of its 95% interval; None for a single item.
        change: the difference as a fraction of the first's value; None where that is not above 0.
        change_interval: the same for the change; None where a resample of the first is not above 0.
        count: items that both results scored.
        unit: what an item is, in the plural.
        higher_is_better: the direction of the metric.
    """

    metric: str
    difference: float
    interval: tuple[float, float] | None
    change: float | None
    change_interval: tuple[float, float] | None
    count: int
    unit: str
    higher_is_better: bool


def scores_of(result: Result, where: str = "this result") -> list[Scores]:
    """Return the metrics of a result that rest on items, in the order of its metrics.

    Args:
        result: a result; see the module's docstring for what `details` must hold.
        where: what to call the result in an error.

    Raises:
        ValueError: if the items are no numbers.
    """
    try:
        found = {scores.metric: scores for read in READERS for scores in read(result)}
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{where} is damaged: its scores by item cannot be read ({error!r})") from error
    for scores in found.values():
        values = np.array(list(scores.items.values())).reshape(-1, 2)
        if not np.isfinite(values).all() or (values[:, 1] <= 0).any():
            raise ValueError(f"{where} is damaged: not all its {scores.unit} have a number for {scores.metric}")
    return [found[name] for name in result.metrics if name in found and found[name].items]


def _from_documents(result: Result) -> list[Scores]:
    documents = result.details.get("documents")
    if documents is None or "loss" not in result.metrics:
        return []
    items = {name: (float(sums["nll"]), float(sums["tokens"])) for name, sums in documents.items() if sums["tokens"]}
    kinds = {"loss": False, "perplexity": True}
    return [
        Scores(metric=name, items=items, unit="documents", exponential=exponential, higher_is_better=False)
        for name, exponential in kinds.items()
        if name in result.metrics
    ]


def _from_distances(result: Result) -> list[Scores]:
    if "distances" not in result.details or "success" not in result.metrics:
        return []
    items = {f"k={one['k']}": (one["hits"] / one["tried"], 1.0) for one in result.details["distances"]}
    return [Scores(metric="success", items=items, unit="distances")]


def _from_items(result: Result) -> list[Scores]:
    items = result.details.get("items", {})
    if not all(isinstance(scores, Mapping) for scores in items.values()):
        items = {next(iter(result.metrics)): items}
    return [
        Scores(metric=metric, items={name: (float(score), 1.0) for name, score in scores.items()})
        for metric, scores in items.items()
    ]


READERS: tuple[Callable[[Result], list[Scores]], ...] = (_from_documents, _from_distances, _from_items)


def unlike_metric(scores: Scores, result: Result) -> str | None:
    """Return that the items do not give the metric that their result states; None if they do."""
    stated = result.metrics[scores.metric]
    made = float(scores.value(*np.array(list(scores.items.values())).sum(axis=0)))
    if isinstance(stated, int | float) and math.isclose(made, stated, rel_tol=1e-6, abs_tol=1e-9):
        return None
    return f"its {scores.unit} give a {scores.metric} of {made:.6g}, not {stated}: another mean, or a changed file"


def resampled_sums(columns: Floats, resamples: int = RESAMPLES, seed: int = SEED) -> Floats:
    """Return the sums of `columns` over items drawn with replacement.

    Args:
        columns: numbers by item, `(items, columns)`.
        resamples: how often to draw as many items as there are.
        seed: of the draws.

    Returns:
        The sums, `(resamples, columns)`.
    """
    generator = np.random.default_rng(seed)
    count = len(columns)
    at_once = max(1, COUNTS_AT_ONCE // count)
    chances = np.full(count, 1 / count)
    sums = []
    for start in range(0, resamples, at_once):
        drawn = generator.multinomial(count, chances, size=min(at_once, resamples - start))
        sums.append(drawn.astype(np.float64) @ columns)
    return np.concatenate(sums)


def unpaired_reason(first: Scores, other: Scores) -> str | None:
    """Return why two results' items cannot be paired; None if they can."""
    if first.items.keys() != other.items.keys():
        only = len(first.items.keys() ^ other.items.keys())
        return f"{only} {first.unit} were scored in one of the two results only"
    if any(first.items[name][1] != other.items[name][1] for name in first.items):
        return f"the {first.unit} have other numbers of tokens: another tokenizer"
    return None


def paired_difference(
    first: Scores, other: Scores, resamples: int = RESAMPLES, seed: int = SEED, confidence: float = CONFIDENCE
) -> Difference:
    """Return the difference of a metric with its interval by a paired bootstrap over the items.

    Args:
        first: the reference.
        other: the same metric of another result over the same items.
        resamples: number of bootstrap resamples.
        seed: of the resamples; equal for all metrics and results, so that they see the same draws.
        confidence: of the interval.

    Raises:
        ValueError: if the items are not the same.
    """
    reason = unpaired_reason(first, other)
    if reason is not None:
        raise ValueError(f"{first.metric} cannot be compared item by item: {reason}")
    columns = np.array([[*first.items[name], other.items[name][0]] for name in first.items], dtype=np.float64)
    totals = columns.sum(axis=0)
    before, after = (float(first.value(total, totals[1])) for total in (totals[0], totals[2]))
    interval = change_interval = None
    if len(columns) > 1:
        sums = resampled_sums(columns, resamples, seed)
        drawn_before, drawn_after = (first.value(sums[:, column], sums[:, 1]) for column in (0, 2))
        interval = _quantiles(drawn_after - drawn_before, confidence)
        if (drawn_before > 0).all():
            change_interval = _quantiles(drawn_after / drawn_before - 1, confidence)
    return Difference(
        metric=first.metric,
        difference=after - before,
        interval=interval,
        change=after / before - 1 if before > 0 else None,
        change_interval=change_interval,
        count=len(columns),
        unit=first.unit,
        higher_is_better=first.higher_is_better,
    )


def _quantiles(values: Floats, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def describe_bootstrap() -> dict[str, Any]:
    """Return how the intervals are made, for the comparison's JSON."""
    return {"method": "paired percentile bootstrap", "confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED}
