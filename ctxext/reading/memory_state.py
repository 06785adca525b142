"""What the rows of a batch remember, and which of it is evicted when the memory is full.

Eviction policies (Attendre, arXiv 2401.04881: LRA and LFA beside first-in first-out). Each layer has a memory of its
own and evicts by what its own heads attend to; every layer keeps as many tokens. The definitions here are ours:

- A head of a query *attends* a remembered token when it gives it at least an even share of its attention: a weight of
  1/n or more, where n is the number of keys that it reads (k of them with `top_k`), within one in a thousand, so that
  rounding decides nothing between equal scores. Dropout and gate do not count; all heads that share a key do.
- Only the queries of later windows count, in passes that append to the memory: not the token's own window, in which
  every token is attended by its neighbours, nor padding, nor what is read within `Memory.frozen`.
- `lra` evicts the least recently attended: those of which the last query that any head attended them with is the most
  tokens ago. Being read the first time counts as being attended, as in any cache of the least recently used.
- `lfa` evicts the least frequently attended: those with the fewest pairs of query and head that attended them, divided
  by the queries that have read since. A total would keep whatever is old.
- `fifo` evicts the oldest.

The tokens of the window that was just read stay, for no query of a later window could attend them yet, and so do the
sinks; of equals the oldest go. All of this looks back only: what is kept when a window is read depends on that window
and on earlier ones, so that no prediction depends on a token behind it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from ctxext.reading.memory_index import RowIndex

EVICTIONS = ("fifo", "lra", "lfa")
EVEN = 0.999  # of an even share of the attention


class Uses(NamedTuple):
    """How remembered tokens were attended, at one layer; `(batch, slots)` int32 each.

    Attributes:
        hits: Pairs of query and head that attended the token; in what one window adds, those of its queries.
        since: Queries after the last that attended it (`lra`), or that have read since it was remembered (`lfa`).
    """

    hits: torch.Tensor
    since: torch.Tensor


@dataclass(frozen=True)
class Remembered:
    """What the rows remember; never changed in place, so that a forward pass keeps what it began with.

    Attributes:
        layers: Keys without rotation and values of each layer, `(batch, key heads, slots, head_dim)` each.
        valid: `(batch, slots)`, false where a row remembers less than others. Oldest first. The same for all layers,
            though with `lra` and `lfa` not of the same tokens.
        uses: Of each layer; none with `fifo`.
        indexes: Of each layer and row; none with an exact search. They may change hands: see `RowIndex`.
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    valid: torch.Tensor
    uses: list[Uses] = field(default_factory=list)
    indexes: list[list[RowIndex]] = field(default_factory=list)

    def forget(self, rows: torch.Tensor) -> Remembered:
        """Return what is remembered but for the rows, `(batch,)` bool."""
        indexes = [
            [index.emptied() if forget else index for index, forget in zip(layer, rows.tolist(), strict=True)]
            for layer in self.indexes
        ]
        return Remembered(self.layers, self.valid & ~rows[:, None], self.uses, indexes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all of it by name, for a file."""
        named = {"valid": self.valid}
        for layer, (key, value) in enumerate(self.layers):
            named |= {f"{layer}.key": key, f"{layer}.value": value}
        for layer, uses in enumerate(self.uses):
            named |= {f"{layer}.hits": uses.hits, f"{layer}.since": uses.since}
        for layer, indexes in enumerate(self.indexes):
            for row, index in enumerate(indexes):
                cells = index.cells.copy()  # rows may share those of nothing
                named[f"{layer}.cells.{row}"] = torch.from_numpy(cells)
        return named

    @staticmethod
    def from_tensors(named: dict[str, torch.Tensor], device: torch.device | str) -> Remembered:
        """Return what `tensors` named; keys and values stay where they are, the rest is on `device`."""
        valid, layers = named["valid"].to(device), range(sum(name.endswith(".key") for name in named))
        uses = [
            Uses(named[f"{n}.hits"].to(device), named[f"{n}.since"].to(device)) for n in layers if f"{n}.hits" in named
        ]
        indexes = []
        if any(".cells." in name for name in named):
            from ctxext.reading.memory_index import RowIndex

            counts = valid.sum(dim=1).tolist()
            indexes = [
                [RowIndex.of(count, named[f"{n}.cells.{row}"].cpu().numpy()) for row, count in enumerate(counts)]
                for n in layers
            ]
        return Remembered([(named[f"{n}.key"], named[f"{n}.value"]) for n in layers], valid, uses, indexes)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return which keys are the best: `(..., keys)` bool; of equal scores the last ones.

    Args:
        scores: `(..., keys)`, minus infinity for what is hidden.
        count: k, at most as many as there are keys.

    Returns:
        `count` true ones in a row; all of a row that sees fewer keys than that, hidden ones too.
    """
    if on_cpu := scores.device.type == "cpu":  # where torch's topk takes three quarters of the attention's time
        place = scores.shape[-1] - count
        least = torch.from_numpy(np.partition(scores.numpy(), place, axis=-1)[..., place : place + 1].copy())
    else:
        least = scores.topk(count, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    among = scores >= least
    tied = (among.view(torch.int8).sum(dim=-1, keepdim=True, dtype=torch.int32) > count) & (least > -math.inf)
    if on_cpu and not tied.any():  # of a GPU, asking would wait for it
        return among
    equal = scores == least
    room = count - (among & ~equal).sum(dim=-1, keepdim=True)
    from_the_end = equal.flip(-1).cumsum(dim=-1, dtype=torch.int32).flip(-1)
    return among & (~tied | ~equal | (from_the_end <= room))


def attended(
    weights: torch.Tensor, read: torch.Tensor, real: torch.Tensor, slots: torch.Tensor | None, count: int
) -> Uses:
    """Return how a window's queries attended the remembered tokens.

    Args:
        weights: `(batch, heads, queries, found)`, those of remembered tokens.
        read: `(batch, heads, queries, 1)`, how many keys each query read, those of the window included.
        real: `(batch, queries)`, false for padding.
        slots: `(batch, heads, queries, found)`, which slots these are; None where they are all of them, in order.
        count: Slots that there are.

    Returns:
        Hits of this window, and the queries after the last hit: as many as the window has where there is none.
    """
    hit = (weights * read >= EVEN) & (weights > 0) & real[:, None, :, None]
    behind = real.sum(dim=1, keepdim=True) - real.cumsum(dim=1)
    nothing = int(real.shape[1])
    if slots is None:
        hits = hit.sum(dim=(1, 2), dtype=torch.int32)
        since = behind[:, :, None].where(hit.any(dim=1), nothing).amin(dim=1)
    else:
        where, flat = slots.flatten(1), hit.flatten(1)
        hits = flat.new_zeros(len(flat), count, dtype=torch.int32).scatter_add(1, where, flat.int())
        each = behind[:, None, :, None].where(hit, nothing).flatten(1)
        since = each.new_full((len(flat), count), nothing).scatter_reduce(1, where, each, "amin")
    return Uses(hits, since.int())


def add_uses(policy: str, old: Uses | None, new: Uses | None, real: torch.Tensor) -> Uses:
    """Return the uses of the remembered tokens and, behind them, of the window's own.

    Args:
        policy: `lra` or `lfa`.
        old: Before the window; None where nothing was remembered.
        new: What the window's queries attended, as `attended` has it; None as `old`.
        real: `(batch, queries)`, false for padding.
    """
    tokens = real.sum(dim=1, keepdim=True, dtype=torch.int32)
    since = (tokens - real.cumsum(dim=1)).int() if policy == "lra" else torch.zeros_like(real, dtype=torch.int32)
    hits = torch.zeros_like(since)
    if old is None or new is None:
        return Uses(hits, since)
    waited = old.since + tokens
    waited = new.since.where(new.hits > 0, waited) if policy == "lra" else waited
    return Uses(torch.cat([old.hits + new.hits, hits], dim=1), torch.cat([waited, since], dim=1))


def keep(
    valid: torch.Tensor, uses: Uses | None, *, policy: str, new: int, size: int, sinks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which slots are kept, oldest first, and which of these are valid: `(batch, at most size)` each.

    Args:
        valid: `(batch, slots)`, what is remembered and behind it the window.
        uses: Of these slots; None with `fifo`.
        policy: One of `EVICTIONS`.
        new: Slots of the window, which come last.
        size: Tokens that a row may remember.
        sinks: First tokens that are never evicted.
    """
    worth = torch.zeros_like(valid, dtype=torch.float64)
    if uses is not None:
        worth = -uses.since.double() if policy == "lra" else uses.hits.double() / uses.since.clamp_min(1)
    worth[:, valid.shape[1] - new :] = torch.finfo(worth.dtype).max
    worth = worth.masked_fill(valid.cumsum(dim=1) <= sinks, torch.inf).masked_fill(~valid, -torch.inf)
    kept = valid & best(worth, min(size, valid.shape[1]))
    order = (~kept).int().argsort(dim=1, stable=True)[:, :size]
    return order, kept.gather(1, order)
