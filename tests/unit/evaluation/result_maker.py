"""A result with every field, for tests that need a few of them."""

from __future__ import annotations

from typing import Any

from ctxext.evaluation.result import Result


def made_result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "evaluation": "passkey",
        "protocol_id": "passkey-v1:length=64",
        "metrics": {},
        "options": {},
        "settings": {},
        "checkpoint": {"name": "base", "hash": "h1"},
        "corpus": None,
        "dtype": "float32",
        "attention": "sdpa",
        "device": "cpu",
        "tokens_scored": 1,
        "skipped": {},
        "notes": [],
        "seed": 0,
        "versions": {},
        "wall_time": 1.0,
    }
    return Result(**{**values, **changes})
