"""`ctxext reproduce random-access`: the experiments of random-access reading (arXiv 2405.13216) on small models.

Models read long documents in windows of L tokens and skip by the policy while they train, from random weights or from
a model pretrained on shuffled chunks of L tokens; all are read without skipping. Every model is trained and measured
in a process of its own and its result is one file, so an interrupted experiment goes on where it stopped.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ctxext.checkpoint.files import read_json, write_json
from ctxext.evaluation.loading import fast_bfloat16
from ctxext.reproduce.apart import run_apart
from ctxext.reproduce.pi import claim_folder, stage
from ctxext.training.recipe_files import recipe_root

CORPUS = "sympy-source"
NOTHING, SHORT = "random weights", "short text"  # what training begins with
POOLINGS = ("mean", "exponential-decay", "last")


@dataclass(frozen=True)
class Settings:
    """What all models of an experiment share.

    Attributes:
        window: L(M), tokens.
        steps: Of training from random weights; also of pretraining on shuffled chunks.
        tuning_steps: Of fine-tuning what was pretrained on shuffled chunks.
        tokens_per_step: Of one step.
        width: Hidden size.
        layers: Decoder layers.
        heads: Query and key heads.
        vocabulary: Tokens.
        learning_rate: Of training, at its peak; cosine decay.
        tuning_rate: Of fine-tuning, at its peak; cosine decay.
        document: Tokens of the shortest document, as the paper's 4000 are 8 windows.
        memory: Tokens remembered at every layer, as the paper's 1536 are 3 windows. Queries read all of them: the
            paper does not state k.
        documents: Held-out documents.
        read: Windows of each that are read.
        bf16: Whether training computes in bfloat16.
    """

    window: int = 128
    steps: int = 1000
    tuning_steps: int = 250
    tokens_per_step: int = 4096
    width: int = 128
    layers: int = 4
    heads: int = 4
    vocabulary: int = 1024
    learning_rate: float = 2e-3
    tuning_rate: float = 5e-4
    document: int = 1024
    memory: int = 384
    documents: int = 24
    read: int = 32
    bf16: bool = field(default_factory=fast_bfloat16)

    @property
    def middle(self) -> int:
        """The paper's best skipping rate: half a window."""
        return self.window // 2

    @property
    def far(self) -> int:
        """The paper's largest: 100000 tokens are 195 windows of 512."""
        return 195 * self.window


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model.

    Attributes:
        start: What it was before: random weights, or a model of short text.
        read: Whether it is trained on long documents at all.
        rate: K in training, tokens.
        threshold: alpha, nats.
        pooling: Of the losses of a window.
        scope: X: a `document` or the `stream` of all.
        memory: Whether it is trained and read with a memory.
        seed: Of weights and data.
    """

    start: str = NOTHING
    read: bool = True
    rate: int = 0
    threshold: float = 6.0
    pooling: str = "mean"
    scope: str = "document"
    memory: bool = False
    seed: int = 0

    @property
    def label(self) -> str:
        """What tables call it, whatever its seed."""
        if not self.read:
            return self.start
        words = [f"{self.start}, K = {self.rate}"]
        words += [f"alpha = {self.threshold:g}"] if self.threshold != Run.threshold else []
        words += [self.pooling] if self.pooling != Run.pooling else []
        words += [self.scope] if self.scope != Run.scope else []
        words += ["memory"] if self.memory else []
        return ", ".join(words)

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.label} seed {self.seed}".replace(", ", "-").replace(" = ", "-").replace(" ", "-")


def arms(settings: Settings) -> list[Run]:
    """Return the models of one seed."""
    middle, far = settings.middle, settings.far
    return [
        Run(read=False),
        Run(start=SHORT, read=False),
        *(Run(rate=rate) for rate in (0, 1, middle, far)),
        *(Run(rate=rate, scope="stream") for rate in (middle, far)),
        *(Run(start=SHORT, rate=rate) for rate in (0, middle)),
        *(Run(rate=middle, pooling=pooling) for pooling in POOLINGS[1:]),
        *(Run(rate=rate, memory=True) for rate in (0, middle)),
    ]


def swept(settings: Settings) -> list[Run]:
    """Return the models by which alpha is swept, which the paper does not state; of the first seed only."""
    return [Run(rate=settings.middle, threshold=threshold) for threshold in (3.0, 12.0)]


Results = dict[str, list[dict[str, Any]]]  # by the model's label, a seed each


def run_all(runs: Sequence[Run], settings: Settings, output: Path, jobs: int) -> Results:
    """Train and measure what is missing; return the results by label, a seed each.

    Args:
        runs: The models.
        settings: What they share.
        output: The folder of results; taken up where it stopped.
        jobs: Models at once, each with its share of the cores.

    Raises:
        ValueError: If the folder holds something else, or a model's process fails; names its log.
    """
    claim_folder(output, json.loads(json.dumps(asdict(settings))))
    missing = [run for run in runs if not result_file(run, output).exists()]
    starts = dict.fromkeys((run.start, run.seed) for run in missing)
    shared = {"settings": asdict(settings), "output": str(output)}
    makes = {f"start {start} seed {seed}".replace(" ", "-"): {"start": start, "seed": seed} for start, seed in starts}
    trains = {run.name: {"run": asdict(run)} for run in missing}
    with stage(f"{len(missing)} models to train and measure, {jobs} at once"):
        for part in (makes, trains):
            jobs_of = {name: {**job, **shared} for name, job in part.items()}
            run_apart("ctxext.reproduce.reading", jobs_of, output, jobs)
    found: Results = {}
    for run in runs:
        found.setdefault(run.label, []).append(read_json(result_file(run, output)))
    return found


def result_file(run: Run, output: Path) -> Path:
    """Return the file of a model's result."""
    return output / "results" / f"{run.name}.json"


def start_folder(start: str, seed: int, settings: Settings, output: Path) -> Path:
    """Return the model that training begins with, made if it is not there."""
    folder = output / "models" / f"{start} seed {seed}".replace(" ", "-")
    if (folder / "final" / "config.json").exists():
        return folder / "final"
    given: dict[str, Any] = {
        "output_dir": folder,
        "window": settings.window,
        "vocabulary": settings.vocabulary,
        "layers": settings.layers,
        "width": settings.width,
        "heads": settings.heads,
        "kv_heads": settings.heads,
        "mlp_width": 2 * settings.width,
        "passkeys": 0.0,
        "max_steps": settings.steps if start == SHORT else 0,
        "per_device_train_batch_size": max(1, settings.tokens_per_step // settings.window),
        "learning_rate": settings.learning_rate,
        "warmup_steps": _warmup(settings.steps),
        "bf16": settings.bf16,
        "torch_compile": False,
        "save_strategy": "no",
        "seed": seed,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, str(recipe_root() / "pretrain.py"), *words], check=True)
    return folder / "final"


def _warmup(steps: int) -> int:
    return min(100, steps // 10)


def recipe(run: Run, settings: Settings, start: Path, folder: Path) -> dict[str, Any]:
    """Return the config by which a model reads long documents."""
    steps = settings.steps if run.start == NOTHING else settings.tuning_steps
    return {
        "model": str(start.absolute()),
        "length": settings.window,
        "batch_size": max(1, settings.tokens_per_step // settings.window),
        "per_device_train_batch_size": max(1, settings.tokens_per_step // settings.window),
        "learning_rate": settings.learning_rate if run.start == NOTHING else settings.tuning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": _warmup(steps),
        "weight_decay": 0.1,
        "max_steps": steps,
        "bf16": settings.bf16,
        "use_cpu": not _has_gpu(),
        "seed": run.seed,
        "reading": {
            "rate": run.rate,
            "threshold": run.threshold,
            "pooling": run.pooling,
            "scope": run.scope,
            **({"memory": {"size": settings.memory}} if run.memory else {}),
        },
        "data": {"sources": [{"data": CORPUS, "min_tokens": settings.document}]},
        "loss_limit": 1000.0,  # with a memory that is not read yet, and from random weights, a loss may jump
        "logging_steps": max(1, steps // 100),
        "save_strategy": "no",
        "output_dir": str(folder.absolute()),
    }


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def train(run: Run, settings: Settings, output: Path) -> Path:
    """Train a model by the recipe; return its folder, `final` in it."""
    folder = output / "models" / run.name
    if (folder / "final" / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    start = start_folder(run.start, run.seed, settings, output)
    config = folder / "recipe.yaml"
    config.write_text(yaml.safe_dump(recipe(run, settings, start, folder), sort_keys=False), encoding="utf-8")
    subprocess.run([sys.executable, str(recipe_root() / "finetune.py"), "--config", str(config)], check=True)
    return folder


def measure(folder: Path, settings: Settings, memory: bool) -> dict[str, Any]:
    """Read held-out documents in order; return the perplexity over all, and the loss of each."""
    from ctxext.evaluation.loading import RunSettings, load
    from ctxext.reading.memory import MemoryConfig
    from ctxext.reading.reader import DocumentReader
    from ctxext.reading.skip import SkipPolicy

    loaded = load(folder, RunSettings(dtype="float32"))
    remembering = MemoryConfig(size=settings.memory) if memory else None
    losses = []
    with DocumentReader(
        loaded.model,
        loaded.tokenizer,
        policy=SkipPolicy(rate=0),
        window=settings.window,
        memory=remembering,
        bos=loaded.tokenizer.bos_token_id,
    ) as reader:
        for text in _held_out(loaded.tokenizer, settings):
            windows = islice(reader.read(text), settings.read)  # full ones: each counts alike
            losses.append(statistics.fmean(window.loss for window in windows if window.loss is not None))
    return {"perplexity": math.exp(statistics.fmean(losses)), "losses": losses}


def _held_out(tokenizer: Any, settings: Settings) -> Iterable[str]:
    """Return held-out documents that are long enough."""
    from ctxext.data.corpora import open_corpus

    needed = settings.window * settings.read + 1
    texts = (document.text for document in open_corpus(CORPUS).documents())
    return islice(
        (text for text in texts if len(tokenizer(text, verbose=False)["input_ids"]) > needed), settings.documents
    )


def skips(folder: Path) -> list[tuple[int, float]]:
    """Return how many tokens were skipped after a window, on average, by step."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["skipped_per_window"]) for line in lines if "skipped_per_window" in line]


def main(job: dict[str, Any]) -> None:
    """Make what a job asks for: a model to start from, or one that is trained and measured."""
    settings, output = Settings(**job["settings"]), Path(job["output"])
    if "start" in job:
        start_folder(job["start"], job["seed"], settings, output)
        return
    run = Run(**job["run"])
    result: dict[str, Any] = {"model": run.label, "seed": run.seed}
    if run.read:
        folder = train(run, settings, output)
        result["skips"] = skips(folder)
    else:
        start_folder(run.start, run.seed, settings, output)
        folder = output / "models" / f"{run.start} seed {run.seed}".replace(" ", "-")
    result |= measure(folder / "final", settings, run.memory)
    result_file(run, output).parent.mkdir(exist_ok=True)
    write_json(result_file(run, output), result)
    if run.read:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
