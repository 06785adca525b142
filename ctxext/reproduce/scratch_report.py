"""The reports of `ctxext reproduce alibi` and `reproduce sandwich`: claims, tables by length, pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint.files import write_json
from ctxext.evaluation.plots import draw_curves
from ctxext.evaluation.result import versions
from ctxext.reproduce.pi_claims import Claim
from ctxext.reproduce.pi_report import REPORT, TABLE, claims_table
from ctxext.reproduce.scratch import Results, Settings

PROTOCOLS = {
    "last_token": "perplexity of the last token, by the tokens read before it",
    "nonoverlapping": "perplexity in non-overlapping windows",
    "sliding": "perplexity in sliding windows, their stride a quarter of them",
}


def write_report(
    title: str, results: Results, claims: Sequence[Claim], settings: Settings, output: Path, protocols: Sequence[str]
) -> dict[str, Any]:
    """Draw the pictures and write `report.md` and `report.json` into `output`; return what the latter holds."""
    pictures = [_draw(results, protocol, settings, output) for protocol in protocols]
    trained = (
        f"{settings.steps} steps of {settings.tokens_per_step} tokens in "
        f"{'bfloat16' if settings.bf16 else 'float32'}; L = {settings.window}"
    )
    lines = [f"# {title}", "", *claims_table(claims), "", f"Every model: {trained}.", ""]
    for protocol in protocols:
        lines += [f"## {PROTOCOLS[protocol]}", "", *_table(results, protocol, settings), ""]
    lines += [f"![{path.name}]({path.name})" for path in pictures]
    (output / REPORT).write_text("\n".join(lines) + "\n", encoding="utf-8")
    answer = {
        "title": title,
        "claims": [claim.to_json() for claim in claims],
        "results": results,
        "trained": trained,
        "versions": versions(),
        "pictures": [str(path) for path in pictures],
        "report": str(output / REPORT),
    }
    write_json(output / TABLE, answer)
    return answer


def _mean(rows: Sequence[dict[str, Any]], protocol: str, length: str) -> float:
    """Return the geometric mean over seeds."""
    return math.exp(statistics.fmean(math.log(row[protocol][length]) for row in rows))


def _table(results: Results, protocol: str, settings: Settings) -> list[str]:
    """Return a table of perplexity by length, the geometric mean over seeds."""
    lengths = [str(length) for length in settings.lengths]
    lines = [f"| model | seeds | {' | '.join(lengths)} |", f"|---|---|{'---|' * len(lengths)}"]
    for label, rows in results.items():
        cells = [f"{_mean(rows, protocol, length):.2f}" for length in lengths]
        lines.append(f"| {label} | {len(rows)} | {' | '.join(cells)} |")
    return lines


def _draw(results: Results, protocol: str, settings: Settings, output: Path) -> Path:
    shared = {
        "id": protocol,
        "title": PROTOCOLS[protocol],
        "x_label": "tokens",
        "y_label": "perplexity",
        "kind": "log-line",
        "mark_window": True,
    }
    curves = []
    for label, rows in results.items():
        lengths = sorted(int(length) for length in rows[0][protocol])
        values = [_mean(rows, protocol, str(length)) for length in lengths]
        curves.append((label, {**shared, "x": lengths, "y": values}))
    return draw_curves(curves, output / f"{protocol}.png", settings.window)
