"""Parts of an experiment in processes of their own, several at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def cores() -> int:
    """Return how many cores this process may use (`taskset` and batch systems give fewer than there are)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_apart(module: str, jobs: Mapping[str, Mapping[str, Any]], output: Path, parallel: int) -> None:
    """Run `python -m module JOB` for every job, and say on stderr what is done.

    Args:
        module: Reads its job as JSON from the command line, and writes its result itself.
        jobs: By name.
        output: Its folder `logs` gets what they print.
        parallel: Jobs at once, each with its share of the cores.

    Raises:
        ValueError: If a process fails; names its log.
    """
    threads = max(1, cores() // parallel)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    done = 0

    def run(name: str) -> None:
        nonlocal done
        log = output / "logs" / f"{name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", module, json.dumps(jobs[name])]
        with log.open("w", encoding="utf-8") as file:
            code = subprocess.run(command, stdout=file, stderr=file, env=environment).returncode
        if code:
            raise ValueError(f"{name} ended with exit code {code}; its log is {log}")
        done += 1
        print(f"- {done} of {len(jobs)}: {name}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(run, jobs))
