"""A comparison people can trust: what differs in protocol or corpus is marked or refused."""

import dataclasses
import json
import math

import pytest
from typer.testing import CliRunner

from ctxext.cli import app
from ctxext.evaluation.base import Plot
from ctxext.evaluation.compare import compare_results
from ctxext.evaluation.plots import draw_curves, labels
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


def test_other_conditions_and_own_notes_are_footnotes(tmp_path):
    first = result(settings={"load_in_4bit": False}, versions={"torch": "2.11"}, notes=["all say so"])
    other = {"settings": {"load_in_4bit": True}, "versions": {"torch": "2.12"}, "attention": "eager", "device": "cuda"}
    changed = result(dtype="bfloat16", tokens_scored=9, notes=["all say so", "only this"], **other)
    third = result(settings=first.settings, versions=first.versions, notes=["all say so", "only this"])
    comparison = compare_results(saved(tmp_path, first, changed, third))
    assert comparison["footnotes"] == [
        "dtype: bfloat16, where the first has float32",
        "4-bit weights: True, where the first has False",
        "attention: eager, where the first has sdpa",
        "device: cuda, where the first has cpu",
        "torch: 2.12, where the first has 2.11",
        "tokens scored: 9, where the first has 10",
        "only this",
    ]
    assert [row["footnotes"] for row in comparison["results"]] == [[], [1, 2, 3, 4, 5, 6, 7], [7]]
    assert comparison["notes"] == ["all say so"]
    text = comparison_text(comparison)
    assert "[1] dtype: bfloat16, where the first has float32" in text and "note: all say so" in text


def perplexity(factor, count=12, **changes):
    """A result whose documents lose `factor` times as much, a little more or less by document."""
    documents = {f"{i}.py": {"nll": factor * (20.0 + i) + 0.01 * (-1) ** i, "tokens": 10} for i in range(count)}
    loss = sum(one["nll"] for one in documents.values()) / (10 * count)
    details = {"documents": documents}
    return result(metrics={"perplexity": math.exp(loss), "loss": loss}, details=details, **changes)


def test_paired_differences_are_shown_with_their_intervals(tmp_path):
    comparison = compare_results(saved(tmp_path, perplexity(1), perplexity(1.02), result()))
    assert [one["metric"] for one in comparison["results"][1]["paired"]] == ["perplexity", "loss"]
    loss = comparison["results"][1]["paired"][1]
    assert loss["difference"] == pytest.approx(0.02 * 2.55)
    assert loss["interval"][0] < loss["difference"] < loss["interval"][1]
    assert comparison["results"][2]["unpaired"] == "perplexity keeps no scores by document or item"
    assert comparison["bootstrap"]["resamples"] == 10_000 and comparison["bootstrap"]["seed"] == 0
    text = comparison_text(comparison)
    for part in (
        "difference to base (1)",
        "+0.0510",
        "12 documents",
        "10000 resamples, seed 0",
        "no interval for base",
    ):
        assert part in text


def test_numbers_that_their_documents_do_not_give_have_no_interval(tmp_path):
    other = perplexity(1.02)
    other.metrics["perplexity"] *= 0.9
    row = compare_results(saved(tmp_path, perplexity(1), other))["results"][1]
    assert row["paired"] == [] and "another mean, or a changed file" in row["unpaired"]


@pytest.mark.parametrize(
    ("factor", "count", "verdict", "code"),
    # The mean loss is 2.55, so that perplexity rises by exp(0.02 * 2.55) - 1 = 5.2%, then 10.7%, 6.1% and 0.2%.
    [
        (1.02, 12, "HOLDS", 0),
        (1.04, 12, "DOES NOT HOLD", 1),
        (1.0234, 12, "UNDECIDED", 1),
        (1.001, 4, "UNDECIDED", 1),
    ],
)
def test_no_worse_than_in_words_and_as_exit_code(tmp_path, factor, count, verdict, code):
    options = {"options": {"length": 8192}}
    paths = saved(tmp_path, perplexity(1, count, **options), perplexity(factor, count, **options))
    done = CliRunner().invoke(app, ["compare", *map(str, paths), "--no-worse-than", "6%"])
    assert done.exit_code == code
    assert f"base (2) is no worse than 6% at the original window of 8192 tokens: {verdict}\n" in done.output
    as_json = CliRunner().invoke(app, ["compare", *map(str, paths), "--no-worse-than", "6%", "--json"])
    check = json.loads(as_json.stdout)["check"]
    assert (as_json.exit_code, check["holds"], check["limit"]) == (code, code == 0, 0.06)
    if count < 10:
        assert "4 documents are too few for an interval" in check["verdicts"][0]["reason"]


def test_no_worse_than_tells_a_length_that_is_not_the_original_window(tmp_path):
    paths = saved(tmp_path, *(perplexity(1, options={"length": 16384}) for _ in range(2)))
    assert compare_results(paths, no_worse_than=0.0)["check"]["holds"]
    text = comparison_text(compare_results(paths, no_worse_than=0.0))
    assert "at 16384 tokens, BEYOND the original window of 8192: HOLDS" in text


def test_no_worse_than_needs_comparable_results_with_scores(tmp_path):
    other = perplexity(1, protocol_id="perplexity-v1:length=64,stride=16")
    with pytest.raises(ValueError, match="(?s)not every result can be compared .*stride=16"):
        compare_results(saved(tmp_path, perplexity(1), perplexity(1), other), no_worse_than=0.02)
    with pytest.raises(ValueError, match="(?s)needs scores by document or item.*1.json: perplexity keeps no scores"):
        compare_results(saved(tmp_path, perplexity(1), result()), no_worse_than=0.02)
    with pytest.raises(ValueError, match="give at least two"):
        compare_results(saved(tmp_path, perplexity(1)), no_worse_than=0.02)


def test_all_files_that_are_no_results_at_once(tmp_path):
    good, *wrong = saved(tmp_path, result()) + [tmp_path / "a.json", tmp_path / "b.json"]
    wrong[0].write_text("{")
    wrong[1].write_text("{}")
    with pytest.raises(ValueError, match="(?s)a.json is not a ctxext result.*b.json is not a ctxext result"):
        compare_results([good, *wrong])


def test_names_from_files_neither_leave_the_folder_nor_are_formulas(tmp_path):
    plot = {**dataclasses.asdict(CURVE), "id": "../../up", "title": r"$\frac", "x_label": "$x$ $", "y_label": "a$b"}
    odd = result(checkpoint={"name": r"_$\nope$", "original_window": 8192}, plots=[plot])
    pictures = compare_results(saved(tmp_path, odd, odd), tmp_path / "drawn")["pictures"]
    assert pictures == [str(tmp_path / "drawn" / "-up.png")] and (tmp_path / "drawn" / "-up.png").exists()


def test_labels_tell_adapters_and_equal_names_apart():
    tuned = result(settings={"adapter": "/runs/lora-1000"})
    assert labels([result(), tuned, result()]) == ["base (1)", "base + lora-1000", "base (2)"]


def test_an_unknown_kind_of_plot(tmp_path):
    with pytest.raises(ValueError, match="kind 'pie'; allowed: line, log-line, heat"):
        draw_curves([("a", {**dataclasses.asdict(CURVE), "kind": "pie"})], tmp_path / "x.png")
    with pytest.raises(ValueError, match="plot 'loss' of a cannot be drawn: 2 x and 1 y values"):
        draw_curves([("a", {**dataclasses.asdict(CURVE), "y": [1.0]})], tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_text_of_a_result(tmp_path):
    text = result_text(result(), tmp_path / "r.json")
    for part in ("perplexity of base", "8.0000", "documents too short 3", "a note", "protocol perplexity-v1"):
        assert part in text
