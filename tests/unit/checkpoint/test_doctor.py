"""Every fault in a checkpoint that has it, and none in one that is healthy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_cases import CHANGES, Config, add_companions, counted, edit, in_both, noticed, spell
from helpers import (
    LENGTH,
    METHODS,
    TINY,
    WINDOW,
    expected,
    options_for,
    read_config,
    rotary_dim,
    theta_of,
    write_config,
)
from safetensors.numpy import load_file, save_file

import ctxext.checkpoint.verify
from ctxext import diagnose, patch_checkpoint
from ctxext.checkpoint.normalize import normalize_config


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


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_fault_of_the_config_is_found(name: str, healthy: Path) -> None:
    code, level, fixable, change = CHANGES[name]
    edit(healthy, change)
    found = {fault.code: fault for fault in diagnose(healthy, verify=False)}
    assert code in found, list(found)
    assert (found[code].level, found[code].fixable) == (level, fixable)
    assert "\n" not in found[code].message and found[code].remedy


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


def test_a_limit_above_the_length_is_a_notice_and_one_without_end_is_none(healthy: Path) -> None:
    (healthy / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 2 * LENGTH}))
    assert counted(healthy) == {} and "tokenizer-limit" in noticed(healthy)
    (healthy / "tokenizer_config.json").write_text(json.dumps({"model_max_length": int(1e30)}))
    assert "tokenizer-limit" not in noticed(healthy)


def test_every_layer_that_slides_is_a_warning(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    patch_checkpoint(tiny_source("mistral"), tmp_path / "out", method="linear", length=LENGTH, verify=False)
    assert counted(tmp_path / "out") == {}
    edit(tmp_path / "out", lambda c: c.update(sliding_window=64), keep_record=True)
    assert counted(tmp_path / "out") == {"sliding-window": "warning"}


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
