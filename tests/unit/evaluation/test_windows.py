"""Which window scores which token, worked out by hand and by brute force."""

import pytest

from ctxext.evaluation.windows import Window, evenly_spaced, plan_windows


def test_by_hand():
    # 12 tokens 0..11, windows of 4, stride 2. The first reads 0..3 and predicts 1..4; the next reads 2..5, predicts
    # 3..6 and scores what is new, 5 and 6; and so on. The last one reads 8..10 only, because 11 is the last target.
    assert plan_windows(12, 4, 2) == [
        Window(start=0, stop=4, first=1),
        Window(start=2, stop=6, first=5),
        Window(start=4, stop=8, first=7),
        Window(start=6, stop=10, first=9),
        Window(start=8, stop=11, first=11),
    ]
    # not overlapping: each reads four tokens and predicts the four after its first
    assert plan_windows(9, 4, 4) == [Window(0, 4, 1), Window(4, 8, 5)]
    assert plan_windows(3, 4, 2) == [Window(0, 2, 1)]
    assert plan_windows(1, 4, 2) == plan_windows(0, 4, 2) == []


@pytest.mark.parametrize("tokens", range(2, 40))
@pytest.mark.parametrize(("length", "stride"), [(8, 1), (8, 3), (8, 8), (5, 4), (1, 1)])
def test_every_token_once_with_the_most_context(tokens, length, stride):
    scored = {}
    for window in plan_windows(tokens, length, stride):
        assert window.read <= length and window.stop < tokens
        for target in range(window.first, window.stop + 1):
            assert target not in scored
            scored[target] = target - window.start
    assert sorted(scored) == list(range(1, tokens))
    for target, context in scored.items():
        contexts = [target - start for start in range(0, tokens, stride) if 1 <= target - start <= length]
        assert context == max(contexts)


def test_out_of_range():
    with pytest.raises(ValueError, match="stride 5 must lie between 1 and the length 4"):
        plan_windows(10, 4, 5)
    with pytest.raises(ValueError, match="length 0"):
        plan_windows(10, 0, 1)


def test_evenly_spaced():
    assert evenly_spaced(10, 4) == [0, 3, 6, 9]
    assert evenly_spaced(10, 1) == [5]
    assert evenly_spaced(3, 5) == evenly_spaced(3, 0) == [0, 1, 2]
    assert len(set(evenly_spaced(1000, 999))) == 999
