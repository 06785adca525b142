"""`ctxext bench reading` measures what it says, on short documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxext.bench import reading
from ctxext.bench.measure import Sample
from ctxext.bench.reading import bench_reading
from ctxext.bench.run import BENCHES, render_bench


def test_the_report_compares_with_reading_everything_and_with_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children are replaced: a token takes 1 ms, 2 ms in the long document, and a tenth of that where skipped."""

    def child(command: list[str]) -> Sample:
        options = json.loads(command[-1])
        length = int(Path(options["file"]).stem)
        slow = 2.0 if length == 300 else 1.0
        skips = 0 < options["rate"] <= length * 10
        answer = {"windows": 1, "tokens_read": length, "tokens_skipped_about": 0, "tokenizing_seconds": length / 1e4}
        seconds = length / 1000 * slow * (0.1 if skips else 1.0)
        return Sample(seconds=seconds, wall_seconds=1.0, peak_mb=100.0 + length / 100 * skips, answer=answer)

    monkeypatch.setattr("ctxext.bench.measure.run_once", child)
    monkeypatch.setattr(reading, "_write_documents", lambda lengths, folder: {n: folder / f"{n}.txt" for n in lengths})
    report = bench_reading(1, lengths=(100, 300))
    assert report["time_over_k0"]["K = 1000"] == {"100": 0.1, "300": 0.1}
    assert report["time_over_k0"]["K = 10000"] == {"100": 1.0, "300": 1.0}
    assert report["tokenizing_seconds"]["K = 0"] == {"100": 0.01, "300": 0.03}
    assert report["peak_memory_ratios"] == {"K = 0": 1.0, "K = 1000": round(103 / 101, 3), "K = 10000": 1.0}
    assert report["largest_peak_memory_ratio"] == round(103 / 101, 3) and report["time_per_token_ratio"] == 2.0
    assert "300 tokens, K = 1000" in render_bench([report]) and BENCHES["reading"] is bench_reading


def test_documents_have_exactly_so_many_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from ctxext.checkpoint.source import resolve_checkpoint

    files = reading._write_documents((50, 5000), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(resolve_checkpoint("tiny"))
    texts = {length: path.read_text() for length, path in files.items()}
    assert texts[5000].startswith(texts[50])
    for length, text in texts.items():
        assert len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) == length


@pytest.mark.slow
def test_a_small_run_in_processes_of_its_own() -> None:
    report = bench_reading(1, lengths=(600, 3000))
    sides = report["sides"]
    assert [side["answer"]["tokens_read"] for name, side in sides.items() if name.endswith("K = 0")] == [600, 3000]
    assert sides["3000 tokens, K = 1000"]["answer"]["tokens_read"] < 3000
    assert 0.8 < report["largest_peak_memory_ratio"] < 1.2
