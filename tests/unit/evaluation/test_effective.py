"""Effective lengths and weighted means, against RULER's published row of GPT-4."""

import pytest

from ctxext.evaluation.effective import effective_length, weighted_averages

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
