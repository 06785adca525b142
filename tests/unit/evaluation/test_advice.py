"""The advice of a sweep on made tables: one for each branch, and its figures worked out by hand."""

import pytest

from ctxext.checkpoint.files import read_json
from ctxext.evaluation.advice import UNPATCHED, advice_text, advise, memory_needs, serving_support

ALL = {"transformers 5": True, "vLLM": True, "llama.cpp": True}


def row(method, losses, window_loss=2.0, loaders=ALL):
    serving = {name: {"supported": supported, "problems": []} for name, supported in loaders.items()}
    return {
        "method": method,
        "long_loss": sum(losses) / len(losses),
        "long_losses": losses,
        "window_loss": window_loss,
        "window_cost": window_loss - 2.0,
        "serving": None if method == UNPATCHED else serving,
    }


def around(mean, swing=0.0):
    """Twelve losses of that mean, which swing in turn."""
    return [mean + (swing if index % 2 else -swing) for index in range(12)]


def test_a_clear_winner():
    rows = [row("yarn", around(2.0, 0.5)), row("ntk", around(2.5, 0.5)), row(UNPATCHED, around(6.0))]
    advice = advise(rows, 12, [])
    for case in ("without_training", "with_fine_tuning"):
        assert advice[case]["method"] == "yarn"
        assert not any("apart" in reason for reason in advice[case]["reasons"])
    ntk = advice["against_best"]["ntk"]
    assert ntk["difference"] == pytest.approx(0.5) and ntk["interval"] == pytest.approx((0.5, 0.5))
    assert ntk["worse"], "sequence by sequence 0.5 worse, although the losses themselves overlap"
    assert "not where it ends" in advice["with_fine_tuning"]["reasons"][-1]


def test_overlapping_intervals_are_said_and_loaders_decide():
    few = {**ALL, "vLLM": False}
    rows = [row("yarn", around(2.0), loaders=few), row("ntk", around(2.01, 0.5)), row("linear", around(3.0))]
    made = advise(rows, 12, [])["without_training"]
    assert made["method"] == "ntk"
    assert any("do not tell it apart from yarn" in reason for reason in made["reasons"])
    assert not any("linear" in reason for reason in made["reasons"])


def test_with_equal_loaders_the_window_decides():
    rows = [row("yarn", around(2.0), 2.3), row("ntk", around(2.01, 0.5), 2.1)]
    assert advise(rows, 12, [])["without_training"]["method"] == "ntk"


def test_too_few_sequences_decide_nothing():
    rows = [row("yarn", [2.0, 2.1], 2.2), row("ntk", [2.02, 2.12], 2.1), row("linear", [3.0, 3.1])]
    advice = advise(rows, 2, [])
    assert advice["without_training"]["method"] == "ntk"
    told = "2 sequences are too few to tell methods apart (at least 10: --documents), so yarn"
    assert any(reason.startswith(told) for reason in advice["without_training"]["reasons"])
    assert not advice["against_best"]["linear"]["worse"], "two sequences have an interval, but it decides nothing"


def test_one_sequence_has_no_interval():
    assert advise([row("yarn", [2.0]), row("ntk", [4.0])], 1, [])["against_best"]["ntk"]["interval"] is None


def test_a_model_that_needs_no_method():
    made = advise([row(UNPATCHED, around(1.9)), row("yarn", around(2.0))], 12, [])["without_training"]
    assert made["method"] is None and "leave the checkpoint as it is" in made["reasons"][0]


def test_frequencies_that_change_are_not_fine_tuned():
    rows = [row("dynamic", around(2.0)), row("yarn", around(2.5))]
    advice = advise(rows, 12, ["dynamic"])
    assert advice["without_training"]["method"] == "dynamic" and advice["with_fine_tuning"]["method"] == "yarn"
    assert any("dynamic left out" in reason for reason in advice["with_fine_tuning"]["reasons"])
    assert advise(rows[:1], 12, ["dynamic"])["with_fine_tuning"]["method"] is None


def test_nothing_tried():
    advice = advise([row(UNPATCHED, around(2.0))], 12, [])
    assert advice["without_training"]["method"] is None and advice["against_best"] == {}


def test_support_is_what_inspect_says(byte_checkpoint, tmp_path):
    from ctxext.checkpoint.inspect import inspect_checkpoint
    from ctxext.checkpoint.patch import patch_checkpoint

    config = read_json(byte_checkpoint() / "config.json")
    for method in ("yarn", "dynamic"):
        patch_checkpoint(byte_checkpoint(), tmp_path / method, method=method, length=256)
        told = {one["loader"]: one["supported"] for one in inspect_checkpoint(tmp_path / method)["loaders"]}
        made = serving_support(config, method, 256)
        assert {loader: reading["supported"] for loader, reading in made.items()} == told
    assert not all(told.values()) and serving_support(config, "longrope", 256) is None


def test_memory_by_hand(byte_checkpoint):
    needs = memory_needs(byte_checkpoint(), 1000, 4)
    assert needs["kv_cache"] == 2 * 2 * (2 * 16) * 1000 * 4, "keys and values, 2 layers, 2 heads of 16, 4 bytes"
    assert needs["full"]["peak"] > needs["full"]["activations"] > 0
    assert memory_needs(byte_checkpoint("mixtral"), 1000, 4) is None


def test_the_text_says_it_all():
    few = {**ALL, "llama.cpp": False}
    rows = [row("yarn", around(2.0), loaders=few), row("ntk", around(2.5)), row(UNPATCHED, around(6.0))]
    advice = {**advise(rows, 12, []), "must_be_trained": ["alibi"]}
    needs = {"kv_cache": 2e9, "lora": {"peak": 3e9, "activations": 1e9}, "full": {"peak": 5e9, "activations": 1.5e9}}
    text = advice_text({"advice": advice, "memory": needs, "methods": rows})
    for part in (
        "KV cache 2 GB",
        "3 GB (lora) or 5 GB (full), activations 1.5 GB",
        "must be trained first: alibi",
        "without training: yarn",
        "with fine-tuning: yarn",
        "not by llama.cpp",
    ):
        assert part in text
