"""What is written beyond the scaling itself: gemma3's attention types, head dimensions, other lengths, olmo2."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import llama_config

from ctxext.checkpoint.plan import PatchPlan, plan_patch
from ctxext.positions.rope import Linear


def plan(config: dict[str, Any], method: str, length: int, **more: Any) -> PatchPlan:
    return plan_patch(config, method=method, length=length, **more)


def test_gemma3_names_only_layer_types() -> None:
    config = llama_config(model_type="gemma3_text", rope_parameters={"rope_type": "linear", "factor": 8.0})
    with pytest.raises(
        ValueError, match="rope_parameters has a key 'rope_type', 'linear'; this model type has full_attention"
    ):
        plan(config, "linear", 512)


def test_gemma3_card_without_lengths() -> None:
    """The text_config of google/gemma-3-4b-it names no max_position_embeddings, and a linear factor of 8."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    with pytest.raises(ValueError, match="max_position_embeddings 131072 is the length before or after"):
        plan(config, "linear", 262144)
    planned = plan(config, "linear", 262144, original_length=16384)
    assert planned.scaling == Linear(rope_theta=1e6, factor=16.0)
    section = planned.config["text_config"]
    assert section["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert section["max_position_embeddings"] == 262144 and planned.rope.rotary_dim == 256


def test_other_lengths_of_a_config_follow() -> None:
    written = plan(llama_config(max_sequence_length=128, seq_length=128), "linear", 512).config
    assert written["max_sequence_length"] == written["seq_length"] == written["max_position_embeddings"] == 512


def test_head_dim_is_spelt_out_where_transformers_4_needs_it() -> None:
    assert plan(llama_config(model_type="mistral"), "yarn", 512).config["head_dim"] == 16
    assert plan({**llama_config(), "head_dim": None}, "yarn", 512).config["head_dim"] == 16
    assert "head_dim" not in plan(llama_config(), "yarn", 512).config


def test_olmo2_says_what_transformers_4_refuses() -> None:
    config = llama_config(model_type="olmo2")
    assert plan(config, "linear", 512).config["rope_scaling"] == {"type": "linear", "factor": 4.0}
    (note,) = plan(config, "yarn", 512).notes
    assert "transformers 4 refuses to load this: its olmo2" in note
    assert plan(config, "ntk", 512).notes == []


def test_gemma3_local_theta_is_kept_for_both_versions() -> None:
    config = llama_config(model_type="gemma3_text", rope_theta=None)
    new = {"sliding_attention": {"rope_theta": 2e4}, "full_attention": {"rope_type": "default", "rope_theta": 5e5}}
    written = plan({**config, "rope_parameters": new}, "linear", 512).config
    assert written["rope_local_base_freq"] == written["rope_parameters"]["sliding_attention"]["rope_theta"] == 2e4
    old = plan({**config, "rope_local_base_freq": 2e4, "rope_theta": 5e5}, "linear", 512).config
    assert {**old, "ctxext": 0} == {**written, "ctxext": 0}
    with pytest.raises(ValueError, match="rope_local_base_freq is 10000.0 but rope_parameters.sliding_attention"):
        plan({**config, "rope_parameters": new, "rope_local_base_freq": 1e4}, "linear", 512)
    for key, told in (("sliding_attention", "is 3; it must be a dict"), ("full_atention", r"mean 'full_attention'\?")):
        with pytest.raises(ValueError, match=told):
            plan({**config, "rope_parameters": {key: 3}}, "linear", 512)
