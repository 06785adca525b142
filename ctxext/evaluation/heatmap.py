"""One picture of success by prompt length and by depth, from results at several lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.evaluation.effective import check_one_model
from ctxext.evaluation.plots import DPI, SIZE_INCHES
from ctxext.evaluation.result import Result

DEPTH_LABEL = "depth in the prompt (%)"
PASSKEY = "passkey"


def depth_profile(result: Result) -> tuple[int, list[float], list[float]]:
    """Return a result's success by depth.

    Args:
        result: of `passkey`, whose distances from the end become depths, or of any evaluation with a heat plot over
            `DEPTH_LABEL`, such as `retrieval`.

    Returns:
        The prompt's length in tokens; ascending depths in percent, 0 at the start and 100 at the end; a success rate
        between 0 and 1 for each.

    Raises:
        ValueError: if the result has no such curve, or no length.
    """
    length = result.options.get("length")
    for plot in result.plots:
        if not isinstance(length, int) or plot["kind"] != "heat":
            continue
        if plot["x_label"] == DEPTH_LABEL:
            return length, list(plot["x"]), list(plot["y"])
        if plot["id"] == PASSKEY:
            return length, [100 * (1 - k / length) for k in reversed(plot["x"])], list(reversed(plot["y"]))
    raise ValueError(f"a result of {result.evaluation} has no success by depth; results of passkey and retrieval have")


def _edges(centres: Sequence[float]) -> list[float]:
    """Return cell borders between 0 and 100, half-way between neighbouring depths."""
    return [0.0, *((low + high) / 2 for low, high in zip(centres[:-1], centres[1:], strict=True)), 100.0]


def draw_length_by_depth(results: Sequence[Result], path: Path) -> Path:
    """Draw success by length (columns) and depth (rows, the start of the prompt on top) into a PNG file.

    Args:
        results: of one checkpoint, with protocols that differ in the length only.
        path: the PNG file.

    Raises:
        ValueError: if they differ in more, or two have the same length.
    """
    check_one_model(results, "a picture of length and depth")
    profiles = sorted(depth_profile(result) for result in results)
    lengths = [length for length, _, _ in profiles]
    if len(set(lengths)) < len(lengths):
        raise ValueError(f"two results have the same length ({', '.join(map(str, lengths))}): leave one out")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(min(SIZE_INCHES[0], 3 + 0.8 * len(lengths)), SIZE_INCHES[1]), dpi=DPI, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image: Any = None
    for column, (_, depths, rates) in enumerate(profiles):
        image = axes.pcolormesh(
            [column - 0.46, column + 0.46],
            _edges(depths),
            [[rate] for rate in rates],
            vmin=0,
            vmax=1,
            cmap="RdYlGn",
            edgecolors="white",
            linewidth=0.4,
        )
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel(DEPTH_LABEL)
    axes.set_ylim(100, 0)
    axes.set_title(f"{results[0].evaluation} of {results[0].checkpoint['name']}")
    figure.colorbar(image, ax=axes, label="success rate", pad=0.02)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
