"""The result of an evaluation: a JSON file that carries everything its number depends on."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "ctxext-result"
FORMAT_VERSION = 1


@dataclass(kw_only=True)
class Result:
    """One evaluation of one checkpoint.

    Attributes:
        evaluation: the evaluation's name.
        protocol_id: results with another one must not be compared.
        metrics: the numbers; the first is the headline.
        options: every option of the evaluation, defaults included.
        settings: how the model was loaded (`RunSettings`), as given.
        checkpoint: `name`, `hash` (sha256 over config and weights), `model_type`, `max_position_embeddings`,
            `original_window` (tokens), `rope` and `fitted_length` (tokens, or None).
        corpus: `name`, `source`, `hash` (sha256 over the documents used), `documents`, `tokens`; None without one.
        dtype: of the weights.
        attention: the attention backend that ran.
        device: that held the model.
        tokens_scored: how many tokens the metrics rest on.
        skipped: how many documents or tokens were not scored, by reason.
        notes: what a reader of the score must know.
        seed: of the evaluation; None when nothing is random.
        versions: of ctxext, torch, transformers and python.
        wall_time: seconds of scoring, including those of an interrupted run that this one continued.
        details: the evaluation's own.
        plots: curves for `ctxext compare`, as `Plot` fields.
    """

    evaluation: str
    protocol_id: str
    metrics: dict[str, Any]
    options: dict[str, Any]
    settings: dict[str, Any]
    checkpoint: dict[str, Any]
    corpus: dict[str, Any] | None
    dtype: str
    attention: str
    device: str
    tokens_scored: int
    skipped: dict[str, int]
    notes: list[str]
    seed: int | None
    versions: dict[str, str]
    wall_time: float
    details: dict[str, Any] = field(default_factory=dict)
    plots: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object, marked as ours."""
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    def save(self, path: Path) -> None:
        """Write the result to `path`, whole or not at all."""
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a result file.

        Raises:
            ValueError: if the file is not a result, or was written by a newer format.
            OSError: if it cannot be read.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a ctxext result: it is not JSON") from error
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            raise ValueError(f'{path} is not a ctxext result: it has no "format": "{FORMAT}"')
        if content.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{path} has result format {content.get('format_version')}, this ctxext reads {FORMAT_VERSION}: "
                "use the ctxext that wrote it"
            )
        names = {item.name for item in dataclasses.fields(cls)}
        missing = sorted(names - set(content))
        if missing:
            raise ValueError(f"{path} is a damaged ctxext result: it lacks {', '.join(missing)}")
        return cls(**{name: content[name] for name in names})


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it appears whole or not at all: beside its place, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o644)
        os.replace(beside, path)
    except OSError:
        Path(beside).unlink(missing_ok=True)
        raise


def check_output(path: Path) -> None:
    """Refuse a file that could not be written, before an hour is spent on its content; nothing is left behind.

    Raises:
        ValueError: if `path` is a folder, or no file can be made in its folder.
    """
    if path.is_dir():
        raise ValueError(f"--output {path} is a folder: name a file in it, such as {path / 'result.json'}")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--output {path} cannot be written: {folder} takes no files ({error.strerror}); name a file elsewhere"
        ) from error


def versions() -> dict[str, str]:
    """Return the versions that a score may depend on."""
    packages = {name: importlib.metadata.version(name) for name in ("ctxext", "torch", "transformers")}
    return {**packages, "python": platform.python_version()}
