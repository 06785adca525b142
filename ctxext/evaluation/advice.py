"""What a sweep's figures recommend, with the reasons in words: for use as it is, and for fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.evaluation.paired import FEWEST_ITEMS, Scores, paired_difference

UNPATCHED = "(unpatched)"
# Nats per token: with too few sequences for an interval, methods within this of the best count as close to it.
CLOSE = 0.05


def serving_support(config: dict[str, Any], method: str, length: int) -> dict[str, dict[str, Any]] | None:
    """Return what each loader makes of a method at `length` tokens, as `ctxext inspect` has it; None if unwritable.

    Args:
        config: the parsed `config.json` of the checkpoint before the patch.
        method: a method that needs no further options.
        length: the wanted context length in tokens.
    """
    from ctxext.checkpoint.loaders import read_as_transformers4, read_as_transformers5
    from ctxext.checkpoint.plan import plan_patch
    from ctxext.checkpoint.servers import read_as_llama_cpp, read_as_vllm

    try:
        patched = plan_patch(config, method=method, length=length).config
    except ValueError:
        return None
    readings = (
        read_as_transformers5(patched),
        read_as_transformers4(patched),
        read_as_vllm(patched, length),
        read_as_llama_cpp(patched),
    )
    return {one.loader: {"supported": one.supported, "problems": list(one.problems)} for one in readings}


def memory_needs(folder: Path, length: int, bytes_per_number: int) -> dict[str, Any] | None:
    """Return the bytes that a sequence of `length` tokens takes, which no native method changes.

    Args:
        folder: the checkpoint.
        length: in tokens.
        bytes_per_number: of the weights' dtype, which the cache has too.

    Returns:
        `kv_cache` where every layer keeps every token, and of the leanest setting on one device that `ctxext plan`
        has, `lora` and `full`, the `peak` and the `activations`; None for a shape that `plan` does not know.
    """
    from ctxext.training.plan_choose import plan_checkpoint
    from ctxext.training.plan_shape import read_shape

    try:
        shape = read_shape(folder)
        needs: dict[str, Any] = {"kv_cache": 2 * shape.layers * shape.key_width * length * bytes_per_number}
        for method in ("lora", "full"):
            rows = plan_checkpoint(str(folder), length=length, method=method)["settings"]
            leanest = min((row["bytes"] for row in rows), key=lambda row: row["peak"])
            needs[method] = {name: leanest[name] for name in ("peak", "activations")}
    except ValueError:
        return None
    return needs


def against_best(rows: Sequence[Mapping[str, Any]], best: str) -> dict[str, dict[str, Any]]:
    """Compare the long-range loss of every tried method with that of the best, sequence by sequence.

    Returns:
        By method its `difference` (at or above 0), its paired bootstrap `interval`, and whether the method is `worse`
        for sure: there are enough sequences, and the interval lies above 0.
    """

    def scores(row: Mapping[str, Any]) -> Scores:
        items = {str(index): (loss, 1.0) for index, loss in enumerate(row["long_losses"])}
        return Scores(metric="loss", items=items, unit="sequences", higher_is_better=False)

    tried = {row["method"]: row for row in rows if row["long_loss"] is not None}
    made = {}
    for name, row in tried.items():
        found = paired_difference(scores(tried[best]), scores(row))
        enough = found.interval is not None and found.count >= FEWEST_ITEMS
        made[name] = {
            "difference": found.difference,
            "interval": found.interval,
            "worse": bool(enough and found.interval is not None and found.interval[0] > 0),
        }
    return made


def _supporters(row: Mapping[str, Any]) -> list[str]:
    return [loader for loader, reading in (row.get("serving") or {}).items() if reading["supported"]]


def _chosen(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the row that most loaders read as it is, then that of the least loss inside the window."""
    return min(rows, key=lambda row: (-len(_supporters(row)), row["window_loss"], row["long_loss"]))


def _reasons(row: Mapping[str, Any], tied: Sequence[Mapping[str, Any]], sequences: int) -> list[str]:
    """Say why a row was chosen among those that the figures do not tell apart from the best."""
    reasons = [f"long-range loss {row['long_loss']:.4f} nats per token"]
    if row["window_cost"] is not None:
        reasons.append(f"{row['window_cost']:+.4f} inside the original window")
    others = [other["method"] for other in tied if other["method"] != row["method"]]
    if others and sequences < FEWEST_ITEMS:
        reasons.append(
            f"{sequences} sequences are too few to tell methods apart (at least {FEWEST_ITEMS}: --documents), so "
            f"{', '.join(others)}, within {CLOSE} of the least, may be as good or better"
        )
    elif others:
        reasons.append(f"the intervals do not tell it apart from {', '.join(others)}")
    if others:
        reasons.append("of these it was taken for the most loaders, then for the least loss inside the window")
    lacking = [loader for loader in row.get("serving") or {} if loader not in _supporters(row)]
    readers = ", ".join(_supporters(row)) or "no loader that is known"
    reasons.append(f"read as it is by {readers}" + (f"; not by {', '.join(lacking)}" if lacking else ""))
    return reasons


def advise(rows: Sequence[Mapping[str, Any]], sequences: int, length_dependent: Sequence[str]) -> dict[str, Any]:
    """Recommend a method without training and one to fine-tune.

    Args:
        rows: the sweep's, ranked, with `long_losses` and `serving`.
        sequences: how many were read.
        length_dependent: methods whose frequencies change with the length of the input.

    Returns:
        `without_training` and `with_fine_tuning`, each with `method` (or None) and `reasons`, and `against_best`.
    """
    tried = [row for row in rows if row["long_loss"] is not None and row["method"] != UNPATCHED]
    none = {"method": None, "reasons": ["no method could be tried"]}
    if not tried:
        return {"without_training": none, "with_fine_tuning": none, "against_best": {}}
    compared = against_best(rows, tried[0]["method"])
    close = [row for row in tried if row is tried[0] or not compared[row["method"]]["worse"]]
    if sequences < FEWEST_ITEMS:  # nothing is decided
        close = [row for row in close if row["long_loss"] <= tried[0]["long_loss"] + CLOSE]
    return {
        "without_training": _without_training(rows, tried, close, sequences),
        "with_fine_tuning": _with_fine_tuning(tried, close, sequences, length_dependent),
        "against_best": compared,
    }


def _without_training(
    rows: Sequence[Mapping[str, Any]],
    tried: Sequence[Mapping[str, Any]],
    close: Sequence[Mapping[str, Any]],
    sequences: int,
) -> dict[str, Any]:
    plain = next((row for row in rows if row["method"] == UNPATCHED), None)
    if plain is not None and plain["long_loss"] is not None and plain["long_loss"] <= tried[0]["long_loss"]:
        best = tried[0]
        told = (
            f"the unpatched model's long-range loss, {plain['long_loss']:.4f}, is not above that of {best['method']}"
        )
        return {"method": None, "reasons": [f"{told}, {best['long_loss']:.4f}: leave the checkpoint as it is"]}
    chosen = _chosen(close)
    return {"method": chosen["method"], "reasons": _reasons(chosen, close, sequences)}


def _with_fine_tuning(
    tried: Sequence[Mapping[str, Any]],
    close: Sequence[Mapping[str, Any]],
    sequences: int,
    length_dependent: Sequence[str],
) -> dict[str, Any]:
    fixed = [row for row in close if row["method"] not in length_dependent]
    fixed = fixed or [row for row in tried if row["method"] not in length_dependent][:1]
    if not fixed:
        reason = "only methods whose frequencies change with the length were tried: training sees one length"
        return {"method": None, "reasons": [reason]}
    chosen = _chosen(fixed)
    caution = (
        "this is where fine-tuning starts, not where it ends: a sweep does not measure the order after training; "
        "fine-tune the close ones alike and compare them"
    )
    dropped = [row["method"] for row in close if row["method"] in length_dependent]
    reasons = _reasons(chosen, fixed, sequences)
    if dropped:
        reasons.append(f"{', '.join(dropped)} left out: its frequencies change with the length of the input")
    return {"method": chosen["method"], "reasons": [*reasons, caution]}


def advice_text(ranking: Mapping[str, Any]) -> str:
    """Return a sweep's advice in words."""
    from ctxext.evaluation.render import table

    advice, memory = ranking["advice"], ranking["memory"]
    shown = [row for row in ranking["methods"] if row.get("serving")]
    loaders = list(shown[0]["serving"]) if shown else []
    marks = [
        [row["method"], *("yes" if row["serving"][loader]["supported"] else "no" for loader in loaders)]
        for row in shown
    ]
    lines = ["read as it is by:", table(["method", *loaders], marks)] if shown else []
    if memory is not None:
        lines.append(
            f"memory, the same for every method: KV cache {memory['kv_cache'] / 1e9:.3g} GB a sequence; fine-tuning "
            f"on one device at its leanest {memory['lora']['peak'] / 1e9:.3g} GB (lora) or "
            f"{memory['full']['peak'] / 1e9:.3g} GB (full), activations {memory['full']['activations'] / 1e9:.3g} GB"
        )
    if advice["must_be_trained"]:
        lines.append(f"not tried, must be trained first: {', '.join(advice['must_be_trained'])}")
    for title, key in (("without training", "without_training"), ("with fine-tuning", "with_fine_tuning")):
        made = advice[key]
        lines.append(f"{title}: {made['method'] or 'none'}")
        lines += [f"  - {reason}" for reason in made["reasons"]]
    return "\n".join(lines)
