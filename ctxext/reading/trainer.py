"""Training with random-access reading: the data server is told how well each window was predicted, and skips."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ctxext.checkpoint.files import read_json, write_json
from ctxext.data.tokens import TokenStore
from ctxext.reading.server import IGNORED, DataServer, StoredDocuments, Window, collate
from ctxext.training.arguments import Recipe
from ctxext.training.trainer import ContextTrainer


def make_server(recipe: Recipe, args: Any, stores: Sequence[TokenStore]) -> DataServer:
    """Return the data server of this process.

    Args:
        recipe: With `reading`.
        args: Its TrainingArguments.
        stores: The tokens of its sources.
    """
    assert recipe.reading is not None
    return DataServer(
        StoredDocuments(stores, args.data_seed if args.data_seed is not None else args.seed),
        rows=args.train_batch_size * args.gradient_accumulation_steps,
        window=recipe.length - 1,  # the last token of a row is predicted only, and begins the next window
        policy=recipe.reading.policy,
        scope=recipe.reading.scope,
        rank=args.process_index,
        processes=args.world_size,
    )


class Turns(Dataset[dict[str, torch.Tensor]]):
    """Stands in for the data, which is known only once the window before was read: items are empty turns of a row.

    Args:
        count: Turns of the whole run, over all rows and processes.
        stores: The tokens of what is read.
    """

    def __init__(self, count: int, stores: Sequence[TokenStore]) -> None:
        self.count = count
        self._digest = hashlib.sha256("".join(store.meta["sha256"] for store in stores).encode()).hexdigest()

    @property
    def packs(self) -> Turns:
        """What `ContextTrainer` asks about its data."""
        return self

    def digest(self) -> str:
        """Return what tells this run's documents from another's."""
        return self._digest

    def documents(self, turn: int) -> list[str]:
        """Return no names: which documents a step read is in the reader's state."""
        return []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"turn": torch.tensor(index)}


class ReadingTrainer(ContextTrainer):
    """Train on the windows of a data server.

    The rows of a process are those of all its micro-batches of a step: with accumulation too every row is read, and
    skips, once a step.

    Args:
        model: As for `ContextTrainer`.
        args: The same.
        recipe: With `reading`.
        turns: As many as sequences in the run.
        tokenizer: Saved with every checkpoint.
        server: This process's.
        pad: The token that fills short windows.
    """

    def __init__(
        self, model: Any, args: Any, recipe: Recipe, turns: Turns, tokenizer: Any, server: DataServer, pad: int
    ) -> None:
        self.server, self.pad = server, pad
        self._confidences: list[float] = []
        self._logged = (0, 0)
        super().__init__(model, args, recipe, turns, tokenizer)  # type: ignore[arg-type]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the windows of a step in place of its empty turns, and the number of their predictions."""
        return super().get_batch_samples(self._served(epoch_iterator, num_batches), num_batches, device)

    def _served(self, turns: Iterator[Any], count: int) -> Iterator[dict[str, torch.Tensor]]:
        windows, size = self.server.windows(), int(self.args.train_batch_size)
        for number, _ in enumerate(islice(turns, count)):
            yield self._batch(windows[number * size : (number + 1) * size])

    def _batch(self, windows: list[Window]) -> dict[str, torch.Tensor]:
        return collate(windows, self.recipe.length, self.pad)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss; tell the server what the rows' windows were like once all of the step are read."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        self._confidences += self._pooled(outputs["logits"].detach(), inputs["labels"])
        if len(self._confidences) == self.server.rows:
            self.server.advance(self._confidences)
            self._confidences = []
        return (loss, outputs) if return_outputs else loss

    def _pooled(self, logits: torch.Tensor, labels: torch.Tensor) -> list[float]:
        """Return the pooled loss of each row; `logits` `(batch, length, vocabulary)`, `labels` `(batch, length)`."""
        pooled = []
        for row, targets in zip(logits[:, :-1], labels[:, 1:], strict=True):
            known = targets != IGNORED
            losses = torch.nn.functional.cross_entropy(row[known].float(), targets[known], reduction="none")
            pooled.append(self.server.policy.pool(losses.clamp_min(0).tolist()))
        return pooled

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log with the loss how many tokens this process skipped after a window, on average since the last time."""
        read, skipped = self.server.read - self._logged[0], self.server.skipped - self._logged[1]
        if "loss" in logs and read:
            windows = max(1, read // self.server.window)
            logs = {**logs, "skipped_per_window": skipped / windows, "share_read": read / (read + skipped)}
            self._logged = (self.server.read, self.server.skipped)
        super().log(logs, *args, **kwargs)

    def save_stream(self, folder: Path) -> None:
        """Save where this process's rows are."""
        write_json(folder / self._state_name, self.server.state())

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train, from where a checkpoint's readers were if there is one."""
        if resume_from_checkpoint:
            self.server.load_state(read_json(Path(resume_from_checkpoint) / self._state_name))
            self._logged = (self.server.read, self.server.skipped)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    @property
    def _state_name(self) -> str:
        return f"reader-{self.args.process_index}.json"
