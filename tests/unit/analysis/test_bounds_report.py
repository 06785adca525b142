"""`ctxext analyze score-bounds` on formulas: what each method does to the bounds, the files, and wrong calls."""

import json
import math
import sys

import numpy as np
import pytest
from helpers import expected

from ctxext import cli
from ctxext.analysis import bounds
from ctxext.analysis.bounds_report import UNSCALED, BoundsOptions, bounds_report, render_report, unseen_pairs


def run(monkeypatch, capsys, *arguments):
    """Call the command in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["ctxext", "analyze", "score-bounds", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return ended.value.code or 0, said.out, said.err


def rows_of(**options):
    return {row["name"]: row for row in bounds_report(BoundsOptions(**options))["bounds"]}


def test_the_unscaled_row_has_the_numbers_of_the_paper_and_those_that_hold():
    row = rows_of()[UNSCALED]
    assert 128 / row["interpolation"]["closed_form"] == pytest.approx(294.73, abs=0.005)
    assert 128 / row["interpolation"]["bound"] == pytest.approx(256.1, abs=0.05)
    assert row["interpolation"]["reached"] == pytest.approx(0.494, abs=5e-4)
    assert row["times_smaller"]["bound"] == pytest.approx(512, abs=0.5)
    assert row["times_smaller"]["closed_form"] == pytest.approx(2 * 294.73, abs=0.01)
    assert row["times_smaller"]["against_sum"] == pytest.approx(64 / (128 / 256.1), rel=1e-3)
    found = row["extrapolation"]
    assert (found["length"], found["reach"], found["min_at"], found["first_below_one"]) == (4096, 65536, 3643, 4861)
    assert found["min_ratio"] == pytest.approx(1.1159, abs=1e-4) and found["min_ratio_to_reach"] < 0.63


METHODS = ("linear", "ntk", "dynamic", "ntk_by_parts", "yarn", "longrope", "llama3", "theta")


def test_every_method_against_frequencies_computed_without_ctxext():
    given = {"rope_theta": 200000.0, "long_factor": tuple(1.0 + 0.5 * j for j in range(8))}
    rows = rows_of(head_dim=16, length=128, factor=4.0, methods=METHODS, given=given, reach=1000)
    assert list(rows) == [UNSCALED, *METHODS]
    for method in METHODS:
        frequencies, factor = expected(method, 10000.0, 16, 128, 512, seq_len=512)
        row = rows[method]
        assert row["logit_factor"] == pytest.approx(factor**2, rel=1e-6)
        assert row["interpolation"]["bound"] == pytest.approx(factor**2 * np.sum(frequencies**2) / 8, rel=1e-5)
        sums = np.abs(np.cumsum(np.exp(1j * np.outer(np.arange(513), frequencies)), axis=1)).sum(axis=1)
        assert row["extrapolation"]["min_ratio"] == pytest.approx(sums.min() / 16, rel=1e-3)
    closed = {name: row["interpolation"]["closed_form"] for name, row in rows.items()}
    assert closed["theta"] == pytest.approx(16 / (32 * math.log(200000)))
    assert closed["linear"] == pytest.approx(closed[UNSCALED] / 16)
    assert closed["yarn"] is None and closed["llama3"] is None
    assert rows["linear"]["interpolation"]["bound"] == pytest.approx(rows[UNSCALED]["interpolation"]["bound"] / 16)


def test_pairs_at_angles_that_training_never_reached():
    # Within 100 tokens the pairs make 15.9, 0.8 and 0.08 turns; four times further the last two go beyond.
    trained = np.array([1.0, 0.05, 0.005])
    assert unseen_pairs(trained, trained, length=400, window=100) == 2
    assert unseen_pairs(trained / 4, trained, length=400, window=100) == 0
    assert unseen_pairs(trained / np.array([1, 4, 2]), trained, length=400, window=100) == 1
    assert unseen_pairs(trained, trained, length=100, window=100) == 0
    rows = rows_of(methods=("linear", "yarn"), factor=8.0, reach=16384)
    assert rows[UNSCALED]["unseen_pairs"] > 0
    assert rows["linear"]["unseen_pairs"] == rows["yarn"]["unseen_pairs"] == 0


def test_the_folder_and_the_json_document(monkeypatch, capsys, tmp_path):
    output = tmp_path / "out"
    code, out, err = run(
        monkeypatch, capsys, "--head-dim", 32, "--theta", 1e4, "--length", 64, "--method", "pi", "--method", "yarn",
        "--factor", 4, "--beta-fast", 16, "--seed", 5, "--output", output, "--json",
    )  # fmt: skip
    assert code == 0, err
    answer = json.loads(out)
    written = json.loads((output / "score-bounds.json").read_text())
    assert {key: value for key, value in answer.items() if key != "written"} == written
    assert [row["name"] for row in written["bounds"]] == [UNSCALED, "linear", "yarn"]
    assert written["bounds"][0]["interpolation"]["reached"] == pytest.approx(0.180, abs=5e-4)
    assert (written["format"], written["fit"]["seed"]) == ("ctxext-score-bounds", 5)
    assert (written["extended_length"], written["method_options"]) == (256, {"beta_fast": 16.0})
    assert {"ctxext", "torch", "python"} <= set(written["versions"])
    for name in ("fit", "extrapolation", "counter-example"):
        assert (output / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    assert run(monkeypatch, capsys, "--length", 64, "--output", output)[0] == 2, "what is there is not replaced"
    code, out, _ = run(monkeypatch, capsys, "--length", 64)
    assert code == 0 and "294.73" in out and "256.1" in out and "0.494" in out


def test_the_text_of_a_report():
    text = render_report(bounds_report(BoundsOptions(head_dim=64, length=32, methods=("linear",), factor=2.0)))
    assert "head dim 64, theta 10000, trained at 32 tokens, read to 64" in text
    assert "does not hold: with all phases aligned" in text
    # ln b is so small that the closed form is large: 64 / (32 ln 1.1) = 21, and no more than 64 / 2 * 0.12 is reached.
    assert "is not exceeded here" in render_report(bounds_report(BoundsOptions(head_dim=64, theta=1.1, length=32)))
    assert text.count("linear") >= 2 and "below 1 from" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--head-dim", 127], ["--head-dim 127", "even"]),
        (["--head-dim", 0], ["--head-dim 0", "at least 2"]),
        (["--theta", 1], ["--theta 1", "above 1"]),
        (["--theta", "nan"], ["--theta nan", "finite"]),
        (["--length", 1], ["--length 1", "at least 2"]),
        (["--head-dim", 3, "--theta", 0.5], ["--head-dim 3", "--theta 0.5"]),
        (["--method", "yarn"], ["yarn", "--factor"]),
        (["--factor", 4], ["--factor 4", "--method"]),
        (["--method", "yarn", "--factor", 1], ["--factor 1", "above 1"]),
        (["--method", "theta", "--factor", 4], ["--rope-theta"]),
        (["--method", "longrope", "--factor", 4], ["--long-factor", "64 numbers"]),
        (["--method", "longrope", "--factor", 4, "--long-factor", "1,2"], ["long_factor", "64"]),
        (["--method", "yarm", "--factor", 4], ["unknown method 'yarm'", "yarn"]),
        (["--method", "alibi", "--factor", 4], ["attention bias"]),
        (["--method", "linear", "--factor", 4, "--beta-fast", 8], ["--beta-fast", "linear"]),
        (["--beta-fast", 8], ["--beta-fast", "without --method"]),
        (["--ridge", 0], ["--ridge 0"]),
        (["--seed", -1], ["--seed -1"]),
        (["--reach", 100], ["--reach 100", "4096"]),
        (["--queries", 4], ["--queries", "--checkpoint"]),
        (["--data", "sympy-source", "--dtype", "float32"], ["--data, --dtype", "--checkpoint"]),
        (["--force"], ["--force", "--output"]),
    ],
)
def test_wrong_calls(monkeypatch, capsys, arguments, words):
    length = [] if "--length" in arguments else ["--length", 2048]
    code, out, err = run(monkeypatch, capsys, *length, *arguments)
    assert (code, out) == (2, "") and "Traceback" not in err
    assert all(word in err for word in words), err


def test_a_call_that_fails_leaves_nothing_behind(monkeypatch, capsys, tmp_path):
    assert (
        run(monkeypatch, capsys, "--length", 64, "--method", "theta", "--factor", 2, "--output", tmp_path / "x")[0]
        == 2
    )
    assert list(tmp_path.iterdir()) == []


def test_bounds_of_frequencies_without_a_base():
    # A made set of two pairs: nothing in it needs b^(-2j/d).
    frequencies = np.array([0.3, 0.2])
    assert bounds.curvature_bound(frequencies, 0.2) == pytest.approx((0.09 + 0.04) * 0.2 * 0.8 / 2)
