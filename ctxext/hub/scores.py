"""Results of evaluations as a card has them: only those of this very checkpoint, with what their numbers rest on."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint.files import read_json
from ctxext.evaluation.fingerprint import checkpoint_hash
from ctxext.evaluation.result import Result
from ctxext.hub.files import ADAPTER_FILES, FIGURES, Upload, is_adapter


def own_results(folder: Path, paths: Sequence[Path]) -> tuple[list[Result], list[str]]:
    """Return the results of a checkpoint, and a note for each file that is another's.

    Args:
        folder: The checkpoint or adapter.
        paths: Result files.

    Raises:
        ValueError: If a file is no result, or none of them is this checkpoint's.
        OSError: If one cannot be read.
    """
    if not paths:
        return [], []
    own, mine, notes = _hash(folder), [], []
    for path in dict.fromkeys(paths):
        result = Result.load(path)
        if result.checkpoint.get("hash") == own:
            mine.append(result)
        else:
            name = result.checkpoint.get("name")
            notes.append(f"{path} is not in the card: it is a result of another checkpoint ({name})")
    if not mine:
        raise ValueError(
            f"none of the results is of {folder} (sha256 {own[:16]}): {'; '.join(notes)}. Evaluate the folder as it is"
            " to be pushed: any change of config or weights makes it another checkpoint"
        )
    return mine, notes


def _hash(folder: Path) -> str:
    if not is_adapter(folder):
        return checkpoint_hash(folder)
    base = Path(str(read_json(folder / ADAPTER_FILES[0]).get("base_model_name_or_path"))).expanduser()
    if not base.is_dir():
        raise ValueError(
            f"the results of adapter {folder} are known by its base too, which is no folder here ({base}): leave "
            "--results out, or merge the adapter (`ctxext merge`), evaluate and push that"
        )
    return checkpoint_hash(base, folder)


def model_index(results: Sequence[Result]) -> list[Any]:
    """Return results as huggingface_hub's `EvalResult`, one for each number; the protocol is its dataset's config."""
    from huggingface_hub import EvalResult

    found = []
    for result in results:
        corpus = str((result.corpus or {}).get("name") or result.evaluation)
        rests_on = {"attention": result.attention, "dtype": result.dtype, "tokens_scored": result.tokens_scored}
        for metric, value in _numbers(result).items():
            found.append(
                EvalResult(
                    task_type="text-generation",
                    task_name=result.evaluation,
                    dataset_type=corpus,
                    dataset_name=corpus,
                    dataset_config=result.protocol_id,
                    metric_type=metric,
                    metric_name=f"{result.evaluation} {metric}",
                    metric_value=value,
                    metric_args=rests_on,
                )
            )
    return found


def _numbers(result: Result) -> dict[str, float]:
    return {
        name: value
        for name, value in result.metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }


def score_lines(results: Sequence[Result], figures: Sequence[Upload]) -> list[str]:
    """Return a table of the results, what each rests on, and their curves, as Markdown."""
    from ctxext.evaluation.render import number

    lines = ["| evaluation | metric | value | note |", "|---|---|---|---|"]
    for index, result in enumerate(results, start=1):
        lines += [
            f"| {cell(result.evaluation)} | {cell(name)} | {number(value)} | [{index}] |"
            for name, value in _numbers(result).items()
        ]
    lines.append("")
    for index, result in enumerate(results, start=1):
        lines.append(f"{index}. `{cell(result.protocol_id)}`: {_rests_on(result)}")
        lines += [f"   - {cell(note)}" for note in result.notes]
    pictures = [f"![{Path(figure.path).stem}]({figure.path})" for figure in figures]
    return [*lines, *(["", *pictures] if pictures else [])]


def _rests_on(result: Result) -> str:
    corpus = result.corpus or {}
    said = [
        f"{corpus.get('documents')} documents of {cell(str(corpus.get('name')))}" if corpus else None,
        f"{result.tokens_scored} tokens scored",
        *(
            f"not scored: {count} {cell(reason.replace('_', ' '))}"
            for reason, count in result.skipped.items()
            if count
        ),
        f"attention {result.attention}",
        result.dtype,
        f"seed {result.seed}" if result.seed is not None else None,
        ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        f"checkpoint sha256 {result.checkpoint['hash']}",
    ]
    return "; ".join(part for part in said if part)


def cell(text: str) -> str:
    """Return a text that comes from a file so that it stays within one cell of a table and one line."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'").split())


def draw_figures(results: Sequence[Result]) -> list[Upload]:
    """Return the curves of each result as PNG pictures."""
    from ctxext.evaluation.plots import draw

    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for index, result in enumerate(results, start=1):
            for path in draw([result], Path(scratch) / str(index)):
                name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{index}-{result.evaluation}-{path.stem}")
                content = path.read_bytes()
                found.append(Upload(path=f"{FIGURES}/{name}.png", source=content, size=len(content)))
    return found
