"""`ctxext data prepare` and `ctxext recipe`, as they are typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ctxext.cli import app


def answer(*words: str) -> Any:
    done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_recipes_are_listed_and_copied(tmp_path: Path) -> None:
    rows = answer("recipe", "list")
    names = [row["name"] for row in rows]
    assert {"finetune.py", "configs/pi-llama2-7b-8k.yaml", "accelerate/zero3.yaml"} <= set(names)
    assert all(row["what"] for row in rows)
    copied = Path(answer("recipe", "copy", "pi-llama2-7b-8k", str(tmp_path))["copied"])
    assert copied == tmp_path / "pi-llama2-7b-8k.yaml" and yaml.safe_load(copied.read_text())["length"] == 8192
    with pytest.raises(ValueError, match="is there already"):
        answer("recipe", "copy", "pi-llama2-7b-8k", str(tmp_path))
    with pytest.raises(ValueError, match="did you mean 'pi-llama2-7b-8k'"):
        answer("recipe", "copy", "pi-lama2-7b-8k", str(tmp_path))


def test_data_is_prepared_once(byte_checkpoint: Callable[..., Path], texts: Path, tmp_path: Path) -> None:
    config = {
        "model": str(byte_checkpoint()),
        "method": "yarn",
        "length": 256,
        "data": {"sources": [{"data": str(texts), "min_tokens": 50}], "cache": str(tmp_path / "cache")},
        "output_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    (source,) = answer("data", "prepare", "--config", str(path))["sources"]
    assert (source["documents"], source["tokens"]) == (2, 150 + 90 + 4)
    assert source["skipped"] == {"documents_too_short": 1}
    assert answer("data", "prepare", "--config", str(path))["sources"] == [source]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    with pytest.raises(ValueError, match="no corpus and no file"):
        answer("data", "prepare", "--config", str(path), "--data.sources.0.data", "sympy-sorce")
