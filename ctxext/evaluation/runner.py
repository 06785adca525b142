"""Drive any evaluation over any checkpoint: load, plan, score unit by unit, resume, and write the result."""

from __future__ import annotations

import dataclasses
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ctxext.evaluation.base import Evaluation, Plan, Session
from ctxext.evaluation.fingerprint import checkpoint_hash
from ctxext.evaluation.loading import Loaded, RunSettings, load, original_window
from ctxext.evaluation.partial import Partial, partial_path, run_key
from ctxext.evaluation.progress import progress_bar
from ctxext.evaluation.result import Result, versions

DEFAULT_FOLDER = Path("runs")


def run_evaluation(
    evaluation: Evaluation, source: str | Path, settings: RunSettings | None = None, output: Path | None = None
) -> tuple[Result, Path]:
    """Evaluate a checkpoint and write the result; an interrupted run is taken up where it stopped.

    Args:
        evaluation: what to measure, with its options.
        source: a local folder, GGUF file or Hub id.
        settings: how to load the checkpoint.
        output: where to write the result; by default a name in `runs/` that follows from what is run.

    Returns:
        The result and the path it was written to.

    Raises:
        ValueError: if the options, the checkpoint and the data do not fit together.
        OSError: if a file cannot be read or written.
    """
    settings = settings or RunSettings()
    loaded = load(source, settings, evaluation.evaluated_length())
    session = Session(loaded.model, loaded.tokenizer, settings.batch_size)
    with ThreadPoolExecutor(1) as background:
        hashing = background.submit(checkpoint_hash, *loaded.folders)
        plan = evaluation.plan(session)
        checkpoint = _describe(loaded, str(source), hashing.result())
    key = run_key(_identity(evaluation, session, settings, plan, checkpoint))
    path = output or DEFAULT_FOLDER / f"{evaluation.name}-{_file_name(checkpoint['name'])}-{key[:8]}.json"
    with Partial(partial_path(path, key), key) as partial:
        scored = _score_all(evaluation, session, plan, partial)
    result = _result(evaluation, session, settings, plan, checkpoint, scored, partial.seconds)
    result.save(path)
    partial.remove()
    return result, path


def _score_all(evaluation: Evaluation, session: Session, plan: Plan, partial: Partial) -> list[dict[str, Any]]:
    """Score the units that are not in `partial` yet; return the scores in the plan's order."""
    total = sum(unit.cost for unit in plan.units)
    scored: list[dict[str, Any]] = []
    with progress_bar(evaluation.name, total) as advance:
        for unit in plan.units:
            if unit.id in partial.scored:
                scored.append(partial.scored[unit.id])
            else:
                start = time.perf_counter()
                score = evaluation.score(session, unit)
                scored.append(partial.add(unit.id, score, time.perf_counter() - start))
            advance(unit.cost)
            if evaluation.finished(scored):
                break
    return scored


def _identity(
    evaluation: Evaluation, session: Session, settings: RunSettings, plan: Plan, checkpoint: dict[str, Any]
) -> dict[str, Any]:
    """Return everything that must be equal for the finished units of another run to be reused."""
    return {
        "protocol_id": evaluation.protocol_id(),
        "options": dataclasses.asdict(evaluation),
        "settings": dataclasses.asdict(settings),
        "checkpoint": checkpoint["hash"],
        "corpus": plan.corpus["hash"] if plan.corpus else None,
        "units": run_key({"ids": [unit.id for unit in plan.units]}),
        "dtype": _dtype(session.model),
        "attention": _attention(session.model),
        "device": str(session.model.device),
        "versions": versions(),
    }


def _describe(loaded: Loaded, source: str, digest: str) -> dict[str, Any]:
    """Return the checkpoint's part of the result."""
    config = loaded.model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {
        "name": Path(source).resolve().name if Path(source).exists() else source,
        "hash": digest,
        "model_type": config.model_type,
        "max_position_embeddings": getattr(text_config, "max_position_embeddings", None),
        "original_window": original_window(config, loaded.rope),
        "rope": loaded.rope,
        "fitted_length": loaded.fitted_length,
    }


def _notes(evaluation: Evaluation, checkpoint: dict[str, Any]) -> list[str]:
    length, window = evaluation.evaluated_length(), checkpoint["max_position_embeddings"]
    notes = []
    if length and window and length > window:
        notes.append(f"read at {length} tokens, beyond the checkpoint's max_position_embeddings of {window}")
    if checkpoint["fitted_length"]:
        notes.append(f"length-dependent frequencies fixed for {checkpoint['fitted_length']} tokens")
    return notes


def _result(
    evaluation: Evaluation,
    session: Session,
    settings: RunSettings,
    plan: Plan,
    checkpoint: dict[str, Any],
    scored: list[dict[str, Any]],
    seconds: float,
) -> Result:
    summary = evaluation.summarize(plan, scored)
    return Result(
        evaluation=evaluation.name,
        protocol_id=evaluation.protocol_id(),
        metrics=summary.metrics,
        options=dataclasses.asdict(evaluation),
        settings=dataclasses.asdict(settings),
        checkpoint=checkpoint,
        corpus=plan.corpus,
        dtype=_dtype(session.model),
        attention=_attention(session.model),
        device=str(session.model.device),
        tokens_scored=summary.tokens_scored,
        skipped=plan.skipped,
        notes=[*_notes(evaluation, checkpoint), *plan.notes, *summary.notes],
        seed=getattr(evaluation, "seed", None),
        versions=versions(),
        wall_time=round(seconds, 3),
        details=summary.details,
        plots=[dataclasses.asdict(plot) for plot in summary.plots],
    )


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _attention(model: Any) -> str:
    return str(getattr(model.config, "_attn_implementation", "unknown"))


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)
