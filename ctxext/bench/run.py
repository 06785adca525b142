"""The benchmarks by name, and their reports as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ctxext.bench.attention import bench_attention
from ctxext.bench.evaluations import bench_passkey, bench_perplexity, bench_sliding
from ctxext.bench.patch import bench_patch
from ctxext.bench.reading import bench_reading
from ctxext.bench.train import bench_train
from ctxext.positions.base import nearest

BENCHES: dict[str, Callable[[int], dict[str, Any]]] = {
    "patch": bench_patch,
    "perplexity": bench_perplexity,
    "sliding": bench_sliding,
    "passkey": bench_passkey,
    "train": bench_train,
    "attention": bench_attention,
    "reading": bench_reading,
}


def run_bench(name: str, rounds: int) -> list[dict[str, Any]]:
    """Run one benchmark, or `all` of them; return their reports.

    Raises:
        ValueError: If there is none of that name, or `rounds` is not positive.
    """
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}; it must be at least 1")
    if name == "all":
        return [bench(rounds) for bench in BENCHES.values()]
    if name not in BENCHES:
        known = [*BENCHES, "all"]
        raise ValueError(f"no benchmark is called {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    return [BENCHES[name](rounds)]


def render_bench(reports: list[dict[str, Any]]) -> str:
    """Return the reports as text: medians by side, then the ratios beside their targets."""
    lines = []
    for report in reports:
        machine = report["machine"]
        lines.append(f"{report['bench']}: {report['what']}")
        lines.append(f"  {machine['cpu']}, {machine['cores']} cores, torch {machine['versions']['torch']}")
        for name, side in report["sides"].items():
            low, high = side["seconds_min_max"]
            lines.append(
                f"  {name:32} {side['seconds']:9.2f} s ({low:.2f} to {high:.2f}, {side['runs']} runs), "
                f"peak {side['peak_mb']:.0f} MB"
            )
        known = ("bench", "what", "machine", "sides", "targets")
        for key, value in report.items():
            if key not in known:
                target = report["targets"].get(key)
                lines.append(f"  {key:32} {json.dumps(value)}" + (f"  (target {target:.4g})" if target else ""))
    return "\n".join(lines)
