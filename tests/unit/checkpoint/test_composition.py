"""What a config means, in every dialect, and what patching an already scaled model makes of it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from helpers import llama_config

from ctxext.checkpoint.plan import PatchPlan, plan_patch
from ctxext.checkpoint.rope_config import read_rope
from ctxext.positions.rope import Dynamic, Linear, LongRoPE, Theta
from ctxext.positions.rope_by_parts import Llama3, NTKByParts, Yarn

LLAMA31 = llama_config(
    max_position_embeddings=131072,
    rope_theta=500000.0,
    rope_scaling={
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
)
QWEN = llama_config(
    model_type="qwen2",
    max_position_embeddings=32768,
    rope_theta=1000000.0,
    rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
)
FACTORS = [1.0 + j for j in range(8)]
PHI3_128K = {
    **llama_config(
        model_type="phi3",
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": FACTORS},
    ),
    "sliding_window": 262144,
}


def plan(config: dict[str, Any], method: str, length: int, **more: Any) -> PatchPlan:
    before = copy.deepcopy(config)
    planned = plan_patch(config, method=method, length=length, **more)
    assert config == before, "a plan must not change the config that it reads"
    return planned


def noted(planned: PatchPlan, words: str) -> bool:
    return any(words in note for note in planned.notes)


def test_llama31_llama3_scaling_is_restated() -> None:
    planned = plan(LLAMA31, "llama3", 262144)
    assert planned.rope.window == 131072 and planned.rope.original_length == 8192
    assert planned.scaling == Llama3(rope_theta=5e5, factor=16.0, original_max_position_embeddings=8192)
    assert planned.total_factor == 32.0
    assert noted(planned, "composes with the llama3 scaling that is there: 2 times more, 32 times the pretrained 8192")
    assert planned.config["rope_theta"] == planned.config["rope_parameters"]["rope_theta"] == 5e5
    assert planned.config["rope_scaling"]["factor"] == 16.0


def test_llama31_ntk_raises_the_base_and_keeps_the_scaling() -> None:
    planned = plan(LLAMA31, "ntk", 262144)
    assert planned.scaling == Llama3(
        rope_theta=5e5 * 2 ** (16 / 14), factor=8.0, original_max_position_embeddings=8192
    )
    ratio = planned.scaling.inv_freq(16) / read_rope(LLAMA31).scaling.inv_freq(16)
    assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(0.5)
    assert read_rope(planned.config).scaling == planned.scaling


@pytest.mark.parametrize(
    ("config", "method", "has"),
    [
        (LLAMA31, "yarn", "llama3"),
        (LLAMA31, "linear", "llama3"),
        (QWEN, "linear", "yarn"),
        (QWEN, "ntk", "yarn"),
        (QWEN, "ntk_by_parts", "yarn"),
        (PHI3_128K, "linear", "longrope"),
    ],
)
def test_undefined_compositions_are_refused_with_the_way_out(config: dict[str, Any], method: str, has: str) -> None:
    with pytest.raises(ValueError, match=f"scaled by '{has}' already .* '{method}' on top of it is not defined; use "):
        plan(config, method, 2**18)


def test_qwen_yarn_reads_factor_times_original() -> None:
    rope = read_rope(QWEN)
    assert (rope.window, rope.original_length, rope.ambiguity) == (131072, 32768, None)
    planned = plan(QWEN, "yarn", 262144)
    assert isinstance(planned.scaling, Yarn) and planned.scaling.factor == 8.0
    assert planned.scaling.attention_factor == pytest.approx(1.2079441542)  # 0.1 ln 8 + 1
    assert planned.config["max_position_embeddings"] == 262144
    extended = {**QWEN, "max_position_embeddings": 131072}
    assert plan(extended, "yarn", 262144).scaling == planned.scaling


def test_yarn_whose_factor_is_not_the_ratio_is_ambiguous() -> None:
    """Qwen3's cards: max_position_embeddings 40960 with factor 4 over 32768."""
    with pytest.raises(
        ValueError, match="yarn factor is 4.0, but max_position_embeddings 40960 .* to 131072 in SOURCE"
    ):
        plan({**QWEN, "max_position_embeddings": 40960}, "yarn", 262144)


def test_phi3_longrope_is_replaced_by_new_factors() -> None:
    rope = read_rope(PHI3_128K)
    assert (rope.window, rope.original_length) == (131072, 4096)
    assert rope.scaling.cos_sin_factor == pytest.approx(1.1902380714)  # sqrt(1 + 5/12)
    long_factor = tuple(2.0 * f for f in FACTORS)
    planned = plan(PHI3_128K, "longrope", 262144, long_factor=long_factor)
    assert planned.config["rope_scaling"] == {
        "type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": list(long_factor),
    }
    assert planned.config["original_max_position_embeddings"] == 4096
    assert planned.total_factor == 64.0
    assert read_rope(planned.config).scaling.cos_sin_factor == pytest.approx((1 + 6 / 12) ** 0.5)


def test_phi3_default_has_original_4096() -> None:
    config = {key: value for key, value in PHI3_128K.items() if key != "original_max_position_embeddings"}
    assert read_rope(config).original_length == 4096


@pytest.mark.parametrize("spelling", ["longrope", "su", "yarn"])
def test_old_names_of_phi3_longrope(spelling: str) -> None:
    scaling = {**PHI3_128K["rope_scaling"], "type": spelling}
    assert read_rope({**PHI3_128K, "rope_scaling": scaling}).scaling == read_rope(PHI3_128K).scaling


def linear_source(max_length: int) -> dict[str, Any]:
    return llama_config(max_position_embeddings=max_length, rope_scaling={"type": "linear", "factor": 4.0})


def test_linear_without_provenance_is_ambiguous() -> None:
    with pytest.raises(
        ValueError, match="factor 4.0 does not say whether max_position_embeddings 8192 .* --original-len"
    ):
        plan(linear_source(8192), "linear", 65536)


@pytest.mark.parametrize(("stated", "window"), [(2048, 8192), (8192, 32768)])
def test_linear_with_the_original_length_composes(stated: int, window: int) -> None:
    planned = plan(linear_source(8192), "linear", 65536, original_length=stated)
    assert planned.rope.window == window
    assert planned.scaling == Linear(rope_theta=1e4, factor=4.0 * 65536 / window)
    assert planned.total_factor == 65536 / stated
    assert noted(planned, f"{65536 / stated:g} times the pretrained {stated} in all")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (linear_source(8192), "original_length is 4096; with the linear factor 4.0 .* it must be 2048 or 8192"),
        (LLAMA31, "original_length is 4096; config.json says that it is 8192: leave it out"),
        (llama_config(max_position_embeddings=2048), "original_length is 4096; .* max_position_embeddings 2048"),
        (
            llama_config(max_position_embeddings=2048, rope_scaling={"type": "dynamic", "factor": 2.0}),
            "original_length is 4096; config.json says that it is 2048",
        ),
    ],
)
def test_an_original_length_that_contradicts_the_config_is_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan(config, "linear", 2**20, original_length=4096)


def test_original_length_against_the_record_is_refused() -> None:
    patched = plan(llama_config(), "linear", 512).config
    assert plan(patched, "linear", 1024, original_length=128).total_factor == 8.0
    with pytest.raises(ValueError, match="original_length is 256; config.json says that it is 128"):
        plan(patched, "linear", 1024, original_length=256)


@pytest.mark.parametrize("method", ["linear", "yarn", "ntk", "ntk_by_parts", "dynamic", "llama3"])
def test_ctxext_twice_is_ctxext_once(method: str) -> None:
    first = plan(llama_config(rope_theta=123456.0), method, 512)
    second = plan(first.config, method, 2048)
    once = plan(llama_config(rope_theta=123456.0), method, 2048)
    np.testing.assert_allclose(second.scaling.inv_freq(16, 2048), once.scaling.inv_freq(16, 2048), rtol=1e-12)
    assert second.scaling.cos_sin_factor == pytest.approx(once.scaling.cos_sin_factor)
    assert second.total_factor == 16.0 and second.rope.original_length == 128
    assert noted(second, "4 times more, 16 times the pretrained 128 in all")
    record = second.config["ctxext"]
    assert (record["factor"], record["total_factor"], record["original_length"]) == (4.0, 16.0, 128)
    assert [entry["length"] for entry in record["history"]] == [512]
    third = plan(second.config, method, 4096)
    assert [entry["length"] for entry in third.config["ctxext"]["history"]] == [512, 2048]


def test_edited_after_a_patch_is_ambiguous() -> None:
    patched = {**plan(llama_config(), "linear", 512).config, "max_position_embeddings": 4096}
    with pytest.raises(ValueError, match="recorded length 512, but max_position_embeddings is 4096"):
        plan(patched, "linear", 8192)


def test_dynamic_keeps_max_position_embeddings() -> None:
    planned = plan(llama_config(), "dynamic", 512)
    assert planned.config["max_position_embeddings"] == 128
    rope = read_rope(planned.config)
    assert (rope.window, rope.original_length) == (512, 128)
    assert noted(planned, "ctxext.fit_length")


@pytest.mark.parametrize("method", ["linear", "theta", "ntk", "yarn", "dynamic", "ntk_by_parts", "llama3"])
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "gemma3_text"])
def test_theta_is_never_lost(model_type: str, method: str) -> None:
    key = "rotary_emb_base" if model_type == "gpt_neox" else "rope_theta"
    config = llama_config(**{"model_type": model_type, "rope_theta": None, "head_dim": 16, key: 654321.0})
    if model_type == "gpt_neox":
        config["rotary_pct"] = 0.5
    options = {"rope_theta": 7e6} if method == "theta" else {}
    written = plan(config, method, 512, **options).config
    new = written["rope_parameters"]
    new = new["full_attention"] if model_type == "gemma3_text" else new
    assert written[key] == new["rope_theta"]
    rope = read_rope(written)
    assert rope.rotary_dim == (8 if model_type == "gpt_neox" else 16)
    kept = {"theta": 7e6, "ntk": 654321.0 * 4 ** (rope.rotary_dim / (rope.rotary_dim - 2))}.get(method, 654321.0)
    assert rope.scaling.rope_theta == pytest.approx(kept)


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({}, Theta(rope_theta=1e4)),
        ({"rope_theta": None}, Theta(rope_theta=1e4)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Theta(rope_theta=5e5)),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}, Theta(rope_theta=7e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, Linear(rope_theta=1e4, factor=2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, Linear(rope_theta=1e4, factor=2)),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            Dynamic(rope_theta=1e4, factor=2.0, original_max_position_embeddings=128),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
            Yarn(
                rope_theta=1e4,
                factor=2.0,
                original_max_position_embeddings=64,
                attention_factor=1.0693147180559945,
            ),
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                }
            },
            NTKByParts(rope_theta=1e4, factor=2.0, original_max_position_embeddings=64, attention_factor=1.0),
        ),
        (
            {
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "su", "short_factor": [1] * 8, "long_factor": [2] * 8},
            },
            LongRoPE(
                rope_theta=1e4,
                factor=2.0,
                original_max_position_embeddings=64,
                attention_factor=(1 + 1 / 6) ** 0.5,
                short_factor=(1,) * 8,
                long_factor=(2,) * 8,
            ),
        ),
    ],
)
def test_dialects_are_read_right(changes: dict[str, Any], scaling: object) -> None:
    assert read_rope(llama_config(**changes)).scaling == scaling
    assert read_rope({**llama_config(), **changes}).scaling == scaling  # null is as good as absent


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 10000.0 but rope_parameters.rope_theta is 500000.0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "say factor 2.0 and None, rope_type 'linear' and 'default', .* delete the wrong one",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_scaling and rope_parameters say factor 2.0 and 4.0, ",
        ),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 16,
                },
            },
            "rope_scaling and rope_parameters say beta_fast None and 16, ",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            "rope_type 'linear' but type 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear", "factr": 2.0}}, r"has a key 'factr' \(did you mean 'factor'\?\)"),
        ({"rope_scaling": {"type": "linaer", "factor": 2.0}}, r"rope_type is 'linaer' \(did you mean 'linear'\?\)"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn', which needs factor, and there is none"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be a dict or null"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'; it must be a finite number above 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; this model type rotates whole heads"),
        ({"max_position_embeddings": 4096.0}, "max_position_embeddings is 4096.0; it must be a whole number"),
        ({"head_dim": 15}, "head_dim is 15 .* which rotates 15 dimensions; it must be an even number"),
        (
            {
                "original_max_position_embeddings": 32,
                "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
            },
            "original_max_position_embeddings is 32 at the top level and 64 in the scaling",
        ),
        ({"ctxext": []}, r"ctxext is \[\] in config.json"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "no original_max_position_embeddings, so loaders take"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}},
            "original_max_position_embeddings is 256; it must be no more than max_position_embeddings, 128",
        ),
    ],
)
def test_contradictions_and_misspellings_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan({**llama_config(), **changes}, "yarn", 512)
