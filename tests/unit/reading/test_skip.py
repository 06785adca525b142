"""The skip policy against equation 1 worked out by hand and in exact fractions, and what must hold for any reading."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxext.reading.skip import SkipPolicy, log_probability_confidence


def test_equation_1_by_hand():
    policy = SkipPolicy(rate=256, threshold=6.0)
    assert policy.skip(1.7, 5000) == 256 * 3, "floor(6 / 1.7) = 3, floor(5000 / 256) = 19"
    assert policy.skip(0.1, 5000) == 256 * 19, "floor(6 / 0.1) = 60"
    assert policy.skip(6.1, 5000) == 0, "less sure than the threshold"
    assert policy.skip(6.0, 5000) == 256
    assert policy.skip(0.5, 255) == 0, "not one step remains"
    assert policy.skip(0.0, 1000) == 768 and policy.skip(5e-324, 1000) == 768
    assert policy.skip(1.0, 0) == policy.skip(1.0, -3) == 0
    assert SkipPolicy(rate=0).skip(0.001, 10**9) == 0, "sequential"
    assert SkipPolicy(rate=1, threshold=0.0).skip(0.5, 100) == 0


@given(
    rate=st.integers(0, 10**6),
    threshold=st.floats(0, 1e3),
    confidence=st.floats(0, 1e4),
    remaining=st.integers(-(10**6), 10**9),
)
def test_a_skip_is_a_multiple_of_the_rate_within_what_remains(rate, threshold, confidence, remaining):
    skipped = SkipPolicy(rate=rate, threshold=threshold).skip(confidence, remaining)
    assert skipped >= 0 and skipped <= max(0, remaining)
    if rate == 0:
        assert skipped == 0
        return
    assert skipped % rate == 0
    steps = max(0, remaining) // rate
    if confidence > 0:  # in exact fractions; the quotient of floats may round up to a whole number
        exact, rounded = Fraction(threshold) / Fraction(confidence), threshold / confidence
        assert skipped // rate in {min(steps, math.floor(exact)), steps if rounded >= steps else math.floor(rounded)}
    else:
        assert skipped // rate == steps


def test_pooling_by_hand():
    losses = [4.0, 2.0, 1.0]
    assert SkipPolicy(pooling="mean").pool(losses) == pytest.approx(7 / 3)
    assert SkipPolicy(pooling="last").pool(losses) == 1.0
    # weights 1/4, 1/2, 1
    assert SkipPolicy(pooling="exponential-decay", decay=0.5).pool(losses) == pytest.approx((1 + 1 + 1) / 1.75)


@given(st.lists(st.floats(0, 50), min_size=1, max_size=40), st.floats(0.01, 0.99))
def test_poolings_lie_within_the_losses_and_agree_on_equal_ones(losses, decay):
    for pooling in ("mean", "exponential-decay", "last"):
        policy = SkipPolicy(pooling=pooling, decay=decay)
        assert min(losses) - 1e-9 <= policy.pool(losses) <= max(losses) + 1e-9
        assert policy.pool([losses[0]] * len(losses)) == pytest.approx(losses[0])


def test_what_cannot_be():
    with pytest.raises(ValueError, match="rate -1 must.*threshold nan must.*'men'.*did you mean.*decay 1.0 must"):
        SkipPolicy(rate=-1, threshold=math.nan, pooling="men", decay=1.0)
    for losses in ([], [1.0, math.nan], [1.0, -0.1]):
        with pytest.raises(ValueError, match="a window's losses are nats"):
            SkipPolicy().pool(losses)
    with pytest.raises(ValueError, match="a pooled loss of nan is not a number of nats"):
        SkipPolicy(rate=1).skip(math.nan, 5)


def test_confidence_without_labels():
    assert log_probability_confidence([-0.1, -2.0]) == [0.1, 2.0]
