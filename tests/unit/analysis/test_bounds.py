"""Score bounds: the numbers of the issue, values by hand, and that what is called a bound is never exceeded."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxext.analysis import bounds


def plain(dim: int, theta: float = 10000.0) -> np.ndarray:
    return theta ** (-np.arange(0, dim, 2) / dim)


def deviation(products, frequencies, distance):
    """|a(s) - a_linear(s)|, term by term."""
    low = math.floor(distance)

    def score(s):
        return sum((h * np.exp(1j * s * f)).real for h, f in zip(products, frequencies, strict=True))

    t = distance - low
    return abs(score(distance) - (1 - t) * score(low) - t * score(low + 1))


def test_the_papers_closed_form_and_the_bound_that_holds():
    assert 128 / bounds.closed_form(128, 10000.0) == pytest.approx(294.73, abs=0.005)
    assert 128 / bounds.curvature_bound(plain(128)) == pytest.approx(256.1, abs=0.05)
    assert 2 * 128 / bounds.curvature_bound(plain(128)) == pytest.approx(512, abs=0.5)
    assert bounds.closed_form(128, 10000.0, 0.25) == pytest.approx(128 * 0.25 * 0.75 / (8 * math.log(10000)))


@pytest.mark.parametrize(("dim", "reached", "closed"), [(128, 0.494, 0.434), (32, 0.180, 0.109)])
def test_aligned_phases_exceed_the_closed_form(dim, reached, closed):
    frequencies = plain(dim)
    assert bounds.closed_form(dim, 10000.0) == pytest.approx(closed, abs=5e-4)
    assert bounds.aligned_deviation(frequencies) == pytest.approx(reached, abs=5e-4)
    for distance in (0.5, 1234.5):
        products = bounds.aligned_products(frequencies, distance)
        assert np.abs(products) == pytest.approx(1)
        assert deviation(products, frequencies, distance) == pytest.approx(reached, abs=5e-4)
        assert deviation(products, frequencies, distance) > bounds.closed_form(dim, 10000.0)


def test_b_over_d_is_above_1_to_4096_and_not_for_ever():
    ratio = bounds.partial_sums(plain(128), np.arange(22298.0)) / 128
    assert ratio[:4097].min() == pytest.approx(1.1159, abs=1e-4) and ratio[:4097].argmin() == 3643
    assert ratio[22297] == pytest.approx(0.63, abs=5e-3)
    assert int(np.flatnonzero(ratio < 1)[0]) == 4861


def test_partial_sums_by_hand():
    # d = 4: A_1 = exp(is), A_2 = exp(is) + exp(is/100), and |exp(ia) + exp(ib)| = 2 |cos((a - b) / 2)|.
    distances = np.array([0.0, 1.0, 2.5, 317.0])
    expected = 1 + 2 * np.abs(np.cos(distances * 0.99 / 2))
    assert bounds.partial_sums(np.array([1.0, 0.01]), distances) == pytest.approx(expected)
    assert bounds.partial_sums(plain(6), np.array([0.0])) == pytest.approx([1 + 2 + 3])


def test_one_pair_by_hand():
    # d = 2: theta = 1 whatever the base, a(s) = cos(s) for h = 1 and -sin(s) for h = i.
    frequencies, s = plain(2), np.array([0.0, 0.5, 3.0])
    assert bounds.attention_score(np.array([1 + 0j]), frequencies, s) == pytest.approx(np.cos(s))
    assert bounds.attention_score(np.array([1j]), frequencies, s) == pytest.approx(-np.sin(s))
    assert bounds.curvature_bound(frequencies) == pytest.approx(1 / 8)
    assert bounds.aligned_deviation(frequencies) == pytest.approx(1 - math.cos(0.5))
    assert bounds.partial_sums(frequencies, s) == pytest.approx([1, 1, 1])
    assert bounds.closed_form(2, math.e) == pytest.approx(1 / 16)


frequency_sets = st.lists(st.floats(1e-6, 3.0), min_size=1, max_size=24).map(np.array)


@settings(max_examples=150, deadline=None)
@given(frequency_sets, st.integers(0, 2**32 - 1), st.floats(0, 5000))
def test_no_score_exceeds_what_is_called_a_bound(frequencies, seed, distance):
    draw = np.random.default_rng(seed)
    products = draw.standard_normal(len(frequencies)) + 1j * draw.standard_normal(len(frequencies))
    largest, t = np.abs(products).max(), distance - math.floor(distance)
    found, slack = deviation(products, frequencies, distance), 1e-9 * len(frequencies) * largest
    assert found <= largest * bounds.aligned_deviation(frequencies, t) + slack
    assert bounds.aligned_deviation(frequencies, t) <= bounds.curvature_bound(frequencies, t) + 1e-9
    score = bounds.attention_score(products, frequencies, np.array([distance]))
    assert abs(score[0]) <= 2 * largest * bounds.partial_sums(frequencies, np.array([distance]))[0] + slack


@settings(max_examples=60, deadline=None)
@given(frequency_sets, st.floats(0.01, 0.99), st.integers(0, 3000))
def test_aligned_products_reach_the_largest_deviation_at_any_fraction(frequencies, fraction, whole):
    products = bounds.aligned_products(frequencies, whole + fraction)
    reached = bounds.aligned_deviation(frequencies, (whole + fraction) - whole)
    assert deviation(products, frequencies, whole + fraction) == pytest.approx(reached, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_dividing_all_frequencies_divides_the_bound_by_the_square(factor):
    frequencies = plain(64, 500000.0)
    divided = bounds.curvature_bound(frequencies / factor)
    assert divided == pytest.approx(bounds.curvature_bound(frequencies) / factor**2)


def test_the_fit_is_the_solution_of_its_normal_equations():
    frequencies = plain(8)
    [fit] = bounds.fit_scores(frequencies, 60, ridges=[0.5], seed=3)
    s = np.arange(60)
    features = np.stack([wave(s * f) for wave in (np.cos, np.sin) for f in frequencies], axis=1)
    expected = np.linalg.solve(features.T @ features + 0.5 * np.eye(8), features.T @ fit.scores)
    assert np.concatenate([fit.products.real, -fit.products.imag]) == pytest.approx(expected)
    assert fit.at(s[:5].astype(float)) == pytest.approx((features @ expected)[:5])


def test_the_fit_is_small_inside_and_explodes_beyond():
    fits = bounds.fit_scores(plain(128), 2048, ridges=[1.0, 1e-9], seed=0)
    tame, wild = (fit.summary() for fit in fits)
    assert wild["largest_inside"] < 1 and wild["largest_between"] < 1
    assert wild["largest_beyond"] > 8000 and wild["max_product"] > 1000
    assert tame["largest_beyond"] < 3, "what lies beyond depends on the regularization"
    assert fits[0].scores == pytest.approx(np.random.default_rng(0).standard_normal(2048))
