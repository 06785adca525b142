"""Pictures of analyses: all models in one, PNG on a light background."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.analysis.field import ERF_THRESHOLD
from ctxext.evaluation.plots import COLORS, DPI, NO_FORMULAS, STYLES, WINDOW_COLOR, labels
from ctxext.evaluation.result import Result

WIDTH, HEIGHT = 11.0, 4.6
FLOOR = 1e-4  # shares beyond are not drawn


def _look(index: int) -> dict[str, Any]:
    return {"color": COLORS[index % len(COLORS)], "linestyle": STYLES[index // len(COLORS) % len(STYLES)]}


def _save(figure: Any, path: Path) -> Path:
    """Write a figure beside its place and rename it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".png")
    os.close(handle)
    figure.savefig(beside)
    os.chmod(beside, 0o644)
    os.replace(beside, path)
    return path


def _mark(axes: Any, positions: Sequence[int], what: str, top: bool = False) -> None:
    """Draw a dashed line at each token count and name it along the line, at its lower or upper end."""
    for position in sorted(set(positions)):
        axes.axvline(position, color=WINDOW_COLOR, linestyle="--", linewidth=1.1)
        axes.annotate(
            f"{what} {position}",
            (position, 0.97 if top else 0.03),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-4, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="top" if top else "bottom",
            color=WINDOW_COLOR,
            fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1},
        )


def _logarithmic_tokens(axes: Any, length: int) -> None:
    """Number an axis of token counts by powers of two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(1, length * 1.05)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.tick_params(axis="x", labelsize=8)


def draw_fields(results: Sequence[Result], path: Path) -> Path:
    """Draw cumulative gradients of several models, and on logarithmic axes what lies further back.

    Receptive fields at 0.99 are marked by dots, training lengths by dashed lines, 95% intervals by bands.

    Args:
        results: of `ReceptiveField`.
        path: the PNG file.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    length = max(result.options["length"] for result in results)
    trained = [result.details["train_length"] for result in results]
    with matplotlib.rc_context(NO_FORMULAS):
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
        near, far = figure.subplots(1, 2)
        lines = [_draw_field(near, far, result, index) for index, result in enumerate(results)]
        for axes in (near, far):
            _mark(axes, [value for value in trained if value and value <= length], "training length")
            axes.set_xlabel("most recent tokens")
            axes.grid(alpha=0.25)
        near.set(xlim=(0, length * 1.02), ylim=(0, 1.02), ylabel="share of the gradient")
        near.set_title("Gradient on the most recent tokens", fontsize=10)
        _logarithmic_tokens(far, length)
        far.set(yscale="log", ylim=(FLOOR, 1.1), ylabel="share of the gradient left")
        far.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        far.axhline(1 - ERF_THRESHOLD, color="#5f6b7a", linewidth=0.9, linestyle=":")
        far.set_title(f"Gradient on all tokens before them; ERF at {1 - ERF_THRESHOLD:.2g}", fontsize=10)
        names = [
            f"{label} (ERF {_paper_field(result)})" for label, result in zip(labels(results), results, strict=True)
        ]
        figure.legend(lines, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False, fontsize=9)
        return _save(figure, path)


def _paper_field(result: Result) -> int:
    return int(result.details["fields"][f"{ERF_THRESHOLD:g}"]["erf"])


def _draw_field(near: Any, far: Any, result: Result, index: int) -> Any:
    curve, look = result.details["curve"], _look(index)
    tokens, color = curve["recent_tokens"], look["color"]
    (line,) = near.plot(tokens, curve["share"], linewidth=1.6, **look)
    far.plot(tokens, _left(curve["share"]), linewidth=1.6, **look)
    if "low" in curve:
        near.fill_between(tokens, curve["low"], curve["high"], color=color, alpha=0.15, linewidth=0)
        far.fill_between(tokens, _left(curve["low"]), _left(curve["high"]), color=color, alpha=0.15, linewidth=0)
    for axes, height in ((near, ERF_THRESHOLD), (far, 1 - ERF_THRESHOLD)):
        axes.plot([_paper_field(result)], [height], "o", color=color, markersize=5, zorder=5)
    return line


def _left(shares: Sequence[float]) -> list[float]:
    """Return what shares leave over, with a floor below the picture for its logarithmic axis."""
    return [max(1 - share, FLOOR / 10) for share in shares]


def draw_attention(results: Sequence[Result], path: Path) -> Path:
    """Draw, for each model, how far back each head attends on average.

    Args:
        results: of `ReceptiveField` with attention mass.
        path: the PNG file.
    """
    import matplotlib
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    length = max(result.options["length"] for result in results)
    with matplotlib.rc_context(NO_FORMULAS):
        figure = Figure(figsize=(1.6 + 3.1 * columns, 0.6 + 2.6 * rows), dpi=DPI, layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, result, label in zip(panels, results, labels(results), strict=False):
            grid = [[max(1.0, cell) for cell in row] for row in result.details["attention"]["mean_distance"]]
            axes.imshow(grid, norm=LogNorm(1, length), cmap="viridis", aspect="auto", origin="lower")
            axes.set_title(label, fontsize=10)
            axes.set_xlabel("head")
            axes.set_ylabel("layer")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        for axes in panels[len(results) :]:
            axes.set_visible(False)
        bar = figure.colorbar(panels[0].images[0], ax=list(panels), label="mean distance of attention (tokens)")
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        return _save(figure, path)


def draw_position_loss(results: Sequence[Result], path: Path) -> Path:
    """Draw loss by position with 95% bands over documents; triangles on the axis show where models break.

    Args:
        results: of `PositionLoss`.
        path: the PNG file.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(NO_FORMULAS):
        figure = Figure(figsize=(8.5, 4.6), dpi=DPI, layout="constrained")
        axes = figure.subplots()
        lines, names = [], []
        for index, (label, result) in enumerate(zip(labels(results), results, strict=True)):
            edges, loss, look = result.details["bucket_edges"], result.details["loss"], _look(index)
            lines.append(axes.stairs(loss["mean"], edges, baseline=None, linewidth=1.6, **look))
            if "low" in loss:
                low, high = (end + end[-1:] for end in (loss["low"], loss["high"]))
                axes.fill_between(edges, low, high, step="post", color=look["color"], alpha=0.15, linewidth=0)
            where = result.metrics["break_position"]
            if where is not None:
                axes.plot(
                    [where],
                    [0.0],
                    "^",
                    color=look["color"],
                    markersize=8,
                    clip_on=False,
                    zorder=5,
                    transform=axes.get_xaxis_transform(),
                )
            names.append(label if where is None else f"{label} (breaks at {where})")
        length = max(result.options["length"] for result in results)
        windows = [result.details["window"] for result in results]
        _mark(axes, [value for value in windows if value and value < length], "original window", top=True)
        axes.set_xlim(0, length)
        axes.set_xlabel("position (tokens)")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.25)
        figure.legend(lines, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False, fontsize=9)
        return _save(figure, path)
