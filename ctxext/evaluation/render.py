"""Text for people: results, comparisons and sweeps as tables."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.evaluation.paired import FEWEST_ITEMS
from ctxext.evaluation.result import Result
from ctxext.evaluation.verdict import percent

WIDTH = 110


def number(value: Any) -> str:
    """Return a metric as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"
    return "-" if value is None else str(value)


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a plain-text table; numbers are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD)
    for index, header in enumerate(headers):
        numeric = any(isinstance(row[index], int | float) for row in rows)
        drawn.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(number(cell) for cell in row))
    text = io.StringIO()
    Console(file=text, width=WIDTH, no_color=True, markup=False, emoji=False).print(drawn)
    return text.getvalue().strip("\n")


def result_text(result: Result, path: Path) -> str:
    """Return a result in a few lines."""
    lines = [f"{result.evaluation} of {result.checkpoint['name']}"]
    lines += [f"  {name:<22} {number(value)}" for name, value in result.metrics.items()]
    lines.append(f"  {'tokens scored':<22} {result.tokens_scored}")
    lines += [f"  skipped: {name.replace('_', ' '):<13} {count}" for name, count in result.skipped.items()]
    lines += [f"  note: {note}" for note in result.notes]
    lines.append(f"  {result.dtype}, {result.attention}, {result.device}, {result.wall_time:.1f} s")
    lines.append(f"  protocol {result.protocol_id}")
    lines.append(f"  written to {path}")
    return "\n".join(lines)


def comparison_text(comparison: Mapping[str, Any]) -> str:
    """Return a comparison as tables: what cannot be compared is marked with `!`, other conditions with footnotes."""
    rows = comparison["results"]
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    headers = ["", "checkpoint", *metrics, "tokens", "dtype", "attention", "seconds"]
    cells = [
        [
            "" if row["comparable"] else "!",
            row["label"] + "".join(f" [{mark}]" for mark in row["footnotes"]),
            *(row["metrics"].get(name) for name in metrics),
            row["tokens_scored"],
            row["dtype"],
            row["attention"],
            row["wall_time"],
        ]
        for row in rows
    ]
    lines = [f"protocol {rows[0]['protocol_id']}", table(headers, cells)]
    for row in rows:
        if not row["comparable"]:
            lines.append(f"! {row['path']} cannot be compared with the first: {'; '.join(row['differences'])}")
    lines += [f"[{mark}] {text}" for mark, text in enumerate(comparison["footnotes"], start=1)]
    lines += [f"note: {note}" for note in comparison["notes"]]
    lines += _paired_lines(comparison)
    if "check" in comparison:
        lines += ["", *check_lines(comparison["check"])]
    lines += [f"drawn: {picture}" for picture in comparison["pictures"]]
    return "\n".join(lines)


def interval_text(interval: Sequence[float] | None, form: Callable[[float], str]) -> str:
    """Return an interval as people read it."""
    return "-" if interval is None else f"{form(interval[0])} to {form(interval[1])}"


def signed(value: float) -> str:
    """Return a difference as people read it."""
    return f"{value:+.4f}" if abs(value) < 1000 else f"{value:+.4g}"


def _paired_lines(comparison: Mapping[str, Any]) -> list[str]:
    """Return the differences to the first result with their intervals, and why some have none."""
    rows, made = comparison["results"], comparison["bootstrap"]
    cells = [
        [
            row["label"],
            one["metric"],
            signed(one["difference"]),
            interval_text(one["interval"], signed),
            "-" if one["change"] is None else percent(one["change"]),
            interval_text(one["change_interval"], percent),
            f"{one['count']} {one['unit']}{' (few)' if one['count'] < FEWEST_ITEMS else ''}",
        ]
        for row in rows
        for one in row["paired"]
    ]
    lines = []
    if cells:
        interval = f"{made['confidence']:.0%} interval"
        headers = ["checkpoint", "metric", "difference", interval, "change", interval, "over"]
        lines += ["", f"difference to {rows[0]['label']}", table(headers, cells)]
        lines.append(f"intervals: {bootstrap_text(made)}")
        if any(one["count"] < FEWEST_ITEMS for row in rows for one in row["paired"]):
            lines.append(f"(few): fewer than {FEWEST_ITEMS}, so that the interval is too narrow")
    lines += [f"no interval for {row['label']}: {row['unpaired']}" for row in rows if row["unpaired"]]
    return lines


def bootstrap_text(made: Mapping[str, Any]) -> str:
    """Say how intervals are made."""
    return f"{made['method']}, {made['resamples']} resamples, seed {made['seed']}"


def check_lines(check: Mapping[str, Any]) -> list[str]:
    """Return the verdicts of `--no-worse-than` in words."""
    return [
        f"{one['label']} is no worse than {100 * check['limit']:g}% {check['where']}: {one['verdict'].upper()}\n"
        f"  {one['metric']} {number(one['before'])} before, {number(one['after'])} after; {one['reason']}"
        for one in check["verdicts"]
    ]


def report_text(answer: Mapping[str, Any]) -> str:
    """Say what a report holds and where it is."""
    lines = [f"{group['title']}: {', '.join(row['label'] for row in group['results'])}" for group in answer["groups"]]
    return "\n".join([*lines, f"written to {answer['report']}"])


def sweep_text(ranking: Mapping[str, Any]) -> str:
    """Return a sweep's ranking as a table, the command that patches the winner, and the advice."""
    from ctxext.evaluation.advice import advice_text

    headers = ["method", "long-range loss", "change inside window", "loss inside window", "seconds", "remark"]
    cells = [
        [row["method"], row["long_loss"], row["window_cost"], row["window_loss"], row["seconds"], row["remark"]]
        for row in ranking["methods"]
    ]
    lines = [
        f"{ranking['checkpoint']} at {ranking['length']} tokens (window {ranking['original_window']}), "
        f"{ranking['documents']} sequences of {ranking['corpus']['name']}, {ranking['dtype']}, before any training",
        table(headers, cells),
        f"long-range loss: mean over the last {ranking['long_range_tokens']} tokens, nats per token",
    ]
    lines += [f"note: {note}" for note in ranking["notes"]]
    lines.append(f"patch with the best: {ranking['command']}" if ranking["command"] else "no method could be tried")
    return "\n".join([*lines, advice_text(ranking)])
