"""`ctxext reproduce alibi|sandwich|swap` on models of a few steps, and their claims on made-up curves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ctxext.recipes.pretrain import Organism
from ctxext.reproduce import scratch, scratch_claims
from ctxext.reproduce.pi_claims import Measured, Measurement
from ctxext.reproduce.scratch import Model, Settings, run_models
from ctxext.reproduce.scratch_claims import ALIBI_CHECKS, ALIBI_MODELS, SANDWICH_CHECKS, SANDWICH_MODELS, check
from ctxext.reproduce.scratch_report import write_report
from ctxext.reproduce.sinusoidal import SinusoidalLlamaConfig, sinusoids
from ctxext.reproduce.swap_claims import check_swaps

SMALL = Settings(
    window=16, steps=2, tokens_per_step=64, width=16, layers=1, heads=2, vocabulary=260, segments=6, bf16=False
)


@pytest.mark.slow
def test_a_model_is_trained_measured_reported_and_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Model("kerple_log", seed=3)]
    results = run_models(models, SMALL, tmp_path / "out", jobs=1)
    (row,) = results["kerple_log"]
    assert [int(length) for length in row["nonoverlapping"]] == [16, 32, 64, 128, 256]
    assert [int(length) for length in row["last_token"]] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert all(1 < value < 1000 for protocol in ("nonoverlapping", "sliding") for value in row[protocol].values())
    final = tmp_path / "out" / "models" / "kerple_log-seed-3" / "final"
    config = json.loads((final / "config.json").read_text())
    assert config["model_type"] == "ctxext_llama" and config["max_position_embeddings"] == 16
    weights = AutoModelForCausalLM.from_pretrained(final)
    assert weights.dtype == torch.bfloat16 and weights.model.score_bias.kernel.log_r1.dtype == torch.float32
    answer = write_report("small", results, [], SMALL, tmp_path / "out", ("last_token",))
    assert "| kerple_log | 1 |" in Path(answer["report"]).read_text() and Path(answer["pictures"][0]).exists()
    monkeypatch.setattr(scratch, "run_apart", lambda module, jobs, *rest: jobs and pytest.fail("trained again"))
    assert run_models(models, SMALL, tmp_path / "out", jobs=1) == results


def test_a_failed_model_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="windowed-seed-0 ended with exit code 1; its log is .*windowed-seed-0.txt"):
        run_models([Model("windowed")], SMALL, tmp_path, jobs=1)
    assert "method 'windowed' needs --window" in (tmp_path / "logs" / "windowed-seed-0.txt").read_text()
    with pytest.raises(ValueError, match="positions 'sinusodial' .did you mean 'sinusoidal'"):
        Organism(positions="sinusodial")


def test_sinusoids_and_the_model_that_adds_them() -> None:
    made = sinusoids(5, 4)
    assert made[3].tolist() == pytest.approx([math.sin(3), math.sin(0.03), math.cos(3), math.cos(0.03)])
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(SinusoidalLlamaConfig(**shape, vocab_size=30)).eval()
    ids = torch.full((1, 6), 7)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
        model.model.embed_tokens.weight.mul_(0)
        alone = model(input_ids=ids, use_cache=False).logits[0]
    assert not torch.allclose(logits[1], logits[5])  # the same token, told apart by its place
    assert not torch.allclose(alone[1], alone[5])
    with pytest.raises(ValueError, match="has no cache"):
        model(input_ids=ids, use_cache=True)


def curve(base: float, **at: float) -> dict[str, float]:
    return {**{str(16 << doubling): base for doubling in range(5)}, **{key[1:]: value for key, value in at.items()}}


def made_up(models: Any, change: Callable[[Model], dict[str, float]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for model in models:
        values = change(model)
        row = {"seed": model.seed, "nonoverlapping": values, "sliding": values, "last_token": values}
        found.setdefault(model.label, []).append(row)
    return found


def test_alibi_claims_tell_right_from_wrong() -> None:
    good = {
        "sinusoidal": curve(10, _32=11),
        "rotary": curve(10, _32=9, _64=11),
        "t5": curve(10, _32=9, _64=9, _128=11),
        "alibi": curve(10, _32=9.9),
        "sinusoidal L_tr x2": curve(12, _32=9.9),
    }
    claims = check(
        made_up(ALIBI_MODELS, lambda model: good[model.label]), 16, ALIBI_CHECKS, {"time": 0.9, "memory": 1}
    )
    assert [claim.holds for claim in claims] == [True, True, True, True, False]  # the memory of the last is not less
    bad = {**good, "alibi": curve(10, _32=10.5, _256=12)}
    claims = check(made_up(ALIBI_MODELS, lambda model: bad[model.label]), 16, ALIBI_CHECKS)
    assert [claim.holds for claim in claims] == [False, False, False, False]


def test_sandwich_claims_tell_right_from_wrong() -> None:
    def paper(model: Model) -> dict[str, float]:
        options = dict(model.options)
        if model.positions in ("sinusoidal", "rotary"):
            return curve(10, _64=20, _128=30, _256=40)
        if model.positions in ("t5", "kerple_log", "kerple_power"):
            return curve(9)
        if model.positions == "sandwich":
            return curve(10, _32=9.5, _64=9.4, _128=9.5, _256=9.6)
        breaks = options.get("slope_shift", 0) > 4 or options.get("shared_exponent", 0) > 4
        if (breaks or options.get("window", 0) > 90) and model.stretch == 1:
            return curve(10, _256=16)
        return curve(10)

    claims = check(made_up(SANDWICH_MODELS, paper), 16, SANDWICH_CHECKS)
    assert [claim.holds for claim in claims] == [True] * len(SANDWICH_CHECKS), [claim.to_json() for claim in claims]
    turned = check(made_up(SANDWICH_MODELS, lambda model: curve(10, _64=12, _256=13)), 16, SANDWICH_CHECKS)
    assert [claim.holds for claim in turned] == [False] * len(SANDWICH_CHECKS), [claim.to_json() for claim in turned]
    assert len({model.name for model in (*ALIBI_MODELS, *SANDWICH_MODELS)}) == len({*ALIBI_MODELS, *SANDWICH_MODELS})
    assert scratch_claims.KEPT == 1.05 and scratch_claims.BROKEN == 1.5  # committed before the first run


def test_swaps_are_judged_beside_linear() -> None:
    def row(method: str, near: float, far: float, found: float, step: int = 100) -> Measurement:
        values = {16: near, 64: far}
        common = {"factor": 4, "seed": 0, "corpus": "text", "step": step, "k_max": 64}
        return Measurement(method=method, perplexity=values, success=found, **common)  # type: ignore[arg-type]

    rows = [
        row("linear", 10, 9, 0.5),
        row("alibi", 10.1, 9.1, 0.5),
        row("t5", 10, 9.3, 0.5),
        row("sandwich", 9, 9, 0.4),
    ]
    claims = check_swaps(Measured(16, "text", rows))
    assert {claim.text.split()[0]: claim.holds for claim in claims} == {"alibi": True, "t5": False, "sandwich": False}
