"""The picture of a LongRoPE search: the best perplexity by forward passes, and the factors beside other methods'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ctxext.positions.base import FloatArray


def draw_search(
    answer: Mapping[str, Any], log: Sequence[Mapping[str, Any]], factors: Mapping[str, FloatArray], path: Path
) -> Path:
    """Draw a search into a PNG file.

    Args:
        answer: the result of the search.
        log: its candidates in order.
        factors: those of other methods by name, `(dimensions,)`.
        path: the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    best = list(accumulate((row["perplexity"] for row in log), min))
    left.plot([row["forward_passes"] for row in log], best, drawstyle="steps-post", label="best of the search")
    others = {name: math.exp(answer["methods"][name]["search"]["loss"]) for name in factors}
    for index, (name, perplexity) in enumerate(others.items(), start=1):
        left.axhline(perplexity, color=f"C{index}", linestyle="--", label=f"{name} {perplexity:.2f}")
        right.plot(factors[name], color=f"C{index}", linestyle="--", label=name)
    # Methods far worse than the best of them lie above the frame; the legend has their numbers.
    left.set_ylim(0.98 * min(best[-1], *others.values()), 1.1 * min(others.values()))
    right.plot(answer["long_factor"], marker="o", markersize=3, label="searched")
    left.set(xlabel="forward passes", ylabel=f"perplexity at {answer['length']} tokens")
    left.set_title(f"{answer['checkpoint']}, the {answer['documents']} documents of the search")
    right.set(xlabel="dimension, from the highest frequency", ylabel="factor")
    right.set_title(f"window {answer['original_window']} to {answer['length']}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path)
    return path
