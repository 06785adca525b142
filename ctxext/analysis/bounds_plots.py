"""Score bounds in pictures: the Position Interpolation paper's Figures 2 and 5, and how its closed form fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ctxext.analysis import bounds
from ctxext.analysis.bounds_report import UNSCALED, BoundsOptions, frequencies_of, scalings
from ctxext.evaluation.plots import COLORS, DPI, NO_FORMULAS, STYLES, WINDOW_COLOR
from ctxext.positions.base import FloatArray

GREY = COLORS[7]
STRETCHES = 160  # of an axis, of whose distances the smallest value is drawn
WHOLE_POINTS = range(25, 76)  # distances between which the fit is drawn, as in the paper


def save_figure(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> Path:
    """Draw a figure of `size` inches into a PNG file.

    Args:
        path: the file.
        size: width and height in inches.
        draw: makes axes on the figure and draws into them.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {**NO_FORMULAS, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(path)
    return path


def curve_style(index: int) -> dict[str, Any]:
    """Return colour and line style of the curve number `index`."""
    return {"color": COLORS[index % len(COLORS)], "linestyle": STYLES[index // len(COLORS) % len(STYLES)]}


def draw_ratios(
    frequencies: Mapping[str, FloatArray], length: int, reach: int, path: Path, window: int | None = None
) -> Path:
    """Draw B(s)/d (the paper's Figure 5), up to `length` tokens and on a logarithmic axis up to `reach`.

    It swings from one distance to the next: bands reach from the smallest to the largest value of each stretch, lines
    are the smallest, and a single curve is drawn at every distance up to `length`, as in the paper.

    Args:
        frequencies: `(d / 2,)` for each label.
        length: tokens.
        reach: tokens, at least `length`.
        path: the PNG file.
        window: tokens that the model was trained to read, marked.
    """
    distances = np.arange(reach + 1.0)
    ratios = {name: bounds.partial_sums(thetas, distances) / (2 * len(thetas)) for name, thetas in frequencies.items()}
    near = np.unique(np.linspace(0, length, STRETCHES).astype(int))
    far = np.unique(np.geomspace(1, reach, STRETCHES).astype(int))

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        right.set_xscale("log")
        for axes, edges in ((left, near), (right, far)):
            for index, (name, ratio) in enumerate(ratios.items()):
                if axes is left and len(ratios) == 1:
                    left.plot(distances[: length + 1], ratio[: length + 1], linewidth=0.8, **curve_style(index))
                    continue
                lowest, highest = (how.reduceat(ratio, edges)[:-1] for how in (np.minimum, np.maximum))
                axes.fill_between(
                    edges[:-1], lowest, highest, color=COLORS[index % len(COLORS)], alpha=0.1, linewidth=0
                )
                axes.plot(edges[:-1], lowest, linewidth=1.4, label=name, **curve_style(index))
            axes.axhline(1, color="black", linestyle="--", linewidth=1)
            axes.set_yscale("log")
            axes.grid(alpha=0.3)
            axes.set_xlabel("distance s (tokens)")
            _mark(axes, window, edges[-1])
        left.set_ylabel("B(s) / d")
        left.set_title("at every distance" if len(ratios) == 1 else "smallest in each stretch", fontsize=11)
        right.set_title(f"to {reach:,} tokens: smallest in each stretch", fontsize=11)
        plain_log_axis(left.yaxis, (1, 2, 5))
        plain_log_axis(right.yaxis, (1, 2, 5))
        plain_log_axis(right.xaxis)
        right.legend(fontsize=9, loc="upper right")

    return save_figure(path, (10.0, 4.2), draw)


def _mark(axes: Any, window: int | None, end: float) -> None:
    """Mark the length of training, where it lies on the axes."""
    if window is not None and window < end:
        axes.axvline(window, color=WINDOW_COLOR, linestyle=":", linewidth=1.2)
        axes.annotate(
            f" L = {window}",
            (window, 0.02),
            xycoords=axes.get_xaxis_transform(),
            color=WINDOW_COLOR,
            fontsize=8,
        )


def plain_log_axis(axis: Any, multiples: tuple[int, ...] = (1,)) -> None:
    """Write the numbers of a logarithmic axis plainly, at these multiples of the powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=multiples))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_fit(fit: bounds.Fit, path: Path) -> Path:
    """Draw random scores and their fit: inside, far outside and between whole distances (the paper's Figure 2)."""
    length = len(fit.scores)
    last = min(WHOLE_POINTS.stop - 1, length - 1)
    first = min(WHOLE_POINTS.start, max(0, last - 10))

    def draw(figure: Any) -> None:
        inside, beyond, between = figure.subplots(1, 3)
        distances = np.arange(2.0 * length)
        inside.plot(distances[:length], fit.scores, ".", color=GREY, markersize=1.5, alpha=0.6, label="random scores")
        inside.plot(distances[:length], fit.at(distances[:length]), color=COLORS[0], linewidth=1.1, label="fit")
        inside.legend(fontsize=8, loc="upper right", markerscale=4)
        inside.set_title("inside: fitted", fontsize=11)
        beyond.plot(distances, fit.at(distances), color=COLORS[1], linewidth=1.2)
        beyond.axvline(length, color=WINDOW_COLOR, linestyle="--", linewidth=1.2)
        beyond.set_title("beyond: extrapolated", fontsize=11)
        beyond.annotate(
            f"L = {length} ", (length, 0.98), xycoords=beyond.get_xaxis_transform(), ha="right", va="top", fontsize=8,
            color=WINDOW_COLOR,
        )  # fmt: skip
        fine, whole = np.arange(first, last + 0.0625, 0.125), np.arange(first, last + 1.0)
        for distance in whole:
            between.axvline(distance, color=GREY, linewidth=0.4, alpha=0.5)
        between.plot(fine, fit.at(fine), color=COLORS[2], linewidth=1.4)
        between.plot(whole, fit.at(whole), "o", color=COLORS[2], markersize=2.5)
        between.set_title("between whole distances: smooth", fontsize=11)
        inside.set_ylabel("score a(s)")
        for axes in (inside, beyond, between):
            axes.set_xlabel("distance s (tokens)")
            axes.grid(alpha=0.3)

    return save_figure(path, (12.0, 3.8), draw)


def draw_counter_example(frequencies: FloatArray, rope_theta: float, path: Path) -> Path:
    """Draw the score whose phases are aligned half-way between two distances, and its deviation against the bounds.

    Args:
        frequencies: unscaled, `(d / 2,)`.
        rope_theta: b.
        path: the PNG file.
    """
    dim = 2 * len(frequencies)
    products = bounds.aligned_products(frequencies, 0.5)
    fraction = np.linspace(0, 1, 201)
    score = bounds.attention_score(products, frequencies, fraction)
    ends = bounds.attention_score(products, frequencies, np.array([0.0, 1.0]))
    chord = ends[0] + (ends[1] - ends[0]) * fraction

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        left.plot(fraction, score, color=COLORS[0], linewidth=1.8, label="a(s), phases aligned half-way")
        left.plot(fraction, chord, color=GREY, linestyle="--", linewidth=1.4, label="linear between its ends")
        left.plot([0, 1], ends, "o", color=GREY, markersize=4)
        left.vlines(0.5, chord[100], score[100], color=WINDOW_COLOR, linewidth=1.6)
        left.annotate(
            f" {score[100] - chord[100]:.3f} max|h|",
            (0.5, (score[100] + chord[100]) / 2),
            color=WINDOW_COLOR,
            fontsize=9,
        )
        left.margins(y=0.25)
        left.set_ylabel("score / max|h|")
        left.legend(fontsize=8, loc="lower center")
        holds = [bounds.curvature_bound(frequencies, t) for t in fraction]
        closed = [bounds.closed_form(dim, rope_theta, t) for t in fraction]
        right.plot(fraction, holds, color=COLORS[2], linewidth=1.6, label="bound that holds")
        right.plot(fraction, score - chord, color=COLORS[0], linewidth=1.8, label="a(s) - linear, the example")
        right.plot(fraction, closed, color=COLORS[1], linestyle="--", linewidth=1.6, label="the paper's closed form")
        right.fill_between(fraction, closed, score - chord, where=score - chord > closed, color=COLORS[0], alpha=0.12)
        right.set_ylabel("deviation / max|h|")
        right.set_ylim(bottom=0)
        right.legend(fontsize=8, loc="lower center")
        for axes in (left, right):
            axes.set_xlabel("s - s1 (between two whole distances)")
            axes.grid(alpha=0.3)
        figure.suptitle(f"head dim {dim}, theta {rope_theta:g}", fontsize=11)

    return save_figure(path, (10.0, 4.0), draw)


def draw_bounds(options: BoundsOptions, report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw all pictures of a report of `bounds_report` into a folder."""
    made = scalings(options)
    frequencies = {name: frequencies_of(scaling, options) for name, scaling in made.items()}
    first = report["bounds"][0]["extrapolation"]
    [fit] = bounds.fit_scores(frequencies[UNSCALED], options.length, ridges=[options.ridge], seed=options.seed)
    return [
        draw_fit(fit, folder / "fit.png"),
        draw_ratios(frequencies, first["length"], first["reach"], folder / "extrapolation.png", options.length),
        draw_counter_example(frequencies[UNSCALED], options.theta, folder / "counter-example.png"),
    ]
