"""Mutated configs: a patched checkpoint that stock transformers loads, or an error that names what is wrong."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import LENGTH, WINDOW, frequencies_at, llama_config, read_config, with_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from ctxext import patch_checkpoint
from ctxext.checkpoint.rope_config import read_rope

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {**YARN, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
BASES = [
    llama_config(),
    llama_config(rope_scaling=YARN),
    llama_config(rope_scaling=LLAMA3),
    llama_config(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    llama_config(rope_scaling=YARN, rope_parameters={**YARN, "rope_theta": 1e4}),
    llama_config(rope_scaling={"type": "dynamic", "factor": 2.0}),
    llama_config(model_type="phi3", partial_rotary_factor=0.5, pad_token_id=0),
    llama_config(
        model_type="gpt_neox",
        rope_theta=None,
        hidden_size=128,
        rotary_emb_base=1e4,
        rotary_pct=0.25,
        rope_scaling=YARN,
    ),
    llama_config(
        model_type="gemma3_text",
        num_hidden_layers=6,
        head_dim=16,
        sliding_window=32,
        rope_theta=1e6,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": None},
    ),
]
TOP_KEYS = [
    *llama_config(),
    "head_dim",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "ctxext",
    "sliding_window",
    "layer_types",
    "attention_bias",
    "attention_dropout",
    "dtype",
    "torch_dtype",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "use_cache",
    "pretraining_tp",
    "quantization_config",
    "_attn_implementation",
    "attn_implementation",
    "auto_map",
    "id2label",
    "num_labels",
    "output_attentions",
    "transformers_version",
    "unheard_of",
    "rope_tetha",
    "rotary_emb_base",
    "rotary_pct",
    "rope_local_base_freq",
]
ROPE_KEYS = [
    *LLAMA3,
    "type",
    "rope_theta",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "mscale",
    "factr",
]
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 16, 64, 128, 10**6, 2**31, 2**63, 10**30, 10**400, -(10**400)]),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.5, 0.5, 1.5, 128.0, 1e4, 1e308]),
)
SIMPLE = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "128", "yarn", "silu", "float32", "null", "x y"])
)
ROPES = st.one_of(
    st.sampled_from([YARN, LLAMA3, LONGROPE, {"type": "linear", "factor": 2.0}, {"rope_type": "default"}, {}]),
    st.dictionaries(st.sampled_from(ROPE_KEYS), SIMPLE, max_size=4),
)
VALUES = st.one_of(
    SIMPLE, st.lists(SIMPLE, max_size=3), st.dictionaries(st.sampled_from(["a", "factor"]), SIMPLE, max_size=2)
)
# (section or None for the top level, key, value or DELETE)
DELETE = object()
MUTATIONS = st.one_of(
    st.tuples(st.none(), st.sampled_from(TOP_KEYS), st.one_of(st.just(DELETE), VALUES)),
    st.tuples(st.none(), st.sampled_from(["rope_scaling", "rope_parameters"]), ROPES),
    st.tuples(
        st.sampled_from(["rope_scaling", "rope_parameters"]),
        st.sampled_from(ROPE_KEYS),
        st.one_of(st.just(DELETE), VALUES),
    ),
)
CASES = st.tuples(st.sampled_from(BASES), st.lists(MUTATIONS, min_size=1, max_size=3))
counter = itertools.count()


def mutate(base: dict[str, Any], mutations: list[tuple[str | None, str, Any]]) -> dict[str, Any]:
    config = copy.deepcopy(base)
    for section, key, value in mutations:
        target = config
        if section is not None:
            if not isinstance(config.get(section), dict):
                config[section] = {}
            target = config[section]
        if value is DELETE:
            target.pop(key, None)
        else:
            target[key] = copy.deepcopy(value)
    return config


def named(message: str, mutations: list[tuple[str | None, str, Any]]) -> bool:
    """Whether the message names a mutated key, and its value when it has one that is no container."""
    for _, key, value in mutations:
        if isinstance(value, dict):
            if any(k in message and (isinstance(v, (dict, list)) or told(message, v)) for k, v in value.items()):
                return True
        if key in message and (value is DELETE or told(message, value)):
            return True
    return False


def told(message: str, value: Any) -> bool:
    """Whether the message says the value, as Python or a person writes it."""
    if value is None or isinstance(value, (dict, list)):
        return True
    if repr(value) in message or isinstance(value, str):
        return repr(value) in message
    written = float(value) if abs(value) < 1e300 else value
    return f"{written!r}" in message or (isinstance(value, float) and f"{value:g}" in message)


def judge(
    source: Callable[[str], Path], work: Path, base: dict[str, Any], mutations: list[tuple[str | None, str, Any]]
) -> None:
    config = mutate(base, mutations)
    place = work / str(next(counter))
    folder, output = with_config(source(base["model_type"]), place / "source", config), place / "out"
    try:
        patch_checkpoint(folder, output, method=method_for(base), length=LENGTH, link="hard")
    except ValueError as error:
        assert named(str(error), mutations) or about_the_call(str(error)), f"{error}\nfor {mutations}"
        assert not list(place.glob("*out*")) and not list(place.glob(".*"))
    else:
        model = AutoModelForCausalLM.from_pretrained(output)
        rope = read_rope(read_config(output))
        assert rope.window == LENGTH
        np.testing.assert_allclose(frequencies_at(model, 1)[0], rope.scaling.inv_freq(rope.rotary_dim), rtol=1e-5)
    finally:
        shutil.rmtree(place)


def method_for(base: dict[str, Any]) -> str:
    return "linear" if base["model_type"] == "phi3" else "yarn"


def about_the_call(message: str) -> bool:
    """Whether the config is right as it is, and only yarn at LENGTH cannot be had on top of it."""
    return "on top of it is not defined" in message or "tokens already, so ask for more" in message


@pytest.mark.parametrize("base", BASES, ids=range(len(BASES)))
def test_the_bases_themselves(base: dict[str, Any], tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    folder = with_config(tiny_source(base["model_type"]), tmp_path / "source", base)
    method = {2: "llama3", 5: "dynamic"}.get(BASES.index(base), method_for(base))
    assert read_rope(base).window == (2 * WINDOW if method == "dynamic" else WINDOW)
    patch_checkpoint(folder, tmp_path / "out", method=method, length=LENGTH)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=CHECKS)
@given(CASES)
def test_500_mutated_configs(
    tiny_source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, case: Any
) -> None:
    judge(tiny_source, tmp_path_factory.getbasetemp() / "mutated", *case)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=CHECKS)
@given(CASES)
def test_other_mutated_configs_each_time(
    tiny_source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, case: Any
) -> None:
    judge(tiny_source, tmp_path_factory.getbasetemp() / "mutated", *case)
