"""Fine-tuning with random-access reading: which windows are read, resuming, processes, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ctxext.data.tokens import TokenRules, open_store
from ctxext.reading.memory import Memory
from ctxext.reading.server import DataServer, collate
from ctxext.recipes import finetune
from ctxext.training.config_file import ConfigError
from ctxext.training.recipe_files import recipe_root

SKIPPING = {"method": None, "length": 32, "reading": {"rate": 16, "threshold": 12.0}, "batch_size": 4}


@pytest.fixture
def reading(write_recipe: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that writes a small recipe whose rows read windows of 32 tokens."""
    return lambda **changes: write_recipe(**{**SKIPPING, **changes})


def run(path: Path, *words: str) -> Path:
    return finetune.finetune(["--config", str(path), *words])


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_the_windows_of_a_run_are_those_of_equation_1(
    reading: Callable[..., Path], byte_models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rate of 0 the model stays what it was, and every window and skip can be worked out from its losses."""
    batches: list[list[list[int]]] = []

    def noted(windows: Any, length: int, pad: int) -> Any:
        batches.append([window.tokens.tolist() for window in windows])
        return collate(windows, length, pad)

    monkeypatch.setattr("ctxext.reading.trainer.collate", noted)
    path = reading(max_steps=8, learning_rate=0.0, per_device_train_batch_size=2)  # two micro-batches of two rows
    final = run(path)
    model = AutoModelForCausalLM.from_pretrained(byte_models()).eval()
    seen = [batches[step] + batches[step + 1] for step in range(0, 16, 2)]

    recipe, folder = finetune.read_recipe(["--config", str(path)])
    tokenizer = finetune.AutoTokenizer.from_pretrained(folder)
    rules = TokenRules(bos="auto", eos="auto", longest_whole=33)
    store = open_store(recipe.data.sources[0], tokenizer, rules, tmp_path / "cache")
    texts = [store.tokens[a:b].tolist() for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True)]
    skips = 0
    for row in range(4):
        for before, after in zip(seen[:-1], seen[1:], strict=True):
            tokens = before[row]
            (text,) = [text for text in texts if any(text[i : i + len(tokens)] == tokens for i in range(len(text)))]
            (start,) = [i for i in range(len(text)) if text[i : i + len(tokens)] == tokens]
            with torch.no_grad():
                loss = float(model(input_ids=torch.tensor([tokens]), labels=torch.tensor([tokens])).loss)
            remaining = len(text) - start - 32
            skipped = 16 * min(remaining // 16, int(12.0 // loss)) if remaining > 0 else 0
            following = text[start + 32 + skipped : start + 32 + skipped + 33]
            if len(following) > 1:
                assert after[row] == following
                skips += skipped > 0
            else:
                assert after[row] in [other[:33] for other in texts], "another document, from its beginning"
    assert skips > 5
    assert load_file(final / "model.safetensors").keys()
    lines = log(tmp_path / "run")
    assert all(line["skipped_per_window"] % 4 == 0 and 0 < line["share_read"] <= 1 for line in lines)
    assert max(line["skipped_per_window"] for line in lines) >= 16


def test_a_resumed_run_reads_on_where_it_was(reading: Callable[..., Path], tmp_path: Path) -> None:
    path = reading(max_steps=6, save_steps=2, save_total_limit=5, learning_rate=1e-2)
    whole = run(path, "--output_dir", str(tmp_path / "whole"))
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "whole", broken)
    for name in ("final", "checkpoint-6"):
        shutil.rmtree(broken / name)
    resumed = run(path, "--output_dir", str(broken))
    assert log(broken) == log(tmp_path / "whole")
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    states = [json.loads((folder / "checkpoint-6" / "reader-0.json").read_text()) for folder in (broken, whole.parent)]
    assert states[0] == states[1] and states[0]["skipped"] > 0
    with pytest.raises(ConfigError, match="holds another run: reading differ"):
        run(path, "--output_dir", str(broken), "--reading.rate", "8")


MEMORY = {"rate": 16, "threshold": 12.0, "memory": {"size": 48, "top_k": 40, "gate": True}}


def test_a_run_with_a_memory_resumes_and_accumulates(reading: Callable[..., Path], tmp_path: Path) -> None:
    """What rows remember is saved, belongs to the rows of a micro-batch, and is out of the way of evaluations."""
    evaluations = {"perplexity": {"data": "python-docs", "length": 32, "stride": 0, "max_windows": 3}}
    more = {"evaluations": evaluations, "evaluate_every": 3, "save_at": [2]}
    path = reading(reading=MEMORY, max_steps=6, save_steps=6, learning_rate=1e-3, **more)
    whole = run(path, "--output_dir", str(tmp_path / "whole"), "--per_device_train_batch_size", "2")
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "whole", broken)
    for name in ("final", "checkpoint-6"):
        shutil.rmtree(broken / name)
    assert (broken / "checkpoint-2" / "reader-0.memory").exists()
    resumed = run(path, "--output_dir", str(broken), "--per_device_train_batch_size", "2")
    assert log(broken) == log(tmp_path / "whole")
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert any(name.endswith("memory_gate") for name in load_file(whole / "model.safetensors"))
    run(path, "--output_dir", str(tmp_path / "at-once"), "--per_device_train_batch_size", "4")
    run(path, "--output_dir", str(tmp_path / "without"), "--reading.memory", "null")
    names = ("whole", "at-once", "without")
    losses = {name: [line["loss"] for line in log(tmp_path / name) if "loss" in line] for name in names}
    assert losses["at-once"] == pytest.approx(losses["whole"], rel=1e-3)
    assert losses["without"][0] == pytest.approx(losses["at-once"][0], rel=1e-6), "nothing is remembered yet"
    assert abs(losses["without"][1] - losses["at-once"][1]) > 1e-4
    with pytest.raises(ConfigError, match="size 0 must be at least 1 token"):
        run(reading(reading={"memory": {"size": 0}}))
    with pytest.raises(ConfigError, match="reading.memory.gate is trained with tuning 'full' only, not 'lora'"):
        run(reading(reading=MEMORY, tuning="lora"))


def test_rows_forget_where_a_document_begins(reading: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[bool]] = []
    forgotten: list[list[bool]] = []

    def noted(windows: Any, length: int, pad: int) -> Any:
        begun.append([window.fresh for window in windows])
        return collate(windows, length, pad)

    reset = Memory.reset
    monkeypatch.setattr("ctxext.reading.trainer.collate", noted)
    monkeypatch.setattr(Memory, "reset", lambda self, rows: (forgotten.append(list(rows)), reset(self, rows))[1])
    run(reading(reading=MEMORY, max_steps=12))
    assert forgotten == begun and any(map(any, begun[1:])) and not all(map(any, begun[1:]))


@pytest.mark.slow
def test_two_processes_read_what_their_rows_would_read(reading: Callable[..., Path], tmp_path: Path) -> None:
    """The rows of both processes together are those of one: the same documents, the same losses."""
    path = reading(max_steps=6, save_steps=3)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name, launcher in (("one", []), ("two", command)):
        own = [str(recipe_root() / "finetune.py"), "--config", str(path), "--output_dir", str(tmp_path / name)]
        backend = ["--ddp_backend", "gloo"] if launcher else []
        subprocess.run([sys.executable, *launcher, *own, *backend], check=True, env=environment, timeout=200)
    one, two = log(tmp_path / "one"), log(tmp_path / "two")
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in two], rel=1e-3)
    places = [
        json.loads((tmp_path / name / "checkpoint-6" / f"reader-{rank}.json").read_text())["places"]
        for name, rank in (("one", 0), ("two", 0), ("two", 1))
    ]
    assert places[0] == places[1] + places[2]


def test_only_the_questions_behind_documents_are_learned(reading: Callable[..., Path], tmp_path: Path) -> None:
    """Documents with a question each: far longer than a window, so that one window in eight asks."""
    rows = [{"text": f"document {n} " + "of much text " * 18, "ask": f" What? {n}"} for n in range(9)]
    data = tmp_path / "asked.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"data": str(data), "kind": "completion", "prompt_column": "text", "completion_column": "ask"}
    path = reading(data={"sources": [source]}, reading={"rate": 0}, max_steps=9, learning_rate=0.0)
    trainer, _ = finetune.prepare(["--config", str(path)])
    asked: list[list[int]] = []
    windows = DataServer.windows

    def noted(server: DataServer) -> Any:
        found = windows(server)
        asked.append([window.tokens.tolist() for window in found if window.counts])
        return found

    trainer.server.windows = noted.__get__(trainer.server)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert all((loss > 0) == bool(told) for loss, told in zip(losses, asked[::2], strict=True))
    assert 0 < sum(loss > 0 for loss in losses) < 9, "most steps have nothing to learn, and none stops the run"
    (step,) = [number for number, told in enumerate(asked[::2]) if told][:1]
    text = trainer.processing_class.decode(asked[::2][step][0])
    assert text.startswith(" What? ")
    with torch.no_grad():
        alone = [trainer.model(input_ids=(ids := torch.tensor([told])), labels=ids).loss for told in asked[::2][step]]
    counts = [len(told) - 1 for told in asked[::2][step]]
    wanted = sum(float(loss) * count for loss, count in zip(alone, counts, strict=True)) / sum(counts)
    assert losses[step] == pytest.approx(wanted, rel=1e-4)
    with pytest.raises(ConfigError, match="'stream' has no place for the questions"):
        run(reading(data={"sources": [source]}, reading={"scope": "stream"}))


def test_what_cannot_be_is_said_before_anything_is_loaded(reading: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"reading.scop is no key \(did you mean 'scope'\?\); allowed: rate"):
        run(reading(reading={"scop": "stream"}))
    with pytest.raises(ConfigError, match=r"reading: rate -1 must be 0.*'men' \(did you mean 'mean'\?\)"):
        run(reading(reading={"rate": -1, "pooling": "men"}))
    with pytest.raises(ConfigError, match="epochs are not known beforehand.*reading needs the loss of every token"):
        run(reading(epochs=1, memory="lean"))


def test_the_server_is_told_once_a_step(reading: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    advance = DataServer.advance
    monkeypatch.setattr(DataServer, "advance", lambda self, c: (told.append(len(c)), advance(self, c))[1])
    trainer, _ = finetune.prepare(["--config", str(reading(max_steps=3, per_device_train_batch_size=1))])
    metrics = trainer.train().metrics
    assert told == [4, 4, 4]
    assert 0 < trainer.state.log_history[-1]["share_waiting_for_data"] < 1 and metrics["train_runtime"] > 0
