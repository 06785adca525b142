"""`ctxext bench attention` measures what it says, on small settings."""

from __future__ import annotations

from ctxext.bench.attention import BIASES, bench_attention
from ctxext.bench.run import render_bench


def test_a_small_run_has_a_ratio_for_every_bias_and_setting() -> None:
    report = bench_attention(1, settings=[("float32", 16, 64)], memory_lengths=(64,))
    (row,) = report["time_ratios"].values()
    assert set(BIASES) < set(row) and row["plain"] == 1.0 and all(ratio > 0 for ratio in row.values())
    assert set(report["decode_ratios"]) == {"plain", *BIASES}
    assert report["mb_above_plain"]["64"]["plain"] == 0.0
    assert report["worst_fixed_ratio_from_4096"] is None  # nothing that long was measured
    assert report["worst_decode_ratio"] == max(report["decode_ratios"].values())
    assert "worst_decode_ratio" in render_bench([report])
