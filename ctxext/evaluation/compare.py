"""Put results side by side, say which of them may be compared, and draw them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.evaluation.result import Result

# Fields that do not forbid a comparison, but that a reader must be told of when they differ.
CONDITIONS = ("dtype", "attention", "device")


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
    corpora = [item.corpus["hash"] if item.corpus else None for item in (result, reference)]
    if corpora[0] != corpora[1]:
        reasons.append("another corpus: the documents read differ")
    return reasons


def _row(result: Result, path: Path, reference: Result) -> dict[str, Any]:
    differences = _differences(result, reference)
    return {
        "path": str(path),
        "checkpoint": result.checkpoint["name"],
        "evaluation": result.evaluation,
        "protocol_id": result.protocol_id,
        "metrics": result.metrics,
        "tokens_scored": result.tokens_scored,
        "dtype": result.dtype,
        "attention": result.attention,
        "device": result.device,
        "wall_time": result.wall_time,
        "notes": result.notes,
        "comparable": not differences,
        "differences": differences,
    }


def compare_results(paths: Sequence[Path], output: Path | None = None) -> dict[str, Any]:
    """Compare results with the first one.

    Args:
        paths: result files.
        output: a folder for the pictures; none are drawn without it.

    Returns:
        `results`: one row per file, `comparable` False and `differences` filled where protocol or corpus differ from
        the first file's; `warnings`: conditions (dtype, attention, device) that differ; `pictures`: PNG files.

    Raises:
        ValueError: if a file is not a result, or no two of them may be compared.
        OSError: if a file cannot be read or written.
    """
    results = [Result.load(path) for path in paths]
    rows = [_row(result, path, results[0]) for result, path in zip(results, paths, strict=True)]
    if len(rows) > 1 and not any(row["comparable"] for row in rows[1:]):
        reasons = "\n".join(f"  {row['path']}: {'; '.join(row['differences'])}" for row in rows[1:])
        raise ValueError(f"nothing here can be compared with {paths[0]}:\n{reasons}")
    comparable = [result for result, row in zip(results, rows, strict=True) if row["comparable"]]
    warnings = []
    for name in CONDITIONS:
        values = sorted({str(getattr(result, name)) for result in comparable})
        if len(values) > 1:
            warnings.append(f"{name} differs between comparable results: {', '.join(values)}")
    pictures: list[str] = []
    if output is not None:
        from ctxext.evaluation.plots import draw

        pictures = [str(path) for path in draw(comparable, output)]
    return {"results": rows, "warnings": warnings, "pictures": pictures}
