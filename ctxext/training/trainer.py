"""transformers' Trainer with what extending a context window needs: packs, warm-up, whole checkpoints, a watch."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Trainer

from ctxext.checkpoint.files import weight_files
from ctxext.data.dataset import PackedDataset, stack
from ctxext.training.arguments import Recipe
from ctxext.training.checkpoints import PARTIAL, drop_old, finish_folder, identity, publish, write_state
from ctxext.training.watch import LossWatch

logger = logging.getLogger(__name__)


class ContextTrainer(Trainer):  # type: ignore[misc]
    """Train a model on packs as a recipe says.

    Args:
        model: A patched model of transformers, or a peft model around one.
        args: `training_arguments` of the recipe.
        recipe: The recipe.
        dataset: The packs, `max_steps * batch_size` of them or more.
        tokenizer: Saved with every checkpoint.
    """

    def __init__(self, model: Any, args: Any, recipe: Recipe, dataset: PackedDataset, tokenizer: Any) -> None:
        self.recipe, self.packs = recipe, dataset.packs
        self.run = identity(recipe, self.packs.digest())
        self.watch = LossWatch(recipe.loss_limit, self._documents)
        self._output_override: str | None = None
        super().__init__(
            model=model, args=args, train_dataset=dataset, data_collator=stack, processing_class=tokenizer
        )

    def _documents(self, step: int) -> list[str]:
        """Return the documents of a step's batch, counted from 1, over all processes."""
        size = self.recipe.batch_size
        names = [name for pack in range((step - 1) * size, step * size) for name in self.packs.documents(pack)]
        return list(dict.fromkeys(names))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss, averaged over the counted tokens of the whole step on all devices."""
        inputs = {**inputs, "use_cache": False}
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = result[0] if return_outputs else result
        self.watch.micro(self.state.global_step + 1, float(loss.detach()))
        return result

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the gradient's norm before clipping, once the watch has seen it."""
        norm = super()._get_grad_norm(model, grad_norm)
        self.watch.step(self.state.global_step + 1, None if norm is None else float(norm))
        return norm

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the scheduler, whose warm-up rises linearly from `warmup_start` of the rate rather than from zero."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        steps = self.args.get_warmup_steps(num_training_steps)
        if steps > 0 and isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            start = self.recipe.warmup_start
            factors = [_warmed_up(start, steps, after) for after in scheduler.lr_lambdas]
            self.lr_scheduler = scheduler = torch.optim.lr_scheduler.LambdaLR(scheduler.optimizer, factors)
        return scheduler

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights or adapter of a checkpoint.

        Trainer's own reads config.json as a config without a type, and fails where that holds both dialects.
        """
        model, folder = model or self.model, Path(resume_from_checkpoint)
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif hasattr(model, "peft_config"):
            model.load_adapter(str(folder), model.active_adapters[0], is_trainable=True)
        else:
            weights = [path for path in weight_files(folder) if path.suffix == ".safetensors"]
            unread = set(model.state_dict())
            for path in weights:
                tensors = load_file(path)
                model.load_state_dict(tensors, strict=False)
                unread -= set(tensors)
            model.tie_weights()
            lost = unread - set(getattr(model, "_tied_weights_keys", None) or ())
            assert not lost, f"{folder} lacks {sorted(lost)}"

    def _get_output_dir(self, trial: Any) -> str:
        return self._output_override or str(super()._get_output_dir(trial))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a complete folder: weights or adapter, config in both dialects, tokenizer."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            base = self.accelerator.unwrap_model(self.model)
            adapted = hasattr(base, "peft_config")
            config = base.get_base_model().config if adapted else None
            finish_folder(Path(output_dir or self.args.output_dir), self.recipe.length, config)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint beside its place and rename it: a kill at any moment leaves the last whole one."""
        name = f"checkpoint-{self.state.global_step}"

        def write(partial: Path) -> None:
            self._output_override = str(partial)
            keep, self.args.save_total_limit = self.args.save_total_limit, None
            try:
                super(ContextTrainer, self)._save_checkpoint(model, trial)
            finally:
                self._output_override, self.args.save_total_limit = None, keep
            self.save_stream(partial / name)
            if self.args.should_save:
                write_state(partial / name, self.state.global_step * self.recipe.batch_size, self.run)

        self._whole(write, name)
        if self.args.should_save:
            drop_old(Path(self.args.output_dir), self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it the model is evaluated; what training has in the model must not be in the way."""
        yield

    def save_stream(self, folder: Path) -> None:
        """Save where this process is in its data; packs follow from the step alone."""

    def save_final(self) -> Path:
        """Save the finished model, without optimizer states, to `output_dir/final`; return the folder."""
        self._whole(lambda partial: self.save_model(str(partial / "final")), "final")
        return Path(self.args.output_dir) / "final"

    def _whole(self, write: Callable[[Path], None], name: str) -> None:
        """Let all processes write `name` into a partial folder, then move it to its place."""
        output = Path(self.args.output_dir)
        partial = output / PARTIAL
        if self.args.should_save:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        done = False
        try:
            write(partial)
            done = True
        finally:
            if not done:
                logger.error(
                    "%s was not saved; the checkpoints from before are whole. Start the same command again to go on "
                    "from the newest (after a full disk, free some space first)",
                    output / name,
                )
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            publish(partial / name, output / name)
            partial.rmdir()
        self.accelerator.wait_for_everyone()


def _warmed_up(start: float, steps: int, after: Callable[[int], float]) -> Callable[[int], float]:
    """Return a schedule that rises linearly from `start` over `steps` steps, and is `after` from there on.

    It is a function, for a scheduler's state then holds numbers only and loads without unpickling code.
    """

    def factor(step: int) -> float:
        return start + (1.0 - start) * step / steps if step < steps else after(step)

    return factor
