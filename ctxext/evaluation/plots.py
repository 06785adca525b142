"""Draw the curves of results: one picture for each kind of curve, all results in it; PNG files or inline SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctxext.evaluation.result import Result

SIZE_INCHES = (8.0, 4.5)
SVG_SIZE_INCHES = (5.2, 3.1)
DPI = 150
Curves = list[tuple[str, dict[str, Any]]]

# Distinct for colour-blind readers too, together with the markers; line styles follow when the colours are used up.
COLORS = ("#2166c4", "#c8690a", "#1b8a5a", "#b5388f", "#7154c9", "#2b93b0", "#8a6240", "#5f6b7a")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLES = ("-", "--", ":")
WINDOW_COLOR = "#d1345b"
# What an SVG writes in these is replaced by what the page's colour scheme says.
INK, SOFT, PAGE = "#010203", "#040506", "#fdfcfb"
# Names come from files: a dollar sign in one is a dollar sign.
NO_FORMULAS: Any = {"text.parse_math": False}
MOST_NUMBERED_CELLS = 10
LONGEST_TICK = 22


def labels(results: Sequence[Result]) -> list[str]:
    """Return a distinct label for each result: checkpoint and adapter, numbered where names repeat."""
    names = []
    for result in results:
        adapter = result.settings.get("adapter")
        names.append(f"{result.checkpoint['name']}{f' + {Path(str(adapter)).name}' if adapter else ''}")
    return [f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _draw_lines(axes: Any, curves: Curves) -> None:
    for index, (_, plot) in enumerate(curves):
        axes.plot(
            plot["x"],
            _numbers(plot["y"]),
            color=COLORS[index % len(COLORS)],
            marker=MARKERS[index % len(MARKERS)],
            linestyle=STYLES[index // len(COLORS) % len(STYLES)],
            markersize=3.5,
            linewidth=1.6,
        )
    axes.set_ylabel(str(curves[0][1]["y_label"]))
    axes.grid(alpha=0.3)


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
    numbered = max(len(plot["x"]) for _, plot in curves) <= MOST_NUMBERED_CELLS
    for row, (_, plot) in enumerate(curves):
        edges = _cell_edges(plot["x"])
        image = axes.pcolormesh(
            edges, [row - 0.42, row + 0.42], [_numbers(plot["y"])], vmin=0, vmax=1, edgecolors=PAGE, linewidth=0.6
        )
        if numbered:
            for low, high, y in zip(edges[:-1], edges[1:], plot["y"], strict=True):
                said, color = ("", "white") if y is None else (f"{y:.2g}", "white" if y < 0.6 else "black")
                axes.text((low + high) / 2, row, said, ha="center", va="center", color=color, fontsize=8)
    names = [label if len(label) <= LONGEST_TICK else f"{label[: LONGEST_TICK - 1]}…" for label, _ in curves]
    axes.set_yticks(range(len(curves)), names)
    axes.invert_yaxis()
    if not numbered:
        axes.figure.colorbar(image, ax=axes, label=str(curves[0][1]["y_label"]), pad=0.02)


KINDS: dict[str, Callable[[Any, Curves], None]] = {
    "line": _draw_lines,
    "log-line": _draw_lines_on_log_axis,
    "heat": _draw_heat,
}


def _check(curves: Curves) -> None:
    first = curves[0][1]
    if first["kind"] not in KINDS:
        raise ValueError(f"plot {first['id']!r} has kind {first['kind']!r}; allowed: {', '.join(KINDS)}")
    for label, plot in curves:
        if len(plot["x"]) != len(plot["y"]) or not plot["x"] or plot["kind"] != first["kind"]:
            raise ValueError(
                f"plot {plot['id']!r} of {label} cannot be drawn: {len(plot['x'])} x and {len(plot['y'])} y values, "
                f"kind {plot['kind']!r} (the first: {first['kind']!r})"
            )


def _mark_window(axes: Any, curves: Curves, window: int) -> None:
    """Draw a dashed line at the original window, its name on the side where there is room."""
    kind = curves[0][1]["kind"]
    late = window > 0.55 * max(max(plot["x"]) for _, plot in curves)
    axes.axvline(window, color=WINDOW_COLOR, linestyle="--", linewidth=1.2)
    axes.annotate(
        f" original window {window} ",
        (window, 1),
        xycoords=axes.get_xaxis_transform(),
        ha="right" if late else "left",
        va="top" if kind == "line" else "bottom",
        color=WINDOW_COLOR,
        fontsize=8,
    )


def _figure(curves: Curves, size: tuple[float, float], window: int | None) -> Any:
    """Return a figure with labelled curves of one kind, without title and legend."""
    from matplotlib.figure import Figure

    _check(curves)
    first = curves[0][1]
    height = 1.2 + 0.42 * len(curves) if first["kind"] == "heat" else size[1]
    figure = Figure(figsize=(size[0], height), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    KINDS[first["kind"]](axes, curves)
    axes.set_xlabel(str(first["x_label"]))
    if first["mark_window"] and window and window <= max(max(plot["x"]) for _, plot in curves):
        _mark_window(axes, curves, window)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def draw_curves(curves: Curves, path: Path, original_window: int | None = None) -> Path:
    """Draw labelled curves of one kind into a PNG file.

    Args:
        curves: pairs of label and `Plot` fields, all with the same `id`.
        path: the PNG file.
        original_window: the model's original window in tokens, marked by a dashed line if x are token positions.

    Raises:
        ValueError: if the kind of the plot is unknown, or a curve has not as many values as positions.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with matplotlib.rc_context(NO_FORMULAS):
        figure = _figure(curves, SIZE_INCHES, original_window)
        FigureCanvasAgg(figure)
        axes = figure.axes[0]
        axes.set_title(str(curves[0][1]["title"]), pad=14)
        if curves[0][1]["kind"] != "heat":
            axes.legend(axes.lines[: len(curves)], [label for label, _ in curves], frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path


def svg_curves(curves: Curves, salt: str, original_window: int | None = None) -> str:
    """Draw labelled curves of one kind as an SVG element to put into an HTML page, without title and legend.

    Its text is text; it refers to nothing outside itself. Its colours are the page's: `currentColor`, and the custom
    properties `--page`, `--soft`, `--window` and `--series-1` to `--series-8`.

    Args:
        curves: as for `draw_curves`.
        salt: another one for each picture of a page, so that no two share an id.
        original_window: as for `draw_curves`.

    Raises:
        ValueError: as `draw_curves`.
    """
    import io

    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    colors = {"axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK}
    style: Any = {**NO_FORMULAS, **colors, "grid.color": SOFT, "svg.fonttype": "none", "svg.hashsalt": salt}
    with matplotlib.rc_context({**style, "font.size": 9.5}):
        figure = _figure(curves, SVG_SIZE_INCHES, original_window)
        FigureCanvasSVG(figure)
        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return _inline(text.getvalue())


def _inline(svg: str) -> str:
    """Return matplotlib's SVG file as an element of an HTML page: no prologue, namespaces or ids of groups."""
    element = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    element = re.sub(r' xmlns(:xlink)?="[^"]*"', "", element).replace("xlink:href=", "href=")
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    element = re.sub(r' (width|height)="[\d.]+pt"', "", element, count=2)
    names = {color: f"var(--series-{index})" for index, color in enumerate(COLORS, start=1)}
    names |= {INK: "currentColor", SOFT: "var(--soft)", PAGE: "var(--page)", WINDOW_COLOR: "var(--window)"}
    for color, name in names.items():
        element = element.replace(color, name)
    return element


def group_curves(
    results: Sequence[Result], names: Sequence[str] | None = None
) -> tuple[dict[str, Curves], int | None]:
    """Return the curves of results by plot id, and the original window if it is the same for all."""
    groups: dict[str, Curves] = {}
    windows = {result.checkpoint.get("original_window") for result in results}
    for label, result in zip(labels(results), results, strict=True):
        for plot in result.plots:
            groups.setdefault(str(plot["id"]), []).append((label, plot))
    return groups, windows.pop() if len(windows) == 1 else None


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw every curve of `results` into PNG files in `folder`, curves of the same id together."""
    groups, window = group_curves(results)
    # An id comes from a file that anybody may have written: it must not lead out of the folder.
    names = {name: re.sub(r"[^A-Za-z0-9_-]+", "-", name) for name in groups}
    return [draw_curves(curves, folder / f"{names[name]}.png", window) for name, curves in groups.items()]
