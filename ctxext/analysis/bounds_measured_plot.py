"""The picture of measured attention logits: their distribution by distance, and the largest against the bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctxext.analysis.bounds_plots import GREY, plain_log_axis, save_figure
from ctxext.evaluation.plots import COLORS, WINDOW_COLOR

BANDS = (
    ("q0.001", "q0.999", 0.16, "0.1% to 99.9%"),
    ("q0.01", "q0.99", 0.22, "1% to 99%"),
    ("q0.25", "q0.75", 0.4, "25% to 75%"),
)
COLUMN_INCHES = (4.4, 6.4)


def draw_logits(report: dict[str, Any], path: Path) -> Path:
    """Draw a report of `measure_checkpoints` into a PNG file, a column for each checkpoint.

    Above, the distribution of all layers' logits by distance; below, the largest |logit| of every layer on a
    logarithmic axis, between what its queries and keys can reach at any distance and the paper's bound.
    """
    found = report["checkpoints"]

    def draw(figure: Any) -> None:
        grid = figure.subplots(2, len(found), sharex=True, sharey="row", squeeze=False)
        for column, checkpoint in enumerate(found):
            _draw_distribution(grid[0][column], checkpoint)
            _draw_largest(grid[1][column], checkpoint)
            for axes in grid[:, column]:
                axes.axvline(checkpoint["window"], color=WINDOW_COLOR, linestyle="--", linewidth=1.2)
                axes.grid(alpha=0.3)
            grid[0][column].set_title(checkpoint["name"], fontsize=11)
            grid[1][column].set_xlabel("distance (tokens)")
        grid[0][0].set_ylabel("logit, all layers")
        grid[1][0].set_ylabel("largest |logit|")
        for row, place in ((grid[0], "outside upper center"), (grid[1], "outside lower center")):
            figure.legend(*row[0].get_legend_handles_labels(), ncols=5, loc=place, fontsize=8)

    width = max(7.0, COLUMN_INCHES[0] * len(found))
    return save_figure(path, (width, COLUMN_INCHES[1]), draw)


def _middles(edges: list[int]) -> list[float]:
    return [(low + high - 1) / 2 for low, high in zip(edges[:-1], edges[1:], strict=True)]


def _draw_distribution(axes: Any, checkpoint: dict[str, Any]) -> None:
    cells = checkpoint["all_layers"]["cells"]
    x = [middle for middle, cell in zip(_middles(checkpoint["edges"]), cells, strict=True) if cell is not None]
    counted = [cell for cell in cells if cell is not None]
    for low, high, alpha, label in BANDS:
        bottom, top = ([cell[name] for cell in counted] for name in (low, high))
        axes.fill_between(x, bottom, top, color=COLORS[0], alpha=alpha, linewidth=0, label=label)
    axes.plot(x, [cell["q0.5"] for cell in counted], color=COLORS[0], linewidth=1.5, label="median")
    for name, label in (("max", "smallest, largest"), ("min", "")):
        axes.plot(x, [cell[name] for cell in counted], color=GREY, linewidth=0.9, label=label)


def _draw_largest(axes: Any, checkpoint: dict[str, Any]) -> None:
    middles = _middles(checkpoint["edges"])
    for number, layer in enumerate(checkpoint["layers"]):
        largest = [float("nan") if cell is None else max(-cell["min"], cell["max"]) for cell in layer["cells"]]
        axes.plot(middles, largest, color=COLORS[0], linewidth=0.8, alpha=0.6, label=None if number else "each layer")
    every = checkpoint["all_layers"]
    axes.axhline(every["reachable"], color=COLORS[2], linewidth=1.5, label="sum|h|: reachable at some distance")
    axes.plot(middles, every["bound"], color=COLORS[1], linewidth=1.5, label="2 max|h| B(s), largest in each stretch")
    axes.plot([], [], color=WINDOW_COLOR, linestyle="--", linewidth=1.2, label="window")
    axes.set_yscale("log")
    plain_log_axis(axes.yaxis)
