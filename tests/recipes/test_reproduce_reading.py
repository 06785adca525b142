"""`reproduce random-access`: its claims on made-up figures, and the whole chain on a model of one layer (slow)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.data.corpora import open_corpus
from ctxext.reproduce import reading
from ctxext.reproduce.reading import SHORT, Run, Settings, arms, run_all, start_folder
from ctxext.reproduce.reading_claims import check, wanted
from ctxext.reproduce.reading_report import write_report

SMALL = Settings(
    window=32,
    steps=8,
    tuning_steps=4,
    tokens_per_step=128,
    width=16,
    layers=1,
    heads=2,
    vocabulary=300,
    document=64,
    memory=48,
    documents=2,
    read=4,
    bf16=False,
)
# What the paper reports, or as good: every claim holds.
PAPER = {
    Run(read=False): 366.5,
    Run(start=SHORT, read=False): 831.31,
    Run(): 40.0,
    Run(rate=1): 39.0,
    Run(rate=64): 35.59,
    Run(rate=24960): 38.0,
    Run(rate=64, scope="stream"): 35.7,
    Run(rate=24960, scope="stream"): 41.0,
    Run(start=SHORT): 19.10,
    Run(start=SHORT, rate=64): 16.97,
    Run(rate=64, pooling="exponential-decay"): 35.6,
    Run(rate=64, pooling="last"): 35.8,
    Run(memory=True): 14.97,
    Run(rate=64, memory=True): 14.15,
}


def results(changes: dict[Run, float] | None = None, fewer: bool = False) -> dict[str, list[dict[str, Any]]]:
    steps = [(step, float(-step if fewer else step)) for step in range(1, 9)]
    return {
        run.label: [{"model": run.label, "seed": 0, "perplexity": value, **({"skips": steps} if run.rate else {})}]
        for run, value in {**PAPER, **(changes or {})}.items()
    }


def failing(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [claim.text for claim in check(found, Settings()) if not claim.holds]


def test_the_experiment_has_the_papers_models() -> None:
    assert set(arms(Settings())) == set(PAPER)
    assert len({run.name for run in wanted((0, 1), Settings())}) == 2 * len(PAPER) + 2
    assert [run.threshold for run in wanted((3, 4), Settings())[-2:]] == [3.0, 12.0]


def test_every_claim_holds_on_the_papers_figures_and_can_fail() -> None:
    assert failing(results()) == []
    assert len(failing({})) == len(check({}, Settings())), "nothing is decided without results"
    middle = Run(rate=64)
    for changes, words in (
        ({middle: 40.5}, "K = L/2 is below that with K = 0, 1 and 195 L"),
        ({middle: 39.5}, "K = L/2 is below that with K = 0, 1 and 195 L"),
        ({Run(read=False): 900.0}, "worse than random weights"),
        ({Run(start=SHORT): 16.0}, "tuned on long documents"),
        ({Run(start=SHORT, rate=64): 36.0}, "below every model trained"),
        ({Run(rate=64, pooling="last"): 36.4}, "perplexities within 1.02 times"),
        ({Run(memory=True): 14.0}, "with a memory: K = L/2"),
        ({Run(rate=64, memory=True): 35.6}, "is below without one"),
    ):
        assert any(words in text for text in failing(results(changes))), words
    assert [text for text in failing(results(fewer=True)) if "more tokens are skipped" in text]
    (grown,) = [claim for claim in check(results(), Settings()) if "more tokens are skipped" in claim.text]
    assert grown.found[0] == {"where": "K = 1 seed 0", "figure": "1.5 to 7.5 a window", "holds": True}


def test_the_report_has_every_model_and_the_picture_of_skips(tmp_path: Path) -> None:
    answer = write_report(results(), check(results(), Settings()), Settings(), tmp_path)
    text = Path(answer["report"]).read_text()
    assert "| random weights, K = 64 | 1 | 35.59 | 8 |" in text and "| random weights | 1 | 366.50 |  |" in text
    assert Path(answer["pictures"][0]).stat().st_size > 10_000 and "skips.png" in text


def test_a_claim_needs_every_seed() -> None:
    found = results()
    for run, value in ((Run(read=False), 366.5), (Run(start=SHORT, read=False), 100.0)):
        found[run.label].append({"model": run.label, "seed": 1, "perplexity": value})
    (claim,) = [claim for claim in check(found, Settings()) if "worse than random" in claim.text]
    assert [row["holds"] for row in claim.found] == [True, False] and not claim.holds


@pytest.mark.slow
def test_models_are_trained_measured_reported_and_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    runs = [Run(read=False), Run(rate=16, threshold=20.0), Run(start=SHORT, rate=16, memory=True)]
    found = run_all(runs, SMALL, output, jobs=1)
    (row,) = found[Run(read=False).label]
    assert row["perplexity"] == pytest.approx(_perplexity(start_folder(runs[0].start, 0, SMALL, output)), rel=1e-5)
    (read,) = found[runs[1].label]
    assert [step for step, _ in read["skips"]] == list(range(1, 9)) and max(value for _, value in read["skips"]) >= 16
    assert 1 < read["perplexity"] < row["perplexity"] < 330
    answer = write_report(found, check(found, SMALL), SMALL, output)
    assert f"| {runs[2].label} | 1 | " in Path(answer["report"]).read_text()
    assert sorted(path.name for path in (output / "models").iterdir()) == [
        "random-weights-seed-0",
        "short-text-seed-0",
    ]
    monkeypatch.setattr(reading, "run_apart", lambda module, jobs, *rest: jobs and pytest.fail("trained again"))
    assert run_all(runs, SMALL, output, jobs=1) == found
    with pytest.raises(ValueError, match="holds another experiment: width differ"):
        run_all(runs, replace(SMALL, width=8), output, jobs=1)


def _perplexity(folder: Path) -> float:
    """Return the perplexity of the first windows of the long held-out documents, tokenized whole."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for document in open_corpus("sympy-source").documents():
        ids = tokenizer(document.text)["input_ids"]  # begins with the end mark
        if len(ids) > SMALL.window * SMALL.read + 1 and len(losses) < SMALL.documents * SMALL.read:
            for start in range(0, SMALL.window * SMALL.read, SMALL.window):
                part = torch.tensor([ids[start : start + SMALL.window + 1]])
                with torch.no_grad():
                    losses.append(float(model(input_ids=part, labels=part).loss))
    return math.exp(sum(losses) / len(losses))


def test_a_job_is_json() -> None:
    run = Run(start=SHORT, rate=3, memory=True, seed=2)
    assert Run(**json.loads(json.dumps(run.__dict__))) == run
    assert run.name == "short-text-K-3-memory-seed-2"
