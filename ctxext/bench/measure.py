"""Run the sides of a benchmark in turn, each in a fresh process, and time them from outside and inside."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.evaluation.progress import progress_bar


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of one side.

    Attributes:
        seconds: What the side says its work took, start-up and loading left out; the whole process where it says none.
        wall_seconds: The whole process.
        peak_mb: Largest resident set of the process, in MB (10^6 bytes).
        answer: What the side computed, to be compared between sides.
    """

    seconds: float
    wall_seconds: float
    peak_mb: float
    answer: dict[str, Any]


def run_once(command: Sequence[str]) -> Sample:
    """Run a command; the last line of its output may be JSON with `seconds` and `answer`.

    Raises:
        ValueError: If it fails; carries the end of what it said.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        lines = output.read().decode().strip().splitlines()
        if process.returncode:
            told = errors.read().decode()[-2000:]
            raise ValueError(f"{' '.join(command)} failed with exit code {process.returncode}:\n{told}")
    said = json.loads(lines[-1]) if lines and lines[-1].startswith('{"seconds"') else {}
    scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in kilobytes elsewhere
    return Sample(
        seconds=said.get("seconds", wall),
        wall_seconds=wall,
        peak_mb=usage.ru_maxrss * scale / 1e6,
        answer=said.get("answer", {}),
    )


def interleave(sides: Mapping[str, Sequence[str]], rounds: int, title: str) -> dict[str, list[Sample]]:
    """Run every side once a round, in turn; return the samples by side."""
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    with progress_bar(f"bench {title}", rounds * len(sides)) as advance:
        for _ in range(rounds):
            for name, command in sides.items():
                samples[name].append(run_once(command))
                advance(1)
    return samples


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return medians and the spread of one side."""
    seconds = [sample.seconds for sample in samples]
    return {
        "seconds": round(statistics.median(seconds), 3),
        "seconds_min_max": [round(min(seconds), 3), round(max(seconds), 3)],
        "wall_seconds": round(statistics.median(sample.wall_seconds for sample in samples), 3),
        "peak_mb": round(statistics.median(sample.peak_mb for sample in samples), 1),
        "runs": len(samples),
        "answer": samples[0].answer,
    }


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    from ctxext.evaluation.result import versions

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "versions": versions()}
