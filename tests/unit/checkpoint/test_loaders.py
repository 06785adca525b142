"""What the loaders are said to read against what transformers 5 (here) and 4.57 (a second environment) do read."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import LENGTH, WINDOW, frequencies_at, llama_config, read_config, tiny_config, write_config
from transformers import AutoConfig, AutoModelForCausalLM

from ctxext.checkpoint.loaders import LoaderReading, read_as_transformers4, read_as_transformers5
from ctxext.checkpoint.servers import read_as_llama_cpp, read_as_vllm

ORIGINAL = "original_max_position_embeddings"
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: WINDOW}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 0.5 * j for j in range(8)]}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, **LISTS}
PHI3 = {key: values[:4] for key, values in LISTS.items()}


def of(family: str, **values: Any) -> dict[str, Any]:
    """A config of a family without anything on rope but what is given; None is written as null."""
    config = tiny_config(family).to_dict()
    for key in ("rope_parameters", "rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct", ORIGINAL):
        config.pop(key, None)
    config.pop("partial_rotary_factor", None)
    return {**config, **values}


def llama(**values: Any) -> dict[str, Any]:
    return {**llama_config(rope_theta=None, max_position_embeddings=LENGTH), **values}


VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": llama(),
    "theta": llama(rope_theta=5e5),
    "theta null": llama(rope_theta=None),
    "new only": llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "new theta null": llama(rope_parameters={"rope_type": "default", "rope_theta": None}),
    "new without theta": llama(rope_parameters={"rope_type": "default"}, rope_theta=5e5),
    "both": llama(rope_theta=5e5, rope_parameters={**LINEAR, "rope_theta": 5e5}, rope_scaling=LINEAR),
    "theta lost": llama(rope_scaling=LINEAR, rope_parameters={**LINEAR, "rope_theta": 5e5}),
    "scaling null": llama(rope_theta=5e5, rope_scaling=None),
    "scaling empty": llama(rope_theta=5e5, rope_scaling={}),
    "linear, type": llama(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0}),
    "linear, new only": llama(rope_parameters={**LINEAR, "rope_theta": 5e5}),
    "linear, no factor": llama(rope_theta=5e5, rope_scaling={"rope_type": "linear"}),
    "unknown type": llama(rope_theta=5e5, rope_scaling={"rope_type": "linaer", "factor": 4.0}),
    "su": llama(rope_theta=5e5, rope_scaling={**LONGROPE, "rope_type": "su"}),
    "contradiction": llama(rope_theta=5e5, rope_scaling=LINEAR, rope_parameters={**YARN, "rope_theta": 1e6}),
    "dynamic": llama(max_position_embeddings=WINDOW, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    "dynamic, enlarged": llama(rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    "yarn": llama(rope_theta=5e5, rope_scaling=YARN),
    "yarn, new only": llama(rope_parameters={**YARN, "rope_theta": 5e5}),
    "yarn, no original": llama(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "yarn, top original": llama(rope_scaling={"rope_type": "yarn", "factor": 4.0}, **{ORIGINAL: WINDOW}),
    "yarn, two originals": llama(rope_scaling=YARN, **{ORIGINAL: 2 * WINDOW}),
    "yarn, attention": llama(rope_scaling={**YARN, "attention_factor": 1.5}),
    "yarn, mscale": llama(rope_scaling={**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}),
    "yarn, ramp": llama(rope_scaling={**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}),
    "yarn, other factor": llama(rope_scaling={**YARN, "factor": 2.0}),
    "llama3": llama(rope_scaling={**LLAMA3, ORIGINAL: WINDOW}),
    "llama3, no ramp": llama(rope_scaling={"rope_type": "llama3", "factor": 4.0, ORIGINAL: WINDOW}),
    "llama3, no original": llama(rope_scaling=LLAMA3),
    "longrope, top original": llama(rope_scaling=LONGROPE, **{ORIGINAL: WINDOW}),
    "longrope, inner original": llama(rope_scaling={**LONGROPE, ORIGINAL: WINDOW}),
    "longrope, attention": llama(rope_scaling={**LONGROPE, "attention_factor": 1.2}, **{ORIGINAL: WINDOW}),
    "longrope, no original": llama(rope_scaling=LONGROPE),
    "longrope, short list": llama(rope_scaling={**LONGROPE, "short_factor": [1.0] * 7}, **{ORIGINAL: WINDOW}),
    "longrope, one list": llama(rope_scaling={"rope_type": "longrope", "long_factor": LISTS["long_factor"]}),
    "mixtral, nothing": of("mixtral"),
    "mixtral, yarn, no head_dim": {**of("mixtral", rope_scaling=YARN), "head_dim": None},
    "mixtral, llama3, no head_dim": {**of("mixtral", rope_scaling={**LLAMA3, ORIGINAL: WINDOW}), "head_dim": None},
    "mistral, yarn": of("mistral", rope_scaling=YARN, rope_theta=5e5),
    "mistral, new only": of("mistral", rope_parameters={**YARN, "rope_theta": 5e5}),
    "qwen2, yarn": of("qwen2", rope_scaling={**YARN, "type": "yarn"}, rope_theta=1e6),
    "qwen3, nothing": of("qwen3"),
    "qwen3_moe, linear": of("qwen3_moe", rope_scaling=LINEAR, rope_theta=1e6),
    "smollm3, nothing": of("smollm3"),
    "gemma, dynamic": of("gemma", rope_scaling={"rope_type": "dynamic", "factor": 4.0}, rope_theta=2e4),
    "olmo2, type": of("olmo2", rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=5e5),
    "olmo2, rope_type": of("olmo2", rope_scaling=LINEAR, rope_theta=5e5),
    "olmo2, yarn": of("olmo2", rope_scaling=YARN, rope_theta=5e5),
    "gpt_neox": of("gpt_neox", rotary_emb_base=2e4, rotary_pct=0.5),
    "gpt_neox, nothing": of("gpt_neox"),
    "gpt_neox, linear": of("gpt_neox", rotary_emb_base=2e4, rotary_pct=0.25, rope_scaling=LINEAR),
    "gpt_neox, new only": of("gpt_neox", rope_parameters={**LINEAR, "rope_theta": 2e4, "partial_rotary_factor": 0.5}),
    "phi3, nothing": of("phi3"),
    "phi3, su": of("phi3", rope_scaling={"type": "su", **PHI3}, partial_rotary_factor=0.5, **{ORIGINAL: WINDOW}),
    "phi3, longrope": of(
        "phi3", rope_scaling={"type": "longrope", **PHI3}, partial_rotary_factor=0.5, **{ORIGINAL: WINDOW}
    ),
    "phi3, no original": of("phi3", rope_scaling={"type": "longrope", **PHI3}, partial_rotary_factor=0.5),
    "phi3, rope_type": of("phi3", rope_scaling={"rope_type": "longrope", **PHI3}, partial_rotary_factor=0.5),
    "phi3, four keys": of(
        "phi3", rope_scaling={"type": "longrope", "factor": 4.0, **PHI3}, partial_rotary_factor=0.5, **{ORIGINAL: 64}
    ),
    "phi3, new only": of(
        "phi3", rope_parameters={"rope_type": "default", "rope_theta": 2e4}, partial_rotary_factor=0.5
    ),
    "gemma3, nothing": of("gemma3_text"),
    "gemma3, old": of("gemma3_text", rope_scaling=LINEAR, rope_theta=5e5, rope_local_base_freq=1e4),
    "gemma3, new": of(
        "gemma3_text",
        rope_parameters={
            "full_attention": {**YARN, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "truncate": False,
        },
    ),
    "gemma3, both": of(
        "gemma3_text",
        rope_scaling=LINEAR,
        rope_theta=5e5,
        rope_parameters={
            "full_attention": {**LINEAR, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
ONLY_IN_5 = {"float length": llama(max_position_embeddings=float(LENGTH))}


def simulated(reading: LoaderReading) -> list[tuple[list[float], float]] | None:
    """What a reading turns with at both lengths, or None where it refuses the config."""
    if reading.scaling is None:
        return None
    frequencies = [reading.scaling.inv_freq(reading.rotary_dim, n) for n in (WINDOW, LENGTH)]
    return [(list(values), reading.scaling.cos_sin_factor) for values in frequencies]


def assert_same(name: str, mine: Any, theirs: Any) -> None:
    assert (mine is None) == (theirs is None), f"{name}: said {mine}, is {theirs}"
    for (frequencies, factor), (wanted, wanted_factor) in zip(mine or [], theirs or [], strict=True):
        assert len(frequencies) == len(wanted), name
        np.testing.assert_allclose(frequencies, wanted, rtol=1e-5, err_msg=name)
        assert factor == pytest.approx(wanted_factor, rel=1e-6), name


def in_transformers5(folder: Path) -> Any:
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        return [(values.tolist(), factor) for values, factor in (frequencies_at(model, n) for n in (WINDOW, LENGTH))]
    except Exception:  # whatever it is that transformers raises for a config that it cannot use
        return None


@pytest.mark.parametrize("name", [*VARIANTS, *ONLY_IN_5])
def test_transformers_5_reads_what_is_said(name: str, tmp_path: Path) -> None:
    config = {**VARIANTS, **ONLY_IN_5}[name]
    write_config(tmp_path, config)
    reading = read_as_transformers5(json.loads(json.dumps(config)))
    assert_same(name, simulated(reading), in_transformers5(tmp_path))
    assert reading.supported or reading.problems


READ_IN_TRANSFORMERS_4 = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
answers = {}
for name, folder in json.load(sys.stdin).items():
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        module = next(m for n, m in model.named_modules() if n.endswith("rotary_emb"))
        answers[name] = []
        for length in (%d, %d):
            module(torch.zeros(1), torch.tensor([[length - 1]]))
            answers[name].append([module.inv_freq.tolist(), float(module.attention_scaling)])
    except Exception as error:
        answers[name] = None
print("ANSWERS" + json.dumps(answers))
"""


@pytest.mark.slow
def test_transformers_4_reads_what_is_said(transformers4: str, tmp_path: Path) -> None:
    folders = {}
    for number, (name, config) in enumerate(VARIANTS.items()):
        folders[name] = str(tmp_path / str(number))
        (tmp_path / str(number)).mkdir()
        write_config(tmp_path / str(number), config)
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
    for name, config in VARIANTS.items():
        try:
            assert_same(name, simulated(read_as_transformers4(json.loads(json.dumps(config)))), answers[name])
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


def test_transformers_4_silently_reads_the_default_base_of_a_config_in_the_new_dialect_only() -> None:
    reading = read_as_transformers4(VARIANTS["linear, new only"])
    assert (reading.rope_type, reading.theta, reading.factor, reading.length) == ("default", 10000.0, None, LENGTH)
    assert reading.supported and not reading.turns_as(read_as_transformers5(VARIANTS["linear, new only"]), LENGTH)


def test_vllm_multiplies_the_length_of_linear_again_and_is_told_the_right_one() -> None:
    reading = read_as_vllm(VARIANTS["linear, type"], LENGTH)
    assert reading.length == 4 * LENGTH and reading.flags == ("--max-model-len", str(LENGTH))
    assert reading.supported
    gemma = read_as_vllm({**VARIANTS["gemma3, old"], "max_position_embeddings": LENGTH}, LENGTH)
    assert gemma.length == LENGTH


def test_vllm_is_given_the_base_that_dynamic_has_at_the_length() -> None:
    reading = read_as_vllm(VARIANTS["dynamic"], LENGTH)
    assert not reading.supported and "dynamic" in reading.problems[0]
    told = json.loads(reading.flags[-1])
    stretch = 4.0 * LENGTH / WINDOW - 3
    theta = 10000.0 * stretch ** (16 / 14)
    assert told["rope_parameters"]["rope_theta"] == pytest.approx(theta)
    assert told["max_position_embeddings"] == LENGTH


def test_vllm_starts_longrope_at_its_original_length_and_has_its_own_attention_factor() -> None:
    reading = read_as_vllm(VARIANTS["longrope, top original"], LENGTH)
    assert reading.length == WINDOW and reading.supported and not reading.problems
    other = read_as_vllm(VARIANTS["longrope, attention"], LENGTH)
    own = math.sqrt(1 + math.log(4) / math.log(WINDOW))
    assert f"{own:g}" in other.problems[0]
    assert json.loads(other.flags[-1])["rope_parameters"]["long_mscale"] == 1.2


def test_vllm_does_not_multiply_yarn_and_so_ends_early_where_nobody_did() -> None:
    assert read_as_vllm(VARIANTS["yarn"], LENGTH).length == LENGTH
    short = read_as_vllm({**VARIANTS["yarn"], "max_position_embeddings": WINDOW}, LENGTH)
    assert not short.supported and f"allows {WINDOW} tokens" in short.problems[0]
    assert "0.20.0 and earlier ignore it" in read_as_vllm(VARIANTS["yarn, attention"], LENGTH).problems[0]


@pytest.mark.parametrize(
    ("name", "left", "problem"),
    [
        ("linear, type", "linear", None),
        ("yarn", "yarn", None),
        ("yarn, attention", "yarn", "attention_factor 1.5 has no effect"),
        ("yarn, ramp", "yarn", "beta_fast, beta_slow and truncate are dropped"),
        ("dynamic", "default", "dynamic scaling is dropped"),
        ("longrope, top original", "default", "longrope factors are dropped"),
        ("llama3", "llama3", "original length of 8192, not 128"),
        ("phi3, longrope", "longrope", None),
        ("gpt_neox", "default", "converted without base and scaling"),
        ("gpt_neox, nothing", "default", None),
        ("qwen2, yarn", "yarn", None),
    ],
)
def test_what_survives_the_conversion_to_gguf(name: str, left: str, problem: str | None) -> None:
    reading = read_as_llama_cpp(VARIANTS[name])
    assert reading.rope_type == left
    assert [problem in told for told in reading.problems] == [True] if problem else not reading.problems


def test_llama3_of_another_family_is_dropped_by_the_conversion_and_kept_with_the_top_level_length() -> None:
    dropped = read_as_llama_cpp(of("qwen2", rope_scaling={**LLAMA3, ORIGINAL: WINDOW}, rope_theta=1e6))
    assert dropped.rope_type == "default" and "llama3 scaling is dropped for qwen2" in dropped.problems[0]
    kept = read_as_llama_cpp({**VARIANTS["llama3"], ORIGINAL: WINDOW})
    assert kept.supported and not kept.problems


def test_a_reading_is_plain_json(llama: Path) -> None:
    reading = read_as_transformers5(read_config(llama)).to_dict()
    assert json.loads(json.dumps(reading)) == reading
    assert reading["loader"] == "transformers 5.24" and reading["rope_theta"] == 10000.0
