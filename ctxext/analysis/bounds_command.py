"""The command line of the score bounds: `ctxext analyze score-bounds`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext.checkpoint.method_flags import (
    AttentionFactor,
    BetaFast,
    BetaSlow,
    Factors,
    HighFreqFactor,
    LowFreqFactor,
    PluginOptions,
    RopeTheta,
    Truncate,
)
from ctxext.evaluation.commands import RUN_OPTIONS


def score_bounds(
    length: Annotated[int, typer.Option(help="Tokens of training, or with --checkpoint tokens to read.")],
    head_dim: Annotated[int | None, typer.Option(help="Rotated dimensions of a head.  [default: 128]")] = None,
    theta: Annotated[float | None, typer.Option(help="Base of the frequencies.  [default: 10000]")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A position method beside the unscaled one; may be given several times.")
    ] = None,
    factor: Annotated[float | None, typer.Option(help="With --method: the extended length over --length.")] = None,
    rope_theta: RopeTheta = None,
    attention_factor: AttentionFactor = None,
    beta_fast: BetaFast = None,
    beta_slow: BetaSlow = None,
    truncate: Truncate = None,
    long_factor: Factors = None,
    short_factor: Factors = None,
    low_freq_factor: LowFreqFactor = None,
    high_freq_factor: HighFreqFactor = None,
    option: PluginOptions = None,
    reach: Annotated[int | None, typer.Option(help="Search B(s) up to this distance.  [default: 32 lengths]")] = None,
    ridge: Annotated[float | None, typer.Option(help="Of the fit that is drawn.  [default: 1e-9]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random scores that are fitted.  [default: 0]")] = None,
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="Measure the logits of this one; may be given several times.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="With --checkpoint: a corpus or a path.  [default: sympy-source]")
    ] = None,
    split: Annotated[str | None, typer.Option(help="With --checkpoint: another split of the corpus.")] = None,
    documents: Annotated[int | None, typer.Option(help="With --checkpoint: sequences to read.  [default: 1]")] = None,
    queries: Annotated[
        int | None,
        typer.Option(help="With --checkpoint: queries of a sequence that are counted; 0: all.  [default: 256]"),
    ] = None,
    window: Annotated[int | None, typer.Option(help="With --checkpoint: tokens that it was trained to read.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"With --checkpoint: {RUN_OPTIONS['dtype'][2]}.")] = None,
    device: Annotated[str | None, typer.Option(help=f"With --checkpoint: {RUN_OPTIONS['device'][2]}")] = None,
    trust_remote_code: Annotated[
        bool | None,
        typer.Option("--trust-remote-code", help=f"With --checkpoint: {RUN_OPTIONS['trust_remote_code'][2]}."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A folder to make, with the report and pictures.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an --output that is not empty.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Bound attention scores between the distances of training and beyond, or measure them on checkpoints.

    Formulas of the Position Interpolation paper for any head dimension, base and position method; with --checkpoint
    the distribution of attention logits by distance, inside the window and beyond it, against these bounds.
    """
    from ctxext.cli import emit

    formulas = {"head_dim": head_dim, "theta": theta, "factor": factor, "reach": reach, "ridge": ridge, "seed": seed}
    own = {
        "rope_theta": rope_theta,
        "attention_factor": attention_factor,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": truncate,
        "long_factor": long_factor,
        "short_factor": short_factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
    }
    reading = {"data": data, "split": split, "documents": documents, "queries": queries, "window": window}
    loading = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    if checkpoint:
        refuse({**formulas, **own, "method": method or None, "option": option or None}, "with --checkpoint")
        emit(measured(checkpoint, length, reading, loading, output, force), as_json, _render_measured)
    else:
        refuse({**reading, **loading}, "without --checkpoint")
        emit(
            formulated(length, tuple(method or ()), formulas, own, option or [], output, force),
            as_json,
            _render_bounds,
        )


def refuse(given: dict[str, Any], when: str) -> None:
    """Refuse options that would have no effect.

    Raises:
        ValueError: Names those that were given.
    """
    useless = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if useless:
        raise ValueError(f"{', '.join(useless)} cannot take effect {when}: leave out what does not belong together")


def formulated(
    length: int,
    methods: tuple[str, ...],
    formulas: dict[str, Any],
    own: dict[str, Any],
    pairs: list[str],
    output: Path | None,
    force: bool,
) -> dict[str, Any]:
    """Return the report of `bounds_report`, written and drawn into a folder if one is given."""
    from ctxext.analysis.bounds_plots import draw_bounds
    from ctxext.analysis.bounds_report import BoundsOptions, bounds_report
    from ctxext.checkpoint.options import parse_factors, parse_options

    for name in ("long_factor", "short_factor"):
        own = {**own, name: parse_factors(name, own[name])}
    given = {name: value for name, value in formulas.items() if value is not None}
    options = BoundsOptions(length=length, methods=methods, given={**own, **parse_options(pairs)}, **given)
    with _folder(output, force) as folder:
        report = bounds_report(options)
        if folder is not None:
            draw_bounds(options, report, folder)
            _write(report, folder)
    return _with_written(report, output)


def measured(
    checkpoints: list[str],
    length: int,
    reading: dict[str, Any],
    loading: dict[str, Any],
    output: Path | None,
    force: bool,
) -> dict[str, Any]:
    """Return the report of `measure_checkpoints`, written and drawn into a folder if one is given."""
    from ctxext.analysis.bounds_measured import MeasureOptions, measure_checkpoints
    from ctxext.analysis.bounds_measured_plot import draw_logits
    from ctxext.evaluation.loading import RunSettings

    options = MeasureOptions(length=length, **{name: value for name, value in reading.items() if value is not None})
    settings = RunSettings(**{name: value for name, value in loading.items() if value is not None})
    with _folder(output, force) as folder:
        report = measure_checkpoints(checkpoints, options, settings)
        if folder is not None:
            draw_logits(report, folder / "logits.png")
            _write(report, folder)
    return _with_written(report, output)


@contextlib.contextmanager
def _folder(output: Path | None, force: bool) -> Iterator[Path | None]:
    """Yield the folder to write into, which appears whole or not at all; None without --output."""
    from ctxext.checkpoint.files import whole_folder

    if output is None:
        if force:
            raise ValueError("--force has no effect without --output: leave it out, or name the folder")
        yield None
        return
    with whole_folder(output, force) as folder:
        yield folder


def _write(report: dict[str, Any], folder: Path) -> None:
    (folder / "score-bounds.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _with_written(report: dict[str, Any], output: Path | None) -> dict[str, Any]:
    if output is None:
        return report
    return {**report, "written": [str(path) for path in sorted(output.iterdir())]}


def _render_bounds(report: dict[str, Any]) -> str:
    from ctxext.analysis.bounds_report import render_report

    return render_report(report) + _render_written(report)


def _render_measured(report: dict[str, Any]) -> str:
    from ctxext.analysis.bounds_measured import render_measured

    return render_measured(report) + _render_written(report)


def _render_written(report: dict[str, Any]) -> str:
    return f"\nwritten to {', '.join(report['written'])}" if "written" in report else ""
