"""What `--fix` makes of every fault that has one right answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from doctor_cases import CHANGES, ORIGINAL, Config, add_companions, counted, edit, in_both, without
from helpers import (
    LENGTH,
    WINDOW,
    expected,
    frequencies_at,
    read_config,
    snapshot,
)
from transformers import AutoModelForCausalLM

from ctxext import patch_checkpoint
from ctxext.checkpoint.doctor import doctor
from ctxext.checkpoint.normalize import normalize_config
from ctxext.checkpoint.rope_config import read_rope

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


def test_a_save_of_plain_transformers_is_written_in_both_dialects(healthy: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    AutoModelForCausalLM.from_pretrained(healthy).save_pretrained(again)
    assert "rope_theta" not in read_config(again) and counted(again)["only-new-dialect"] == "error"
    assert normalize_config(again) is True
    written = read_config(again)
    assert written["rope_theta"] == 10000.0 and written["rope_scaling"] == read_config(healthy)["rope_scaling"]
    assert read_rope(written) == read_rope(read_config(healthy))
    assert normalize_config(again) is False and counted(again, verify=True) == {}
