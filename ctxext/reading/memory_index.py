"""An approximate index of remembered keys, for a memory so large that scoring every key takes too long (faiss).

The random-access paper reads its memory by "an approximated Top-K Key-Value retrieval algorithm" (arXiv 2405.13216,
section 3) and does not say which. Here each row, layer and key head has an inverted file. K-means makes cells of the
keys, each key in the cell of the nearest centre; a query looks only into the cells whose centres have the largest
inner product with it, and there compares all keys. (To put keys into the cell of the largest inner product too, as
faiss does by itself, found 0.77 of the best 32 keys of a middle layer of SmolLM2, where this finds 0.98.)

Stored keys have no rotation and are all read at one position, so that the inner product of a query with a read key is
that of the query, turned back by that position, with the stored one: the keys are indexed as they are.
The index gives k candidates by query and head, of equal ones any; what is best of them and of the window is read
exactly, with gradients.
It is faiss because new keys enter cells at once and old ones leave them, which a memory does at every window, while a
graph index (HNSW) costs a search to insert and can only mark what is gone; and because the same centres and keys give
the same candidates, so that a resumed run reads what an unbroken one does. faiss searches on the CPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

ALONE = 2048  # keys below which one cell holds all, so that the search is exact
ROUNDS = 10  # of k-means
SAMPLE = 64  # keys for each cell that k-means sees
SEED = 1


def faiss() -> Any:
    """Return the library.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        import faiss as library
    except ImportError:
        message = "index 'approximate' needs faiss: pip install 'ctxext[read]', or use index 'exact'"
        raise ValueError(message) from None
    return library


def cells_for(count: int) -> int:
    """Return how many cells so many keys get: the power of two next to their square root."""
    return 1 if count < ALONE else 2 ** round(math.log2(math.sqrt(count)))


class RowIndex:
    """What one row remembers at one layer, in cells.

    `follow` hands the built index on to the memory behind the next window, for changing it is cheap; should the memory
    before that window be read once more, it is built again from its keys and cells, with the same outcome.

    Args:
        numbers: `(slots,)` int64 ascending: a number for each token, which stays while its slot changes.
        cells: `(key heads, cells, head_dim)` float32, their centres; with one cell, whatever that is.
        built: By key head; None to build it when it is needed.
    """

    def __init__(self, numbers: np.ndarray[Any, Any], cells: np.ndarray[Any, Any], built: list[Any] | None = None):
        self.numbers, self.cells, self._built = numbers, cells, built

    @staticmethod
    def of(count: int, cells: np.ndarray[Any, Any]) -> RowIndex:
        """Return the index of the first `count` slots."""
        return RowIndex(np.arange(count, dtype=np.int64), cells)

    def emptied(self) -> RowIndex:
        """Return the index of a row that remembers nothing."""
        return RowIndex.of(0, self.cells[:, :1])

    def follow(self, order: np.ndarray[Any, Any], slots: int, keys: torch.Tensor) -> RowIndex:
        """Return the index behind a window.

        Args:
            order: `(kept,)`, where what is kept lay: in the slots before, or, from `slots` on, in the window.
            slots: That there were before, filled or not.
            keys: `(key heads, kept or more, head_dim)`, of what is kept, in this order.
        """
        first = int(self.numbers[-1]) + 1 if len(self.numbers) else 0
        is_new = order >= slots
        numbers = first + order - slots
        numbers[~is_new] = self.numbers[order[~is_new]]
        wanted = cells_for(len(numbers))
        if wanted > self.cells.shape[1]:
            return RowIndex(numbers, _centres(_floats(keys[:, : len(numbers)]), wanted))
        built, self._built = self._built, None
        if built is not None:
            gone, new = np.setdiff1d(self.numbers, numbers, assume_unique=True), np.flatnonzero(is_new)
            added = _floats(keys[:, new])
            for index, states in zip(built, added, strict=True):
                index.remove_ids(gone)
                index.add_with_ids(states, numbers[new])
        return RowIndex(numbers, self.cells, built)

    def search(self, keys: torch.Tensor, queries: torch.Tensor, count: int, share: float) -> np.ndarray[Any, Any]:
        """Return the slots of the best keys that are found: `(key heads, queries, count)`, -1 where there are fewer.

        Args:
            keys: `(key heads, slots, head_dim)`, all that is remembered.
            queries: `(key heads, queries, head_dim)`, as if they stood at position 0 and the keys too.
            count: k.
            share: Of the cells that a query looks into; at least one.
        """
        if self._built is None:
            self._built = [
                _index(cells, states, self.numbers)
                for cells, states in zip(self.cells, _floats(keys[:, : len(self.numbers)]), strict=True)
            ]
        found = []
        for index, cells, asked in zip(self._built, self.cells, _floats(queries), strict=True):
            index.nprobe = max(1, round(share * len(cells)))
            nearest = faiss().knn(asked, cells, index.nprobe, metric=faiss().METRIC_INNER_PRODUCT)
            found.append(_search_cells(index, asked, count, *nearest))
        numbers = np.stack(found)
        return np.where(numbers < 0, -1, np.searchsorted(self.numbers, numbers))


def _floats(states: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(states.detach().float().cpu().numpy())


def _centres(keys: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Return `(key heads, count, head_dim)`."""
    means = []
    for states in keys:
        kmeans = faiss().Kmeans(
            states.shape[1], count, niter=ROUNDS, seed=SEED, min_points_per_centroid=1, max_points_per_centroid=SAMPLE
        )
        kmeans.train(states)
        means.append(kmeans.centroids.copy())
    return np.stack(means)


def _search_cells(
    index: Any, queries: np.ndarray[Any, Any], count: int, scores: np.ndarray[Any, Any], cells: np.ndarray[Any, Any]
) -> Any:
    """Return the numbers of the best keys in each query's cells, `(queries, count)`."""
    from faiss.contrib.ivf_tools import search_preassigned

    return search_preassigned(index, queries, count, cells, scores)[1]


def _index(cells: np.ndarray[Any, Any], keys: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> Any:
    library = faiss()
    centres = library.IndexFlatL2(cells.shape[1])
    centres.add(np.ascontiguousarray(cells))
    index = library.IndexIVFFlat(centres, cells.shape[1], len(cells), library.METRIC_INNER_PRODUCT)
    index.add_with_ids(keys, numbers)
    return index
