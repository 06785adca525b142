"""`ctxext reproduce question-answering`: K in training and inference (arXiv 2405.13216, section 5), in small.

A model with a memory is tuned on documents with a planted fact and a question behind them, at every rate K_train, and
then asked about other documents at every rate K_infer, as the paper's figure 5. Every K_train is tuned and asked in a
process of its own and its result is one file, so an interrupted experiment goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ctxext.checkpoint.files import read_json, write_json
from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.evaluation.result import versions
from ctxext.reproduce.apart import run_apart
from ctxext.reproduce.pi import claim_folder, stage
from ctxext.reproduce.pi_claims import Claim
from ctxext.reproduce.pi_report import REPORT, TABLE, claims_table
from ctxext.training.recipe_files import recipe_root

TITLE = "Skipping in training and in answering, reproduced in small"


@dataclass(frozen=True)
class Settings:
    """What all models of an experiment share.

    Attributes:
        model: That is tuned; it finds a passkey within its window.
        window: L, tokens.
        rates: K; the paper's 0, 1000 and 10000 are 0, 2 and 20 windows of its 512, where documents have 46. Here they
            have 16, and K is 0, 1 and 4 windows.
        memory: Tokens remembered at every layer: 3 windows, as in the paper.
        length: Tokens of a document that is asked about; those of the tuning have half as many or more.
        repeats: Copies of the fact in a document.
        documents: To tune on.
        steps: Of tuning.
        rows: Windows of a step.
        learning_rate: Of tuning.
        depths: Places of the fact in the documents asked about.
        trials: Documents at each.
    """

    model: str = "tiny"
    window: int = 256
    rates: tuple[int, ...] = (0, 256, 1024)
    memory: int = 768
    length: int = 4096
    repeats: int = 4
    documents: int = 600
    steps: int = 150
    rows: int = 16
    learning_rate: float = 5e-4
    depths: int = 5
    trials: int = 8


Grid = dict[int, list[dict[str, Any]]]  # by K_train, a seed each


def run_grid(settings: Settings, seeds: Sequence[int], output: Path, jobs: int) -> Grid:
    """Tune and ask what is missing; return the results.

    Args:
        settings: Of the experiment.
        seeds: Of the tuning's data.
        output: The folder of results; taken up where it stopped.
        jobs: Models at once, each with its share of the cores.

    Raises:
        ValueError: If the folder holds something else, or a model's process fails; names its log.
    """
    claim_folder(output, json.loads(json.dumps(asdict(settings))))
    wanted = [(rate, seed) for seed in seeds for rate in settings.rates]
    missing = [(rate, seed) for rate, seed in wanted if not _result(output, rate, seed).exists()]
    shared = {"settings": asdict(settings), "output": str(output)}
    for seed in sorted({seed for _, seed in missing}):
        _plant(settings, seed, output)
    with stage(f"{len(missing)} models to tune and ask, {jobs} at once"):
        names = {f"K-{rate}-seed-{seed}": {"rate": rate, "seed": seed, **shared} for rate, seed in missing}
        run_apart("ctxext.reproduce.asking", names, output, jobs)
    grid: Grid = {}
    for rate, seed in wanted:
        grid.setdefault(rate, []).append(read_json(_result(output, rate, seed)))
    return grid


def _result(output: Path, rate: int, seed: int) -> Path:
    return output / "results" / f"K-{rate}-seed-{seed}.json"


def _plant(settings: Settings, seed: int, output: Path) -> Path:
    """Write the documents of a seed's tuning; return the file."""
    path = output / f"asked-{seed}.jsonl"
    if not path.exists():
        given = {
            "output": path,
            "model": settings.model,
            "documents": settings.documents,
            "length": settings.length,
            "repeats": settings.repeats,
            "seed": seed,
        }
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, str(recipe_root() / "plant_questions.py"), *words], check=True)
    return path


def recipe(settings: Settings, rate: int, seed: int, asked: Path, folder: Path) -> dict[str, Any]:
    """Return the config by which a model learns to answer."""
    import torch

    source = {"data": str(asked.absolute()), "kind": "completion"}
    return {
        "model": str(resolve_checkpoint(settings.model)),
        "length": settings.window,
        "batch_size": settings.rows,
        "per_device_train_batch_size": settings.rows,
        "learning_rate": settings.learning_rate,
        "max_steps": settings.steps,
        "use_cpu": not torch.cuda.is_available(),
        "seed": seed,
        "reading": {"rate": rate, "memory": {"size": settings.memory}},
        "data": {"sources": [{**source, "prompt_column": "document", "completion_column": "asked"}]},
        "loss_limit": 1e6,  # of a few questions a step, some are easy
        "save_strategy": "no",
        "output_dir": str(folder.absolute()),
    }


def ask(settings: Settings, loaded: Any, rate: int) -> dict[str, Any]:
    """Return what a model scores that skips by a rate: exact match, and the share of the documents that it read."""
    from ctxext.evaluation.base import Session, build
    from ctxext.evaluation.registry import load
    from ctxext.evaluation.runner import evaluate

    options = {
        "reader": "skip",
        "skip_rate": rate,
        "window": settings.window,
        "memory_size": settings.memory,
        "length": settings.length,
        "repeats": settings.repeats,
        "distractors": 0,
        "depths": settings.depths,
        "trials": settings.trials,
    }
    metrics = evaluate(build(load("question-answering"), options), Session(loaded.model, loaded.tokenizer, 1)).metrics
    return {name: metrics[name] for name in ("exact_match", "share_read", "seen", "answered_of_seen")}


def main(job: dict[str, Any]) -> None:
    """Tune a model at one rate, ask it at all, and write its result."""
    from ctxext.evaluation.loading import RunSettings, load

    settings, output = Settings(**{**job["settings"], "rates": tuple(job["settings"]["rates"])}), Path(job["output"])
    rate, seed = job["rate"], job["seed"]
    folder = output / "models" / f"K-{rate}-seed-{seed}"
    if not (folder / "final" / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "recipe.yaml"
        given = recipe(settings, rate, seed, _plant(settings, seed, output), folder)
        config.write_text(yaml.safe_dump(given, sort_keys=False), encoding="utf-8")
        subprocess.run([sys.executable, str(recipe_root() / "finetune.py"), "--config", str(config)], check=True)
    loaded = load(folder / "final", RunSettings(dtype="float32"))
    cells = {str(infer): ask(settings, loaded, infer) for infer in settings.rates}
    _result(output, rate, seed).parent.mkdir(exist_ok=True)
    write_json(_result(output, rate, seed), {"rate": rate, "seed": seed, "cells": cells})
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def check(grid: Grid, settings: Settings) -> list[Claim]:
    """Return the claims of section 5 with what was found; they were committed before the first full run."""
    far_reading = Claim("at a fixed K_train, K_infer of at least K_train is no worse than any smaller one")
    far_training = Claim("at a fixed K_infer, a larger K_train is no worse than a smaller one")
    both = Claim("the largest K in training and inference is best")
    largest = settings.rates[-1]
    for number, seed in enumerate(row["seed"] for row in grid[settings.rates[0]]):
        table = {rate: _scores(grid[rate][number]) for rate in settings.rates}
        for rate in settings.rates[1:]:
            far = min(value for infer, value in table[rate].items() if infer >= rate)
            near = max(value for infer, value in table[rate].items() if infer < rate)
            far_reading.add(f"K_train {rate}, seed {seed}", f"{far:.3f} against {near:.3f}", far >= near)
        for infer in settings.rates:
            column = [table[rate][infer] for rate in settings.rates]
            told = ", ".join(f"{value:.3f}" for value in column)
            far_training.add(f"K_infer {infer}, seed {seed}", told, column == sorted(column))
        best = max(value for row in table.values() for value in row.values())
        found = table[largest][largest]
        both.add(f"seed {seed}", f"{found:.3f}, the best {best:.3f}", found == best)
    return [far_reading, far_training, both]


def _scores(row: dict[str, Any]) -> dict[int, float]:
    return {int(infer): cell["exact_match"] for infer, cell in row["cells"].items()}


def write_report(grid: Grid, claims: Sequence[Claim], settings: Settings, output: Path) -> dict[str, Any]:
    """Write `report.md` and `report.json` into `output`; return what the latter holds."""
    told = (
        f"{settings.model}, {settings.steps} steps of {settings.rows} windows of {settings.window} tokens, "
        f"{settings.memory} remembered; {settings.depths * settings.trials} documents of {settings.length} tokens "
        f"with {settings.repeats} copies of the fact. Exact match (share of the document read), mean over seeds."
    )
    heads = " | ".join(f"K_infer = {infer}" for infer in settings.rates)
    lines = [
        f"# {TITLE}",
        "",
        *claims_table(claims),
        "",
        told,
        "",
        f"| | {heads} |",
        "|---|" + "---|" * len(settings.rates),
    ]
    for rate, rows in grid.items():
        cells = []
        for infer in settings.rates:
            scores = [row["cells"][str(infer)]["exact_match"] for row in rows]
            spread = f" ± {statistics.stdev(scores):.3f}" if len(scores) > 1 else ""
            read = statistics.fmean(row["cells"][str(infer)]["share_read"] for row in rows)
            cells.append(f"{statistics.fmean(scores):.3f}{spread} ({read:.2f})")
        lines.append(f"| K_train = {rate} | {' | '.join(cells)} |")
    (output / REPORT).write_text("\n".join(lines) + "\n", encoding="utf-8")
    answer = {
        "title": TITLE,
        "claims": [claim.to_json() for claim in claims],
        "grid": {str(rate): rows for rate, rows in grid.items()},
        "settings": asdict(settings),
        "versions": versions(),
        "pictures": [],
        "report": str(output / REPORT),
    }
    write_json(output / TABLE, answer)
    return answer


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
