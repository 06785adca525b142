"""Checkpoints with one fault each, and what the tests of doctor share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import (
    LENGTH,
    WINDOW,
    read_config,
    write_config,
)

from ctxext import diagnose

ORIGINAL = "original_max_position_embeddings"
Config = dict[str, Any]


def add_companions(folder: Path, length: int) -> None:
    """Put a tokenizer's and a generation's limits beside a checkpoint."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
    (folder / "generation_config.json").write_text(json.dumps({"max_length": length}))
    (folder / "tokenizer.json").write_text(json.dumps({"truncation": {"max_length": length}, "model": {}}))


def counted(folder: Path, verify: bool = False) -> dict[str, str]:
    return {fault.code: fault.level for fault in diagnose(folder, verify=verify) if fault.counts}


def noticed(folder: Path) -> set[str]:
    return {fault.code for fault in diagnose(folder, verify=False) if not fault.counts}


def edit(folder: Path, change: Callable[[Config], object], keep_record: bool = False) -> None:
    """Change a config in place; without its record it is one that ctxext never saw."""
    config = read_config(folder)
    if not keep_record:
        config.pop("ctxext", None)
    change(config)
    write_config(folder, config)


def spell(config: Config, scaling: Config | None, **values: Any) -> None:
    """Write one scaling in both dialects."""
    config["rope_scaling"] = scaling
    config["rope_parameters"] = {"rope_theta": config["rope_theta"], **(scaling or {"rope_type": "default"})}
    config.update(values)


def in_both(**values: Any) -> Callable[[Config], object]:
    return lambda config: [config[key].update(values) for key in ("rope_scaling", "rope_parameters")]


def without(*keys: str) -> Callable[[Config], object]:
    def change(config: Config) -> None:
        for key in keys:
            config.pop(key, None)
            for dialect in ("rope_scaling", "rope_parameters"):
                (config.get(dialect) or {}).pop(key, None)

    return change


CHANGES: dict[str, tuple[str, str, bool, Callable[[Config], object]]] = {
    "new dialect only": ("only-new-dialect", "error", True, without("rope_theta", "rope_scaling")),
    "theta null": ("theta-missing", "error", True, lambda c: c.update(rope_theta=None)),
    "theta null everywhere": (
        "theta-missing",
        "error",
        False,
        lambda c: (c.update(rope_theta=None), c["rope_parameters"].update(rope_theta=None)),
    ),
    "theta lost": (
        "theta-lost",
        "error",
        True,
        lambda c: (c.pop("rope_theta"), c["rope_parameters"].update(rope_theta=5e5)),
    ),
    "factors differ": (
        "dialects-contradict",
        "error",
        False,
        lambda c: c["rope_parameters"].update(factor=2.0),
    ),
    "thetas differ": ("dialects-contradict", "error", False, lambda c: c.update(rope_theta=5e5)),
    "longrope, old dialect, inner length": (
        "loaders-disagree",
        "error",
        True,
        lambda c: (
            c.pop("rope_parameters"),
            c.update(
                rope_scaling={
                    "rope_type": "longrope",
                    "factor": 4.0,
                    ORIGINAL: WINDOW,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                }
            ),
        ),
    ),
    "float length": ("float-length", "error", True, lambda c: c.update(max_position_embeddings=float(LENGTH))),
    "half a token": ("float-length", "error", False, lambda c: c.update(max_position_embeddings=LENGTH + 0.5)),
    "inner float length": ("float-length", "error", True, in_both(**{ORIGINAL: float(WINDOW)})),
    "typing mistake": ("unknown-rope-key", "error", False, in_both(atention_factor=1.0)),
    "key of nobody": ("unknown-rope-key", "error", True, in_both(finetuned=True)),
    "unknown type": ("unknown-rope-type", "error", False, in_both(rope_type="yarm")),
    "yarn without original": ("original-length-missing", "error", False, without(ORIGINAL)),
    "yarn with another factor": ("yarn-factor", "error", False, in_both(factor=2.0)),
    "length not multiplied": (
        "length-not-multiplied",
        "warning",
        True,
        lambda c: c.update(max_position_embeddings=WINDOW),
    ),
    "dynamic enlarged": (
        "dynamic-enlarged",
        "error",
        True,
        lambda c: spell(c, {"rope_type": "dynamic", "factor": 4.0, ORIGINAL: WINDOW}),
    ),
    "short list": (
        "longrope-factors",
        "error",
        False,
        lambda c: spell(
            c,
            {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 7},
            **{ORIGINAL: WINDOW},
        ),
    ),
    "no factor": (
        "config",
        "error",
        False,
        lambda c: [c[k].pop("factor") for k in ("rope_scaling", "rope_parameters")],
    ),
    "no length": ("config", "error", False, without("max_position_embeddings")),
    "fewer layers": ("layer-count", "error", False, lambda c: c.update(num_hidden_layers=3)),
}
