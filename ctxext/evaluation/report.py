"""One HTML file from many results: grouped by comparable protocol, with tables, curves, intervals and footnotes.

The file needs nothing else: styles and pictures (SVG, whose text stays text) are in it, it holds no script and no
address, and it says so to the browser by a content security policy. Whatever comes from result files is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ctxext.evaluation.compare import comparable_key, compare_loaded, conditions, load_results
from ctxext.evaluation.paired import CONFIDENCE, FEWEST_ITEMS
from ctxext.evaluation.plots import COLORS, STYLES, group_curves, labels, svg_curves
from ctxext.evaluation.render import bootstrap_text, interval_text, number, signed
from ctxext.evaluation.result import Result, check_output, write_whole
from ctxext.evaluation.verdict import percent

TEMPLATE, STYLE = "report.html.j2", "report.css"
BORDERS = dict(zip(STYLES, ("solid", "dashed", "dotted"), strict=True))


@dataclass(frozen=True, kw_only=True)
class Group:
    """The results of one evaluation, protocol and corpus, which may be compared.

    Attributes:
        number: from 1, as the page numbers it.
        title: evaluation and length.
        results: in the order given; the first is the reference.
        comparison: of them, as from `compare_loaded`.
    """

    number: int
    title: str
    results: list[Result]
    comparison: dict[str, Any]

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics of the group, the headline first."""
        return list(dict.fromkeys(name for result in self.results for name in result.metrics))


def write_report(paths: Sequence[Path], output: Path, title: str) -> dict[str, Any]:
    """Write a report of results to one HTML file.

    Args:
        paths: result files. In each group the reference is the first file's checkpoint, or else the group's first.
            A file given twice counts once.
        output: the HTML file, written whole or not at all.
        title: of the page.

    Returns:
        `report`: the path; `results`: their number; `groups`: for each its `title` and comparison.

    Raises:
        ValueError: if a file is not a result, is damaged or cannot be read, or `output` cannot be written.
    """
    check_output(output)
    by_place: dict[Path, Path] = {}
    for path in paths:
        by_place.setdefault(path.resolve(), path)
    once = list(by_place.values())
    groups = group_results(load_results(once), once)
    write_whole(output, render_report(groups, title))
    return {
        "report": str(output),
        "results": len(once),
        "groups": [{"title": group.title, **group.comparison} for group in groups],
    }


def group_results(results: Sequence[Result], paths: Sequence[Path]) -> list[Group]:
    """Return results in groups that may be compared: by evaluation as they first appear, shorter lengths first.

    In each group the results of the first result's checkpoint come first.
    """
    first = _checkpoint_key(results[0])
    members: dict[tuple[str, str, str | None], list[tuple[Result, Path]]] = {}
    for result, path in zip(results, paths, strict=True):
        members.setdefault(comparable_key(result), []).append((result, path))
    evaluations = list(dict.fromkeys(key[0] for key in members))
    ordered = sorted(members.values(), key=lambda pairs: (evaluations.index(pairs[0][0].evaluation), _length(pairs)))
    for pairs in ordered:
        pairs.sort(key=lambda pair: _checkpoint_key(pair[0]) != first)
    titles = _titles([pairs[0][0] for pairs in ordered])
    return [
        Group(
            number=index,
            title=title,
            results=[result for result, _ in pairs],
            comparison=compare_loaded([result for result, _ in pairs], [path for _, path in pairs]),
        )
        for index, (pairs, title) in enumerate(zip(ordered, titles, strict=True), start=1)
    ]


def _length(pairs: Sequence[tuple[Result, Path]]) -> int:
    length = pairs[0][0].options.get("length")
    return length if isinstance(length, int) else 0


def _titles(results: Sequence[Result]) -> list[str]:
    """Return a title for each; where several would have the same, also the options by which these differ."""
    titles = [_title(result) for result in results]
    found = []
    for title, result in zip(titles, results, strict=True):
        same = [other.options for name, other in zip(titles, results, strict=True) if name == title]
        differing = [name for name, value in result.options.items() if any(one.get(name) != value for one in same)]
        words = [f"{name.replace('_', ' ')} {result.options[name]}" for name in differing]
        found.append(", ".join([title, *words]))
    return found


def _title(result: Result) -> str:
    length = result.options.get("length")
    return f"{result.evaluation}, {length} tokens" if isinstance(length, int) else str(result.evaluation)


def render_report(groups: Sequence[Group], title: str) -> str:
    """Return the page.

    Raises:
        ValueError: if a plot of a result cannot be drawn.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        number=number, signed=signed, percent=percent, signed_interval=_signed_interval, percent_interval=_percentages
    )
    here = files("ctxext.evaluation")
    template = environment.from_string(here.joinpath(TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        title=title,
        # The two texts that are no user's: our style sheet, and what matplotlib drew and escaped.
        style=Markup(here.joinpath(STYLE).read_text(encoding="utf-8")),
        figures={group.number: _figures(group, Markup) for group in groups},
        groups=groups,
        overview=_overview(groups),
        by_length=_length_by_depth(groups, Markup),
        shared={group.number: _shared(group) for group in groups},
        own={group.number: _own(group) for group in groups},
        confidence=f"{CONFIDENCE:.0%}",
        fewest=FEWEST_ITEMS,
        bootstrap=bootstrap_text(groups[0].comparison["bootstrap"]),
    )


def _signed_interval(interval: Sequence[float] | None) -> str:
    return interval_text(interval, signed)


def _percentages(interval: Sequence[float] | None) -> str:
    return interval_text(interval, percent)


def _figures(group: Group, trusted: Any) -> list[dict[str, Any]]:
    """Return the pictures of a group with their legends."""
    curves_by_id, window = group_curves(group.results)
    figures = []
    for index, curves in enumerate(curves_by_id.values()):
        first = curves[0][1]
        legend = [
            {"label": label, "series": i % len(COLORS) + 1, "border": BORDERS[STYLES[i // len(COLORS) % len(STYLES)]]}
            for i, (label, _) in enumerate(curves)
        ]
        svg = trusted(svg_curves(curves, f"{group.number}-{index}", window))
        figures.append({"title": first["title"], "svg": svg, "legend": [] if first["kind"] == "heat" else legend})
    return figures


def _length_by_depth(groups: Sequence[Group], trusted: Any) -> list[dict[str, Any]]:
    """Return a picture of success by length and depth for each checkpoint that was tested at several lengths."""
    from ctxext.evaluation.heatmap import DEPTH_LABEL, depth_profile

    rows: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for result in (result for group in groups for result in group.results):
        try:
            length, depths, rates = depth_profile(result)
        except ValueError:
            continue
        protocol = re.sub(r"\blength=\d+", "", result.protocol_id)
        shown = {"x": depths, "y": rates, "x_label": DEPTH_LABEL, "y_label": "success rate"}
        plot = {**shown, "id": "length-by-depth", "kind": "heat", "mark_window": False}
        rows.setdefault((*_checkpoint_key(result), result.evaluation, protocol), {}).setdefault(length, plot)
    figures: list[dict[str, Any]] = []
    for (name, _, evaluation, _), by_length in rows.items():
        if len(by_length) > 1:
            curves = [(f"{length} tokens", plot) for length, plot in sorted(by_length.items())]
            svg = trusted(svg_curves(curves, f"depth-{len(figures)}"))
            figures.append({"title": f"{evaluation} of {name} by length and depth", "svg": svg, "legend": []})
    return figures


def _overview(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return one row for each checkpoint with its headline metrics by group."""
    results = [result for group in groups for result in group.results]
    checkpoints: dict[tuple[str, str], Result] = {}
    for result in results:
        checkpoints.setdefault(_checkpoint_key(result), result)
    rows = []
    for label, key in zip(labels(list(checkpoints.values())), checkpoints, strict=True):
        cells = []
        for group in groups:
            found = [result.metrics for result in group.results if _checkpoint_key(result) == key]
            cells.append(" / ".join(number(metrics.get(group.metrics[0])) for metrics in found))
        rows.append({"label": label, "cells": cells})
    return rows


def _checkpoint_key(result: Result) -> tuple[str, str]:
    return str(result.checkpoint["name"]), str(result.checkpoint.get("hash"))


def facts(result: Result) -> dict[str, str]:
    """Return what a result's numbers depend on, in words for people."""
    corpus = result.corpus or {}
    said: dict[str, Any] = {
        "checkpoint sha256": result.checkpoint.get("hash"),
        "model type": result.checkpoint.get("model_type"),
        "positions": json.dumps(result.checkpoint.get("rope") or {}, sort_keys=True),
        "max_position_embeddings": result.checkpoint.get("max_position_embeddings"),
        "original window": result.checkpoint.get("original_window"),
        "adapter": result.settings.get("adapter"),
        "corpus": corpus.get("name"),
        "documents": corpus.get("documents"),
        "corpus sha256": corpus.get("hash"),
        **conditions(result),
        "skipped": ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in result.skipped.items()),
        "seconds": result.wall_time,
    }
    return {name: number(value) for name, value in said.items() if value not in (None, "", "{}")}


def _shared(group: Group) -> Mapping[str, str]:
    """Return the facts that all results of a group have in common."""
    first, *others = (facts(result) for result in group.results)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _own(group: Group) -> list[dict[str, str]]:
    """Return for each result of a group the facts that not all have in common."""
    shared = _shared(group)
    own = [{name: value for name, value in facts(result).items() if name not in shared} for result in group.results]
    rows = group.comparison["results"]
    return [{"file": row["path"], **said} for row, said in zip(rows, own, strict=True)]
