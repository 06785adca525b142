"""Recipes on models with an attention bias: what is trained, saved, resumed and merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ctxext
from ctxext import diagnose, patch_checkpoint
from ctxext.evaluation.loading import RunSettings, load
from ctxext.recipes import finetune
from ctxext.training.adapters import merge_adapter

# peft 0.21 asks for an attribute that transformers 5.24 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
IDS = torch.arange(1, 91)[None]
LEARNED = ("model.score_bias.kernel.log_r1", "model.score_bias.kernel.log_r2")


def logits(model: object) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits  # type: ignore[attr-defined,no-any-return]


def start_of(learned: str, folder: Path) -> torch.Tensor:
    return load_file(folder / "model-score-bias.safetensors")[learned]


@pytest.mark.parametrize("memory", ["plain", "lean"])
def test_a_learned_bias_is_trained_saved_and_taken_up(
    memory: str, write_recipe: Callable[..., Path], byte_models: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_recipe(method="kerple_log", memory=memory, max_steps=4)
    final = finetune.finetune(["--config", str(config)])
    patch_checkpoint(byte_models(), tmp_path / "patched", method="kerple_log", length=256)
    weights = load_file(final / "model.safetensors")
    for name in LEARNED:
        assert not torch.equal(weights[name], start_of(name, tmp_path / "patched"))
    assert {fault.code for fault in diagnose(final)} == {"bias-loaders"}
    log = (tmp_path / "run" / "log.jsonl").read_text()
    for name in ("final", "checkpoint-4"):
        (tmp_path / "run" / name).rename(tmp_path / name)
    assert finetune.finetune(["--config", str(config)]) == final  # from checkpoint-2
    assert (tmp_path / "run" / "log.jsonl").read_text() == log
    again = load_file(final / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in weights.items())


def test_packed_documents_are_isolated_with_a_bias(write_recipe: Callable[..., Path]) -> None:
    """Two documents in one row give the logits that each has alone, whatever mask comes along."""
    config = write_recipe(method="sandwich")
    trainer, _ = finetune.prepare(["--config", str(config)])
    model = trainer.model.eval()
    row = torch.cat([IDS[:, :30], IDS[:, 40:80]], dim=1)
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]
    with torch.no_grad():
        packed = model(row, position_ids=positions, attention_mask=torch.ones_like(row)).logits
        apart = torch.cat([model(IDS[:, :30]).logits, model(IDS[:, 40:80]).logits], dim=1)
    torch.testing.assert_close(packed, apart)


def test_adapters_train_a_learned_bias_and_merge_with_it(
    write_recipe: Callable[..., Path], byte_models: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_recipe(method="kerple_log", tuning="lora", max_steps=6, learning_rate=2e-2)
    adapter = finetune.finetune(["--config", str(config)])
    trained = {name: value for name, value in load_file(adapter / "adapter_model.safetensors").items()}
    assert any("score_bias" in name for name in trained)
    merged = merge_adapter(adapter, tmp_path / "merged")
    loaded = ctxext.load_adapter(adapter, dtype=torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    # Adapters are trained on bfloat16 weights, and so are the merged ones: the difference is their rounding.
    torch.testing.assert_close(logits(whole), logits(loaded), rtol=0, atol=1e-2)
    plain = AutoModelForCausalLM.from_pretrained(byte_models(), dtype=torch.float32)
    assert (logits(ctxext.patch(plain, method="kerple_log", length=256)) - logits(loaded)).abs().max() > 0.1
    for name in LEARNED:
        learned = next(value for key, value in trained.items() if key.endswith(name.removeprefix("model.")))
        torch.testing.assert_close(load_file(merged / "model.safetensors")[name], learned)
    with pytest.raises(ValueError, match="was trained on a model with the attention bias .*'kerple_log'"):
        load(byte_models(), RunSettings(adapter=str(adapter)))
    patch_checkpoint(byte_models(), tmp_path / "other", method="alibi", length=256)
    with pytest.raises(ValueError, match="and this one has the attention bias .*'alibi'"):
        load(tmp_path / "other", RunSettings(adapter=str(adapter)))
    patch_checkpoint(byte_models(), tmp_path / "same", method="kerple_log", length=256)
    fitting = load(tmp_path / "same", RunSettings(adapter=str(adapter), dtype="float32"))
    torch.testing.assert_close(logits(fitting.model), logits(loaded), rtol=1e-4, atol=1e-5)


def test_a_bad_bias_is_found_before_anything_is_loaded(write_recipe: Callable[..., Path]) -> None:
    config = write_recipe(method="windowed")
    with pytest.raises(ValueError, match="method 'windowed' needs --window"):
        finetune.finetune(["--config", str(config)])


def test_the_record_of_a_trained_bias(write_recipe: Callable[..., Path]) -> None:
    config = write_recipe(method="windowed", method_options={"window": 48}, max_steps=2)
    final = finetune.finetune(["--config", str(config)])
    written = json.loads((final / "config.json").read_text())
    assert written["bias_parameters"]["window"] == 48 and written["ctxext"]["method"] == "windowed"
    assert written["auto_map"]["AutoModelForCausalLM"] == "modeling_ctxext.CtxextLlamaForCausalLM"
    assert (final / "blocked.py").exists()
