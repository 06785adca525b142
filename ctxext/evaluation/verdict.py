"""Is a patched checkpoint no worse than the one it was made from? Decided by the interval of a paired bootstrap."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ctxext.evaluation.paired import CONFIDENCE, FEWEST_ITEMS
from ctxext.evaluation.result import Result

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


def parse_percentage(text: str) -> float:
    """Return a percentage such as `2%` as a fraction.

    Raises:
        ValueError: if it is no percentage from 0% to below 100%.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", text)
    if match is None or float(match.group(1)) >= 100:
        raise ValueError(f"--no-worse-than {text!r}: write a percentage from 0% to below 100%, such as 2%")
    return float(match.group(1)) / 100


def percent(fraction: float) -> str:
    """Return a relative change as people read it: signed, about three digits."""
    size = abs(100 * fraction)
    return f"{100 * fraction:+.{2 if size < 10 else 1 if size < 100 else 0}f}%"


def check_no_worse(reference: Result, rows: Sequence[Mapping[str, Any]], limit: float) -> dict[str, Any]:
    """Judge whether results are at most `limit` (a fraction) worse than the first, in the first metric with items.

    Args:
        reference: the first result.
        rows: of a comparison (see `compare_results`), the first result's included; all comparable.
        limit: the most that a result may be worse, as a fraction of the first's value.

    Returns:
        `limit`; `where`: what length was read, in words; `verdicts`: for each row after the first its `path`, `label`,
        `metric`, `before`, `after`, `verdict` (`holds`, `does not hold`, `undecided`) and `reason`; `holds`: whether
        all of them hold.

    Raises:
        ValueError: if there is nothing to judge, or a row has no paired difference.
    """
    if len(rows) < 2:
        raise ValueError("--no-worse-than compares with the first result: give at least two")
    wrong = [f"  {row['path']}: {row['unpaired']}" for row in rows[1:] if not row["paired"]]
    if wrong:
        raise ValueError("--no-worse-than needs scores by document or item:\n" + "\n".join(wrong))
    verdicts = []
    for row in rows[1:]:
        difference = row["paired"][0]
        verdict, reason = judge(difference, limit)
        metric = difference["metric"]
        before, after = (one["metrics"][metric] for one in (rows[0], row))
        said = {"metric": metric, "before": before, "after": after, "verdict": verdict, "reason": reason}
        verdicts.append({"path": row["path"], "label": row["label"], **said})
    return {
        "limit": limit,
        "where": _where(reference),
        "verdicts": verdicts,
        "holds": all(one["verdict"] == HOLDS for one in verdicts),
    }


def judge(difference: Mapping[str, Any], limit: float) -> tuple[str, str]:
    """Decide by the interval of the relative change whether a score is at most `limit` worse.

    It holds if the whole interval is at most that much worse, does not hold if the whole interval is worse, and is
    undecided if the interval contains the limit or rests on too few items.

    Args:
        difference: fields of a `Difference`.
        limit: a fraction, not negative.

    Returns:
        The verdict and the reason in words.
    """
    count, unit, interval = difference["count"], difference["unit"], difference["change_interval"]
    if count < FEWEST_ITEMS:
        return UNDECIDED, f"{count} {unit} are too few for an interval: score at least {FEWEST_ITEMS}"
    if interval is None:
        return UNDECIDED, f"the first result's {difference['metric']} is too near 0 for a relative change"
    low, high = interval
    found = f"{percent(low)} to {percent(high)} ({CONFIDENCE:.0%} interval, {count} {unit})"
    worst, best = (-low, -high) if difference["higher_is_better"] else (high, low)
    if worst <= limit:
        return HOLDS, f"the change is {found}"
    if best > limit:
        return FAILS, f"the change is {found}: all of it is worse than the limit"
    return UNDECIDED, f"the change is {found}, which contains the limit: score more {unit}"


def _where(reference: Result) -> str:
    """Say what length was read, against the first result's original window."""
    length, window = reference.options.get("length"), reference.checkpoint.get("original_window")
    if not isinstance(length, int) or not isinstance(window, int):
        return "under this protocol"
    if length > window:
        return f"at {length} tokens, BEYOND the original window of {window}"
    return f"at the original window of {window} tokens" if length == window else f"at {length} of {window} tokens"
