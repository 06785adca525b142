"""A run that is killed again and again, inside saves too, gives the log of the unbroken one to the last bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ctxext.training.checkpoints import newest_checkpoint
from ctxext.training.recipe_files import recipe_root

KILLS = 20


def start(config: Path, output: Path) -> subprocess.Popen[bytes]:
    words = [str(recipe_root() / "finetune.py"), "--config", str(config), "--output_dir", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *words], env=environment, stderr=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_twenty_kills_change_nothing(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    config = write_recipe(max_steps=150, save_steps=1, length=256)
    assert start(config, tmp_path / "whole").wait() == 0
    draw, broken, inside_saves, kills = random.Random(0), tmp_path / "broken", 0, 0
    while kills < KILLS:
        process = start(config, broken)
        before = newest_checkpoint(broken)
        while process.poll() is None and newest_checkpoint(broken) in (None, before):
            time.sleep(0.01)
        time.sleep(draw.random() * 0.5)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        inside_saves += (broken / ".partial").exists()
        left = newest_checkpoint(broken)
        assert left is None or json.loads((left / "trainer_state.json").read_text())["global_step"] > 0
    assert start(config, broken).wait() == 0
    assert kills == KILLS and inside_saves > 0, (kills, inside_saves)
    assert (broken / "log.jsonl").read_text() == (tmp_path / "whole" / "log.jsonl").read_text()
    first, second = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(first[name], second[name]) for name in first)
