"""The sweep on a tiny model: the ranking's order, its numbers against a forward of its own, and its errors."""

import json

import pytest
import torch

from ctxext.evaluation.loading import RunSettings, load
from ctxext.evaluation.render import sweep_text
from ctxext.evaluation.sweep import UNPATCHED, rank, run_sweep


@pytest.fixture
def long_text(tmp_path):
    (tmp_path / "a.txt").write_text("abc " * 40)
    (tmp_path / "b.txt").write_text("hello world, " * 30)
    return tmp_path


def test_a_sweep(byte_checkpoint, long_text):
    output = long_text / "out" / "sweep.json"
    ranking = run_sweep(
        byte_checkpoint(), 256, data=str(long_text), documents=1, settings=RunSettings(dtype="float32"), output=output
    )
    assert json.loads(output.read_text()) == ranking
    assert output.with_suffix(".png").exists()
    rows = {row["method"]: row for row in ranking["methods"]}
    assert {"linear", "ntk", "yarn", "dynamic", "ntk_by_parts", "llama3", UNPATCHED} <= set(rows)
    for name, reason in (("theta", "rope_theta"), ("longrope", "long_factor")):
        assert rows[name]["long_loss"] is None and reason in rows[name]["remark"].replace("-", "_")
    losses = [row["long_loss"] for row in ranking["methods"] if row["long_loss"] is not None]
    assert losses == sorted(losses) and len(losses) == 7
    assert all(row["long_loss"] is None for row in ranking["methods"][7:]), "what was skipped comes last"
    best = next(row["method"] for row in ranking["methods"] if row["method"] != UNPATCHED)
    assert ranking["best"] == best
    assert ranking["command"].endswith(f"--method {best} --length 256")
    assert ranking["original_window"] == 128 and ranking["long_range_tokens"] == 128


def test_the_numbers_are_those_of_a_patched_model(byte_checkpoint, long_text):
    from ctxext.positions.live import patch

    ranking = run_sweep(byte_checkpoint(), 256, data=str(long_text), documents=1, methods=["pi"])
    rows = {row["method"]: row for row in ranking["methods"]}
    loaded = load(byte_checkpoint(), RunSettings())
    ids = [256] + loaded.tokenizer((long_text / "b.txt").read_text(), add_special_tokens=False)["input_ids"][:256]

    def losses(model):
        with torch.no_grad():
            log = model(input_ids=torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
        return [-float(log[p, ids[p + 1]]) for p in range(256)]

    for name, model in ((UNPATCHED, loaded.model), ("linear", None)):
        each = losses(model or patch(loaded.model, method="linear", length=256))
        assert rows[name]["long_loss"] == pytest.approx(sum(each[128:]) / 128, rel=1e-4)
        assert rows[name]["window_loss"] == pytest.approx(sum(each[:128]) / 128, rel=1e-4)
    difference = rows["linear"]["window_loss"] - rows[UNPATCHED]["window_loss"]
    assert rows["linear"]["window_cost"] == pytest.approx(difference)


def test_ranking_by_hand():
    rows = [
        {"method": UNPATCHED, "long_loss": 9.0, "window_loss": 2.0, "window_cost": None},
        {"method": "skipped", "long_loss": None, "window_loss": None, "window_cost": None},
        {"method": "dear", "long_loss": 3.0, "window_loss": 2.5, "window_cost": None},
        {"method": "cheap", "long_loss": 3.0, "window_loss": 2.25, "window_cost": None},
        {"method": "best", "long_loss": 2.5, "window_loss": 4.0, "window_cost": None},
    ]
    ranked = rank(rows)
    assert [row["method"] for row in ranked] == ["best", "cheap", "dear", UNPATCHED, "skipped"]
    assert [row["window_cost"] for row in ranked] == [2.0, 0.25, 0.5, 0.0, None]


def test_short_documents_are_joined_and_it_is_said(byte_checkpoint, long_text):
    (long_text / "c.txt").write_text("xyz" * 60)
    ranking = run_sweep(byte_checkpoint(), 256, data=str(long_text), documents=2, methods=["ntk"])
    assert ranking["notes"] == ["1 sequences are whole documents, 1 are short documents joined"]


def test_what_cannot_be_swept(byte_checkpoint, long_text):
    folder, data = byte_checkpoint(), str(long_text)
    with pytest.raises(ValueError, match="--length 128 must be longer than the model's window of 128"):
        run_sweep(folder, 128, data=data)
    with pytest.raises(ValueError, match="gives 1 sequences of 256 tokens, fewer than --documents 5"):
        run_sweep(folder, 256, data=data, documents=5)
    with pytest.raises(ValueError, match="'yearn' .did you mean 'yarn'"):
        run_sweep(folder, 256, data=data, methods=["yearn"])
    with pytest.raises(ValueError, match="--documents 0"):
        run_sweep(folder, 256, data=data, documents=0)


def test_a_sweep_ends_with_advice(byte_checkpoint, long_text):
    ranking = run_sweep(byte_checkpoint(), 256, data=str(long_text), documents=1, methods=["pi", "alibi"])
    rows = {row["method"]: row for row in ranking["methods"]}
    assert rows["linear"]["long_losses"] == pytest.approx([rows["linear"]["long_loss"]])
    assert rows["alibi"]["long_loss"] is not None and rows["alibi"]["remark"] == "a bias must be trained first"
    assert "alibi" not in ranking["advice"]["must_be_trained"] and "t5" in ranking["advice"]["must_be_trained"]
    assert rows["linear"]["serving"] and rows[UNPATCHED]["serving"] is None
    assert "without training: " in sweep_text(ranking)
