"""Packs as a torch dataset: every item is one pack, read from the memory-mapped tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import Dataset

from ctxext.data.packing import Packs

Batch = dict[str, torch.Tensor]


class PackedDataset(Dataset[Batch]):
    """The packs of a run in their order.

    It is to be read in order, without a shuffling sampler: the order is in the packs. Each rank and each loader worker
    reads the numbers that the sampler gives it, so none sees another's packs and skipping ahead costs nothing.
    """

    def __init__(self, packs: Packs, pad: int) -> None:
        self.packs, self.pad = packs, pad

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Batch:
        """Return `input_ids`, `labels` and `position_ids`, each `(length,)` int64."""
        return {name: torch.from_numpy(values) for name, values in self.packs.arrays(index, self.pad).items()}


def stack(items: Sequence[Batch]) -> Batch:
    """Return a batch: each of the items' tensors stacked to `(batch, length)`."""
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}
