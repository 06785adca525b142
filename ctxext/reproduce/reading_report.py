"""The report of `ctxext reproduce random-access`: claims, a table of all models, and what was skipped over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint.files import write_json
from ctxext.evaluation.plots import draw_curves
from ctxext.evaluation.result import versions
from ctxext.reproduce.pi_claims import Claim
from ctxext.reproduce.pi_report import REPORT, TABLE, claims_table
from ctxext.reproduce.reading import Results, Run, Settings

POINTS = 20  # of a curve
TITLE = "Random-access reading, reproduced in small"


def write_report(results: Results, claims: Sequence[Claim], settings: Settings, output: Path) -> dict[str, Any]:
    """Draw the picture and write `report.md` and `report.json` into `output`; return what the latter holds."""
    pictures = _draw(results, settings, output)
    trained = (
        f"{settings.steps} steps of {settings.tokens_per_step} tokens in {'bfloat16' if settings.bf16 else 'float32'} "
        f"({settings.tuning_steps} of fine-tuning), L = {settings.window}, documents of at least {settings.document} "
        f"tokens; perplexity of {settings.documents} held-out documents, {settings.read} windows of each in order"
    )
    lines = [f"# {TITLE}", "", *claims_table(claims), "", f"Every model: {trained}.", "", *_table(results), ""]
    lines += [f"![{path.name}]({path.name})" for path in pictures]
    (output / REPORT).write_text("\n".join(lines) + "\n", encoding="utf-8")
    answer = {
        "title": TITLE,
        "claims": [claim.to_json() for claim in claims],
        "results": results,
        "trained": trained,
        "versions": versions(),
        "pictures": [str(path) for path in pictures],
        "report": str(output / REPORT),
    }
    write_json(output / TABLE, answer)
    return answer


def _table(results: Results) -> list[str]:
    """Return perplexity by model, mean and standard deviation over seeds, and what was skipped at the end."""
    lines = ["| model | seeds | perplexity | skipped a window |", "|---|---|---|---|"]
    for label, rows in results.items():
        values = [row["perplexity"] for row in rows]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        ends = [_at_the_end(row["skips"]) for row in rows if row.get("skips")]
        skipped = f"{statistics.fmean(ends):.0f}" if ends else ""
        lines.append(f"| {label} | {len(rows)} | {statistics.fmean(values):.2f}{spread} | {skipped} |")
    return lines


def _at_the_end(skips: Sequence[Sequence[float]]) -> float:
    """Return the mean over the last quarter of training."""
    return statistics.fmean(value for _, value in skips[-max(1, len(skips) // 4) :])


def _draw(results: Results, settings: Settings, output: Path) -> list[Path]:
    """Draw the tokens skipped after a window, by step (the paper's figure 4); nothing where nothing was skipped."""
    shared = {
        "id": "skips",
        "x_label": "step",
        "y_label": "tokens skipped after a window",
        "kind": "log-line",
        "mark_window": False,
    }
    curves = []
    figure_4 = (Run(rate=1), Run(rate=settings.middle), Run(rate=settings.far, scope="stream"))
    for label in (run.label for run in figure_4 if run.label in results):
        skips = results[label][0].get("skips") or []
        if any(value for _, value in skips):
            part = max(1, len(skips) // POINTS)
            parts = [skips[at : at + part] for at in range(0, len(skips), part)]
            steps = [points[-1][0] for points in parts]
            values = [statistics.fmean(value for _, value in points) or None for points in parts]
            curves.append((label, {**shared, "title": "tokens skipped in training", "x": steps, "y": values}))
    return [draw_curves(curves, output / "skips.png")] if curves else []
