"""The path through a document: where it was read, where it was skipped, and how sure the model was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.evaluation.plots import COLORS, DPI, NO_FORMULAS

if TYPE_CHECKING:
    from ctxext.reading.reader import WindowRead

SIZE_INCHES = (8.0, 4.5)
READ, MEAN, SKIPPED = COLORS[0], COLORS[1], "#9aa3ad"
MANY = 200  # windows, of which no single one can be told from its neighbours
CELLS = 400  # of the strip
MEANS = 80  # points of the mean loss


def read_shares(spans: Sequence[Sequence[int]], characters: int, cells: int) -> list[float]:
    """Return how much of each part of a document was read, `(cells,)`, between 0 and 1.

    Args:
        spans: First characters and ends of what was read, ascending and apart.
        characters: Of the document.
        cells: Equal parts of it.
    """
    size = characters / cells
    shares = [0.0] * cells
    for start, end in spans:
        for cell in range(int(start / size), min(cells, int(end / size) + 1)):
            shares[cell] += max(0.0, min(end, (cell + 1) * size) - max(start, cell * size)) / size
    return [min(1.0, share) for share in shares]


def draw_path(windows: Sequence[WindowRead], characters: int, path: Path, title: str) -> Path:
    """Draw the windows of a reading into a PNG file.

    Above, each window is a bar from its first to its last character, as high as its pooled loss, and thin lines lead
    across what was skipped; of many windows each is a dot, and a line gives the mean loss. Below, a strip is as dark
    as the text there was read.

    Args:
        windows: As `DocumentReader.read` gave them.
        characters: Of the document.
        path: The PNG file.
        title: The document's name.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(NO_FORMULAS):
        figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        above, strip = figure.subplots(2, 1, sharex=True, height_ratios=(10, 1))
        _draw_losses(above, windows, characters)
        _draw_strip(strip, windows, characters)
        read, skipped = (sum(getattr(window, name) for window in windows) for name in ("tokens", "skipped"))
        gone = f"about {skipped:,}" if skipped else "none"
        words = f"{len(windows):,} window{'s' * (len(windows) != 1)}, {read:,} tokens read, {gone} skipped"
        above.set_title(f"{title}: {words}", pad=12, fontsize=11)
        above.legend(frameon=False, loc="upper right", ncols=3, fontsize=8)
        figure.savefig(path)
    return path


def _draw_losses(axes: Any, windows: Sequence[WindowRead], characters: int) -> None:
    from matplotlib.collections import LineCollection

    part = 100 / characters
    known = [(window, window.loss) for window in windows if window.loss is not None]
    many = len(known) > MANY
    if many:  # a bar would be thinner than a dot, and the lines between them would hide it
        middles = [(window.start + window.end) / 2 * part for window, _ in known]
        axes.plot(middles, [loss for _, loss in known], ".", color=READ, alpha=0.35, markersize=3.5, label="read")
        axes.plot(*_means(known, characters), color=MEAN, linewidth=1.6, label="mean")
    else:
        skips = [
            [(first.end * part, loss), (second.start * part, other)]
            for (first, loss), (second, other) in zip(known, known[1:], strict=False)
            if first.skipped
        ]
        bars = [[(window.start * part, loss), (window.end * part, loss)] for window, loss in known]
        if skips:
            axes.add_collection(LineCollection(skips, colors=SKIPPED, linewidths=0.9, label="skipped"))
        axes.add_collection(LineCollection(bars, colors=READ, linewidths=4, capstyle="butt", label="read"))
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 1.2 * max((loss for _, loss in known), default=0.0) or 1.0)
    axes.set_ylabel("pooled loss of the window (nats)")
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _means(known: Sequence[tuple[WindowRead, float]], characters: int) -> tuple[list[float], list[float]]:
    """Return the middles of parts of the document in percent, and the mean loss of the windows that begin there."""
    parts: dict[int, list[float]] = {}
    for window, loss in known:
        parts.setdefault(window.start * MEANS // characters, []).append(loss)
    middles = [(part + 0.5) * 100 / MEANS for part in sorted(parts)]
    return middles, [sum(parts[part]) / len(parts[part]) for part in sorted(parts)]


def _draw_strip(axes: Any, windows: Sequence[WindowRead], characters: int) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shares = read_shares([(window.start, window.end) for window in windows], characters, CELLS)
    shades = LinearSegmentedColormap.from_list("read", ["#eef1f4", READ])
    edges = [100 * cell / CELLS for cell in range(CELLS + 1)]
    axes.pcolormesh(edges, [0, 1], [shares], cmap=shades, vmin=0, vmax=1)
    axes.set_yticks([])
    axes.set_ylabel("read", rotation=0, ha="right", va="center")
    axes.set_xlabel(f"place in the document (% of its {characters:,} characters)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
