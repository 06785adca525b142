"""`ctxext bench perplexity` and `ctxext bench passkey`: the evaluations against the plain way of doing the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ctxext.bench.measure import Sample, interleave, machine, summarize

SLIDING = {"length": 2048, "stride": 256, "windows": 8, "batch": 4, "dtype": "float32"}
# lm-eval's rolling log-likelihood has no overlapping windows
SIDE_BY_SIDE = {**SLIDING, "stride": 2048}
# float32, for bfloat16 rounds a batch of cached suffixes otherwise than whole prompts; and SmolLM2's tokenizer adds no
# begin-of-sequence token: with one it fails the nearest distance, and k_max would be settled there.
PASSKEY = {"length": 512, "depths": 32, "trials": 10, "bos": "never", "batch": 10, "dtype": "float32"}


def bench_sliding(rounds: int) -> dict[str, Any]:
    """Compare overlapping windows with the loop that makes the logits of every position."""
    targets = {"speedup_plain": 1.15, "peak_memory_ratio_plain": 1 / 3, "relative_difference_plain": 1e-4}
    return _compare_perplexity("sliding", SLIDING, ("plain",), rounds, targets)


def bench_perplexity(rounds: int) -> dict[str, Any]:
    """Compare the evaluation, its windows side by side, with that loop and with lm-eval's `loglikelihood_rolling`."""
    targets = {"speedup_lm-eval": 1 / 1.05, "speedup_plain": 1.0}
    for side in ("lm-eval", "plain"):
        targets |= {f"peak_memory_ratio_{side}": 1 / 3, f"relative_difference_{side}": 1e-4}
    return _compare_perplexity("perplexity", SIDE_BY_SIDE, ("lm-eval", "plain"), rounds, targets)


def _compare_perplexity(
    bench: str, options: dict[str, Any], rivals: tuple[str, ...], rounds: int, targets: dict[str, float]
) -> dict[str, Any]:
    sides = tuple(f"perplexity-{side}" for side in (*rivals, "ctxext"))
    samples = _run(sides, {**options, "checkpoint": str(_smollm2())}, rounds, bench)
    ours = samples["perplexity-ctxext"]
    found: dict[str, Any] = {}
    for rival in rivals:
        theirs = samples[f"perplexity-{rival}"]
        found[f"speedup_{rival}"] = round(_median(theirs) / _median(ours), 3)
        found[f"peak_memory_ratio_{rival}"] = round(_peak(ours) / _peak(theirs), 3)
        values = [side[0].answer["perplexity"] for side in (ours, theirs)]
        found[f"relative_difference_{rival}"] = abs(values[0] / values[1] - 1)
    return {
        "bench": bench,
        "what": "SmolLM2-135M-Instruct, {windows} windows of {length} tokens, stride {stride}, {dtype}, "
        "batch {batch}, sdpa".format(**options),
        "machine": machine(),
        "sides": {side: summarize(samples[side]) for side in sides},
        **found,
        "targets": targets,
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
