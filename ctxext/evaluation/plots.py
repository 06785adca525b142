"""Draw the curves of results: one picture for each kind of curve, all results in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctxext.evaluation.result import Result

SIZE_INCHES = (8.0, 4.5)
DPI = 150
Curves = list[tuple[str, dict[str, Any]]]


def labels(results: Sequence[Result]) -> list[str]:
    """Return a distinct label for each result: the checkpoint's name, numbered where names repeat."""
    names = [str(result.checkpoint["name"]) for result in results]
    return [f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _draw_lines(axes: Any, curves: Curves) -> None:
    for label, plot in curves:
        y = [float("nan") if value is None else value for value in plot["y"]]
        axes.plot(plot["x"], y, marker="o", markersize=3.5, linewidth=1.6, label=label)
    axes.set_ylabel(curves[0][1]["y_label"])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_lines_on_log_axis(axes: Any, curves: Curves) -> None:
    from matplotlib.ticker import LogLocator, ScalarFormatter

    _draw_lines(axes, curves)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter("")


def _cell_edges(x: Sequence[float]) -> list[float]:
    """Return cell borders half-way between neighbouring positions."""
    if len(x) == 1:
        return [x[0] - 0.5, x[0] + 0.5]
    inner = [(low + high) / 2 for low, high in zip(x[:-1], x[1:], strict=True)]
    return [max(0.0, x[0] - (inner[0] - x[0])), *inner, x[-1] + (x[-1] - inner[-1])]


def _draw_heat(axes: Any, curves: Curves) -> None:
    image = None
    for row, (_, plot) in enumerate(curves):
        y = [float("nan") if value is None else value for value in plot["y"]]
        edges = _cell_edges(plot["x"])
        image = axes.pcolormesh(
            edges, [row - 0.42, row + 0.42], [y], vmin=0, vmax=1, cmap="RdYlGn", edgecolors="white", linewidth=0.4
        )
    axes.set_yticks(range(len(curves)), [label for label, _ in curves])
    axes.invert_yaxis()
    axes.figure.colorbar(image, ax=axes, label=curves[0][1]["y_label"], pad=0.02)


KINDS: dict[str, Callable[[Any, Curves], None]] = {
    "line": _draw_lines,
    "log-line": _draw_lines_on_log_axis,
    "heat": _draw_heat,
}


def draw_curves(curves: Curves, path: Path, original_window: int | None = None) -> Path:
    """Draw labelled curves of one kind into a PNG file.

    Args:
        curves: pairs of label and `Plot` fields, all with the same `id`.
        path: the PNG file.
        original_window: the model's original window in tokens, marked by a dashed line if x are token positions.

    Raises:
        ValueError: if the kind of the plot is unknown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = curves[0][1]
    if first["kind"] not in KINDS:
        raise ValueError(f"plot {first['id']!r} has kind {first['kind']!r}; allowed: {', '.join(KINDS)}")
    height = 1.6 + 0.55 * len(curves) if first["kind"] == "heat" else SIZE_INCHES[1]
    figure = Figure(figsize=(SIZE_INCHES[0], height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    KINDS[first["kind"]](axes, curves)
    axes.set_title(first["title"])
    axes.set_xlabel(first["x_label"])
    if first["mark_window"] and original_window and original_window <= max(max(plot["x"]) for _, plot in curves):
        axes.axvline(original_window, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f" original window {original_window}",
            (original_window, 1),
            xycoords=axes.get_xaxis_transform(),
            va="top" if first["kind"] == "line" else "bottom",
            fontsize=8,
        )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw every curve of `results` into PNG files in `folder`, curves of the same id together."""
    groups: dict[str, Curves] = {}
    windows = {result.checkpoint.get("original_window") for result in results}
    for label, result in zip(labels(results), results, strict=True):
        for plot in result.plots:
            groups.setdefault(plot["id"], []).append((label, plot))
    window = windows.pop() if len(windows) == 1 else None
    return [draw_curves(curves, folder / f"{name}.png", window) for name, curves in groups.items()]
