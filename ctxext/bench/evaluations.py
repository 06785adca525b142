"""`ctxext bench perplexity` and `ctxext bench passkey`: the evaluations against the plain way of doing the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ctxext.bench.measure import Sample, interleave, machine, summarize

PERPLEXITY = {"length": 2048, "stride": 256, "windows": 8, "batch": 4, "dtype": "float32"}
# float32, for bfloat16 rounds a batch of cached suffixes otherwise than whole prompts; and SmolLM2's tokenizer adds no
# begin-of-sequence token: with one it fails the nearest distance, and k_max would be settled there.
PASSKEY = {"length": 512, "depths": 32, "trials": 10, "bos": "never", "batch": 10, "dtype": "float32"}


def bench_perplexity(rounds: int) -> dict[str, Any]:
    """Compare the evaluation with the loop that makes the logits of every position."""
    checkpoint = _smollm2()
    sides = ("perplexity-plain", "perplexity-ctxext")
    samples = _run(sides, {**PERPLEXITY, "checkpoint": str(checkpoint)}, rounds, "perplexity")
    plain, ours = (samples[side] for side in sides)
    values = [side[0].answer["perplexity"] for side in (plain, ours)]
    return {
        "bench": "perplexity",
        "what": "SmolLM2-135M-Instruct, {windows} windows of {length} tokens, stride {stride}, {dtype}, "
        "batch {batch}, sdpa".format(**PERPLEXITY),
        "machine": machine(),
        "sides": {side: summarize(samples[side]) for side in sides},
        "speedup": round(_median(plain) / _median(ours), 3),
        "peak_memory_ratio": round(_peak(ours) / _peak(plain), 3),
        "relative_difference": abs(values[1] / values[0] - 1),
        "targets": {"speedup": 1.15, "peak_memory_ratio": 1 / 3, "relative_difference": 1e-4},
    }


def bench_passkey(rounds: int) -> dict[str, Any]:
    """Compare the shared prefix with re-reading every prompt, on the full grid and for k_max alone."""
    checkpoint = _smollm2()
    sides = ("passkey-plain", "passkey-ctxext", "passkey-kmax")
    samples = _run(sides, {**PASSKEY, "checkpoint": str(checkpoint)}, rounds, "passkey")
    plain, ours, kmax = (samples[side] for side in sides)
    return {
        "bench": "passkey",
        "what": "SmolLM2-135M-Instruct, {length} tokens, {depths} depths x {trials} trials, bos {bos}, {dtype}, "
        "batch {batch}, sdpa".format(**PASSKEY),
        "machine": machine(),
        "sides": {side: summarize(samples[side]) for side in sides},
        "speedup": round(_median(plain) / _median(ours), 3),
        "speedup_kmax_only": round(_median(plain) / _median(kmax), 3),
        "depths_read_by_kmax_only": len(kmax[0].answer["hits"]),
        "same_answers": plain[0].answer["hits"] == ours[0].answer["hits"],
        "targets": {"speedup": 1.4, "speedup_kmax_only": 3.0, "same_answers": True},
    }


def _smollm2() -> Path:
    from ctxext.checkpoint.source import resolve_checkpoint
    from ctxext.reproduce.smollm2 import find_smollm2

    return resolve_checkpoint(find_smollm2())


def _run(sides: tuple[str, ...], options: dict[str, Any], rounds: int, title: str) -> dict[str, list[Sample]]:
    commands = {side: [sys.executable, "-m", "ctxext.bench.sides", side, json.dumps(options)] for side in sides}
    return interleave(commands, rounds, title)


def _median(samples: list[Sample]) -> float:
    return float(summarize(samples)["seconds"])


def _peak(samples: list[Sample]) -> float:
    return float(summarize(samples)["peak_mb"])
