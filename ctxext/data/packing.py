"""Packs of exactly `length` tokens, cut from a stream of documents whose order is fixed beforehand.

Pack number i is a function of the data and the seed alone. So the state of the stream is one number, the packs read so
far; a resumed run, another number of processes, or loader workers see the same packs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxext.data.order import mixed_documents, upsampled
from ctxext.data.tokens import TokenStore

BOUNDARIES = ("isolated", "joined")
IGNORED = -100
_NO_PASSES = "passes over the data are defined for one source; state max_steps instead, or name one source"


@dataclass(frozen=True)
class Segment:
    """A stretch of a document in a pack: `stop - start` tokens from its token `start` on."""

    source: int
    document: int
    start: int
    stop: int


class Packs:
    """The packs of a run: which stretch of which document stands where.

    Text is split where a pack is full and goes on in the next. A prompt with its completion, or a conversation, is
    never split: where it does not fit into what is left of a pack, the rest is padded.

    Args:
        stores: The sources' tokens.
        length: Tokens in a pack.
        boundaries: `isolated`: each document attends to itself only, with positions from 0, and no token is predicted
            from another document; `joined`: a pack is one sequence.
        seed: Of the shuffling.
        count: How many packs to plan; None with `passes`.
        passes: How many passes over the one source to plan; the last pack is filled from the pass after.

    Raises:
        ValueError: If `passes` is given with several sources, or a document that stays whole is longer than a pack.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        *,
        length: int,
        boundaries: str = "isolated",
        seed: int = 0,
        count: int | None = None,
        passes: float | None = None,
    ) -> None:
        if boundaries not in BOUNDARIES:
            raise ValueError(f"boundaries is {boundaries!r}; it must be one of {', '.join(BOUNDARIES)}")
        if passes is not None and len(stores) != 1:
            raise ValueError(_NO_PASSES)
        assert (count is None) != (passes is None), "either count or passes"
        self.stores = list(stores)
        self.length, self.boundaries, self.seed = length, boundaries, seed
        self._rows: list[tuple[int, int, int, int]] = []
        self._starts = [0]
        self._room = length
        self._fill(count, passes)
        self._segments = np.asarray(self._rows, dtype=np.int64).reshape(-1, 4)
        del self._rows

    def __len__(self) -> int:
        return len(self._starts) - 1

    def segments(self, index: int) -> list[Segment]:
        """Return what stands in a pack, in order; what is missing to `length` tokens is padding."""
        return [Segment(*row) for row in self._segments[self._starts[index] : self._starts[index + 1]].tolist()]

    def documents(self, index: int) -> list[str]:
        """Return the documents of a pack in words: `corpus: id [first..last token]`."""
        found = []
        for part in self.segments(index):
            store = self.stores[part.source]
            found.append(f"{store.source.data}: {store.document_id(part.document)} [{part.start}..{part.stop - 1}]")
        return found

    def fingerprint(self) -> dict[str, Any]:
        """Return what decides the content of every pack, for a resumed run to compare."""
        sources = [
            {
                "sha256": store.meta["sha256"],
                "weight": store.source.weight,
                "upsample": [store.source.upsample_above, store.source.upsample_times],
            }
            for store in self.stores
        ]
        return {"sources": sources, "length": self.length, "boundaries": self.boundaries, "seed": self.seed}

    def digest(self) -> str:
        """Return the sha256 of `fingerprint`."""
        return hashlib.sha256(json.dumps(self.fingerprint(), sort_keys=True).encode()).hexdigest()

    def _fill(self, count: int | None, passes: float | None) -> None:
        lengths = [store.lengths for store in self.stores]
        orders = [
            upsampled(own, store.source.upsample_above, store.source.upsample_times)
            for own, store in zip(lengths, self.stores, strict=True)
        ]
        weights = [store.source.weight for store in self.stores]
        wanted = None if passes is None else float(passes) * float(lengths[0][orders[0]].sum())
        limit, drawn = count, 0.0
        for source, document in mixed_documents(lengths, weights, orders, self.seed):
            if limit is None and wanted is not None and drawn >= wanted:
                limit = len(self) + (self._room < self.length)
            if limit is not None and len(self) >= limit:
                return
            size = int(lengths[source][document])
            drawn += size
            if self.stores[source].source.keeps_documents_whole:
                self._place_whole(source, document, size)
            else:
                self._place_text(source, document, size, limit)

    def _place_text(self, source: int, document: int, size: int, limit: int | None) -> None:
        start = 0
        while start < size and (limit is None or len(self) < limit):
            stop = min(size, start + self._room)
            self._add(source, document, start, stop)
            start = stop

    def _place_whole(self, source: int, document: int, size: int) -> None:
        if size > self.length:
            name = self.stores[source].document_id(document)
            raise ValueError(f"{name} has {size} tokens; it stays whole and must fit into a pack of {self.length}")
        if size > self._room:
            self._close()
        self._add(source, document, 0, size)

    def _add(self, source: int, document: int, start: int, stop: int) -> None:
        self._rows.append((source, document, start, stop))
        self._room -= stop - start
        if self._room == 0:
            self._close()

    def _close(self) -> None:
        self._starts.append(len(self._rows))
        self._room = self.length

    def arrays(self, index: int, pad: int) -> dict[str, npt.NDArray[np.int64]]:
        """Return a pack as a model reads it.

        Args:
            index: The pack.
            pad: The token that fills what is left.

        Returns:
            `input_ids`, `labels` (-100 where nothing is predicted) and `position_ids`, each `(length,)` int64. The
            model predicts `labels[i + 1]` from what it read up to i. Padding is a document of its own: it needs no
            attention mask, and none is returned.
        """
        ids = np.full(self.length, pad, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        positions = np.arange(self.length, dtype=np.int64)
        at = 0
        for part in self.segments(index):
            store, end = self.stores[part.source], at + part.stop - part.start
            first = int(store.offsets[part.document])
            ids[at:end] = store.tokens[first + part.start : first + part.stop]
            labels[at:end] = ids[at:end]
            if store.counted is not None:
                labels[at:end][store.counted[first + part.start : first + part.stop] == 0] = IGNORED
            if self.boundaries == "isolated":
                positions[at:end] = np.arange(end - at)
                labels[at] = IGNORED
            at = end
        positions[at:] = np.arange(self.length - at)
        labels[0] = IGNORED  # there is nothing to predict it from
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
