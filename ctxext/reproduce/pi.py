"""`ctxext reproduce pi`: the experiments of Position Interpolation (arXiv 2306.15595, section 3) on a small model.

A model of window L is brought to L' = s L by every method, then fine-tuned on plain text by the recipe, in a process
of its own. Before tuning and at given steps the installed evaluations measure perplexity on held-out text by window,
and k_max. Every result is a file of its own, so an interrupted experiment goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ctxext.checkpoint.files import read_json, whole_folder, write_json
from ctxext.checkpoint.patch import patch_checkpoint
from ctxext.checkpoint.rope_config import read_rope
from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.data.sources import Source
from ctxext.data.tokens import check_source
from ctxext.evaluation.loading import fast_bfloat16
from ctxext.evaluation.result import versions
from ctxext.positions import get_method
from ctxext.reproduce.pi_claims import Measured, Measurement
from ctxext.training.recipe_files import recipe_root

DIRECT = "direct"  # the paper's baseline: only the declared window grows, no frequency changes
DESIGN_FILE = "design.json"
CHOOSES_RUNS = ("methods", "seeds", "other_corpus")  # no run depends on what else is run: an experiment may grow


@dataclass(frozen=True, kw_only=True)
class Design:
    """What an experiment consists of.

    Attributes:
        methods: Position methods, and `direct`.
        seeds: Seeds of the fine-tuning data's order, by factor s = L' / L.
        steps: Steps after which a run is measured; 0 is before the first.
        corpus: Fine-tuning (training split) and perplexity (held-out split).
        other_corpus: `linear` is tuned on this one too, at the first factor and seed; None for no such run.
        tokens_per_step: Of one optimizer step; at least L'.
        learning_rate: After 20 steps of warm-up; then constant, as in the paper.
        documents: Held-out documents for perplexity.
        read: Tokens read of each, in windows L.
        depths: Distances of the passkey evaluation.
        trials: Passkeys at each.
        options: Options of methods that need some, by method.
        bf16: Whether training computes in bfloat16, else in float32; by default where the machine is fast at it.
    """

    methods: tuple[str, ...] = (DIRECT, "linear", "ntk", "yarn")
    seeds: tuple[tuple[int, tuple[int, ...]], ...] = ((4, (0, 1, 2)), (8, (0,)))
    steps: tuple[int, ...] = (0, 25, 50, 100, 200, 500, 1000)
    corpus: str = "sympy-source"
    other_corpus: str | None = "python-stdlib"
    tokens_per_step: int = 4096
    learning_rate: float = 2e-4
    documents: int = 8
    read: int = 16
    depths: int = 32
    trials: int = 10
    options: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    bf16: bool = field(default_factory=fast_bfloat16)

    def __post_init__(self) -> None:
        problems = []
        for method in self.methods:
            if method != DIRECT:
                try:
                    get_method(method)
                except ValueError as error:
                    problems.append(f"{error}, direct")
        if not self.methods:
            problems.append("methods is empty: name one")
        if not any(seeds for _, seeds in self.seeds):
            problems.append("there is no seed: give at least 1")
        problems += [
            f"factor {factor} must be a power of two, 2 or more" for factor, _ in self.seeds if not _is_power(factor)
        ]
        if min(self.steps) < 0:
            problems.append(f"steps {min(self.steps)} must not be negative")
        for corpus in (self.corpus, *((self.other_corpus,) if self.other_corpus else ())):
            try:
                check_source(Source(data=corpus))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))

    def runs(self) -> list[Run]:
        """Return the fine-tuning runs; those that every claim needs come first."""
        found = [
            Run(method, factor, seed, self.corpus)
            for factor, seeds in self.seeds
            for seed in seeds
            for method in self.methods
        ]
        if self.other_corpus is not None and "linear" in self.methods:
            factor, seeds = self.seeds[0]
            found.insert(len(self.methods), Run("linear", factor, seeds[0], self.other_corpus))
        return found


def _is_power(factor: int) -> bool:
    return factor >= 2 and factor & (factor - 1) == 0


@dataclass(frozen=True)
class Run:
    """One fine-tuning run: method, factor, seed and corpus."""

    method: str
    factor: int
    seed: int
    corpus: str

    @property
    def name(self) -> str:
        """The run's folder."""
        corpus = re.sub(r"[^\w.-]+", "-", Path(self.corpus).name)
        return f"{self.method}-x{self.factor}-seed{self.seed}-{corpus}"


class Experiment:
    """An experiment in a folder.

    Args:
        model: A checkpoint whose positions are unscaled: a folder, a Hub id, or `tiny`.
        output: The folder of runs, results and report.
        design: What to run.

    Raises:
        ValueError: If the model is scaled already, or the folder holds something else.
    """

    def __init__(self, model: str, output: Path, design: Design) -> None:
        self.base, self.output, self.design = resolve_checkpoint(model), output, design
        rope = read_rope(read_json(self.base / "config.json"))
        if rope.window != rope.original_length:
            raise ValueError(
                f"{model} is extended already, from {rope.original_length} to {rope.window} tokens: give the original"
            )
        self.model, self.window = model, int(rope.window)
        shared = {name: value for name, value in dataclasses.asdict(design).items() if name not in CHOOSES_RUNS}
        claim_folder(output, {"model": model, **json.loads(json.dumps(shared))})

    def measure(self) -> Measured:
        """Run what is missing; return every measurement."""
        runs = self.design.runs()
        missing = [run for run in runs if not self._rows(run).exists()]
        for run in missing:  # a method that cannot be applied is found before hours are spent
            self._start(run)
        for number, run in enumerate(missing, 1):
            with stage(f"run {number} of {len(missing)}: {run.name}"):
                rows = self._measure_run(run)
                write_json(self._rows(run), {"measurements": [row.to_json() for row in rows], "versions": versions()})
        rows = [Measurement.from_json(row) for run in runs for row in read_json(self._rows(run))["measurements"]]
        return Measured(self.window, self.design.corpus, rows)

    def _rows(self, run: Run) -> Path:
        """Return the file of a finished run's measurements."""
        return self.output / "results" / f"{run.name}.json"

    def _measure_run(self, run: Run) -> list[Measurement]:
        start = self._start(run)
        rows = []
        if 0 in self.design.steps and run.corpus == self.design.corpus:
            rows.append(self._measure_model(run, 0, start, self.output / "results" / start.name))
        results, folder = self._rows(run).with_suffix(""), self.output / "runs" / run.name
        tuned = [step for step in self.design.steps if step]
        if tuned:
            self._tune(run, start, folder)
        for step in tuned:
            rows.append(self._measure_model(run, step, folder / f"checkpoint-{step}", results))
        shutil.rmtree(folder, ignore_errors=True)
        return rows

    def _start(self, run: Run) -> Path:
        """Return the patched model that a run starts from."""
        length = run.factor * self.window
        folder = self.output / "start" / f"{run.method}-x{run.factor}"
        if folder.exists():
            return folder
        if run.method != DIRECT:
            options = dict(dict(self.design.options).get(run.method, ()))
            patch_checkpoint(self.base, folder, method=run.method, length=length, link="symlink", **options)
            return folder
        with whole_folder(folder, force=False) as partial:
            shutil.copytree(self.base, partial, dirs_exist_ok=True)
            write_json(
                partial / "config.json",
                {**read_json(self.base / "config.json"), "max_position_embeddings": length},
            )
        return folder

    def recipe(self, run: Run, start: Path, folder: Path) -> dict[str, Any]:
        """Return the config of a run."""
        import torch

        length = run.factor * self.window
        return {
            "model": str(start.absolute()),
            "length": length,
            "batch_size": max(1, self.design.tokens_per_step // length),
            "per_device_train_batch_size": max(1, self.design.tokens_per_step // length),
            "learning_rate": self.design.learning_rate,
            "max_steps": max(self.design.steps),
            "bf16": self.design.bf16,
            "use_cpu": not torch.cuda.is_available(),
            "seed": run.seed,
            "data": {"boundaries": "joined", "sources": [{"data": run.corpus, "min_tokens": length}]},
            "save_at": [step for step in self.design.steps if step],
            "save_steps": max(self.design.steps),
            "save_total_limit": 2 * len(self.design.steps),
            "output_dir": str(folder.absolute()),
        }

    def _tune(self, run: Run, start: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "recipe.yaml"
        config.write_text(yaml.safe_dump(self.recipe(run, start, folder), sort_keys=False), encoding="utf-8")
        command = [sys.executable, str(recipe_root() / "finetune.py"), "--config", str(config)]
        with (folder / "output.txt").open("a", encoding="utf-8") as log:
            code = subprocess.run(command, stdout=log, stderr=log, env=os.environ).returncode
        if code:
            last = (folder / "output.txt").read_text(encoding="utf-8").strip().splitlines()[-3:]
            raise ValueError(f"{run.name} ended with exit code {code}; the end of {folder / 'output.txt'}: {last}")

    def _measure_model(self, run: Run, step: int, checkpoint: Path, results: Path) -> Measurement:
        """Evaluate one model, or read what was found before."""
        length, ends = run.factor * self.window, step in (0, max(self.design.steps))
        windows = [self.window, length]
        if ends:
            windows = [self.window // 2] + [self.window << doubling for doubling in range(run.factor.bit_length())]
        perplexity = {
            window: self._evaluate(checkpoint, results / f"step-{step}-perplexity-{window}.json", **self._text(window))
            for window in windows
        }
        passkey = self._evaluate(
            checkpoint,
            results / f"step-{step}-passkey-{length}.json",
            evaluation="passkey",
            **{"length": length, "depths": self.design.depths, "trials": self.design.trials, "kmax_only": not ends},
        )
        return Measurement(
            method=run.method,
            factor=run.factor,
            seed=run.seed,
            corpus=run.corpus,
            step=step,
            perplexity={window: metrics["perplexity"] for window, metrics in perplexity.items()},
            k_max=passkey["k_max"],
            success=passkey.get("success"),
        )

    def _text(self, window: int) -> dict[str, Any]:
        """Return the perplexity evaluation at a window: the same tokens of the same documents for every window."""
        read = self.design.read * self.window
        return {
            **{"evaluation": "perplexity", "data": self.design.corpus, "length": window, "stride": window // 4},
            **{"truncate": read, "min_tokens": read, "limit": self.design.documents},
        }

    def _evaluate(self, checkpoint: Path, path: Path, *, evaluation: str, **options: Any) -> dict[str, Any]:
        from ctxext.evaluation.base import build
        from ctxext.evaluation.loading import RunSettings
        from ctxext.evaluation.registry import load
        from ctxext.evaluation.result import Result
        from ctxext.evaluation.runner import run_evaluation

        if path.exists():
            return Result.load(path).metrics
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = RunSettings(dtype="float32", batch_size=8)
        return run_evaluation(build(load(evaluation), options), checkpoint, settings, path)[0].metrics


def claim_folder(output: Path, design: dict[str, Any]) -> None:
    """Make a report folder, or take up one that was begun with the same design.

    Raises:
        ValueError: If it holds something else.
    """
    path = output / DESIGN_FILE
    if output.exists() and not path.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is there and no report of ctxext; choose another --output")
    if path.exists() and (before := read_json(path)) != design:
        differing = sorted(key for key in {*before, *design} if before.get(key) != design.get(key))
        raise ValueError(
            f"{output} holds another experiment: {', '.join(differing)} differ; choose another --output, or remove it"
        )
    output.mkdir(parents=True, exist_ok=True)
    write_json(path, design)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Say on stderr what begins, and how long it took."""
    import time

    start = time.perf_counter()
    print(f"- {what} ...", file=sys.stderr, flush=True)
    yield
    print(f"  {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
