"""Drive any evaluation over any checkpoint: load, plan, score unit by unit, resume, and write the result."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ctxext.evaluation.base import Evaluation, Plan, Session, Summary, Unit
from ctxext.evaluation.fingerprint import checkpoint_hash
from ctxext.evaluation.loading import Loaded, RunSettings, load, original_window
from ctxext.evaluation.partial import Partial, left_behind, partial_path, run_key
from ctxext.evaluation.processes import Processes, join_processes
from ctxext.evaluation.progress import progress_bar
from ctxext.evaluation.result import Result, check_output, versions

DEFAULT_FOLDER = Path("runs")


def run_evaluation(
    evaluation: Evaluation, source: str | Path, settings: RunSettings | None = None, output: Path | None = None
) -> tuple[Result, Path]:
    """Evaluate a checkpoint and write the result; an interrupted run is taken up where it stopped.

    Under a launcher of several processes the work is split over them, and every one returns the same result.

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
    processes = join_processes()
    evaluation.check()
    check_output(output or DEFAULT_FOLDER / "result.json")
    loaded = load(source, settings, evaluation.evaluated_length(), processes)
    session = Session(loaded.model, loaded.tokenizer, settings.batch_size)
    with ThreadPoolExecutor(1) as background:
        hashing = background.submit(checkpoint_hash, *loaded.folders) if processes.main else None
        plan = evaluation.plan(session)
        digest = processes.gather({} if hashing is None else {"hash": hashing.result()})["hash"]
    checkpoint = _describe(loaded, str(source), digest)
    key = run_key(_identity(evaluation, session, settings, plan, checkpoint))
    path = output or DEFAULT_FOLDER / f"{evaluation.name}-{_file_name(checkpoint['name'])}-{key[:8]}.json"
    with Partial(partial_path(path, key, processes.rank), key, left_behind(path, key)) as partial:
        scored = _score_all(evaluation, session, plan, partial, processes)
        seconds = max(processes.gather({str(processes.rank): partial.seconds}).values())
    result = _result(evaluation, session, settings, plan, checkpoint, scored, seconds)
    if processes.main:
        result.save(path)
        for left in left_behind(path, key):
            left.unlink(missing_ok=True)
    processes.wait()
    return result, path


def evaluate(evaluation: Evaluation, session: Session) -> Summary:
    """Evaluate a model in memory, with no files: what training and experiments do between their steps."""
    plan = evaluation.plan(session)
    scored: list[dict[str, Any]] = []
    for unit in plan.units:
        scored.append(evaluation.score(session, unit))
        if evaluation.finished(scored):
            break
    return evaluation.summarize(plan, scored)


def _score_all(
    evaluation: Evaluation, session: Session, plan: Plan, partial: Partial, processes: Processes
) -> list[dict[str, Any]]:
    """Score the units that are in no partial file yet; return the scores in the plan's order.

    An evaluation that may end early is asked after every round of one unit for each process, any other at the end.
    """
    may_end_early = type(evaluation).finished is not Evaluation.finished
    size = processes.count if may_end_early else max(1, len(plan.units))
    known = processes.gather(partial.scored)  # nobody has written anything yet: all divide the same work
    scored: list[dict[str, Any]] = []
    with progress_bar(evaluation.name, sum(unit.cost for unit in plan.units), shown=processes.main) as advance:
        for start in range(0, len(plan.units), size):
            units = plan.units[start : start + size]
            missing = [unit for unit in units if unit.id not in known]
            advance(sum(unit.cost for unit in units) - sum(unit.cost for unit in missing))
            for unit in missing[processes.rank :: processes.count]:
                began = time.perf_counter()
                score = _score(evaluation, session, unit, plan)
                partial.add(unit.id, score, time.perf_counter() - began)
                advance(unit.cost * processes.count)
            found = processes.gather({unit.id: partial.scored[unit.id] for unit in units if unit.id in partial.scored})
            for unit in units:
                scored.append(found[unit.id])
                if evaluation.finished(scored):
                    return scored
    return scored


def _score(evaluation: Evaluation, session: Session, unit: Unit, plan: Plan) -> dict[str, Any]:
    """Score one unit; when memory runs out, again with half the batch."""
    from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

    while True:
        try:
            return evaluation.score(session, unit)
        except Exception as error:
            if not should_reduce_batch_size(error):
                raise
            if session.batch_size == 1:
                raise ValueError(
                    f"{session.model.device} has too little memory for one sequence ({unit.id}): use a shorter "
                    "--length, --dtype bfloat16, --load-in-4bit, or --device-map auto over more devices"
                ) from error
        session.batch_size //= 2
        clear_device_cache(garbage_collection=True)
        print(f"out of memory at {unit.id}: going on with --batch-size {session.batch_size}", file=sys.stderr)
        note = "memory ran out at the batch size given; smaller batches were read"
        if note not in plan.notes:
            plan.notes.append(note)


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
        "device": session.model.device.type,  # any process may take up what another one left
        "versions": versions(),
    }


def _describe(loaded: Loaded, source: str, digest: str) -> dict[str, Any]:
    """Return the checkpoint's part of the result."""
    config = loaded.model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {
        "name": Path(source).resolve().name if Path(source).exists() else source,
        "hash": digest,
        "revision": _revision(loaded.folders[0]),
        "model_type": config.model_type,
        "max_position_embeddings": getattr(text_config, "max_position_embeddings", None),
        "original_window": original_window(config, loaded.rope),
        "rope": loaded.rope,
        "fitted_length": loaded.fitted_length,
    }


def _revision(folder: Path) -> str | None:
    """Return the commit of a checkpoint that came from the Hub, whose cache names folders by it."""
    return folder.name if folder.parent.name == "snapshots" else None


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
