"""A tiny byte-level model and a corpus, and a recipe's run in this process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import byte_tokenizer, save_tiny

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


@pytest.fixture(scope="session")
def byte_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves a tiny byte-level llama (window 128) once; tests must not change it."""
    made: dict[Any, Path] = {}

    def model(**overrides: Any) -> Path:
        key = tuple(sorted(overrides.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("models") / f"llama-{len(made)}"
            made[key] = save_tiny(folder, "llama", **{"vocab_size": 300, **overrides})
            tokenizer = byte_tokenizer()
            tokenizer.chat_template = TEMPLATE
            tokenizer.save_pretrained(folder)
        return made[key]

    return model


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 20 to 900 tokens."""
    draw = random.Random(3)
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    rows = ["".join(draw.choice("abcdefgh \n") for _ in range(draw.randint(20, 900))) for _ in range(60)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture
def write_recipe(tmp_path: Path, byte_models: Callable[..., Path], corpus: Path) -> Callable[..., Path]:
    """Return a function that writes a small recipe's config."""

    def write(**changes: Any) -> Path:
        config = {
            "model": str(byte_models()),
            "method": "yarn",
            "length": 256,
            "batch_size": 4,
            "data": {"sources": [{"data": str(corpus)}], "cache": str(tmp_path / "cache")},
            "output_dir": str(tmp_path / "run"),
            "max_steps": 6,
            "save_steps": 2,
            "learning_rate": 1e-3,
            "use_cpu": True,
            "disable_tqdm": True,
            **changes,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
        return path

    return write
