"""Text for people: receptive fields and losses by position as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctxext.evaluation.render import table


def _field(field: Mapping[str, Any]) -> str:
    ends = field["interval"]
    return f"{field['erf']}" if ends is None else f"{field['erf']} ({ends[0]}..{ends[1]})"


def _perplexity(perplexity: Mapping[str, Any] | None) -> str:
    return "-" if perplexity is None else f"{perplexity['at_train_length']:.4g} -> {perplexity['at_length']:.4g}"


def _files(answer: Mapping[str, Any]) -> list[str]:
    results = [f"result {row['result']}" for row in answer["models"]]
    return [*results, *(f"picture {path}" for path in answer["pictures"])]


def fields_text(answer: Mapping[str, Any]) -> str:
    """Return the answer of `run_receptive_field`: fields with 95% intervals, and the verdicts."""
    models = answer["models"]
    shares = list(models[0]["fields"])
    rows = [
        [
            model["checkpoint"],
            *(_field(model["fields"][share]) for share in shares),
            str(model["train_length"] or "-"),
            _perplexity(model["perplexity"]),
        ]
        for model in models
    ]
    headers = [
        "checkpoint",
        *(f"ERF {share}" for share in shares),
        "trained with",
        f"perplexity there -> at {answer['length']}",
    ]
    words = [f"{model['checkpoint']}: {model['verdict']['words']}" for model in models]
    title = (
        f"receptive field at {answer['length']} tokens, in the most recent tokens, with 95% intervals over segments"
    )
    return "\n".join([title, "", table(headers, rows), "", *words, *_files(answer)])


def position_loss_text(answer: Mapping[str, Any]) -> str:
    """Return the answer of `run_position_loss` as a table."""
    rows = []
    for model in answer["models"]:
        metrics = model["metrics"]
        rows.append(
            [
                model["checkpoint"],
                metrics["loss"],
                str(model["window"] or "-"),
                metrics["loss_in_window"],
                metrics["loss_beyond"],
                "-" if metrics["effective_length"] is None else str(metrics["effective_length"]),
                "-" if metrics["break_position"] is None else str(metrics["break_position"]),
            ]
        )
    title = (
        f"loss by position over {answer['documents']} document(s) of {answer['length']} tokens; broken: more than "
        f"{answer['threshold']:g} nats above a document's own loss in the second half of the window"
    )
    headers = ["checkpoint", "loss", "window", "loss in it", "beyond it", "effective length", "breaks at"]
    notes = [f"note: {note}" for note in dict.fromkeys(note for row in answer["models"] for note in row["notes"])]
    return "\n".join([title, "", table(headers, rows), "", *notes, *_files(answer)])
