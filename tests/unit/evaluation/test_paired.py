"""Paired differences against resamples that can be enumerated, known coverage, and hand-made cases."""

import itertools
import math

import numpy as np
import pytest
from test_compare import result

from ctxext.evaluation import paired
from ctxext.evaluation.paired import Scores, paired_difference, resampled_sums, scores_of, unlike_metric
from ctxext.evaluation.verdict import judge, parse_percentage, percent


def documents(**sums):
    return {name: {"nll": nll, "tokens": tokens} for name, (nll, tokens) in sums.items()}


def with_documents(**sums):
    loss = math.fsum(nll for nll, _ in sums.values()) / sum(tokens for _, tokens in sums.values())
    return result(metrics={"perplexity": math.exp(loss), "loss": loss}, details={"documents": documents(**sums)})


def losses(**sums):
    return Scores(metric="loss", items=sums, unit="documents", higher_is_better=False)


def test_two_documents_by_hand():
    # Drawn twice a: (12 - 10) / 5 = 0.4; twice b: (31 - 30) / 10 = 0.1; one of each: 3 / 15 = 0.2, twice as often.
    sums = resampled_sums(np.array([[2.0, 5.0], [1.0, 10.0]]))
    drawn, counts = np.unique((sums[:, 0] / sums[:, 1]).round(9), return_counts=True)
    assert drawn.tolist() == [0.1, 0.2, 0.4]
    assert (counts / len(sums)).tolist() == pytest.approx([0.25, 0.5, 0.25], abs=0.02)
    before, after = with_documents(a=(10, 5), b=(30, 10)), with_documents(a=(12, 5), b=(31, 10))
    perplexity, loss = map(paired_difference, scores_of(before), scores_of(after))
    assert (perplexity.metric, loss.metric, loss.count, loss.unit) == ("perplexity", "loss", 2, "documents")
    assert loss.difference == pytest.approx(3 / 15) and loss.interval == pytest.approx((0.1, 0.4))
    assert perplexity.difference == pytest.approx(math.exp(43 / 15) - math.exp(40 / 15))
    assert perplexity.change == pytest.approx(math.exp(0.2) - 1)
    assert perplexity.change_interval == pytest.approx((math.exp(0.1) - 1, math.exp(0.4) - 1))
    assert not perplexity.higher_is_better


def test_interval_equals_that_of_all_resamples():
    before = {"a": (9.0, 3), "b": (31.0, 10), "c": (14.0, 8), "d": (40.0, 11), "e": (2.0, 2)}
    after = {"a": (12.0, 3), "b": (30.0, 10), "c": (15.5, 8), "d": (44.0, 11), "e": (2.4, 2)}
    every = []
    for drawn in itertools.product(before, repeat=len(before)):
        tokens = sum(before[name][1] for name in drawn)
        old, new = (math.exp(sum(of[name][0] for name in drawn) / tokens) for of in (before, after))
        every.append((new - old, new / old - 1))
    every = np.array(every)
    first, other = (
        Scores(metric="perplexity", items=items, exponential=True, higher_is_better=False) for items in (before, after)
    )
    found = paired_difference(first, other, resamples=200_000)
    for column, interval in enumerate((found.interval, found.change_interval)):
        values = np.sort(every[:, column])
        # Few distinct values: the end must lie within half a percent of probability of the exact quantile.
        for chance, end in zip((0.025, 0.975), interval, strict=True):
            low, high = (values[int((chance + slack) * len(values))] for slack in (-0.005, 0.005))
            assert low <= end <= high


def test_interval_covers_the_truth_about_as_often_as_it_says():
    draw = np.random.default_rng(7)
    covered = 0
    for seed in range(300):
        tokens = draw.integers(200, 2000, 40).astype(float)
        hardness = draw.normal(2.0, 0.5, 40)
        shift = draw.normal(0.05, 0.1, 40)  # independent of the length: the true difference of the losses is 0.05
        names = [str(i) for i in range(40)]
        first = losses(**{n: (h * t, t) for n, h, t in zip(names, hardness, tokens, strict=True)})
        other = losses(**{n: ((h + s) * t, t) for n, h, s, t in zip(names, hardness, shift, tokens, strict=True)})
        low, high = paired_difference(first, other, resamples=600, seed=seed).interval
        covered += low <= 0.05 <= high
    assert 0.89 <= covered / 300 <= 0.98


def test_pairing_takes_out_what_documents_share():
    first = losses(**{str(i): (10.0 * i, 10 + i) for i in range(1, 30)})
    other = losses(**{name: (nll + 0.25 * tokens, tokens) for name, (nll, tokens) in first.items.items()})
    assert paired_difference(first, other).interval == pytest.approx((0.25, 0.25))


def test_draws_do_not_depend_on_how_many_fit_in_memory(monkeypatch):
    columns = np.random.default_rng(0).normal(size=(11, 3))
    whole = resampled_sums(columns, 100)
    monkeypatch.setattr(paired, "COUNTS_AT_ONCE", 70)
    assert np.allclose(resampled_sums(columns, 100), whole)
    assert not np.allclose(resampled_sums(columns, 100, seed=1), whole)


def test_one_document_has_no_interval():
    found = paired_difference(losses(a=(10.0, 5)), losses(a=(11.0, 5)))
    assert found.difference == pytest.approx(0.2) and found.interval is None and found.change_interval is None


def test_hits_by_distance_and_scores_by_item():
    distances = [{"k": 90, "hits": 1, "tried": 4}, {"k": 30, "hits": 4, "tried": 4}]
    passkey = result(metrics={"k_max": 90, "success": 5 / 8}, details={"distances": distances})
    (success,) = scores_of(passkey)
    assert success.items == {"k=90": (0.25, 1.0), "k=30": (1.0, 1.0)} and success.unit == "distances"
    assert unlike_metric(success, passkey) is None
    assert scores_of(result(metrics={"k_max": 90}, details={"distances": distances})) == []
    (flat,) = scores_of(result(metrics={"accuracy": 0.5}, details={"items": {"a": 1, "b": 0}}))
    assert (flat.metric, flat.items, flat.higher_is_better) == ("accuracy", {"a": (1.0, 1.0), "b": (0.0, 1.0)}, True)
    nested = result(metrics={"r1": 0.5, "r2": 0.1}, details={"items": {"r2": {"a": 0.1}, "r1": {"a": 0.5}}})
    assert [scores.metric for scores in scores_of(nested)] == ["r1", "r2"]
    assert scores_of(result()) == []


def test_no_change_relative_to_nothing():
    failed, works = (Scores(metric="success", items={"a": (hit, 1.0), "b": (0.0, 1.0)}) for hit in (0.0, 1.0))
    assert paired_difference(failed, works).change is None
    # Half of the resamples of `works` as the reference are zero too.
    assert paired_difference(works, failed).change == -1 and paired_difference(works, failed).change_interval is None


def test_what_cannot_be_paired():
    first = losses(a=(10.0, 5), b=(30.0, 10))
    with pytest.raises(ValueError, match="loss cannot be compared item by item: 2 documents were scored in one of"):
        paired_difference(first, losses(a=(10.0, 5), c=(30.0, 10)))
    with pytest.raises(ValueError, match="other numbers of tokens: another tokenizer"):
        paired_difference(first, losses(a=(10.0, 6), b=(30.0, 10)))
    changed = with_documents(a=(10, 5), b=(30, 10))
    changed.metrics["loss"] = 2.5
    said = [unlike_metric(scores, changed) for scores in scores_of(changed)]
    assert said[0] is None and said[1].startswith("its documents give a loss of 2.66667, not 2.5: another mean, or")


@pytest.mark.parametrize("sums", [{"nll": math.nan, "tokens": 3}, {"nll": 1.0, "tokens": -3}, {"nll": 1.0}, 7, None])
def test_damaged_scores(sums):
    with pytest.raises(ValueError, match="r.json is damaged"):
        scores_of(result(details={"documents": {"a": sums}}), "r.json")


@pytest.mark.parametrize(
    ("interval", "higher_is_better", "verdict"),
    [
        ((-0.01, 0.02), False, "holds"),
        ((0.019, 0.021), False, "undecided"),
        ((0.021, 0.03), False, "does not hold"),
        ((-0.02, 0.01), True, "holds"),
        ((-0.021, -0.019), True, "undecided"),
        ((-0.03, -0.021), True, "does not hold"),
        (None, True, "undecided"),
    ],
)
def test_verdicts(interval, higher_is_better, verdict):
    difference = {"metric": "m", "unit": "items", "change_interval": interval, "higher_is_better": higher_is_better}
    assert judge({**difference, "count": 10}, 0.02)[0] == verdict
    few, reason = judge({**difference, "count": 9}, 0.02)
    assert few == "undecided" and reason == "9 items are too few for an interval: score at least 10"


def test_percentages():
    assert parse_percentage(" 2 %") == 0.02 and parse_percentage("0.5%") == 0.005 and parse_percentage("0%") == 0
    for wrong in ("2", "-1%", "100%", "two%", "%"):
        with pytest.raises(ValueError, match=r"--no-worse-than .*: write a percentage from 0% to below 100%"):
            parse_percentage(wrong)
    assert [percent(value) for value in (0.01234, -0.1234, 1.234)] == ["+1.23%", "-12.3%", "+123%"]
