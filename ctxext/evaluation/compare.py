"""Put results side by side: which may be compared, under which other conditions, and how much they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.evaluation.paired import (
    Difference,
    describe_bootstrap,
    paired_difference,
    scores_of,
    unlike_metric,
    unpaired_reason,
)
from ctxext.evaluation.plots import labels
from ctxext.evaluation.result import Result, check_output
from ctxext.evaluation.verdict import check_no_worse


def load_results(paths: Sequence[Path]) -> list[Result]:
    """Read result files.

    Raises:
        ValueError: if any of them is not a result or cannot be read, all of those at once.
    """
    results, wrong = [], []
    for path in paths:
        try:
            results.append(Result.load(path))
        except ValueError as error:
            wrong.append(str(error))
        except OSError as error:
            wrong.append(f"{path} cannot be read: {error.strerror}; give result files of `ctxext eval`")
    if wrong:
        raise ValueError("\n".join(wrong))
    return results


def _corpus_hash(result: Result) -> str | None:
    return str(result.corpus["hash"]) if result.corpus else None


def comparable_key(result: Result) -> tuple[str, str, str | None]:
    """Return what two results must share to be compared: evaluation, protocol id and the hash of the corpus."""
    return result.evaluation, result.protocol_id, _corpus_hash(result)


def _differences(result: Result, reference: Result) -> list[str]:
    """Return why `result` must not be compared with `reference`; empty if it may be."""
    reasons = []
    if result.evaluation != reference.evaluation:
        return [f"another evaluation: {result.evaluation}, not {reference.evaluation}"]
    if result.protocol_id != reference.protocol_id:
        ours, theirs = (set(item.protocol_id.split(":", 1)[-1].split(",")) for item in (result, reference))
        said = ", ".join(sorted(ours - theirs)) or result.protocol_id
        wanted = ", ".join(sorted(theirs - ours)) or reference.protocol_id
        reasons.append(f"another protocol: {said} (the first result: {wanted})")
    if _corpus_hash(result) != _corpus_hash(reference):
        reasons.append("another corpus: the documents read differ")
    return reasons


def conditions(result: Result) -> dict[str, Any]:
    """Return what does not forbid a comparison, but what a reader must be told of where it differs."""
    return {
        "dtype": result.dtype,
        "4-bit weights": result.settings.get("load_in_4bit", False),
        "attention": result.attention,
        "device": result.device,
        **result.versions,
        "tokens scored": result.tokens_scored,
        "seed": result.seed,
    }


def _remarks(result: Result, reference: Result, shared_notes: Sequence[str]) -> list[str]:
    """Return what a reader must know of one result: conditions that differ from the first's, and its own notes."""
    ours, theirs = conditions(result), conditions(reference)
    said = [
        f"{name}: {ours.get(name)}, where the first has {theirs.get(name)}"
        for name in {**theirs, **ours}
        if ours.get(name) != theirs.get(name)
    ]
    return said + [note for note in result.notes if note not in shared_notes]


def _paired(result: Result, path: Path, reference: Result, first_path: Path) -> tuple[list[Difference], str | None]:
    """Return the paired differences to the first result, or why there are none."""
    before = {scores.metric: scores for scores in scores_of(reference, str(first_path))}
    pairs = [(before[one.metric], one) for one in scores_of(result, str(path)) if one.metric in before]
    if not pairs:
        return [], f"{result.evaluation} keeps no scores by document or item"
    for first, other in pairs:
        reason = unlike_metric(first, reference) or unlike_metric(other, result) or unpaired_reason(first, other)
        if reason is not None:
            return [], reason
    return [paired_difference(first, other) for first, other in pairs], None


def _row(result: Result, path: Path, label: str, reference: Result, first_path: Path) -> dict[str, Any]:
    reasons = _differences(result, reference)
    differences: list[Difference] = []
    unpaired = None
    if result is not reference and not reasons:
        differences, unpaired = _paired(result, path, reference, first_path)
    return {
        "path": str(path),
        "checkpoint": result.checkpoint["name"],
        "label": label,
        "evaluation": result.evaluation,
        "protocol_id": result.protocol_id,
        "metrics": result.metrics,
        "tokens_scored": result.tokens_scored,
        "dtype": result.dtype,
        "attention": result.attention,
        "device": result.device,
        "wall_time": result.wall_time,
        "notes": result.notes,
        "comparable": not reasons,
        "differences": reasons,
        "paired": [dataclasses.asdict(difference) for difference in differences],
        "unpaired": unpaired,
    }


def compare_loaded(results: Sequence[Result], paths: Sequence[Path]) -> dict[str, Any]:
    """Compare results with the first one; as `compare_results`, for results that were read already."""
    rows = [
        _row(result, path, label, results[0], paths[0])
        for result, path, label in zip(results, paths, labels(results), strict=True)
    ]
    comparable = [result for result, row in zip(results, rows, strict=True) if row["comparable"]]
    shared = [note for note in results[0].notes if all(note in result.notes for result in comparable)]
    footnotes: list[str] = []
    for result, row in zip(results, rows, strict=True):
        remarks = _remarks(result, results[0], shared) if row["comparable"] else []
        footnotes += [remark for remark in remarks if remark not in footnotes]
        row["footnotes"] = [footnotes.index(remark) + 1 for remark in remarks]
    return {"results": rows, "notes": shared, "footnotes": footnotes, "bootstrap": describe_bootstrap()}


def compare_results(
    paths: Sequence[Path], output: Path | None = None, no_worse_than: float | None = None
) -> dict[str, Any]:
    """Compare results with the first one.

    Args:
        paths: result files.
        output: a folder for the pictures; none are drawn without it.
        no_worse_than: also judge whether each result is at most this fraction worse than the first.

    Returns:
        `results`: one row per file, `comparable` False and `differences` filled where evaluation, protocol or corpus
        differ from the first file's; `paired`: `Difference` fields by metric, else `unpaired` says why there are none;
        `footnotes` of a row: numbers, from 1, into the comparison's `footnotes` (other dtype, attention, device,
        versions, number of tokens; notes that not all share). `notes`: those of all; `bootstrap`: how intervals are
        made; `pictures`: PNG files; `check`: with `no_worse_than`, the verdicts.

    Raises:
        ValueError: if a file is not a result or cannot be read, no two of them may be compared, a wanted verdict
            cannot be reached, or `output` cannot be written.
    """
    if output is not None:
        check_output(output / "picture.png")
    results = load_results(paths)
    comparison = compare_loaded(results, paths)
    rows = comparison["results"]
    strangers = [f"  {row['path']}: {'; '.join(row['differences'])}" for row in rows if not row["comparable"]]
    if strangers and (no_worse_than is not None or len(strangers) == len(rows) - 1):
        what = "nothing here" if len(strangers) == len(rows) - 1 else "not every result"
        raise ValueError(f"{what} can be compared with {paths[0]}:\n" + "\n".join(strangers))
    if no_worse_than is not None:
        comparison["check"] = check_no_worse(results[0], rows, no_worse_than)
    comparison["pictures"] = []
    if output is not None:
        from ctxext.evaluation.plots import draw

        drawn = [result for result, row in zip(results, rows, strict=True) if row["comparable"]]
        comparison["pictures"] = [str(path) for path in draw(drawn, output)]
    return comparison
