"""`ctxext bench reading`: time and memory of reading a document, by its length and the skipping rate.

`python -m ctxext.bench.reading OPTIONS-AS-JSON` is one side in a process of its own: the tiny model reads one file.
The baseline is reading everything in order, K = 0.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ctxext.bench.measure import Sample, interleave, machine, summarize

READING: dict[str, Any] = {"checkpoint": "tiny", "window": 256, "alpha": 6.0, "dtype": "float32"}
LENGTHS = (10_000, 30_000, 100_000, 300_000, 1_000_000)  # tokens
RATES = (0, 1000, 10_000)  # K; where it is longer than the document, it is K = 0
MEMORY_TOLERANCE = 1.05  # the text itself lies in memory: 3 MB for a million tokens
_TOKENS_AT_ONCE = 4096


def bench_reading(rounds: int, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Compare skipping with reading everything, and long documents with short ones.

    Args:
        rounds: Runs of each side, in turn.
        lengths: Of the documents, tokens, ascending.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = _write_documents(lengths, Path(folder))
        options = {
            _side(rate, length): {**READING, "rate": rate, "file": str(files[length])}
            for length in lengths
            for rate in RATES
        }
        samples = interleave({side: side_command(given) for side, given in options.items()}, rounds, "reading")
    return {
        "bench": "reading",
        "what": "{checkpoint} model, windows of {window} tokens, alpha {alpha:g}, {dtype}, sympy-source".format(
            **READING
        ),
        "machine": machine(),
        "sides": {side: summarize(samples[side]) for side in samples},
        **_findings(samples, lengths),
        "targets": {"largest_peak_memory_ratio": MEMORY_TOLERANCE, "time_per_token_ratio": 1.1},
    }


def side_command(options: dict[str, Any]) -> list[str]:
    """Return the command of one side."""
    return [sys.executable, "-m", "ctxext.bench.reading", json.dumps(options)]


def _side(rate: int, length: int) -> str:
    return f"{length} tokens, K = {rate}"


def _write_documents(lengths: tuple[int, ...], folder: Path) -> dict[int, Path]:
    """Join documents of sympy-source until there are tokens enough; write the first of them, so many in each file."""
    from transformers import AutoTokenizer

    from ctxext.checkpoint.source import resolve_checkpoint
    from ctxext.data.corpora import open_corpus
    from ctxext.reading.text import LazyText

    tokenizer = AutoTokenizer.from_pretrained(resolve_checkpoint(str(READING["checkpoint"])))
    texts, characters = [], 0
    for document in open_corpus("sympy-source", split="all").documents():
        texts.append(document.text)
        characters += len(document.text)
        if characters > 8 * lengths[-1]:  # more than a token has
            break
    joined = LazyText("\n".join(texts), tokenizer)
    files, tokens = {}, 0
    for length in lengths:
        while tokens < length:
            tokens += len(joined.take(min(_TOKENS_AT_ONCE, length - tokens)))
        files[length] = folder / f"{length}.txt"
        files[length].write_text(joined.text[: joined.place], encoding="utf-8")
    return files


def _findings(samples: dict[str, list[Sample]], lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return what follows from the sides: seconds and shares by K and length, and ratios to K = 0 and 10k tokens."""
    made = {side: summarize(runs) for side, runs in samples.items()}
    found: dict[str, dict[str, Any]] = {"tokenizing_seconds": {}, "tokens_read": {}, "time_over_k0": {}}
    for rate in RATES:
        sides = {str(length): made[_side(rate, length)] for length in lengths}
        for name in ("tokenizing_seconds", "tokens_read"):
            found[name][f"K = {rate}"] = {length: side["answer"][name] for length, side in sides.items()}
        found["time_over_k0"][f"K = {rate}"] = {
            length: round(side["seconds"] / made[_side(0, int(length))]["seconds"], 3)
            for length, side in sides.items()
        }
    first, last = lengths[0], lengths[-1]
    peaks = {
        f"K = {rate}": round(made[_side(rate, last)]["peak_mb"] / made[_side(rate, first)]["peak_mb"], 3)
        for rate in RATES
    }
    each = [made[_side(0, length)]["seconds"] / length for length in (first, last)]
    return {
        **found,
        "peak_memory_ratios": peaks,
        "largest_peak_memory_ratio": max(peaks.values()),
        "time_per_token_ratio": round(each[1] / each[0], 3),
    }


def main(options: dict[str, Any]) -> None:
    """Run one side: read the file; print the seconds, tokenizing included, and what was read."""
    from ctxext.checkpoint.source import resolve_checkpoint
    from ctxext.evaluation.bos import bos_token
    from ctxext.evaluation.loading import RunSettings, load
    from ctxext.reading.reader import DocumentReader
    from ctxext.reading.skip import SkipPolicy

    loaded = load(resolve_checkpoint(options["checkpoint"]), RunSettings(dtype=options["dtype"]))
    policy = SkipPolicy(rate=options["rate"], threshold=options["alpha"])
    bos = bos_token(loaded.tokenizer, "auto")
    text = Path(options["file"]).read_text(encoding="utf-8")
    with DocumentReader(loaded.model, loaded.tokenizer, policy=policy, window=options["window"], bos=bos) as reader:
        sum(1 for _ in reader.read("warm up\n" * options["window"]))
        start = time.perf_counter()
        windows = sum(1 for _ in reader.read(text))
        seconds = time.perf_counter() - start
    answer = {
        "windows": windows,
        "tokens_read": reader.tokens_read,
        "tokens_skipped_about": reader.tokens_skipped,
        "tokenizing_seconds": round(reader.tokenizing_seconds, 3),
    }
    print(json.dumps({"seconds": seconds, "answer": answer}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
