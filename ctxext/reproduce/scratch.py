"""Small models trained from nothing with one way to know positions each: what `reproduce alibi|sandwich` measure.

A model is trained on rows of L_tr tokens by `recipes/pretrain.py`, in a process of its own, then read up to 16 L_tr by
three protocols. Every model's result is one file, so an interrupted experiment goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ctxext.checkpoint.files import read_json, write_json
from ctxext.evaluation.loading import fast_bfloat16
from ctxext.reproduce.apart import run_apart
from ctxext.reproduce.pi import claim_folder, stage
from ctxext.training.recipe_files import recipe_root

STRETCH = 16  # the longest reading, in training lengths
DOCUMENTS, READ = 8, 2  # for perplexity: held-out documents, and longest readings of each


@dataclass(frozen=True)
class Settings:
    """What all models of an experiment share.

    Attributes:
        window: L_tr, tokens.
        steps: Of training.
        tokens_per_step: Of one step.
        width: Hidden size.
        layers: Decoder layers.
        heads: Query and key heads.
        vocabulary: Tokens.
        learning_rate: At its peak; cosine decay, 100 steps of warm-up.
        segments: N of the last-token protocol.
        bf16: Whether training computes in bfloat16.
    """

    window: int = 128
    steps: int = 1500
    tokens_per_step: int = 4096
    width: int = 128
    layers: int = 4
    heads: int = 8
    vocabulary: int = 1024
    learning_rate: float = 2e-3
    segments: int = 500
    bf16: bool = field(default_factory=fast_bfloat16)

    @property
    def lengths(self) -> list[int]:
        """Return the lengths read: L_tr times 1, 2, 4, ... 16."""
        return [self.window << doubling for doubling in range(STRETCH.bit_length())]


@dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        positions: `rotary`, `sinusoidal`, or a bias by name.
        options: The bias's options.
        stretch: Its training length over L_tr.
        seed: Of weights and data.
    """

    positions: str
    options: tuple[tuple[str, Any], ...] = ()
    stretch: int = 1
    seed: int = 0

    @property
    def label(self) -> str:
        """What tables call it, whatever its seed."""
        words = [self.positions, *(f"{name}={value:g}" for name, value in self.options)]
        return " ".join([*words, *([f"L_tr x{self.stretch}"] if self.stretch > 1 else [])])

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.label} seed {self.seed}".replace(" ", "-").replace("=", "-")


Results = dict[str, list[dict[str, Any]]]  # by the model's label, a seed each


def run_models(models: Sequence[Model], settings: Settings, output: Path, jobs: int) -> Results:
    """Train and measure what is missing; return the results by label, a seed each.

    Args:
        models: What to train.
        settings: What they share.
        output: The folder of results; taken up where it stopped.
        jobs: Models at once, each with its share of the cores.

    Raises:
        ValueError: If the folder holds something else, or a model's process fails; names its log.
    """
    claim_folder(output, json.loads(json.dumps(asdict(settings))))
    missing = [model for model in models if not (output / "results" / f"{model.name}.json").exists()]
    jobs_of = {
        model.name: {"model": asdict(model), "settings": asdict(settings), "output": str(output)} for model in missing
    }
    with stage(f"{len(missing)} models to train, {jobs} at once"):
        run_apart("ctxext.reproduce.scratch", jobs_of, output, jobs)
    found: Results = {}
    for model in models:
        found.setdefault(model.label, []).append(read_json(output / "results" / f"{model.name}.json"))
    return found


def train(model: Model, settings: Settings, folder: Path) -> Path:
    """Train one model by the recipe; return the folder of the finished model."""
    window = settings.window * model.stretch
    given: dict[str, Any] = {
        "output_dir": folder,
        "window": window,
        "vocabulary": settings.vocabulary,
        "layers": settings.layers,
        "width": settings.width,
        "heads": settings.heads,
        "kv_heads": settings.heads,
        "mlp_width": 2 * settings.width,
        "passkeys": 0.0,
        "positions": model.positions,
        "position_options": json.dumps(dict(model.options)),
        "max_steps": settings.steps,
        "per_device_train_batch_size": max(1, settings.tokens_per_step // window),
        "learning_rate": settings.learning_rate,
        "warmup_steps": min(100, settings.steps // 10),
        "save_steps": max(1, settings.steps // 3),
        "save_total_limit": 1,
        "bf16": settings.bf16,
        "torch_compile": False,
        "seed": model.seed,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, str(recipe_root() / "pretrain.py"), *words], check=True)
    return folder / "final"


def measure(folder: Path, settings: Settings) -> dict[str, Any]:
    """Return what a trained model scores: perplexity by length, non-overlapping, sliding and of the last token."""
    import ctxext.reproduce.sinusoidal  # noqa: F401  # registers that model
    from ctxext.evaluation.loading import RunSettings, load

    loaded = load(folder, RunSettings(dtype="float32"))
    lengths = settings.lengths
    return {
        "nonoverlapping": {length: _perplexity(loaded, length, length, settings) for length in lengths},
        "sliding": {length: _perplexity(loaded, length, length // 4, settings) for length in lengths},
        "last_token": _last_token(loaded, settings),
    }


def _perplexity(loaded: Any, length: int, stride: int, settings: Settings) -> float:
    """Return perplexity in windows of `length`; the same tokens of the same documents at every length."""
    read = READ * settings.lengths[-1]
    options = {"length": length, "stride": stride, "truncate": read, "min_tokens": read, "limit": DOCUMENTS}
    return float(_evaluate(loaded, "perplexity", {**options, "bos": "never"}, 8192 // length).metrics["perplexity"])


def _last_token(loaded: Any, settings: Settings) -> dict[int, float]:
    """Return the perplexity of the same last tokens by the tokens read before them."""
    lengths = [settings.window // 8, settings.window // 4, settings.window // 2, *settings.lengths]
    options = {"lengths": ",".join(map(str, lengths)), "segments": settings.segments}
    found = _evaluate(loaded, "last-token", options, 8).details["perplexity"]
    return {length: found[str(length)] for length in lengths}


def _evaluate(loaded: Any, name: str, options: dict[str, Any], batch_size: int) -> Any:
    from ctxext.evaluation.base import Session, build
    from ctxext.evaluation.registry import load
    from ctxext.evaluation.runner import evaluate

    evaluation = build(load(name), {"data": "sympy-source", **options})
    return evaluate(evaluation, Session(loaded.model, loaded.tokenizer, max(1, batch_size)))


def main(job: dict[str, Any]) -> None:
    """Train and measure one model, and write its result."""
    options = tuple((name, value) for name, value in job["model"].pop("options"))
    model, settings = Model(**job["model"], options=options), Settings(**job["settings"])
    output = Path(job["output"])
    folder = output / "models" / model.name
    final = folder / "final"
    if not (final / "config.json").exists():
        train(model, settings, folder)
    result = {"model": model.label, "seed": model.seed, **measure(final, settings)}
    (output / "results").mkdir(exist_ok=True)
    write_json(output / "results" / f"{model.name}.json", result)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
