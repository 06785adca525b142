"""Analyse several checkpoints in the same way: one result file for each, and one picture of all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.analysis.pictures import draw_attention, draw_fields, draw_position_loss
from ctxext.analysis.position_loss import PositionLoss
from ctxext.analysis.receptive_field import ReceptiveField
from ctxext.evaluation.base import Evaluation
from ctxext.evaluation.loading import RunSettings
from ctxext.evaluation.result import Result
from ctxext.evaluation.runner import run_evaluation


def result_names(checkpoints: Sequence[str]) -> list[str]:
    """Return a file name for each checkpoint's result: its last name, with its place in front if names repeat."""
    stems = [re.sub(r"[^A-Za-z0-9._-]+", "-", Path(checkpoint).name) or "checkpoint" for checkpoint in checkpoints]
    if len(set(stems)) < len(stems):
        stems = [f"{place}-{stem}" for place, stem in enumerate(stems, 1)]
    return [f"{stem}.json" for stem in stems]


def _measure(
    evaluation: Evaluation, checkpoints: Sequence[str], settings: RunSettings, output: Path
) -> list[tuple[Result, Path]]:
    import ctxext.reproduce.sinusoidal  # noqa: F401  # the papers' baseline, which transformers does not know
    from ctxext.checkpoint.source import resolve_checkpoint

    for checkpoint in checkpoints:  # a wrong name is told before the first one is measured
        resolve_checkpoint(checkpoint)
    return [
        run_evaluation(evaluation, checkpoint, settings, output / name)
        for checkpoint, name in zip(checkpoints, result_names(checkpoints), strict=True)
    ]


def _row(result: Result, path: Path) -> dict[str, Any]:
    return {
        "checkpoint": result.checkpoint["name"],
        "hash": result.checkpoint["hash"],
        "result": str(path),
        "metrics": result.metrics,
        "notes": result.notes,
    }


def run_receptive_field(
    evaluation: ReceptiveField, checkpoints: Sequence[str], settings: RunSettings, output: Path
) -> dict[str, Any]:
    """Measure the receptive field of each checkpoint and draw all of them together.

    Args:
        evaluation: with its options.
        checkpoints: folders, GGUF files or Hub ids.
        settings: how to load them.
        output: folder of the results and pictures.

    Returns:
        `models`: for each checkpoint its result file, fields with intervals, perplexities and verdict; `pictures`.

    Raises:
        ValueError: if the options, a checkpoint and the data do not fit together.
        OSError: if a file cannot be read or written.
    """
    measured = _measure(evaluation, checkpoints, settings, output)
    results = [result for result, _ in measured]
    pictures = [draw_fields(results, output / "receptive-field.png")]
    if evaluation.attention_mass:
        pictures.append(draw_attention(results, output / "attention-distance.png"))
    names = ("train_length", "fields", "reach", "perplexity", "verdict")
    models = [
        {**_row(result, path), **{name: result.details.get(name) for name in names}} for result, path in measured
    ]
    return {"models": models, "length": evaluation.length, "pictures": [str(path) for path in pictures]}


def run_position_loss(
    evaluation: PositionLoss, checkpoints: Sequence[str], settings: RunSettings, output: Path
) -> dict[str, Any]:
    """Measure the loss by position of each checkpoint on the same documents and draw all of them together.

    Arguments and errors as `run_receptive_field`.

    Returns:
        `models`: for each checkpoint its result file, overall loss, break position and effective length; `pictures`.
    """
    measured = _measure(evaluation, checkpoints, settings, output)
    results = [result for result, _ in measured]
    for result in results[1:]:
        if result.details["tokens_hash"] != results[0].details["tokens_hash"]:
            raise ValueError(
                f"{result.checkpoint['name']} reads other tokens than {results[0].checkpoint['name']}: another "
                "tokenizer, whose losses per token cannot be compared; analyse it by itself"
            )
    picture = draw_position_loss(results, output / "position-loss.png")
    models = [{**_row(result, path), "window": result.details["window"]} for result, path in measured]
    answer = {"models": models, "length": evaluation.length, "threshold": evaluation.threshold}
    return {
        **answer,
        "documents": results[0].corpus["documents"] if results[0].corpus else 0,
        "pictures": [str(picture)],
    }
