"""Fine-tuning on a corpus that is tokenized as it is read: resuming, processes, and what is refused."""

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
import zstandard

from ctxext.recipes import finetune
from ctxext.training.config_file import ConfigError
from ctxext.training.prepare import prepare_data
from ctxext.training.recipe_files import recipe_root

READING = {"rate": 16, "threshold": 12.0, "streaming": True, "shuffle_buffer": 7}


@pytest.fixture
def streaming(
    write_recipe: Callable[..., Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Return a function that writes a small recipe whose rows read windows of 32 tokens of a compressed corpus."""
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", False)  # which it tells a server
    path = tmp_path / "texts.jsonl.zst"
    path.write_bytes(zstandard.compress(corpus.read_bytes()))
    data = {"sources": [{"data": str(path), "min_tokens": 50}]}
    small = {"method": None, "length": 32, "reading": READING, "data": data, "save_steps": 2, "save_total_limit": 9}
    return lambda **changes: write_recipe(**{**small, **changes})


def run(path: Path, *words: str) -> Path:
    return finetune.finetune(["--config", str(path), *words])


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def kill_after(step: int, whole: Path, broken: Path) -> None:
    """Copy a run as it would be if it had been killed after a checkpoint."""
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "final")
    for folder in broken.glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)


def readers(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run / f"checkpoint-{step}").glob("reader-*.json"))]


def test_a_resumed_run_reads_on_where_it_was(
    streaming: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = streaming(max_steps=8, learning_rate=1e-2, data_seed=5)
    monkeypatch.setenv("CTXEXT_CACHE", str(tmp_path / "nothing"))
    whole = run(path, "--output_dir", str(tmp_path / "whole"))
    assert not (tmp_path / "nothing").exists(), "no tokens are kept"
    for step in (2, 6):
        broken = tmp_path / f"broken-{step}"
        kill_after(step, tmp_path / "whole", broken)
        resumed = run(path, "--output_dir", str(broken))
        assert log(broken) == log(tmp_path / "whole")
        assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        assert readers(broken, 8) == readers(tmp_path / "whole", 8)
    (state,) = readers(tmp_path / "whole", 8)
    assert state["skipped"] > 0 and len(state["documents"]["read"]) == 4
    assert state["documents"]["sources"][0]["at"]["kept"] > 4, "some rows read their second document"

    kill_after(6, tmp_path / "whole", broken := tmp_path / "changed")
    (file,) = tmp_path.glob("*.zst")
    os.utime(file, ns=(0, 0))
    with pytest.raises(ValueError, match=r"texts.jsonl.zst' has changed since this run began"):
        run(path, "--output_dir", str(broken))
    file.unlink()
    with pytest.raises(ConfigError, match="data.sources.0: no corpus and no file is called"):
        run(path, "--output_dir", str(broken))


def test_what_cannot_be_is_said_before_anything_is_loaded(streaming: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="streaming is no key"):
        run(streaming(reading=None, streaming=True))
    with pytest.raises(
        ConfigError, match="shuffle_buffer has no effect without streaming.*; corpus_tokens has no eff"
    ):
        run(streaming(reading={"shuffle_buffer": 9, "corpus_tokens": 9}))
    with pytest.raises(ConfigError, match="scope 'stream' needs the length of the stream, .*: state corpus_tokens"):
        run(streaming(reading={**READING, "scope": "stream"}))
    source = {"data": "c4-4k", "max_tokens": 9, "upsample_above": 5, "upsample_times": 2}
    with pytest.raises(
        ConfigError, match=r"data.cache has no effect.*data.sources.0: max_tokens and upsample_above and"
    ):
        run(streaming(data={"sources": [source], "cache": "tokens"}))
    with pytest.raises(ConfigError, match="sources of kind text, or completion"):
        run(streaming(data={"sources": [{"data": "c4-4k", "kind": "chat"}]}))
    with pytest.raises(ConfigError, match="reading.streaming leaves nothing to prepare"):
        prepare_data(streaming(), [])
    with pytest.raises(ValueError, match="leaves no document to train on: 60 were read"):
        run(streaming(), "--data.sources.0.min_tokens", "5000")


def test_the_stream_scope_reads_a_stated_number_of_tokens(streaming: Callable[..., Path]) -> None:
    reading = {**READING, "scope": "stream", "corpus_tokens": 800}
    trainer, _ = finetune.prepare(["--config", str(streaming(reading=reading, max_steps=1))])
    skips = trainer.server.advance([1e-9] * 4)
    assert skips == [160] * 4, "|X| = 800 / 4 rows, of which floor((200 - 0 - 32) / 16) steps of 16 are skipped"


@pytest.mark.slow
def test_two_processes_read_other_documents_and_resume(streaming: Callable[..., Path], tmp_path: Path) -> None:
    path = streaming(max_steps=8, learning_rate=1e-2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

    def launch(output: Path) -> None:
        words = ["--config", str(path), "--output_dir", str(output), "--ddp_backend", "gloo"]
        subprocess.run(
            [*launcher, str(recipe_root() / "finetune.py"), *words], check=True, env=environment, timeout=600
        )

    launch(tmp_path / "whole")
    kill_after(4, tmp_path / "whole", tmp_path / "broken")
    launch(tmp_path / "broken")
    assert log(tmp_path / "broken") == log(tmp_path / "whole")
    assert readers(tmp_path / "broken", 8) == readers(tmp_path / "whole", 8)
    weights = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("broken", "whole")]
    assert weights[0] == weights[1]
    read = [
        {
            document[1]
            for step in (2, 4, 6, 8)
            for document in readers(tmp_path / "whole", step)[rank]["documents"]["read"].values()
        }
        for rank in (0, 1)
    ]
    assert not read[0] & read[1] and all(len(documents) > 2 for documents in read)
