"""Text for people: results, comparisons and sweeps as tables."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.evaluation.result import Result

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
    """Return a comparison as a table, what cannot be compared marked with `!` and explained below it."""
    rows = comparison["results"]
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    headers = ["", "checkpoint", *metrics, "tokens", "dtype", "attention", "seconds"]
    cells = [
        [
            "" if row["comparable"] else "!",
            row["checkpoint"],
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
    lines += [f"note: {warning}" for warning in comparison["warnings"]]
    lines += [f"drawn: {picture}" for picture in comparison["pictures"]]
    return "\n".join(lines)


def sweep_text(ranking: Mapping[str, Any]) -> str:
    """Return a sweep's ranking as a table, and the command that patches the winner."""
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
    return "\n".join(lines)
