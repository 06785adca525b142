"""Cumulative gradients and receptive fields by hand, their intervals, and the verdict on made examples."""

import math

import numpy as np
import pytest

from ctxext.analysis import field
from ctxext.analysis.field import bootstrap, cumulative_gradient, empirical_receptive_field
from ctxext.analysis.verdict import perplexity_ratio, verdict


def test_cumulative_gradient_by_hand():
    curve = cumulative_gradient(np.array([[1.0, 0.0, 3.0, 6.0], [0.0, 0.0, 0.0, 2.0]]))
    assert curve.tolist() == [[0.6, 0.9, 0.9, 1.0], [1.0, 1.0, 1.0, 1.0]]
    wanted = {0.1: 1, 0.6: 1, 0.61: 2, 0.9: 2, 0.95: 4, 0.999: 4}
    assert {share: empirical_receptive_field(curve[0], share) for share in wanted} == wanted
    assert empirical_receptive_field(curve[0]) == 4, "0.99 by default"


def test_bootstrap_over_segments(monkeypatch):
    monkeypatch.setattr(field, "COLUMNS_AT_ONCE", 3)  # so that pieces are joined
    curves = cumulative_gradient(np.random.default_rng(0).exponential(size=(12, 10)))
    band, fields = bootstrap(curves, (0.5, 0.99))
    draws = np.random.default_rng(5).integers(0, 12, size=(4000, 12))
    means = curves[draws].mean(axis=1)
    np.testing.assert_allclose(band, np.quantile(means, [0.025, 0.975], axis=0), atol=0.02)
    own = (means < 0.5).sum(axis=1) + 1
    assert fields[0.5] == (np.quantile(own, 0.025), np.quantile(own, 0.975))
    assert fields[0.99] == (10, 10)
    assert bootstrap(curves[:1], (0.5,)) is None


def test_perplexity_ratio_by_hand():
    ratio, low, high = perplexity_ratio([4.0, 6.0], [2.0, 2.0], tokens=2)
    assert ratio == pytest.approx(math.exp(1.5))  # means of (4 - 2) / 2 and (6 - 2) / 2
    assert (low, high) == pytest.approx((math.exp(1), math.exp(2)))
    assert perplexity_ratio([3.0], [2.0], tokens=1) == (math.e, math.e, math.e)


def judged(erf, interval, ratio, train_length=512):
    low, high = ratio
    found = verdict(train_length, 2048, erf, interval, {"ratio": (low + high) / 2, "ratio_interval": [low, high]})
    return found["covered"], found["extrapolated"], found["agrees"]


def test_verdicts_of_the_papers_models():
    """Windows of 100 and 160 tokens with L_tr 512 (section 5.1, Table 1), and of 160 with L_tr 1024 (Table 2)."""
    assert judged(500, (490, 512), (0.98, 1.0)) == (True, True, True)
    assert judged(1024, (900, 1100), (1.3, 1.5)) == (False, False, True)
    assert judged(1024, (900, 1024), (0.99, 1.01), train_length=1024) == (True, True, True)


def test_verdicts_against_the_paper_and_undecided():
    assert judged(2000, (1900, 2048), (0.9, 0.95)) == (False, True, False)
    assert judged(500, (480, 530), (0.9, 0.95)) == (None, True, None)
    assert judged(500, (480, 500), (0.99, 1.03)) == (True, None, None)
    assert judged(500, None, (1.02, 1.02)) == (True, True, True), "2% is still at least the same"
    assert (
        "does not cover the ERF of 2000"
        in verdict(512, 2048, 2000, None, {"ratio": 1, "ratio_interval": [1, 1]})["words"]
    )


def test_nothing_to_judge():
    assert verdict(None, 2048, 5, None, None)["words"].endswith("give --train-length")
    within = verdict(2048, 2048, 5, None, None)
    assert within["covered"] is within["extrapolated"] is within["agrees"] is None
    assert "within its training length of 2048" in within["words"]
