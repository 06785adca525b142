"""ZeRO 1, 2 and 3 in two CPU processes: the loss, the raw gradient norm and the weights of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ctxext.training.recipe_files import recipe_root

ROOT = recipe_root()
MISSING = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.skipif(bool(MISSING), reason=f"DeepSpeed on a CPU compiles and needs {' and '.join(MISSING)}"),
]


def launch(config: Path, output: Path, stage: int | None, *words: str) -> list[dict[str, Any]]:
    """Run the recipe in one process, or in two under ZeRO; return its log."""
    zero = ["--config_file", str(ROOT / "accelerate" / "cpu-zero.yaml"), "--zero_stage", str(stage)]
    launcher = [] if stage is None else ["-m", "accelerate.commands.launch", *zero, "--main_process_port", "0"]
    own = [str(ROOT / "finetune.py"), "--config", str(config), "--output_dir", str(output), *words]
    backend = [] if stage is None else ["--ddp_backend", "gloo"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launcher, *own, *backend], check=True, env=environment, timeout=500)
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def pairs(tmp_path: Path) -> dict[str, Any]:
    """Answers of very different lengths, padded: the ranks count different numbers of tokens."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"q": "x" * (10 + 9 * (i % 11)), "a": "y" * (1 + 13 * (i % 7))} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"data": str(path), "kind": "completion", "prompt_column": "q", "completion_column": "a"}
    return {"sources": [source], "cache": str(tmp_path / "cache")}


# Two of the twelve in every run, those that go wrong first elsewhere; the others take minutes.
@pytest.mark.parametrize(
    ("data", "accumulation", "stages"),
    [
        ("padded", 4, (2, 3)),
        pytest.param("padded", 4, (1,), marks=pytest.mark.slow),
        pytest.param("padded", 1, (1, 2, 3), marks=pytest.mark.slow),
        pytest.param("packed", 4, (1, 2, 3), marks=pytest.mark.slow),
        pytest.param("packed", 1, (1, 2, 3), marks=pytest.mark.slow),
    ],
)
def test_parity_with_one_process(
    write_recipe: Callable[..., Path], tmp_path: Path, data: str, accumulation: int, stages: tuple[int, ...]
) -> None:
    changes = {} if data == "packed" else {"data": pairs(tmp_path)}
    config = write_recipe(
        batch_size=2 * accumulation,
        max_steps=1,
        save_steps=1,
        optim="sgd",
        learning_rate=1.0,
        warmup_steps=0,
        **changes,
    )
    (alone,) = launch(config, tmp_path / "alone", None)
    weights = load_file(tmp_path / "alone" / "final" / "model.safetensors")
    for stage in stages:
        (together,) = launch(config, tmp_path / f"zero{stage}", stage)
        for key in ("loss", "grad_norm", "learning_rate"):
            assert together[key] == pytest.approx(alone[key], rel=1e-5), (stage, key)
        others = load_file(tmp_path / f"zero{stage}" / "final" / "model.safetensors")
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_save_resume_and_gather(write_recipe: Callable[..., Path], tmp_path: Path, stage: int) -> None:
    evaluations = {"perplexity": {"data": "python-docs", "length": 256, "max_windows": 1}}
    config = write_recipe(max_steps=4, evaluations=evaluations, evaluate_every=2)
    whole = launch(config, tmp_path / "whole", stage)
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "whole", broken)
    shutil.rmtree(broken / "final")
    shutil.rmtree(broken / "checkpoint-4")
    assert launch(config, broken, stage) == whole
    AutoModelForCausalLM.from_pretrained(broken / "final")
    first, second = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_a_learned_bias_has_the_gradient_of_one_process(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    once = {"batch_size": 2, "max_steps": 1, "save_steps": 1}
    config = write_recipe(method="kerple_log", optim="sgd", learning_rate=1.0, warmup_steps=0, **once)
    (alone,) = launch(config, tmp_path / "alone", None)
    weights = load_file(tmp_path / "alone" / "final" / "model.safetensors")
    assert "model.score_bias.kernel.log_r1" in weights
    for stage in (1, 2, 3):
        (together,) = launch(config, tmp_path / f"zero{stage}", stage)
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5), stage
        others = load_file(tmp_path / f"zero{stage}" / "final" / "model.safetensors")
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, rtol=1e-5, atol=1e-6)
