"""What happens beside the steps: evaluations through the installed plugins, and a plain log."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ctxext.evaluation.base import Evaluation, Session
from ctxext.evaluation.runner import evaluate

LOG_FILE = "log.jsonl"


class JsonLog(TrainerCallback):  # type: ignore[misc]
    """Write everything that is logged to `log.jsonl`, a line each; a resumed run goes on where its checkpoint was."""

    def __init__(self, output: Path) -> None:
        self.path = output / LOG_FILE

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop the lines from after the checkpoint that the run goes on from."""
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if self.path.exists() and state.global_step > 0:
            for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n") and json.loads(line)["step"] <= state.global_step:
                    kept.append(line)
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, self.path)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Write one line."""
        if state.is_world_process_zero and logs and "train_runtime" not in logs:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


class SaveAt(TrainerCallback):  # type: ignore[misc]
    """Save a checkpoint after given steps, beside those of Trainer's own schedule."""

    def __init__(self, steps: Collection[int]) -> None:
        self.steps = frozenset(steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask Trainer for a checkpoint."""
        if state.global_step in self.steps:
            control.should_save = True


class Evaluations(TrainerCallback):  # type: ignore[misc]
    """Run evaluations before the first step, after every n steps and at the end.

    Every process does the same forwards, so that partitioned parameters are gathered on all of them.

    Args:
        evaluations: By name.
        every: Steps from one to the next.
        tokenizer: The model's.
        batch_size: Sequences read at once.
    """

    def __init__(self, evaluations: Mapping[str, Evaluation], every: int, tokenizer: Any, batch_size: int = 1) -> None:
        self.evaluations, self.every, self.tokenizer, self.batch_size = evaluations, every, tokenizer, batch_size
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure what the model does before any step."""
        if state.global_step == 0:
            self._measure(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure after every n steps and at the last one, before a checkpoint is saved."""
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._measure(control)

    def _measure(self, control: Any) -> None:
        log_the_step = control.should_log  # which logging takes back
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        was_training = model.training
        model.eval()
        generator = torch.random.get_rng_state()
        for name, evaluation in self.evaluations.items():
            with self.trainer.evaluating():
                metrics = evaluate(evaluation, Session(model, self.tokenizer, self.batch_size)).metrics
            self.trainer.log({f"eval_{name}_{key}": value for key, value in metrics.items()})
        torch.random.set_rng_state(generator)
        model.train(was_training)
        control.should_log = log_the_step
