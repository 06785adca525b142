"""Break positions and effective lengths of made curves."""

import numpy as np
import pytest

from ctxext.analysis.breaking import band, breaking

EDGES = [0, 2, 4, 6, 8, 10]  # window 4: the reference is positions 2 and 3


def found(rows, edges=EDGES, window=4, threshold=0.5):
    return breaking(np.array(rows, dtype=float), edges, window, threshold)


def test_a_clean_break():
    rows = [[5, 2, 2.1, 4, 5], [6, 3, 3.2, 5.5, 6]]
    one = found(rows)
    assert (one.break_position, one.effective) == (6, 6)
    assert (one.inside, one.beyond) == (2.5, pytest.approx((2.1 + 4 + 5 + 3.2 + 5.5 + 6) / 6))
    np.testing.assert_allclose(one.excess.mean, [3, 0, 0.15, 2.25, 3])
    assert one.excess.low[3] == pytest.approx(2.0) and one.excess.high[3] == pytest.approx(2.5)


def test_never_broken_and_broken_at_once():
    assert (found([[5, 2, 2, 2, 2.4]] * 2).break_position, found([[5, 2, 2, 2, 2.4]] * 2).effective) == (None, 10)
    assert (found([[5, 2, 3, 4, 5]] * 2).break_position, found([[5, 2, 3, 4, 5]] * 2).effective) == (4, 4)


def test_a_bump_is_no_break_but_ends_the_effective_length():
    one = found([[5, 2, 3, 2, 4]] * 2)
    assert (one.break_position, one.effective) == (8, 4)
    assert found([[5, 2, 3, 2, 2]] * 2).break_position is None


def test_the_interval_decides():
    rows = [[5, 2, 2, 2, 2.0], [5, 2, 2, 2, 6.0], [5, 2, 2, 2, 2.0]]  # one bad document: mean 1.33 above
    one = found(rows)
    assert one.excess.mean[4] > 0.5 > one.excess.low[4] == 0
    assert one.break_position is None and one.effective == 10
    assert (found(rows[1:2]).break_position, found(rows[1:2]).effective) == (8, 8), "a single document has no interval"
    assert found(rows[1:2]).excess.low is None


def test_documents_are_compared_with_themselves():
    hard, easy = [9, 7, 7, 7, 7], [3, 1, 1, 1, 1]
    assert found([hard, easy]).break_position is None
    assert found([hard, easy]).excess.high.tolist()[2:] == [0, 0, 0]


def test_the_reference_weighs_positions():
    one = found([[9, 1, 5, 5]], edges=[0, 4, 5, 8, 10], window=8)
    assert (one.inside, one.beyond) == (4.0, 5.0), "position 4 at 1, positions 5 to 7 at 5"
    assert one.excess.mean[3] == 1.0


def test_bands_by_hand():
    made = band(np.array([[1.0, 4.0], [3.0, 4.0]]))
    assert made.mean.tolist() == [2.0, 4.0] and made.low.tolist() == [1.0, 4.0] and made.high.tolist() == [3.0, 4.0]
