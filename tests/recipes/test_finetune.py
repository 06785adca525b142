"""Runs of the recipe: what it saves, that it resumes to the bit, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import ctxext
from ctxext.recipes import finetune
from ctxext.training.adapters import check_adapter, merge_adapter
from ctxext.training.config_file import ConfigError
from ctxext.training.watch import TrainingStopped

# peft 0.21 asks for an attribute that transformers 5.24 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def run(path: Path, *words: str) -> Path:
    return finetune.finetune(["--config", str(path), *words])


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_run_saves_complete_folders_in_both_dialects(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    final = run(write_recipe(max_steps=2))
    for folder in (final, tmp_path / "run" / "checkpoint-2"):
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "yarn"
        assert config["rope_theta"] == 10000.0 and config["max_position_embeddings"] == 256
        assert config["ctxext"]["method"] == "yarn" and config["ctxext"]["original_length"] == 128
        assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 256
        assert not (folder / "training_args.bin").exists()
        assert len(AutoTokenizer.from_pretrained(folder)("abc")["input_ids"]) == 3
        AutoModelForCausalLM.from_pretrained(folder)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-2", "final", "log.jsonl"]
    assert not list(final.glob("*.pt"))


def test_a_resumed_run_equals_the_unbroken_one_to_the_bit(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    evaluations = {"perplexity": {"data": "python-docs", "length": 256, "max_windows": 1}}
    config = write_recipe(evaluations=evaluations, evaluate_every=3, save_total_limit=5)
    whole = run(config, "--output_dir", str(tmp_path / "whole"))
    assert [line["step"] for line in log(tmp_path / "whole") if "eval_perplexity_loss" in line] == [0, 3, 6]
    # A kill after step 5: what was saved after step 4 is there, and the log has lines from after it.
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "whole", broken)
    shutil.rmtree(broken / "final")
    (broken / "checkpoint-6").rename(broken / ".partial")
    resumed = run(config, "--output_dir", str(broken), "--dataloader_num_workers", "2")
    assert log(broken) == log(tmp_path / "whole")
    first, second = load_file(whole / "model.safetensors"), load_file(resumed / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_full_disk_leaves_the_last_good_checkpoint(
    write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_recipe(max_steps=4)
    save = torch.save
    saved: list[str] = []

    def full(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        saved.append(str(path))
        if "checkpoint-4" in str(path) and "scheduler" in str(path):
            raise OSError(28, "No space left on device")
        save(value, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        run(config)
    assert any("checkpoint-4" in path for path in saved)
    monkeypatch.setattr(torch, "save", save)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    run(config)
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2, 3, 4]


def test_another_run_in_the_same_folder_is_refused(write_recipe: Callable[..., Path]) -> None:
    config = write_recipe(max_steps=2)
    run(config)
    with pytest.raises(ConfigError, match=r"holds another run: length, packs, training.learning_rate differ"):
        run(config, "--length", "512", "--learning_rate", "1e-4")
    with pytest.raises(ConfigError, match="resume: auto"):
        run(config, "--resume", "never")


def test_warm_up_starts_at_a_tenth_and_is_linear(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    run(write_recipe(max_steps=6, warmup_steps=4))
    rates = [line["learning_rate"] / 1e-3 for line in log(tmp_path / "run")]
    assert rates == pytest.approx([0.1, 0.325, 0.55, 0.775, 1.0, 1.0])


def test_a_loss_that_is_no_number_names_step_and_documents(
    write_recipe: Callable[..., Path], byte_models: Callable[..., Path], tmp_path: Path
) -> None:
    trainer, _ = finetune.prepare(["--config", str(write_recipe())])
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = float("nan")
    with pytest.raises(TrainingStopped, match=r"step 1: the loss is nan. The batch: .*texts.jsonl:\d+ \[0\.\."):
        trainer.train()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_adapters_record_the_method_and_merge_without_loss(
    write_recipe: Callable[..., Path], byte_models: Callable[..., Path], tmp_path: Path, tied: bool
) -> None:
    base = byte_models(tie_word_embeddings=tied)
    lora = {"r": 4, "embeddings_and_norms": True}
    config = write_recipe(model=str(base), tuning="lora", lora=lora, dtype="float32", max_steps=3, save_steps=3)
    trainer, _ = finetune.prepare(["--config", str(config)])
    trainer.train()
    adapter = trainer.save_final()
    trained = {
        part
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
        for part in name.split(".")
    }
    assert {"lora_A", "lora_B", "embed_tokens", "norm", "input_layernorm"} <= trained
    ids = torch.randint(3, 250, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = trainer.model.eval()(input_ids=ids).logits
        loaded = ctxext.load_adapter(adapter)(input_ids=ids).logits
        torch.testing.assert_close(loaded, wanted, rtol=1e-4, atol=1e-5)
        merged_folder = merge_adapter(adapter, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(merged_folder)
        torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-5)
        moved = AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits - wanted
    assert moved.abs().max() > 1e-3
    assert merged.config.tie_word_embeddings == tied
    assert ("lm_head.weight" in load_file(merged_folder / "model.safetensors")) != tied
    assert json.loads((merged_folder / "config.json").read_text())["rope_scaling"]["rope_type"] == "yarn"
    with pytest.raises(ValueError, match="trained on a model with yarn scaling from 128 to 256.*no scaling"):
        check_adapter(json.loads((base / "config.json").read_text()), adapter)


def test_qlora_trains_on_four_bits(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = write_recipe(tuning="qlora", lora={"r": 4}, max_steps=2, bf16=True)
    trainer, _ = finetune.prepare(["--config", str(config)])
    kinds = {type(module).__name__ for module in trainer.model.modules()}
    assert "Linear4bit" in kinds
    trainer.train()
    assert (trainer.save_final() / "adapter_model.safetensors").exists()
    merge_adapter(tmp_path / "run" / "final", tmp_path / "merged")


def test_answers_only(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"q": f"question {i}", "a": f"answer {i}"}) + "\n" for i in range(40)))
    source = {"data": str(path), "kind": "chat", "prompt_column": "q", "completion_column": "a"}
    config = write_recipe(data={"sources": [source], "cache": str(tmp_path / "cache")}, max_steps=None, epochs=2)
    trainer, _ = finetune.prepare(["--config", str(config)])
    item = trainer.train_dataset[0]
    counted = trainer.processing_class.decode(item["input_ids"][item["labels"] != -100])
    assert counted.startswith("answer ") and "question" not in counted
    assert trainer.args.max_steps == 3  # 80 conversations of about 28 tokens, nine in a pack of 256, four packs a step


def test_everything_wrong_is_said_before_a_model_is_loaded(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("a model was loaded"))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = write_recipe(
        length=64,
        tuning="lora",
        data={"sources": [{"data": "pile"}, {"data": "sympy-sorce"}]},
        evaluations={"perplexty": {}, "passkey": {"depth": 3}},
        evaluate_every=5,
    )
    with pytest.raises(ConfigError) as caught:
        run(config)
    text = str(caught.value)
    for part in (
        "FSDP needs a GPU",
        "data.sources.0: data 'pile' is a corpus on the Hub; state max_tokens",
        "data.sources.1: no corpus and no file is called 'sympy-sorce'; did you mean 'sympy-source'?",
        "evaluations.perplexty: no evaluation is called 'perplexty'; did you mean 'perplexity'?",
        "evaluations.passkey: passkey has no option depth",
        "length is 64; the model reads 128 tokens already",
    ):
        assert part in text


def test_adapters_targets_are_checked_before_loading(write_recipe: Callable[..., Path]) -> None:
    config = write_recipe(tuning="lora", lora={"targets": ["q_proj", "query"]})
    with pytest.raises(ConfigError, match="lora.targets names query, which the model does not have; it has down_proj"):
        run(config)


def test_an_unpatched_model_without_a_method_is_refused(write_recipe: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="reads 128 tokens; give a method"):
        run(write_recipe(method=None))


@pytest.mark.parametrize("tool", ["g++", "ninja"])
def test_deepspeed_without_a_compiler_is_refused(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *a, **k: None if name == tool else which(name, *a, **k) or name)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match=f"compiles its communication and needs {tool.replace('+', '.')}"):
        run(write_recipe())


def test_checkpoints_are_saved_at_given_steps_too(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    run(write_recipe(max_steps=5, save_steps=4, save_at=[1, 3], save_total_limit=9))
    found = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert found == ["checkpoint-1", "checkpoint-3", "checkpoint-4", "checkpoint-5"]


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_less_memory_is_the_same_run(
    write_recipe: Callable[..., Path], tmp_path: Path, memory: str, tuning: str
) -> None:
    extra = {"tuning": tuning, "dtype": "float32", "max_steps": 4, "save_strategy": "no", "save_steps": None}
    config = write_recipe(**extra)
    run(config, "--output_dir", str(tmp_path / "plain"))
    run(config, "--output_dir", str(tmp_path / memory), "--memory", memory)
    plain, lean = log(tmp_path / "plain"), log(tmp_path / memory)
    assert len({line["loss"] for line in plain}) == 4
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in lean] == pytest.approx([line[key] for line in plain], rel=1e-4)
    trainer, _ = finetune.prepare(["--config", str(config), "--memory", memory])
    model = (trainer.model.get_base_model() if tuning == "lora" else trainer.model).train()
    assert model.is_gradient_checkpointing
    assert (
        model(input_ids=torch.ones(1, 8, dtype=torch.long), labels=torch.ones(1, 8, dtype=torch.long)).logits is None
    )


def test_memory_presets_refuse_what_they_would_undo(write_recipe: Callable[..., Path]) -> None:
    given = ("activation_checkpointing: true", "label_smoothing_factor: 0.1", "offload: true")
    words = [word for pair in given for word in ("--" + pair.split(": ")[0], pair.split(": ")[1])]
    with pytest.raises(ConfigError) as caught:
        run(write_recipe(), "--memory", "fast", *words)
    for part in (
        "activation_checkpointing has no place beside memory 'fast'",
        "label_smoothing_factor needs Trainer's own",
    ):
        assert part in str(caught.value)
    assert "offload moves what memory 'lean' keeps, and memory is 'fast'" in str(caught.value)
    with pytest.raises(ConfigError, match="there is no GPU: leave it out"):
        run(write_recipe(), "--memory", "lean", "--offload", "true")


LOGITS_IN_TRANSFORMERS_4 = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__
assert __version__.startswith("4.57"), __version__
assert len(AutoTokenizer.from_pretrained(sys.argv[1])("abc")["input_ids"]) == 3
with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained(sys.argv[1])(torch.arange(3, 203)[None]).logits
torch.save(logits, sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_transformers_4_reads_a_trained_checkpoint(
    transformers4: str, write_recipe: Callable[..., Path], tmp_path: Path, tuning: str
) -> None:
    final = run(write_recipe(tuning=tuning, dtype="float32", max_steps=2))
    folder = merge_adapter(final, tmp_path / "merged") if tuning == "lora" else final
    there = tmp_path / "logits.pt"
    command = [transformers4, "-c", LOGITS_IN_TRANSFORMERS_4, str(folder), str(there)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
    with torch.no_grad():
        here = AutoModelForCausalLM.from_pretrained(folder)(torch.arange(3, 203)[None]).logits
    torch.testing.assert_close(torch.load(there, weights_only=True), here, rtol=1e-4, atol=1e-5)
