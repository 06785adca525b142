"""Effective lengths and weighted means, against RULER's published row of GPT-4."""

import pytest
from result_maker import made_result

from ctxext.evaluation.effective import effective_length, protocol_but_length, scores_by_length, weighted_averages

# arXiv 2404.06654, table 3: GPT-4, claimed 128K, effective 64K, average 91.6, weighted 89.0 (inc) and 94.1 (dec).
GPT_4 = {4096: 96.6, 8192: 96.3, 16384: 95.2, 32768: 93.2, 65536: 87.0, 131072: 81.2}


def test_the_published_row():
    assert effective_length(GPT_4) == 65536
    rising, falling = weighted_averages(GPT_4)
    assert (round(rising, 1), round(falling, 1)) == (89.0, 94.1)
    assert round(sum(GPT_4.values()) / 6, 1) == 91.6


def test_effective_lengths_by_hand():
    assert effective_length({4: 90.0, 1: 90.0, 2: 80.0}) == 1, "recovering later does not count"
    assert effective_length({1: 85.6, 2: 99.0}) == 0, "the threshold must be exceeded"
    assert effective_length({2: 85.7, 1: 85.7}) == 2
    assert effective_length({1: 0.5, 2: 0.4}, threshold=0.45) == 1
    with pytest.raises(ValueError, match="needs the score of at least one length"):
        effective_length({})


def ruler(length, score, **changes):
    return made_result(
        **{
            "evaluation": "ruler",
            "protocol_id": f"ruler-v1:lengths={length},tasks=vt,samples=2",
            "details": {"score_by_length": {str(length): score}},
            **changes,
        }
    )


def test_results_at_several_lengths():
    both = ruler("1024+4096", 0.0, details={"score_by_length": {"4096": 70.0, "1024": 95.0}})
    assert scores_by_length([both, ruler(2048, 90.0), ruler(1024, 95.0)]) == {1024: 95.0, 2048: 90.0, 4096: 70.0}
    assert effective_length(scores_by_length([both, ruler(2048, 90.0)])) == 2048
    assert protocol_but_length("ruler-v1:lengths=1+2,tasks=vt,length=3") == "ruler-v1:tasks=vt"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol_id": "ruler-v1:lengths=9,tasks=vt,samples=3"}, "2 protocols, of which only the length may differ"),
        ({"checkpoint": {"name": "other", "hash": "h2"}}, "they are of 2 checkpoints: base, other"),
        ({"details": {}}, "a result of ruler has no score by length"),
        ({"details": {"score_by_length": {"1024": 1.0}}}, "two results score 95.0 and 1.0 at 1024 tokens"),
    ],
)
def test_results_that_do_not_belong_together(changes, message):
    with pytest.raises(ValueError, match=message):
        scores_by_length([ruler(1024, 95.0), ruler(9, 1.0, **changes)])
    with pytest.raises(ValueError, match="needs at least one result"):
        scores_by_length([])
