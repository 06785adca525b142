"""The checklists of CONTRIBUTING.md, followed literally with a package of its own, installed beside ctxext."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import save_tiny

HERE = Path(__file__).parent
PACKAGE = HERE / "package"
CONTRIBUTING = HERE.parents[1] / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Install the package into a folder of its own; return a runner of `python -m ctxext` that sees it."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, PACKAGE], check=True)

    def run(*arguments, expect=0):
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "ctxext", *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert done.returncode == expect, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a tiny llama (window 128, theta 10000, head dimension 16) with a tokenizer of single letters."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = save_tiny(tmp_path_factory.mktemp("source") / "tiny")
    letters = {letter: number for number, letter in enumerate("_abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="_"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="_", bos_token="_").save_pretrained(folder)
    return folder


def test_the_checklists_show_the_package_as_it_is():
    blocks = re.findall(r"<!-- (\S+) -->\n+```\w+\n(.*?)```", CONTRIBUTING.read_text(), flags=re.DOTALL)
    shown = {name: text for name, text in blocks}
    assert set(shown) == {"pyproject.toml", "ctxext_example/smooth_parts.py", "ctxext_example/repetition.py"}
    for name, text in shown.items():
        assert text == (PACKAGE / name).read_text(), name


def test_the_method_patches_a_checkpoint_that_stock_transformers_loads(run, checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM

    output = tmp_path / "patched"
    run("patch", checkpoint, output, "--method", "smooth_parts", "--length", 512, "--option", "most=16")
    config = json.loads((output / "config.json").read_text())
    assert config["ctxext"]["options"] == {"most": 16}
    live = AutoModelForCausalLM.from_pretrained(output).model.rotary_emb.inv_freq.double().numpy()
    window, theta, dim = 128, 10000.0, 16
    for j, frequency in enumerate(live):  # the formula again, one frequency at a time
        unscaled = theta ** (-2 * j / dim)
        t = min(max((window * unscaled / (2 * np.pi) - 1) / 15, 0), 1)
        kept = t * t * (3 - 2 * t)
        assert frequency == pytest.approx(unscaled * (kept + (1 - kept) / 4), rel=1e-5)


def test_an_option_of_another_method_is_refused(run, checkpoint, tmp_path):
    done = run(
        "patch", checkpoint, tmp_path / "x", "--method", "smooth_parts", "--length", 512, "--beta-fast", 4, expect=2
    )
    assert "--beta-fast has no effect with method 'smooth_parts'; its options are --most" in done.stderr
    assert not (tmp_path / "x").exists()


def test_the_evaluation_runs_and_its_options_are_the_commands(run, checkpoint, tmp_path):
    assert "repetition" in run("eval", "list").stdout
    assert "--trials" in run("eval", "repetition", "--help").stdout
    done = run(
        "eval", "repetition", checkpoint, "--length", 32, "--trials", 3, "--output", tmp_path / "r.json", "--json"
    )
    result = json.loads(done.stdout)
    assert result["protocol_id"] == "repetition-v1:length=32,trials=3,seed=0"
    assert result["tokens_scored"] == 93
    assert result["metrics"]["gain"] == pytest.approx(result["metrics"]["first"] - result["metrics"]["second"])
    refused = run("eval", "repetition", checkpoint, "--trials", 0, expect=2)
    assert "--trials 0" in refused.stderr


def test_without_the_package_neither_is_there():
    assert importlib.util.find_spec("ctxext_example") is None
    done = subprocess.run([sys.executable, "-m", "ctxext", "eval", "list"], capture_output=True, text=True)
    assert done.returncode == 0 and "repetition" not in done.stdout
