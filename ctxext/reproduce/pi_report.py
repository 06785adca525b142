"""The report of `ctxext reproduce pi`: the claims, the tables, and the paper's curves as pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint.files import write_json
from ctxext.evaluation.plots import draw_curves
from ctxext.evaluation.result import versions
from ctxext.reproduce.pi_claims import Claim, Measured, Measurement, check_claims

REPORT, TABLE = "report.md", "report.json"
_VERDICT = {True: "holds", False: "**fails**"}


def write_report(
    measured: Measured,
    title: str,
    output: Path,
    seconds: float,
    bf16: bool,
    check: Callable[[Measured], list[Claim]] = check_claims,
) -> dict[str, Any]:
    """Draw the pictures and write `report.md` and `report.json`; return what the latter holds."""
    trained = "bfloat16" if bf16 else "float32"
    claims = check(measured)
    pictures = draw(measured, output)
    answer = {
        "title": title,
        "window": measured.window,
        "claims": [claim.to_json() for claim in claims],
        "measurements": [row.to_json() for row in measured.rows.values()],
        "trained_in": trained,
        "versions": versions(),
        "seconds": round(seconds, 1),
        "pictures": [str(path) for path in pictures],
        "report": str(output / REPORT),
    }
    write_json(output / TABLE, answer)
    text = render(title, measured, claims, [path.name for path in pictures])
    (output / REPORT).write_text(f"{text}\nTrained in {trained}; made in {seconds:.0f} seconds.\n", encoding="utf-8")
    return answer


def render(title: str, measured: Measured, claims: Sequence[Claim], pictures: Sequence[str]) -> str:
    """Return the report as Markdown."""
    lines = [f"# {title}", "", *claims_table(claims), ""]
    for factor in sorted({factor for _, factor, *_ in measured.rows}):
        lines += [*_table(measured, factor), ""]
    lines += [f"![{name}]({name})" for name in pictures]
    return "\n".join(lines) + "\n"


def claims_table(claims: Sequence[Claim]) -> list[str]:
    """Return a table of claims with what was found, as lines of Markdown."""
    tried = [claim for claim in claims if claim.holds is not None]
    lines = ["| the paper's claim, with its threshold | | found |", "|---|---|---|"] if tried else []
    for claim in tried:
        found = "; ".join(f"{row['where']}: {row['figure']}{'' if row['holds'] else ' ✗'}" for row in claim.found)
        lines.append(f"| {claim.text} | {_VERDICT[bool(claim.holds)]} | {found} |")
    if len(tried) < len(claims):
        untried = "; ".join(claim.text for claim in claims if claim.holds is None)
        lines += ["", f"Not decided by a run of this size: {untried}."]
    return lines


def _table(measured: Measured, factor: int) -> list[str]:
    """Return the models of one factor before and after tuning: perplexity by window, passkeys."""
    rows = [row for row in measured.rows.values() if row.factor == factor]
    first = {row.method: row.seed for row in reversed(rows) if row.step == 0}  # no seed changes an untuned model
    rows = [row for row in rows if row.step or row.seed == first[row.method]]
    ends = [row for row in rows if row.step in (0, max(row.step for row in rows))]
    windows = sorted({window for row in ends for window in row.perplexity})
    length = factor * measured.window
    header = ["method", "steps", "seed", *(f"perplexity at {window}" for window in windows), "k_max", "passkeys"]
    lines = [
        f"## {measured.window} to {length} tokens",
        "",
        "| " + " | ".join(header) + " |",
        "|---" * len(header) + "|",
    ]
    for row in ends:
        name = row.method if row.corpus == measured.corpus else f"{row.method}, on {row.corpus}"
        values = [f"{row.perplexity[window]:.2f}" if window in row.perplexity else "" for window in windows]
        found = "" if row.success is None else f"{row.success:.0%}"
        seed = str(row.seed) if row.step else ""
        lines.append("| " + " | ".join([name, str(row.step), seed, *values, f"{row.k_max} of {length}", found]) + " |")
    return lines


def draw(measured: Measured, output: Path) -> list[Path]:
    """Draw perplexity by window, and perplexity and k_max by steps, for every factor; return the pictures."""
    pictures = []
    for factor in sorted({factor for _, factor, *_ in measured.rows}):
        length = factor * measured.window
        by_window = _curves_by_window(measured, factor)
        if by_window:
            path = output / f"perplexity-by-window-x{factor}.png"
            pictures.append(draw_curves(by_window, path, measured.window))
        figures: dict[str, tuple[str, Callable[[Measurement], float]]] = {
            "perplexity": (f"perplexity at {length} tokens", lambda row, at=length: row.perplexity[at]),  # type: ignore[misc]
            "kmax": (f"k_max of {length} tokens", lambda row: row.k_max),
        }
        for key, (label, value) in figures.items():
            curves = _curves_by_step(measured, factor, key, label, value)
            if curves:
                pictures.append(draw_curves(curves, output / f"{key}-by-steps-x{factor}.png"))
    return pictures


def _curves_by_window(measured: Measured, factor: int) -> list[tuple[str, dict[str, Any]]]:
    """Return a curve for each method before tuning and for its first seed after."""
    curves = []
    seeds = {method: seed for method, f, seed, corpus, _ in reversed(list(measured.rows)) if f == factor}
    for method, seed in sorted(seeds.items()):
        steps = [row for row in measured.steps(method, factor, seed) if len(row.perplexity) > 2]
        for row in steps:
            label = f"{method}, {row.step} steps" if row.step else f"{method}, untuned"
            windows = sorted(row.perplexity)
            plot = _plot("perplexity", "Perplexity by window", "window (tokens)", "perplexity", windows)
            curves.append((label, {**plot, "y": [row.perplexity[window] for window in windows], "mark_window": True}))
    return curves


def _curves_by_step(
    measured: Measured, factor: int, key: str, label: str, value: Callable[[Measurement], float]
) -> list[tuple[str, dict[str, Any]]]:
    """Return a curve for each run that was tuned."""
    curves = []
    for method in sorted({method for method, f, *_ in measured.rows if f == factor}):
        for _, seed in [run for run in measured.runs(method) if run[0] == factor]:
            rows = measured.steps(method, factor, seed)
            if len(rows) > 1:
                plot = _plot(key, f"{label} while fine-tuning", "steps", label, [row.step for row in rows])
                curves.append((f"{method} (seed {seed})", {**plot, "y": [value(row) for row in rows]}))
    return curves


def _plot(key: str, title: str, x_label: str, y_label: str, x: Sequence[int]) -> dict[str, Any]:
    return {
        **{"id": key, "title": title, "x_label": x_label, "y_label": y_label, "x": list(x)},
        **{"kind": "line" if key == "kmax" else "log-line", "mark_window": False},
    }
