"""Every family and every method: patch the folder, load it with stock transformers, compare, generate, save again."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    LENGTH,
    METHODS,
    TINY,
    WINDOW,
    expected,
    frequencies_at,
    options_for,
    read_config,
    rotary_dim,
    theta_of,
)
from transformers import AutoModelForCausalLM

from ctxext import patch_checkpoint
from ctxext.checkpoint.families import FAMILIES
from ctxext.checkpoint.rope_config import read_rope
from ctxext.positions import METHODS as REGISTERED
from ctxext.positions.live import check_frequencies

REFUSED = {("phi3", "dynamic"): "phi3", ("phi3", "yarn"): "phi3"}
PAIRS = [(family, method) for family in TINY for method in METHODS]
SUPPORTED = [pair for pair in PAIRS if pair not in REFUSED]


def patched(family: str, method: str, source: Path, output: Path) -> Path:
    options = options_for(method, theta_of(family), rotary_dim(family))
    patch_checkpoint(source, output, method=method, length=LENGTH, link="hard", **options)
    return output


def test_the_matrix_covers_every_family_and_method() -> None:
    assert set(TINY) == set(FAMILIES)
    assert set(METHODS) <= set(REGISTERED)


def assert_formula(model: torch.nn.Module, family: str, method: str) -> None:
    for seq_len in (WINDOW, LENGTH):
        frequencies, factor = frequencies_at(model, seq_len)
        wanted, wanted_factor = expected(method, theta_of(family), rotary_dim(family), WINDOW, LENGTH, seq_len)
        np.testing.assert_allclose(frequencies, wanted, rtol=1e-5)
        assert factor == pytest.approx(wanted_factor, rel=1e-6)


@pytest.mark.parametrize(("family", "method"), SUPPORTED)
def test_patched_family_loads_generates_and_turns_as_the_formula_says(
    family: str, method: str, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    output = patched(family, method, tiny_source(family), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(output).eval()
    rope = read_rope(read_config(output))
    check_frequencies(model, rope.scaling, rotary_dim(family), LENGTH)
    assert rope.window == LENGTH and rope.original_length == WINDOW
    tokens = model.generate(torch.arange(3, 40)[None], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert tokens.shape == (1, 41)
    assert_formula(model, family, method)
    model.save_pretrained(tmp_path / "again")
    assert_formula(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), family, method)


@pytest.mark.parametrize(("family", "method"), list(REFUSED))
def test_what_a_family_cannot_express_is_refused_with_the_reason(
    family: str, method: str, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"method '{method}' cannot be written for phi3.* use linear"):
        patched(family, method, tiny_source(family), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", list(TINY))
def test_weights_are_those_of_the_source(family: str, tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_source(family)
    output = patched(family, "linear", source, tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    after = AutoModelForCausalLM.from_pretrained(output).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_sliding_layers_of_gemma3_keep_their_frequencies(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    output = patched("gemma3_text", "linear", tiny_source("gemma3_text"), tmp_path / "out")
    module = AutoModelForCausalLM.from_pretrained(output).model.rotary_emb
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(module.sliding_attention_inv_freq.numpy(), plain, rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_yarn_without_truncation(family: str, tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    patch_checkpoint(tiny_source(family), tmp_path / "out", method="yarn", length=LENGTH, truncate=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    from helpers import stock

    wanted, _ = stock(
        "yarn",
        16,
        theta_of(family),
        LENGTH,
        factor=LENGTH / WINDOW,
        original_max_position_embeddings=WINDOW,
        truncate=False,
    )
    np.testing.assert_allclose(frequencies_at(model, 1)[0], wanted, rtol=1e-5)
    rounded = expected("yarn", theta_of(family), 16, WINDOW, LENGTH)[0]
    assert not np.allclose(wanted, rounded, rtol=1e-3, atol=0)


READ_IN_TRANSFORMERS_4 = """
import json, sys, torch
from transformers import AutoModelForCausalLM
answers = {}
for name, folder in json.load(sys.stdin).items():
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
    except Exception as error:
        answers[name] = repr(error)
        continue
    module = next(m for n, m in model.named_modules() if n.endswith("rotary_emb"))
    answers[name] = []
    for length in (%d, %d):
        module(torch.zeros(1), torch.tensor([[length - 1]]))
        answers[name].append([module.inv_freq.tolist(), module.attention_scaling])
print("ANSWERS" + json.dumps(answers))
"""


@pytest.mark.slow
def test_transformers_4_reads_the_same_frequencies(
    transformers4: str, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    folders = {
        f"{family} {method}": str(patched(family, method, tiny_source(family), tmp_path / f"{family}-{method}"))
        for family, method in SUPPORTED
    }
    done = subprocess.run(
        [transformers4, "-c", READ_IN_TRANSFORMERS_4 % (WINDOW, LENGTH)],
        input=json.dumps(folders),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.split("ANSWERS")[1])
    wrong = []
    for family, method in SUPPORTED:
        answer = answers[f"{family} {method}"]
        if family == "olmo2" and method not in ("linear", "theta", "ntk", "dynamic"):
            assert "must be a dictionary with two fields" in answer  # loudly, and the patch said so
            continue
        if isinstance(answer, str):
            wrong.append(f"{family} {method}: {answer}")
            continue
        for seq_len, (frequencies, factor) in zip((WINDOW, LENGTH), answer, strict=True):
            wanted, wanted_factor = expected(method, theta_of(family), rotary_dim(family), WINDOW, LENGTH, seq_len)
            if not np.allclose(frequencies, wanted, rtol=1e-5, atol=0) or abs(factor - wanted_factor) > 1e-5:
                wrong.append(f"{family} {method} at {seq_len}: {frequencies} {factor}, not {wanted} {wanted_factor}")
    assert not wrong, "\n".join(wrong)
