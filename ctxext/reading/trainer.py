"""Training with random-access reading: the data server is told how well each window was predicted, and skips."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset

from ctxext.checkpoint.files import read_json, write_json
from ctxext.reading.memory import add_memory
from ctxext.reading.memory_state import Remembered
from ctxext.reading.server import DataServer, Documents, StoredDocuments, Window, collate
from ctxext.reading.stream import StreamedDocuments
from ctxext.training.arguments import Recipe
from ctxext.training.prepare import load_tokens, token_rules
from ctxext.training.trainer import ContextTrainer


def make_documents(recipe: Recipe, args: Any, tokenizer: Any) -> Documents:
    """Return what a recipe reads: tokenized on first use, or streamed.

    Args:
        recipe: With `reading`.
        args: Its TrainingArguments.
        tokenizer: Of the model.
    """
    assert recipe.reading is not None
    seed = args.data_seed if args.data_seed is not None else args.seed
    if not recipe.reading.streaming:
        with args.main_process_first(desc="tokenizing"):
            return StoredDocuments(load_tokens(recipe, tokenizer), seed)
    return StreamedDocuments(
        recipe.data.sources,
        tokenizer,
        token_rules(recipe),
        seed=seed,
        buffer=recipe.reading.shuffle_buffer,
        tokens=recipe.reading.corpus_tokens or 0,
        rank=args.process_index,
        processes=args.world_size,
    )


def make_server(recipe: Recipe, args: Any, documents: Documents) -> DataServer:
    """Return the data server of this process.

    Args:
        recipe: With `reading`.
        args: Its TrainingArguments.
        documents: What is read.
    """
    assert recipe.reading is not None
    return DataServer(
        documents,
        rows=args.train_batch_size * args.gradient_accumulation_steps,
        window=recipe.length,
        policy=recipe.reading.policy,
        scope=recipe.reading.scope,
        rank=args.process_index,
        processes=args.world_size,
    )


class Turns(Dataset[dict[str, torch.Tensor]]):
    """Stands in for the data, which is known only once the window before was read: items are empty turns of a row.

    Args:
        count: Turns of the whole run, over all rows and processes.
        digest: Of the documents that are read.
    """

    def __init__(self, count: int, digest: str) -> None:
        self.count, self._digest = count, digest

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
        assert recipe.reading is not None
        self.server, self.pad = server, pad
        self._windows: list[Window] = []  # of this step
        self._confidences: list[float] = []  # of those of them that were read
        self._logged = (0, 0)
        self._data_seconds = 0.0  # pooling losses, moving rows on, making batches: what skipping adds to a step
        remembering = recipe.reading.memory
        self.memory = None if remembering is None else add_memory(model, remembering.config())
        self._remembered: dict[int, Remembered | None] = {}  # by micro-batch
        super().__init__(model, args, recipe, turns, tokenizer)  # type: ignore[arg-type]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the windows of a step in place of its empty turns, and how many of their predictions count."""
        batches, count = super().get_batch_samples(self._served(epoch_iterator, num_batches), num_batches, device)
        return batches, count if count is None else count.clamp_min(1)  # 0 where no row is at its question

    def _served(self, turns: Iterator[Any], count: int) -> Iterator[dict[str, torch.Tensor]]:
        began = time.perf_counter()
        self._windows = self.server.windows()
        batches = [collate(self._rows(number), self.recipe.length, self.pad) for number in range(count)]
        self._data_seconds += time.perf_counter() - began
        for batch, _ in zip(batches, turns, strict=False):
            yield batch

    def _rows(self, micro: int) -> list[Window]:
        """Return the windows of a micro-batch of this step."""
        size = int(self.args.train_batch_size)
        return self._windows[micro * size : (micro + 1) * size]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss; tell the server what the rows' windows were like once all of the step are read."""
        micro = len(self._confidences) // int(self.args.train_batch_size)
        if self.memory is not None:
            self.memory.remembered = self._remembered.get(micro)
            self.memory.reset([window.fresh for window in self._rows(micro)])
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.memory is not None:
            self._remembered[micro] = self.memory.remembered
        if loss.device.type != "cpu":
            torch.accelerator.synchronize(loss.device)  # what follows waits for the model, not for the data
        began = time.perf_counter()
        self._confidences += self._pooled(outputs["logits"].detach(), self._rows(micro))
        if len(self._confidences) == self.server.rows:
            self.server.advance(self._confidences)
            self._confidences = []
        self._data_seconds += time.perf_counter() - began
        return (loss, outputs) if return_outputs else loss

    def _pooled(self, logits: torch.Tensor, windows: Sequence[Window]) -> list[float]:
        """Return the pooled loss of each row, whatever the loss counts; `logits` `(batch, length, vocabulary)`."""
        pooled = []
        for row, window in zip(logits, windows, strict=True):
            following = torch.from_numpy(window.tokens[1:].astype(np.int64)).to(row.device)
            losses = torch.nn.functional.cross_entropy(row[: len(following)].float(), following, reduction="none")
            pooled.append(self.server.policy.pool(losses.clamp_min(0).tolist()))
        return pooled

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log with the loss how many tokens this process skipped after a window, on average since the last time.

        At the end, log the share of the run's time that serving windows took.
        """
        read, skipped = self.server.read - self._logged[0], self.server.skipped - self._logged[1]
        if "loss" in logs and read:
            windows = max(1, read // self.server.window)
            logs = {**logs, "skipped_per_window": skipped / windows, "share_read": read / (read + skipped)}
            self._logged = (self.server.read, self.server.skipped)
        if "train_runtime" in logs:
            logs = {**logs, "share_waiting_for_data": self._data_seconds / logs["train_runtime"]}
        super().log(logs, *args, **kwargs)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it the model is evaluated without what it remembers of its training."""
        if self.memory is None:
            yield
            return
        self.memory.reset()
        with self.memory.frozen():
            yield

    def save_stream(self, folder: Path) -> None:
        """Save where this process's rows are and what they remember."""
        write_json(folder / f"{self._state_name}.json", self.server.state())
        tensors: dict[str, torch.Tensor] = {}
        for micro, remembered in self._remembered.items():
            if remembered is not None:
                tensors |= {f"{micro}.{name}": tensor for name, tensor in remembered.tensors().items()}
        if tensors:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self._memory_file(folder))

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train, from where a checkpoint's readers were if there is one."""
        if resume_from_checkpoint:
            folder = Path(resume_from_checkpoint)
            self.server.load_state(read_json(folder / f"{self._state_name}.json"))
            self._logged = (self.server.read, self.server.skipped)
            if self.memory is not None:
                self._load_memory(folder)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _load_memory(self, folder: Path) -> None:
        device = "cpu" if self.memory is not None and self.memory.config.offload else str(self.args.device)
        tensors = load_file(self._memory_file(folder), device=device)
        for micro in sorted({int(name.split(".")[0]) for name in tensors}):
            start = f"{micro}."
            own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
            self._remembered[micro] = Remembered.from_tensors(own, self.args.device)

    def _memory_file(self, folder: Path) -> Path:
        return folder / f"{self._state_name}.memory"  # not a name that loaders take for weights

    @property
    def _state_name(self) -> str:
        return f"reader-{self.args.process_index}"
