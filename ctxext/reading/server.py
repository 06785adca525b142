"""The data server of random-access reading (arXiv 2405.13216, section 3).

Each row of a batch reads a document of its own. The training loop asks for the rows' next windows, tells the server
how well the model predicted each, and the server moves every row on by the skip policy; a row whose document has ended
goes on with its next one. Where a row is, is a few numbers: a resumed run sees the windows of the unbroken one.

A document may end with a question about it and the answer. It is then read like any other up to there; the question is
a window of its own, never skipped, and the loss counts nothing else.

X, of whose end the policy knows, is either one document or the stream of all documents that a row reads in one pass
over the data: the paper's "consecutively read documents" suggest the latter, its formula the former.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ctxext.data.order import mixed_documents, upsampled
from ctxext.data.tokens import TokenStore
from ctxext.reading.skip import SkipPolicy

SCOPES = ("document", "stream")
IGNORED = -100
Tokens = npt.NDArray[np.integer[Any]]


class Documents(Protocol):
    """An endless sequence of documents: `documents[n]` is the tokens of the n-th, `(tokens,)`.

    Attributes:
        tokens: About how many there are in one pass over the data; 0 where that is not known.
    """

    tokens: int

    def __getitem__(self, number: int) -> Tokens: ...

    def question(self, number: int) -> int:
        """Return how many of a document's last tokens ask and answer a question about it; 0 for plain text."""

    def leave(self, number: int) -> None:
        """Hear that no row will ask for a document again."""
        return

    def digest(self) -> str:
        """Return what tells these documents from others."""

    def state(self) -> dict[str, Any]:
        """Return what it takes to serve the same documents again, as JSON; nothing by default."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to where documents were; raise a ValueError if they are not to be had any more."""
        return


class StoredDocuments(Documents):
    """The documents of tokenized sources, shuffled and mixed by weight, for ever (see `ctxext.data.order`).

    Args:
        stores: The sources' tokens.
        seed: Of the shuffling.

    Raises:
        ValueError: If a source has no document of two tokens: there would be nothing to predict, for ever.
    """

    def __init__(self, stores: Sequence[TokenStore], seed: int) -> None:
        empty = [store.source.data for store in stores if not (store.lengths >= 2).any()]
        if empty:
            raise ValueError(f"{', '.join(empty)}: no document has two tokens, so that there is nothing to predict")
        self.stores = stores
        self.tokens = sum(int(store.lengths.sum()) for store in stores)
        self._drawn: list[tuple[int, int]] = []
        sources = [store.source for store in stores]
        self._coming = mixed_documents(
            [store.lengths for store in stores],
            [source.weight for source in sources],
            [upsampled(store.lengths, store.source.upsample_above, store.source.upsample_times) for store in stores],
            seed,
        )

    def __getitem__(self, number: int) -> Tokens:
        store, span = self._find(number)
        return store.tokens[span]

    def question(self, number: int) -> int:
        """Return how many tokens at a document's end the loss counts, where it does not count all: the completion."""
        store, span = self._find(number)
        return 0 if store.counted is None else int(store.counted[span].sum())

    def digest(self) -> str:
        """Return a sha256 over the tokens of all sources."""
        return hashlib.sha256("".join(store.meta["sha256"] for store in self.stores).encode()).hexdigest()

    def _find(self, number: int) -> tuple[TokenStore, slice]:
        while len(self._drawn) <= number:
            self._drawn.append(next(self._coming))
        source, document = self._drawn[number]
        store = self.stores[source]
        return store, slice(int(store.offsets[document]), int(store.offsets[document + 1]))


@dataclass(frozen=True)
class Window:
    """What a row reads next.

    Attributes:
        tokens: `(n,)`, at most L + 1: all but the last are read, all but the first predicted.
        document: Number of the document that it begins in.
        start: S, its first token in that document.
        fresh: Whether X begins here: what the row remembers is of another one.
        counts: Whether the loss counts its predictions: false before the question of a document that ends with one.
    """

    tokens: Tokens
    document: int
    start: int
    fresh: bool
    counts: bool = True


@dataclass
class _Place:
    """Where a row is: its document, the next window's first token, the tokens of X before it; does X begin here?"""

    document: int
    start: int = 0
    before: int = 0
    fresh: bool = True


class DataServer:
    """Serves the rows of one process with windows, and skips by what it is told of them.

    Args:
        documents: What is read; row g of G (over all processes) reads the documents g, g + G, g + 2 G, ...
        rows: Of this process's batch.
        window: L, tokens.
        policy: How far to skip.
        scope: What X is: a `document`, or the `stream` of a row's documents.
        rank: This process.
        processes: All of them, each with as many rows.

    Raises:
        ValueError: If an argument is out of range; names all that are.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        rows: int,
        window: int,
        policy: SkipPolicy,
        scope: str = "document",
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        counts = {"rows": rows, "window": window}
        wrong = [f"{name} {value} must be at least 1" for name, value in counts.items() if value < 1]
        if scope not in SCOPES:
            wrong.append(f"scope {scope!r} is none of {', '.join(SCOPES)}")
        if scope == "stream" and documents.tokens < 1:
            wrong.append(
                "scope 'stream' needs to know how many tokens the documents have: state it, or read by document"
            )
        if not 0 <= rank < processes:
            wrong.append(f"rank {rank} must lie between 0 and {processes - 1}")
        if wrong:
            raise ValueError("; ".join(wrong))
        self.documents, self.rows, self.window, self.policy, self.scope = documents, rows, window, policy, scope
        self.rank, self.processes = rank, processes
        self.read = self.skipped = 0
        self._places = [_Place(rank * rows + row) for row in range(rows)]
        for place in self._places:
            self._settle(place)

    def _settle(self, place: _Place) -> None:
        """Move a place whose document has ended to where the row goes on."""
        if self.scope == "document":
            while place.start > self._end(place) - 2:  # a prediction needs two tokens
                if place.start < (question := self._question(place.document)):
                    place.start = place.before = question
                else:
                    self._next(place)
                    place.start, place.before, place.fresh = 0, 0, True
            return
        while place.start >= (length := len(self.documents[place.document])):
            self._next(place)
            place.start -= length
        if place.before >= self._stream_tokens:
            place.before, place.fresh = 0, True

    def _next(self, place: _Place) -> None:
        self.documents.leave(place.document)
        place.document += self.rows * self.processes

    def _question(self, number: int) -> int:
        """Return where a document's question begins; where it ends if it has none."""
        return len(self.documents[number]) - self.documents.question(number)

    def _end(self, place: _Place) -> int:
        """Return where the part of a document that a place is in ends: at its question, or at its end."""
        question = self._question(place.document)
        return question if place.start < question else len(self.documents[place.document])

    @property
    def _stream_tokens(self) -> int:
        return max(1, self.documents.tokens // (self.rows * self.processes))

    def windows(self) -> list[Window]:
        """Return the next window of every row; the same ones until `advance` is called."""
        return [self._window(place) for place in self._places]

    def _window(self, place: _Place) -> Window:
        tokens = self.documents[place.document]
        if self.scope == "document":
            part = tokens[place.start : min(place.start + self.window + 1, self._end(place))]
            question = self._question(place.document)
            counts = question == len(tokens) or place.start >= question
            return Window(part, place.document, place.start, place.fresh, counts)
        parts = [tokens[place.start : place.start + self.window + 1]]
        number = place.document
        while (missing := self.window + 1 - sum(map(len, parts))) > 0:
            number += self.rows * self.processes
            parts.append(self.documents[number][:missing])
        return Window(np.concatenate(parts), place.document, place.start, place.fresh)

    def advance(self, confidences: Sequence[float]) -> list[int]:
        """Move every row on behind the window that it has just read.

        Args:
            confidences: C of each row's window, nats, as `SkipPolicy.pool` returns it.

        Returns:
            D of each row: the tokens skipped.

        Raises:
            ValueError: If there is not one for every row, or one is no loss; no row has moved then.
        """
        if len(confidences) != self.rows:
            raise ValueError(f"{len(confidences)} confidences for {self.rows} rows")
        skips = []
        for place, confidence in zip(self._places, confidences, strict=True):
            skips.append(self.policy.skip(confidence, self._remaining(place)))
        for place, window, skipped in zip(self._places, self.windows(), skips, strict=True):
            self.read += len(window.tokens) - 1
            self.skipped += skipped
            moved = self.window + skipped
            if self.scope == "document":  # a window that ends at the question is shorter
                moved = min(moved, self._end(place) - place.start)
            place.start, place.before = place.start + moved, place.before + moved
            place.fresh = False
            self._settle(place)
        return skips

    def _remaining(self, place: _Place) -> int:
        """Return |X| - S - L of the policy; nothing remains behind a question, which is read whole."""
        if self.scope == "stream":
            return self._stream_tokens - place.before - self.window
        question = self._question(place.document)
        return question - place.start - self.window if place.start < question else 0

    def state(self) -> dict[str, Any]:
        """Return where every row is, as JSON."""
        places = [list(dataclasses.astuple(place)) for place in self._places]
        counts = {"read": self.read, "skipped": self.skipped}
        return {**self._identity(), "places": places, **counts, "documents": self.documents.state()}

    def _identity(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("rows", "window", "scope", "rank", "processes")},
            "policy": dataclasses.asdict(self.policy),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to where a server was.

        Raises:
            ValueError: If that one served other windows; names what differs, in the settings or the documents.
        """
        differing = [name for name, value in self._identity().items() if state.get(name) != value]
        if differing:
            told = ", ".join(f"{name} {state.get(name)} (now {self._identity()[name]})" for name in differing)
            raise ValueError(f"this state is of another reader: {told}; give it the same settings, or begin anew")
        self.documents.load_state(state.get("documents", {}))
        self._places = [_Place(*place) for place in state["places"]]
        self.read, self.skipped = state["read"], state["skipped"]


def collate(windows: Sequence[Window], length: int, pad: int) -> dict[str, Any]:
    """Return windows as a batch of transformers: what is read, and what follows each token.

    Args:
        windows: `(batch,)`, of a server whose window is `length`: the last token of a row is predicted only.
        length: L, tokens read in a row.
        pad: What fills the rows on the right.

    Returns:
        `input_ids`, `labels` (the same tokens), `shift_labels` (the token after each; none of a window that does not
        count), both -100 behind the end, `attention_mask` and `position_ids` from 0, int64 `(batch, length)`.
    """
    import torch

    ids = torch.full((len(windows), length), pad)
    labels, following = (torch.full((len(windows), length), IGNORED) for _ in range(2))
    for row, window in enumerate(windows):
        tokens = torch.from_numpy(np.asarray(window.tokens, dtype=np.int64))
        ids[row, : len(tokens) - 1] = labels[row, : len(tokens) - 1] = tokens[:-1]
        if window.counts:
            following[row, : len(tokens) - 1] = tokens[1:]
    mask, positions = (labels != IGNORED).long(), torch.arange(length).repeat(len(windows), 1)
    batch = {"input_ids": ids, "labels": labels, "shift_labels": following}
    return {**batch, "attention_mask": mask, "position_ids": positions}
