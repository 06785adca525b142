"""A tiny random llama that reads text byte by byte, for everything that evaluates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import byte_tokenizer, save_tiny


@pytest.fixture(scope="session")
def byte_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves a tiny byte-level model of a family once; tests must not change it."""
    made: dict[Any, Path] = {}

    def checkpoint(family: str = "llama", bos: bool = True, **overrides: Any) -> Path:
        key = (family, bos, *sorted(overrides.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("bytes") / f"{family}-{len(made)}"
            made[key] = save_tiny(folder, family, **{"vocab_size": 300, **overrides})
            byte_tokenizer(bos).save_pretrained(made[key])
        return made[key]

    return checkpoint


@pytest.fixture(scope="session")
def byte_session(byte_checkpoint: Callable[..., Path]) -> Callable[..., Any]:
    """Return a function that loads such a model into a `Session`, a new one at each call."""
    from ctxext.evaluation.base import Session
    from ctxext.evaluation.loading import RunSettings, load

    def session(family: str = "llama", bos: bool = True, batch_size: int = 3, **overrides: Any) -> Session:
        loaded = load(byte_checkpoint(family, bos, **overrides), RunSettings())
        return Session(loaded.model, loaded.tokenizer, batch_size)

    return session


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A jsonl corpus of three documents with 150, 90 and 20 bytes."""
    import json
    import random

    draw = random.Random(1)
    rows = ["".join(draw.choice("abcdefgh \n") for _ in range(size)) for size in (150, 90, 20)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": row, "other": {"body": [row, row]}}) + "\n" for row in rows))
    return path
