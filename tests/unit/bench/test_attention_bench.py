"""`ctxext bench attention` measures what it says, on small settings."""

from __future__ import annotations

from typing import Any

import pytest

from ctxext.bench import attention
from ctxext.bench.attention import BIASES, bench_attention
from ctxext.bench.measure import Sample
from ctxext.bench.run import render_bench


def test_a_small_setting_has_a_ratio_for_every_bias() -> None:
    small = {"dtype": "float32", "width": 16, "length": 64, "rounds": 1}
    times = attention.time_sides(small)
    assert {*BIASES, "plain", "alibi, dense mask", "alibi, eager"} == set(times)
    assert times["plain"] == 1.0 and all(ratio > 0 for ratio in times.values())
    decode = attention.time_decoding(small)
    assert {*BIASES, "plain"} == set(decode) and decode["plain"] == 1.0


def test_the_report_names_the_worst_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children are replaced: what counts is which ratios count, and that memory is above plain attention."""
    by_length = {1024: 9.0, 4096: 1.1, 8192: 1.2}

    def child(command: list[str]) -> Sample:
        import json

        options: dict[str, Any] = json.loads(command[-1])
        side = options.get("side", "plain")
        peak = {"plain": 100.0, "alibi": 110.0, "kerple_log": 150.0}[side]
        ratio = by_length.get(options["length"], 1.0)
        answer = {"plain": 1.0, **{name: ratio + 0.1 * (name == "sandwich") for name in BIASES}}
        return Sample(seconds=1.0, wall_seconds=1.0, peak_mb=peak, answer=answer)

    monkeypatch.setattr(attention, "run_once", child)
    settings = [("float32", 64, length) for length in (1024, 4096, 8192)]
    report = bench_attention(1, settings=settings, memory_lengths=(4096,))
    assert report["worst_fixed_ratio_from_4096"] == pytest.approx(1.3)  # sandwich at 8192, not 1024
    assert report["worst_learned_ratio_from_4096"] == pytest.approx(1.2)
    assert report["mb_above_plain"] == {"4096": {"plain": 0.0, "alibi": 10.0, "kerple_log": 50.0}}
    assert "worst_fixed_ratio_from_4096" in render_bench([report])


@pytest.mark.slow
def test_a_small_run_in_processes_of_its_own() -> None:
    report = bench_attention(1, settings=[("float32", 16, 64)], memory_lengths=(64,))
    assert len(report["time_ratios"]) == 1 and report["worst_fixed_ratio_from_4096"] is None
