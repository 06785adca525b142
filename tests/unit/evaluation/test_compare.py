"""A comparison people can trust: what differs in protocol or corpus is marked or refused."""

import dataclasses

import pytest

from ctxext.evaluation.base import Plot
from ctxext.evaluation.compare import compare_results
from ctxext.evaluation.plots import draw_curves
from ctxext.evaluation.render import comparison_text, result_text
from ctxext.evaluation.result import Result

CURVE = Plot(id="loss", title="t", x_label="tokens", y_label="nats", x=[100, 9000], y=[2.0, None], mark_window=True)
HEAT = Plot(id="key", title="t", x_label="tokens", y_label="rate", x=[5, 9], y=[0.5, 1.0], kind="heat")


def result(**changes):
    values = {
        "evaluation": "perplexity",
        "protocol_id": "perplexity-v1:length=64,stride=8",
        "metrics": {"perplexity": 8.0, "loss": 2.1},
        "options": {},
        "settings": {},
        "checkpoint": {"name": "base", "original_window": 8192},
        "corpus": {"hash": "c1"},
        "dtype": "float32",
        "attention": "sdpa",
        "device": "cpu",
        "tokens_scored": 10,
        "skipped": {"documents_too_short": 3},
        "notes": ["a note"],
        "seed": None,
        "versions": {},
        "wall_time": 1.0,
        "plots": [dataclasses.asdict(CURVE), dataclasses.asdict(HEAT)],
    }
    return Result(**{**values, **changes})


def saved(folder, *results):
    paths = [folder / f"{number}.json" for number in range(len(results))]
    for item, path in zip(results, paths, strict=True):
        item.save(path)
    return paths


def test_equal_protocols_side_by_side(tmp_path):
    better = result(checkpoint={"name": "yarn", "original_window": 8192}, metrics={"perplexity": 5.0, "loss": 1.6})
    comparison = compare_results(saved(tmp_path, result(), better), tmp_path / "drawn")
    assert all(row["comparable"] for row in comparison["results"])
    text = comparison_text(comparison)
    assert "yarn" in text and "5.0000" in text and "!" not in text
    assert [path.split("/")[-1] for path in comparison["pictures"]] == ["loss.png", "key.png"]
    for picture in comparison["pictures"]:
        with open(picture, "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_another_protocol_is_marked_with_what_differs(tmp_path):
    other = result(protocol_id="perplexity-v1:length=64,stride=16")
    comparison = compare_results(saved(tmp_path, result(), result(), other))
    assert [row["comparable"] for row in comparison["results"]] == [True, True, False]
    assert "another protocol: stride=16 (the first result: stride=8)" in comparison_text(comparison)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol_id": "perplexity-v2:length=64,stride=8"}, "another protocol"),
        ({"corpus": {"hash": "c2"}}, "another corpus"),
        ({"evaluation": "passkey"}, "another evaluation: passkey, not perplexity"),
    ],
)
def test_nothing_comparable_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=f"(?s)nothing here can be compared .*{message}"):
        compare_results(saved(tmp_path, result(), result(**changes)), tmp_path / "drawn")
    assert not (tmp_path / "drawn").exists()


def test_other_conditions_are_warned_of(tmp_path):
    comparison = compare_results(saved(tmp_path, result(), result(dtype="bfloat16")))
    assert comparison["warnings"] == ["dtype differs between comparable results: bfloat16, float32"]


def test_an_unknown_kind_of_plot(tmp_path):
    with pytest.raises(ValueError, match="kind 'pie'; allowed: line, log-line, heat"):
        draw_curves([("a", {**dataclasses.asdict(CURVE), "kind": "pie"})], tmp_path / "x.png")


def test_text_of_a_result(tmp_path):
    text = result_text(result(), tmp_path / "r.json")
    for part in ("perplexity of base", "8.0000", "documents too short 3", "a note", "protocol perplexity-v1"):
        assert part in text
