"""One evaluation over several processes, memory that runs out, and evaluations in a user's own file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ctxext.evaluation.base import Evaluation, Plan, Summary, Unit
from ctxext.evaluation.loading import RunSettings, load
from ctxext.evaluation.partial import Partial, left_behind, partial_path
from ctxext.evaluation.processes import Processes
from ctxext.evaluation.registry import load as load_evaluation
from ctxext.evaluation.result import Result
from ctxext.evaluation.runner import run_evaluation

SETTINGS = RunSettings(batch_size=4, dtype="float32")


def command(processes: int, *words: str) -> list[str]:
    # --multi_gpu is how accelerate is told to start several processes; without a GPU they work on the CPU
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no"]
    launcher += ["--dynamo_backend", "no", "--main_process_port", "0", "--num_processes", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else []), "-m", "ctxext", "eval", *words]


def start(processes: int, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    return subprocess.Popen(command(processes, *words), env=environment, stdout=pipe, stderr=pipe, text=True)


def evaluate(processes: int, output: Path, *words: str) -> tuple[dict[str, object], str]:
    """Run the command; return the result without its times, and what it printed."""
    running = start(processes, *words, "--output", str(output), "--dtype", "float32")
    stdout, stderr = running.communicate(timeout=300)
    assert running.returncode == 0, stderr
    result = Result.load(output).to_json()
    result.pop("wall_time")
    return result, stdout


@pytest.fixture
def perplexity(byte_checkpoint, tmp_path):
    """The words of an evaluation with many units."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    options = f"--data {text} --length 64 --stride 3 --batch-size 2".split()
    return ["perplexity", str(byte_checkpoint()), *options]


def test_two_processes_give_the_score_of_one(perplexity, tmp_path):
    alone, _ = evaluate(1, tmp_path / "alone.json", *perplexity)
    together, stdout = evaluate(2, tmp_path / "together.json", *perplexity)
    assert together == alone
    assert stdout.count("perplexity of") == 1, "one process speaks"
    assert not list(tmp_path.glob("*.partial.jsonl"))


@pytest.mark.slow
def test_three_processes_and_an_evaluation_that_ends_early(perplexity, byte_checkpoint, tmp_path):
    assert evaluate(3, tmp_path / "3.json", *perplexity)[0] == evaluate(1, tmp_path / "1.json", *perplexity)[0]
    passkey = ["passkey", str(byte_checkpoint()), "--length", "420", "--depths", "5", "--trials", "2", "--kmax-only"]
    found = [evaluate(count, tmp_path / f"passkey-{count}.json", *passkey)[0] for count in (1, 2, 3)]
    assert found[0] == found[1] == found[2] and found[0]["metrics"]["k_max"] == 0
    assert len(found[0]["details"]["distances"]) == 1, "what the others tried beyond the first failure is not told"


@pytest.mark.slow
@pytest.mark.parametrize("then", [1, 2])
def test_killed_processes_are_taken_up_by_any_number(then, perplexity, tmp_path):
    whole, _ = evaluate(1, tmp_path / "whole.json", *perplexity)
    running = start(2, *perplexity, "--output", str(tmp_path / "killed.json"), "--dtype", "float32")
    lines = [0]
    while not (len(lines) == 2 and min(lines) > 20):
        assert running.poll() is None, running.communicate()
        lines = [path.read_bytes().count(b"\n") for path in tmp_path.glob("killed.json.*.partial.jsonl")]
        time.sleep(0.01)
    family = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family)
    kept = sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("killed.json.*.partial.jsonl"))
    assert kept > 40 and not (tmp_path / "killed.json").exists()
    assert evaluate(then, tmp_path / "killed.json", *perplexity)[0] == whole
    assert not list(tmp_path.glob("*.partial.jsonl"))


def test_what_any_process_left_is_found(tmp_path):
    output, key = tmp_path / "r[1].json", "k" * 64
    with Partial(partial_path(output, key, 1), key) as partial:
        partial.add("a", {"x": 1}, 3.0)
    with Partial(partial_path(output, "l" * 64), "l" * 64) as partial:
        partial.add("b", {"x": 2}, 3.0)
    assert left_behind(output, key) == [partial_path(output, key, 1)]
    with Partial(partial_path(output, key), key, left_behind(output, key)) as partial:
        assert partial.scored == {"a": {"x": 1}} and partial.seconds == 0.0
    assert len(left_behind(output, key)) == 2


def test_a_device_map_is_for_one_process(byte_checkpoint):
    with pytest.raises(ValueError, match="--device-map spreads one model over all devices, and 2 processes each"):
        load(byte_checkpoint(), RunSettings(device_map="auto"), None, Processes(0, 2, 0))


@dataclass(frozen=True, kw_only=True)
class Hungry(Evaluation):
    """Runs out of memory when it reads more sequences at once than it should."""

    name = "hungry"
    description = "for this test"
    most = 1
    message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."

    def plan(self, session):
        return Plan(units=[Unit("a"), Unit("b")])

    def score(self, session, unit):
        if session.batch_size > self.most:
            raise RuntimeError(self.message)
        return {"batch": session.batch_size}

    def summarize(self, plan, scored):
        return Summary(metrics={"batches": [row["batch"] for row in scored]}, tokens_scored=1)


def test_out_of_memory_halves_the_batch_and_goes_on(byte_checkpoint, tmp_path, capsys):
    result, _ = run_evaluation(Hungry(), byte_checkpoint(), SETTINGS, tmp_path / "r.json")
    assert result.metrics == {"batches": [1, 1]} and result.settings["batch_size"] == 4
    assert result.notes == ["memory ran out at the batch size given; smaller batches were read"]
    assert "out of memory at a: going on with --batch-size 2\n" in capsys.readouterr().err


def test_one_sequence_too_large_is_an_error_that_says_what_to_do(byte_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(Hungry, "most", 0)
    with pytest.raises(ValueError, match=r"cpu has too little memory for one sequence \(a\): use a shorter --length"):
        run_evaluation(Hungry(), byte_checkpoint(), SETTINGS, tmp_path / "r.json")
    monkeypatch.setattr(Hungry, "message", "another fault")
    with pytest.raises(RuntimeError, match="another fault"):
        run_evaluation(Hungry(), byte_checkpoint(), SETTINGS, tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


OWN = '''
from __future__ import annotations
from dataclasses import dataclass
from ctxext.evaluation.base import Evaluation, Plan, Summary, Unit, option


@dataclass(frozen=True, kw_only=True)
class Letters(Evaluation):
    """Counts."""

    name = "letters"
    description = "counts the letters of a word"
    word: str = option("abc", "the word")

    def plan(self, session):
        return Plan(units=[Unit(letter) for letter in self.word])

    def score(self, session, unit):
        return {"one": 1}

    def summarize(self, plan, scored):
        return Summary(metrics={"letters": len(scored)}, tokens_scored=1)
'''


def test_an_evaluation_in_a_file_of_ones_own(byte_checkpoint, tmp_path):
    (tmp_path / "json.py").write_text(OWN)  # a name that must not stand in for the standard library's
    words = [f"{tmp_path / 'json.py'}:Letters", str(byte_checkpoint()), "--word", "ctxext", "--json"]
    result, stdout = evaluate(1, tmp_path / "r.json", *words)
    assert result["metrics"] == {"letters": 6} and json.loads(stdout)["evaluation"] == "letters"
    with pytest.raises(ValueError, match="names no evaluation of .*it defines: Letters; give .*:ClassName"):
        load_evaluation(f"{tmp_path / 'json.py'}:Words")
    with pytest.raises(ValueError, match="names no evaluation of"):
        load_evaluation(str(tmp_path / "json.py"))
    with pytest.raises(ValueError, match="there is no file .*none.py; give an evaluation of your own as path/to"):
        load_evaluation(f"{tmp_path / 'none.py'}:Letters")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match="broken.py cannot be run: ZeroDivisionError"):
        load_evaluation(f"{tmp_path / 'broken.py'}:Letters")
