"""`ctxext reproduce pi` from end to end on a byte-level model: what is trained, measured, kept and reported."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ctxext.evaluation.result import Result
from ctxext.reproduce.pi import Design, Experiment
from ctxext.reproduce.pi_report import write_report

SMALL = {"documents": 2, "depths": 2, "trials": 1, "tokens_per_step": 1024, "other_corpus": None}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents long enough for `read` windows."""
    draw = random.Random(5)
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = ["".join(draw.choice("abcdefgh \n") for _ in range(3000)) for _ in range(8)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(path)


def test_a_run_is_trained_measured_and_taken_up(
    byte_models: Callable[..., Path], texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    design = Design(methods=("linear",), seeds=((4, (7,)),), steps=(0, 1, 2), corpus=texts, **SMALL)
    output = tmp_path / "report"
    recipes = []
    run = subprocess.run

    def noted(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        recipes.append(yaml.safe_load(Path(command[-1]).read_text()))
        return run(command, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(subprocess, "run", noted)
    measured = Experiment(str(byte_models()), output, design).measure()
    assert [(recipe["length"], recipe["batch_size"], recipe["save_at"], recipe["seed"]) for recipe in recipes] == [
        (512, 2, [1, 2], 7)
    ]
    rows = measured.steps("linear", 4, 7)
    assert [sorted(row.perplexity) for row in rows] == [[64, 128, 256, 512], [128, 512], [64, 128, 256, 512]]
    assert rows[0].perplexity[512] != rows[2].perplexity[512]
    results = output / "results" / "linear-x4-seed7-texts.jsonl"
    tuned = Result.load(results / "step-2-perplexity-512.json")
    assert tuned.checkpoint["rope"]["rope_type"] == "linear" and tuned.options["stride"] == 128
    windows = [Result.load(results / f"step-2-perplexity-{window}.json") for window in (64, 128, 256, 512)]
    assert len({result.tokens_scored for result in windows}) == 1
    assert not (output / "runs" / "linear-x4-seed7-texts.jsonl").exists()

    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a finished run was trained again"))
    shutil.rmtree(results)  # a finished run is one small file, which can be published and taken up elsewhere
    shutil.rmtree(output / "start")
    again = Experiment(str(byte_models()), output, design).measure()
    assert again.rows == measured.rows
    Experiment(str(byte_models()), output, Design(**{**vars(design), "methods": ("ntk",)}))  # it may grow
    monkeypatch.undo()
    answer = write_report(again, "small", output, 1.0, bf16=False)
    text = Path(answer["report"]).read_text()
    assert (
        f"| linear | 2 | 7 | {rows[2].perplexity[64]:.2f} |" in text
        and "Not decided by a run of this size: before tuning" in text
    )
    assert all(Path(picture).stat().st_size > 10_000 for picture in answer["pictures"]) and answer["pictures"]
    with pytest.raises(ValueError, match="holds another experiment: learning_rate differ"):
        Experiment(str(byte_models()), output, Design(**{**vars(design), "learning_rate": 1e-3}))


def test_direct_changes_the_window_alone(byte_models: Callable[..., Path], texts: str, tmp_path: Path) -> None:
    design = Design(methods=("direct",), seeds=((4, (0,)),), steps=(0,), corpus=texts, **SMALL)
    measured = Experiment(str(byte_models()), tmp_path / "report", design).measure()
    base = json.loads((byte_models() / "config.json").read_text())
    config = json.loads((tmp_path / "report" / "start" / "direct-x4" / "config.json").read_text())
    assert config == {**base, "max_position_embeddings": 512}
    assert [row.step for row in measured.steps("direct", 4, 0)] == [0]


def test_what_cannot_be_run_is_refused(byte_models: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="unknown method .linaer.*did you mean .linear.*; there is no seed: give at least 1"
    ):
        Design(methods=("linaer",), seeds=((4, ()),))
    with pytest.raises(ValueError, match="did you mean 'python-stdlib'"):
        Design(other_corpus="python-stdlb")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="no report of ctxext; choose another --output"):
        Experiment(str(byte_models()), tmp_path / "mine", Design())
