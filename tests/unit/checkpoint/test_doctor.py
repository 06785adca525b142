"""Every fault in a checkpoint that has it, none in one that is healthy, and what --fix makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
    snapshot,
    theta_of,
    write_config,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

import ctxext.checkpoint.verify
from ctxext import diagnose, patch_checkpoint
from ctxext.checkpoint.doctor import doctor
from ctxext.checkpoint.normalize import normalize_config
from ctxext.checkpoint.rope_config import read_rope

ORIGINAL = "original_max_position_embeddings"
Config = dict[str, Any]


def add_companions(folder: Path, length: int) -> None:
    """Put a tokenizer's and a generation's limits beside a checkpoint."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
    (folder / "generation_config.json").write_text(json.dumps({"max_length": length}))
    (folder / "tokenizer.json").write_text(json.dumps({"truncation": {"max_length": length}, "model": {}}))


@pytest.fixture
def healthy(llama: Path, tmp_path: Path) -> Path:
    """Return a llama that yarn extended to four times its window."""
    patch_checkpoint(llama, tmp_path / "healthy", method="yarn", length=LENGTH, verify=False)
    add_companions(tmp_path / "healthy", LENGTH)
    return tmp_path / "healthy"


def counted(folder: Path, verify: bool = False) -> dict[str, str]:
    return {fault.code: fault.level for fault in diagnose(folder, verify=verify) if fault.counts}


def noticed(folder: Path) -> set[str]:
    return {fault.code for fault in diagnose(folder, verify=False) if not fault.counts}


def edit(folder: Path, change: Callable[[Config], object], keep_record: bool = False) -> None:
    """Change a config in place; without its record it is one that ctxext never saw."""
    config = read_config(folder)
    if not keep_record:
        config.pop("ctxext", None)
    change(config)
    write_config(folder, config)


def spell(config: Config, scaling: Config | None, **values: Any) -> None:
    """Write one scaling in both dialects."""
    config["rope_scaling"] = scaling
    config["rope_parameters"] = {"rope_theta": config["rope_theta"], **(scaling or {"rope_type": "default"})}
    config.update(values)


def in_both(**values: Any) -> Callable[[Config], object]:
    return lambda config: [config[key].update(values) for key in ("rope_scaling", "rope_parameters")]


def without(*keys: str) -> Callable[[Config], object]:
    def change(config: Config) -> None:
        for key in keys:
            config.pop(key, None)
            for dialect in ("rope_scaling", "rope_parameters"):
                (config.get(dialect) or {}).pop(key, None)

    return change


@pytest.mark.parametrize("family", list(TINY))
@pytest.mark.parametrize("method", METHODS)
def test_what_ctxext_patches_has_no_faults(
    family: str, method: str, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    if family == "phi3" and method in ("yarn", "dynamic"):
        pytest.skip("phi3 cannot express it")
    options = options_for(method, theta_of(family), rotary_dim(family))
    out = tmp_path / "out"
    patch_checkpoint(tiny_source(family), out, method=method, length=LENGTH, link="hard", verify=False, **options)
    add_companions(out, LENGTH)
    assert counted(out) == {}
    assert ("cache" in noticed(out)) == (method in ("dynamic", "longrope"))


@pytest.mark.parametrize("method", METHODS)
def test_a_healthy_checkpoint_is_also_built_in_stock_transformers(method: str, llama: Path, tmp_path: Path) -> None:
    options = options_for(method, 10000.0, 16)
    patch_checkpoint(llama, tmp_path / "out", method=method, length=LENGTH, link="hard", verify=False, **options)
    assert counted(tmp_path / "out", verify=True) == {}


@pytest.mark.parametrize("family", list(TINY))
def test_an_unpatched_base_has_no_faults_once_both_dialects_are_there(
    family: str, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    for path in tiny_source(family).iterdir():
        os.link(path, tmp_path / path.name)
    config = read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    write_config(tmp_path, config)
    normalize_config(tmp_path)
    assert counted(tmp_path) == {}


CHANGES: dict[str, tuple[str, str, bool, Callable[[Config], object]]] = {
    "new dialect only": ("only-new-dialect", "error", True, without("rope_theta", "rope_scaling")),
    "theta null": ("theta-missing", "error", True, lambda c: c.update(rope_theta=None)),
    "theta null everywhere": (
        "theta-missing",
        "error",
        False,
        lambda c: (c.update(rope_theta=None), c["rope_parameters"].update(rope_theta=None)),
    ),
    "theta lost": (
        "theta-lost",
        "error",
        True,
        lambda c: (c.pop("rope_theta"), c["rope_parameters"].update(rope_theta=5e5)),
    ),
    "factors differ": (
        "dialects-contradict",
        "error",
        False,
        lambda c: c["rope_parameters"].update(factor=2.0),
    ),
    "thetas differ": ("dialects-contradict", "error", False, lambda c: c.update(rope_theta=5e5)),
    "longrope, old dialect, inner length": (
        "loaders-disagree",
        "error",
        True,
        lambda c: (
            c.pop("rope_parameters"),
            c.update(
                rope_scaling={
                    "rope_type": "longrope",
                    "factor": 4.0,
                    ORIGINAL: WINDOW,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                }
            ),
        ),
    ),
    "float length": ("float-length", "error", True, lambda c: c.update(max_position_embeddings=float(LENGTH))),
    "half a token": ("float-length", "error", False, lambda c: c.update(max_position_embeddings=LENGTH + 0.5)),
    "inner float length": ("float-length", "error", True, in_both(**{ORIGINAL: float(WINDOW)})),
    "typing mistake": ("unknown-rope-key", "error", False, in_both(atention_factor=1.0)),
    "key of nobody": ("unknown-rope-key", "error", True, in_both(finetuned=True)),
    "unknown type": ("unknown-rope-type", "error", False, in_both(rope_type="yarm")),
    "yarn without original": ("original-length-missing", "error", False, without(ORIGINAL)),
    "yarn with another factor": ("yarn-factor", "error", False, in_both(factor=2.0)),
    "length not multiplied": (
        "length-not-multiplied",
        "warning",
        True,
        lambda c: c.update(max_position_embeddings=WINDOW),
    ),
    "dynamic enlarged": (
        "dynamic-enlarged",
        "error",
        True,
        lambda c: spell(c, {"rope_type": "dynamic", "factor": 4.0, ORIGINAL: WINDOW}),
    ),
    "short list": (
        "longrope-factors",
        "error",
        False,
        lambda c: spell(
            c,
            {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 7},
            **{ORIGINAL: WINDOW},
        ),
    ),
    "no factor": (
        "config",
        "error",
        False,
        lambda c: [c[k].pop("factor") for k in ("rope_scaling", "rope_parameters")],
    ),
    "no length": ("config", "error", False, without("max_position_embeddings")),
    "fewer layers": ("layer-count", "error", False, lambda c: c.update(num_hidden_layers=3)),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_fault_of_the_config_is_found(name: str, healthy: Path) -> None:
    code, level, fixable, change = CHANGES[name]
    edit(healthy, change)
    found = {fault.code: fault for fault in diagnose(healthy, verify=False)}
    assert code in found, list(found)
    assert (found[code].level, found[code].fixable) == (level, fixable)
    assert "\n" not in found[code].message and found[code].remedy


FIXED = [name for name, (_, _, fixable, _) in CHANGES.items() if fixable]


@pytest.mark.parametrize("name", FIXED)
def test_a_repair_removes_the_fault_and_keeps_what_was_there(name: str, healthy: Path) -> None:
    code, _, _, change = CHANGES[name]
    edit(healthy, change)
    before = (healthy / "config.json").read_bytes()
    answer = doctor(healthy, fix=True)
    assert answer["healthy"], answer["faults"]
    assert code in [fault["code"] for fault in answer["fixed"]]
    assert "config.json.before-doctor" in answer["backups"]
    assert (healthy / "config.json.before-doctor").read_bytes() == before
    assert not list(healthy.glob("*.partial"))


# What stock transformers turns with after the repair; all of them were yarn by four of a llama with base 10000.
YARN_AGAIN = [
    "new dialect only",
    "key of nobody",
    "theta null",
    "float length",
    "inner float length",
    "length not multiplied",
]


@pytest.mark.parametrize("name", YARN_AGAIN)
def test_stock_transformers_reads_the_repaired_config(name: str, healthy: Path) -> None:
    edit(healthy, CHANGES[name][3])
    doctor(healthy, fix=True)
    frequencies, factor = frequencies_at(AutoModelForCausalLM.from_pretrained(healthy), LENGTH)
    wanted, wanted_factor = expected("yarn", 10000.0, 16, WINDOW, LENGTH)
    np.testing.assert_allclose(frequencies, wanted, rtol=1e-5)
    assert factor == pytest.approx(wanted_factor)
    config = read_config(healthy)
    assert config["max_position_embeddings"] == LENGTH and isinstance(config["max_position_embeddings"], int)
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"]["factor"] == 4.0


def test_a_lost_theta_is_the_one_that_is_spelt(healthy: Path) -> None:
    edit(healthy, CHANGES["theta lost"][3])
    doctor(healthy, fix=True)
    frequencies, _ = frequencies_at(AutoModelForCausalLM.from_pretrained(healthy), LENGTH)
    np.testing.assert_allclose(frequencies, expected("yarn", 5e5, 16, WINDOW, LENGTH)[0], rtol=1e-5)


def test_repaired_dynamic_grows_from_the_original_window(healthy: Path) -> None:
    edit(healthy, CHANGES["dynamic enlarged"][3])
    still, _ = frequencies_at(AutoModelForCausalLM.from_pretrained(healthy), LENGTH)
    np.testing.assert_allclose(still, 10000.0 ** (-np.arange(0, 16, 2) / 16), rtol=1e-5)  # the fault: it does nothing
    doctor(healthy, fix=True)
    frequencies, _ = frequencies_at(AutoModelForCausalLM.from_pretrained(healthy), LENGTH)
    np.testing.assert_allclose(frequencies, expected("dynamic", 10000.0, 16, WINDOW, LENGTH, LENGTH)[0], rtol=1e-5)


def test_a_recorded_original_length_is_written_back(healthy: Path) -> None:
    edit(healthy, without(ORIGINAL), keep_record=True)
    answer = doctor(healthy, fix=True)
    assert answer["healthy"] and [fault["code"] for fault in answer["fixed"]] == ["original-length-missing"]
    assert read_config(healthy)["rope_scaling"][ORIGINAL] == WINDOW


def test_a_recorded_dynamic_is_repaired_too(llama: Path, tmp_path: Path) -> None:
    patch_checkpoint(llama, tmp_path / "out", method="dynamic", length=LENGTH, verify=False)
    edit(tmp_path / "out", lambda c: c.update(max_position_embeddings=LENGTH), keep_record=True)
    assert counted(tmp_path / "out") == {"dynamic-enlarged": "error"}
    assert doctor(tmp_path / "out", fix=True)["healthy"]
    assert read_config(tmp_path / "out")["max_position_embeddings"] == WINDOW


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(max_position_embeddings=2 * LENGTH),
        lambda c: spell(c, {"rope_type": "linear", "factor": 4.0}),
        lambda c: in_both(attention_factor=1.0)(c),
        lambda c: c["ctxext"].update(total_factor=8.0),
        lambda c: c["ctxext"].update(options={"beta_fast": 16.0}),
    ],
)
def test_a_config_that_was_changed_after_the_patch_disagrees_with_the_record(
    change: Callable[[Config], object], healthy: Path
) -> None:
    edit(healthy, change, keep_record=True)
    assert counted(healthy)["provenance"] == "error"


def test_a_change_of_attention_is_found_for_a_recorded_ntk_by_parts(llama: Path, tmp_path: Path) -> None:
    patch_checkpoint(llama, tmp_path / "out", method="ntk_by_parts", length=LENGTH, verify=False)
    assert counted(tmp_path / "out") == {}
    edit(tmp_path / "out", in_both(attention_factor=1.1), keep_record=True)
    assert counted(tmp_path / "out") == {"provenance": "error"}


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("tokenizer_config.json", {"model_max_length": WINDOW}, "tokenizer-limit"),
        ("generation_config.json", {"max_length": 20}, "generation-limit"),
        ("tokenizer.json", {"truncation": {"max_length": WINDOW}, "model": {"ä": 1}}, "tokenizer-truncation"),
    ],
)
def test_a_limit_below_the_length_is_a_warning_and_is_raised(
    name: str, change: Config, code: str, healthy: Path
) -> None:
    (healthy / name).write_text(json.dumps(change))
    assert counted(healthy) == {code: "warning"}
    config = (healthy / "config.json").read_bytes()
    answer = doctor(healthy, fix=True, verify=False)
    assert answer["healthy"] and answer["backups"] == [f"{name}.before-doctor"]
    assert str(LENGTH) in (healthy / name).read_text()
    assert (healthy / "config.json").read_bytes() == config


def test_a_limit_above_the_length_is_a_notice_and_one_without_end_is_none(healthy: Path) -> None:
    (healthy / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 2 * LENGTH}))
    assert counted(healthy) == {} and "tokenizer-limit" in noticed(healthy)
    (healthy / "tokenizer_config.json").write_text(json.dumps({"model_max_length": int(1e30)}))
    assert "tokenizer-limit" not in noticed(healthy)


def test_limits_follow_the_repaired_length(healthy: Path) -> None:
    edit(healthy, lambda c: c.update(max_position_embeddings=WINDOW))
    add_companions(healthy, WINDOW)
    answer = doctor(healthy, fix=True)
    assert answer["healthy"], answer["faults"]
    assert len(answer["backups"]) == 4
    assert json.loads((healthy / "tokenizer_config.json").read_text()) == {"model_max_length": LENGTH}


def test_an_earlier_backup_is_never_overwritten(healthy: Path) -> None:
    for number in ("", ".1", ".2"):
        edit(healthy, CHANGES["float length"][3])
        assert doctor(healthy, fix=True, verify=False)["backups"] == [f"config.json.before-doctor{number}"]


def test_a_linked_config_is_replaced_and_the_blob_it_links_to_is_not(healthy: Path, tmp_path: Path) -> None:
    edit(healthy, CHANGES["new dialect only"][3])
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (healthy / name).rename(blobs / name)
        (healthy / name).symlink_to(blobs / name)
    (blobs / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 8}))
    before = snapshot(blobs)
    assert doctor(healthy, fix=True)["healthy"]
    assert snapshot(blobs) == before
    assert not (healthy / "config.json").is_symlink() and (healthy / "model.safetensors").is_symlink()
    assert not (healthy / "config.json.before-doctor").is_symlink()


def test_a_fault_without_one_right_answer_is_left_and_said(healthy: Path) -> None:
    edit(healthy, in_both(factor=2.0))
    before = snapshot(healthy)
    answer = doctor(healthy, fix=True)
    assert not answer["healthy"] and answer["fixed"] == [] and snapshot(healthy) == before


def test_fixing_a_healthy_checkpoint_changes_nothing(healthy: Path) -> None:
    before = snapshot(healthy)
    answer = doctor(healthy, fix=True)
    assert answer["healthy"] and answer["backups"] == [] and snapshot(healthy) == before


def test_fix_needs_a_local_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--fix changes files, so it needs a local folder"):
        doctor("org/name", fix=True)


def test_every_layer_that_slides_is_a_warning(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    patch_checkpoint(tiny_source("mistral"), tmp_path / "out", method="linear", length=LENGTH, verify=False)
    assert counted(tmp_path / "out") == {}
    edit(tmp_path / "out", lambda c: c.update(sliding_window=64), keep_record=True)
    assert counted(tmp_path / "out") == {"sliding-window": "warning"}


def test_a_scaling_on_sliding_layers_is_undone(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    patch_checkpoint(tiny_source("gemma3_text"), out, method="linear", length=LENGTH, verify=False)
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    edit(out, lambda c: c["rope_parameters"].update(sliding_attention=scaled), keep_record=True)
    assert counted(out) == {"sliding-rope": "error"}
    assert doctor(out, fix=True)["healthy"]
    plain = AutoModelForCausalLM.from_pretrained(out).model.rotary_emb.sliding_attention_inv_freq.numpy()
    np.testing.assert_allclose(plain, 10000.0 ** (-np.arange(0, 16, 2) / 16), rtol=1e-5)


def test_phi3_with_its_first_name_of_longrope_is_rewritten(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    patch_checkpoint(
        tiny_source("phi3"), out, method="longrope", length=LENGTH, verify=False, long_factor=(1.0, 2.0, 3.0, 4.0)
    )
    edit(out, lambda c: (c.pop("rope_parameters"), c["rope_scaling"].update(type="su")))
    assert counted(out) == {"transformers-5": "error"}
    assert doctor(out, fix=True)["healthy"]
    assert read_config(out)["rope_scaling"]["type"] == "longrope"


def test_weights_that_are_missing_cut_short_or_pickled(healthy: Path) -> None:
    weights = healthy / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    assert counted(healthy) == {"weights-truncated": "error"}
    weights.write_bytes(content[:4])
    assert counted(healthy) == {"weights-truncated": "error"}
    weights.unlink()
    assert counted(healthy) == {"weights-missing": "error"}
    (healthy / "pytorch_model.bin").write_bytes(b"")
    assert counted(healthy) == {"pickles-only": "error"}


def test_shards_that_are_missing_and_an_index_that_is_ignored(healthy: Path) -> None:
    index = healthy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert counted(healthy) == {"index-ignored": "warning"}
    (healthy / "model.safetensors").rename(healthy / "model-00002-of-00002.safetensors")
    assert counted(healthy) == {"shard-missing": "error"}
    (healthy / "model-00002-of-00002.safetensors").rename(healthy / "model-00001-of-00001.safetensors")
    assert counted(healthy) == {}


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_frequencies_in_the_weights_are_noted(kind: str, healthy: Path) -> None:
    path = healthy / "model.safetensors"
    tensors = load_file(path)
    wanted, _ = expected("yarn", 10000.0, 16, WINDOW, LENGTH)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = wanted.astype(kind)
    save_file(tensors, path)
    told = [fault for fault in diagnose(healthy, verify=False) if fault.code == "stored-inv-freq"]
    assert len(told) == 1 and told[0].level == "notice" and "other values" not in told[0].message
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = (1.1 * wanted).astype(kind)
    save_file(tensors, path)
    told = [fault for fault in diagnose(healthy, verify=False) if fault.code == "stored-inv-freq"]
    assert "other values" in told[0].message


def test_what_stock_transformers_makes_of_it_is_compared(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(healthy, lambda c: c.update(intermediate_size=32), keep_record=True)
    assert counted(healthy) == {} and counted(healthy, verify=True) == {"stock-model": "error"}

    def differs(folder: Path) -> None:
        raise ValueError("the frequencies differ")

    monkeypatch.setattr(ctxext.checkpoint.verify, "verify_checkpoint", differs)
    assert counted(healthy, verify=True) == {"stock-model": "error"}


def test_loaders_that_need_to_be_told_something_are_notices(llama: Path, tmp_path: Path) -> None:
    patch_checkpoint(llama, tmp_path / "linear", method="linear", length=LENGTH, verify=False)
    told = {fault.code: fault for fault in diagnose(tmp_path / "linear", verify=False)}
    assert told["vllm"].remedy == f"serve it with --max-model-len {LENGTH}"
    assert f"takes {4 * LENGTH} tokens unless told" in told["vllm"].message
    patch_checkpoint(llama, tmp_path / "dynamic", method="dynamic", length=LENGTH, verify=False)
    told = {fault.code: fault for fault in diagnose(tmp_path / "dynamic", verify=False)}
    assert (
        "ctxext.fit_length(model, n)" in told["cache"].remedy and "dynamic scaling is static" in told["vllm"].message
    )
    assert "dropped" in told["llama-cpp"].message
    patch_checkpoint(llama, tmp_path / "parts", method="ntk_by_parts", length=LENGTH, verify=False)
    told = {fault.code: fault for fault in diagnose(tmp_path / "parts", verify=False)}
    assert "0.20.0 and earlier ignore it" in told["vllm"].message


def test_an_implied_theta_and_a_bare_dynamic_are_notices(llama: Path, tmp_path: Path) -> None:
    patch_checkpoint(llama, tmp_path / "out", method="yarn", length=LENGTH, verify=False)
    edit(tmp_path / "out", lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")))
    assert counted(tmp_path / "out") == {} and "theta-implied" in noticed(tmp_path / "out")
    edit(tmp_path / "out", lambda c: c.update(rope_scaling={"rope_type": "dynamic", "factor": 4.0}))
    assert counted(tmp_path / "out") == {} and "dynamic-window" in noticed(tmp_path / "out")


def test_a_method_that_transformers_4_has_not_is_a_notice(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    patch_checkpoint(tiny_source("olmo2"), tmp_path / "out", method="yarn", length=LENGTH, verify=False)
    assert counted(tmp_path / "out") == {} and "transformers-4" in noticed(tmp_path / "out")


def adapter(folder: Path, base: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "peft_type": "LORA"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_an_adapter_whose_base_is_not_the_extended_model(healthy: Path, llama: Path, tmp_path: Path) -> None:
    assert counted(adapter(tmp_path / "good", str(healthy))) == {}
    assert counted(adapter(tmp_path / "beside", "healthy")) == {}
    assert counted(adapter(tmp_path / "plain", str(llama))) == {"adapter-base": "warning"}
    assert counted(adapter(tmp_path / "hub", "org/name")) == {"adapter-base": "warning"}
    shipped = adapter(tmp_path / "shipped", str(llama))
    write_config(shipped, read_config(healthy))
    assert counted(shipped) == {"adapter-base": "error"}
    named = adapter(tmp_path / "named", "org/name")
    write_config(named, read_config(healthy))
    assert counted(named) == {} and noticed(named) == {"adapter-base"}


def test_a_model_without_rope_is_not_diagnosed(healthy: Path) -> None:
    write_config(healthy, {"model_type": "gpt2"})
    with pytest.raises(ValueError, match="gpt2.*no rotary embedding"):
        diagnose(healthy)


def test_a_save_of_plain_transformers_is_written_in_both_dialects(healthy: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    AutoModelForCausalLM.from_pretrained(healthy).save_pretrained(again)
    assert "rope_theta" not in read_config(again) and counted(again)["only-new-dialect"] == "error"
    assert normalize_config(again) is True
    written = read_config(again)
    assert written["rope_theta"] == 10000.0 and written["rope_scaling"] == read_config(healthy)["rope_scaling"]
    assert read_rope(written) == read_rope(read_config(healthy))
    assert normalize_config(again) is False and counted(again, verify=True) == {}


JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(10**400), max_value=10**400),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["yarn", "linear", "x", 0, -1, 1e300, 2**63, 128.0, [], {}, [1.0], {"factor": None}]),
)
KEYS = [
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "head_dim",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "sliding_window",
    "ctxext",
    ORIGINAL,
    "partial_rotary_factor",
]
INNER = ["rope_type", "type", "factor", "rope_theta", ORIGINAL, "attention_factor", "beta_fast", "truncate", "x"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    top=st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=3),
    inner=st.dictionaries(st.sampled_from(INNER), JSON_VALUES, max_size=3),
    dialect=st.sampled_from(["rope_scaling", "rope_parameters"]),
    record=st.dictionaries(
        st.sampled_from(["method", "length", "original_length", "total_factor", "options", "history"]),
        JSON_VALUES,
        max_size=2,
    ),
)
def test_any_config_is_diagnosed_or_refused_with_a_message(
    top: Config, inner: Config, dialect: str, record: Config, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any"
    if not folder.exists():
        patch_checkpoint(llama, folder, method="yarn", length=LENGTH, verify=False)
        (folder / "config.json").rename(folder / "config.patched")
    config = json.loads((folder / "config.patched").read_text())
    config[dialect].update(inner)
    config["ctxext"].update(record)
    config.update(top)
    write_config(folder, config)
    try:
        faults = diagnose(folder, verify=False)
    except ValueError as error:
        assert str(error)
        return
    assert all(fault.code and fault.message and fault.remedy for fault in faults)
    json.dumps([fault.to_dict() for fault in faults])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ctxext", *arguments], capture_output=True, text=True, check=False)


def test_exit_codes_and_output_of_the_command(healthy: Path, tmp_path: Path) -> None:
    fine = run("doctor", str(healthy), "--json")
    assert fine.returncode == 0 and json.loads(fine.stdout)["healthy"] is True
    edit(healthy, CHANGES["new dialect only"][3])
    faulty = run("doctor", str(healthy), "--no-verify")
    assert faulty.returncode == 1
    assert faulty.stdout.splitlines()[0].startswith("error    only-new-dialect  only rope_parameters is there")
    fixed = run("doctor", str(healthy), "--no-verify", "--fix", "--json")
    answer = json.loads(fixed.stdout)
    assert fixed.returncode == 0 and answer["healthy"] and answer["backups"] == ["config.json.before-doctor"]
    nowhere = run("doctor", str(tmp_path / "nowhere"), "--json")
    assert nowhere.returncode == 2 and nowhere.stdout == "" and "there is no folder" in nowhere.stderr
    (healthy / "config.json").write_text("{")
    broken = run("doctor", str(healthy))
    assert broken.returncode == 2 and broken.stdout == "" and "is no JSON" in broken.stderr
