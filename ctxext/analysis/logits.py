"""Measure a model's attention logits by distance, inside and beyond its window, in memory linear in the length.

Queries and keys are taken where they enter the attention function, after their norms and the rotation; a sample of the
queries is multiplied with all keys before it, a block at a time, and of each block only a histogram is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ctxext.evaluation.scoring import reading

QUANTILES = (0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999)
GROUPS = ("trained", "inside", "beyond")
# Bins are even in asinh(logit): 1/256 wide at 0, and 0.4% of the logit where it is large.
BINS_PER_UNIT = 256
HALF_BINS = 15 * BINS_PER_UNIT  # asinh(1.6 million)
LOGITS_AT_ONCE = 1 << 23
MOST_CELLS = 64
CELLS_OF_WINDOW = 16

Watch = Callable[[nn.Module, torch.Tensor, torch.Tensor, float, int | None], None]


def distance_edges(window: int, length: int) -> list[int]:
    """Return ascending edges of distance cells from 0 to `length`; the window, if shorter, is one of them.

    Args:
        window: tokens that the model was trained to read.
        length: tokens read.
    """
    inside = min(window, length)
    cells = max(1, min(CELLS_OF_WINDOW, MOST_CELLS * inside // length, inside))
    beyond = -(-(length - inside) * cells // inside)  # rounded up: as wide as those inside, or a little narrower
    edges = [round(cell * inside / cells) for cell in range(cells + 1)]
    return edges + [inside + round(cell * (length - inside) / beyond) for cell in range(1, beyond + 1)]


@contextmanager
def watched_attention(model: Any, watch: Watch) -> Iterator[None]:
    """Call `watch(module, query, key, scaling, sliding_window)` at every attention; the result stays as it is.

    Another model with the same attention backend is watched too until the block ends.

    Raises:
        ValueError: If the model's attention is not one that transformers looks up by name.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config.get_text_config()._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(f"the attention {name!r} of {type(model).__name__} cannot be watched; load it with 'sdpa'")
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def watching(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        watch(module, query, key, scaling, kwargs.get("sliding_window"))
        return attend(module, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = watching
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


@dataclass
class Counts:
    """Logits of one layer, or of several: a histogram for each cell, and what bounds them.

    Cells are those of `distance_edges` for queries before the window's end, then once more for queries after it.

    Attributes:
        histogram: `(2 * cells, bins)`, int64.
        smallest: `(2 * cells,)`.
        largest: `(2 * cells,)`.
        max_product: max|h_j| over queries, the keys before them, pairs and heads, times the scaling of the logits.
        reachable: the largest scaled sum_j |h_j| of the counted queries: no rotation makes a larger logit.
    """

    histogram: torch.Tensor
    smallest: torch.Tensor
    largest: torch.Tensor
    max_product: float = 0.0
    reachable: float = 0.0

    @classmethod
    def empty(cls, cells: int) -> Counts:
        """Return counts of nothing."""
        return cls(
            torch.zeros(2 * cells, 2 * HALF_BINS, dtype=torch.long),
            torch.full((2 * cells,), torch.inf, dtype=torch.double),
            torch.full((2 * cells,), -torch.inf, dtype=torch.double),
        )

    def add(self, other: Counts) -> None:
        """Take in the counts of another text, or another layer."""
        self.histogram += other.histogram
        self.smallest = torch.minimum(self.smallest, other.smallest)
        self.largest = torch.maximum(self.largest, other.largest)
        self.max_product = max(self.max_product, other.max_product)
        self.reachable = max(self.reachable, other.reachable)

    def summary(self, rows: Sequence[int]) -> dict[str, Any] | None:
        """Return count, quantiles and extremes of the logits in some cells together; None where there are none."""
        histogram = self.histogram[list(rows)].sum(dim=0)
        total = int(histogram.sum())
        if total == 0:
            return None
        low, high = float(self.smallest[list(rows)].min()), float(self.largest[list(rows)].max())
        wanted = torch.tensor([quantile * total for quantile in QUANTILES], dtype=torch.double)
        bins = torch.searchsorted(histogram.cumsum(0).double(), wanted).clamp(max=2 * HALF_BINS - 1)
        middles = torch.sinh((bins.double() + 0.5 - HALF_BINS) / BINS_PER_UNIT).clamp(low, high)
        names = [f"q{quantile:g}" for quantile in QUANTILES]
        return {"logits": total, "min": low, "max": high, **dict(zip(names, middles.tolist(), strict=True))}


@dataclass
class LogitCounter:
    """Counts the logits of every layer that attends over the whole sequence and turns with the distance.

    Attributes:
        window: tokens that the model was trained to read.
        edges: of the distance cells, the last one the length read.
        positions: of the queries that are multiplied with the keys before them.
        rotary_dim: rotated dimensions of a head; pair j is dimensions j and j + rotary_dim / 2.
        layers: counts by layer.
        left_out: layers that slide over less than the length, or do not rotate.
    """

    window: int
    edges: list[int]
    positions: list[int]
    rotary_dim: int
    layers: dict[int, Counts] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)

    def watch(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, scaling: float, sliding_window: int | None
    ) -> None:
        """Count one layer's logits.

        Args:
            module: the attention layer, with its `layer_idx`.
            query: `(1, heads, length, head_dim)`, rotated.
            key: `(1, key heads, length, head_dim)`, rotated.
            scaling: of the logits.
            sliding_window: tokens that the layer sees, None for all.
        """
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if (sliding_window is not None and sliding_window < self.edges[-1]) or not getattr(module, "use_rope", True):
            self.left_out.add(layer)
            return
        counts = self.layers.setdefault(layer, Counts.empty(len(self.edges) - 1))
        exact = torch.promote_types(query.dtype, torch.float32)  # products of bfloat16 states, not rounded again
        groups = query.shape[1] // key.shape[1]
        query, key = query[0].to(exact) * scaling, key[0].to(exact).repeat_interleave(groups, dim=0)
        counts.max_product = max(counts.max_product, largest_product(query, key, self.rotary_dim))
        block = max(1, LOGITS_AT_ONCE // (key.shape[0] * key.shape[1]))
        for start in range(0, len(self.positions), block):
            places = torch.tensor(self.positions[start : start + block], device=key.device)
            self._count(counts, query[:, places], key, places)

    def _count(self, counts: Counts, query: torch.Tensor, key: torch.Tensor, places: torch.Tensor) -> None:
        """Count the logits of some queries, `(heads, queries, head_dim)`, at their places in the sequence."""
        distance = places[:, None] - torch.arange(key.shape[1], device=key.device)
        seen = distance >= 0
        cells = len(self.edges) - 1
        edges = torch.tensor(self.edges[1:-1], device=key.device)
        rows = torch.bucketize(distance, edges, right=True) + cells * (places[:, None] >= self.window)
        rows = rows[seen]
        logits = (query @ key.transpose(-1, -2))[:, seen]
        bins = (torch.asinh(logits) * BINS_PER_UNIT).floor().long() + HALF_BINS
        bins = rows * (2 * HALF_BINS) + bins.clamp(0, 2 * HALF_BINS - 1)
        counts.histogram += (
            torch.bincount(bins.flatten(), minlength=counts.histogram.numel()).view(-1, 2 * HALF_BINS).cpu()
        )
        for extreme, over_heads, how in (
            (counts.smallest, logits.amin(dim=0), "amin"),
            (counts.largest, logits.amax(dim=0), "amax"),
        ):
            extreme.scatter_reduce_(0, rows.cpu(), over_heads.cpu().double(), how)
        norms = pair_norms(query, self.rotary_dim) @ pair_norms(key, self.rotary_dim).transpose(-1, -2)
        rest = query[..., self.rotary_dim :] @ key[..., self.rotary_dim :].transpose(-1, -2)
        counts.reachable = max(counts.reachable, float((norms + rest.abs())[:, seen].max()))

    def rows(self, group: str) -> list[int]:
        """Return the cells of a group of logits.

        `trained`: queries before the window's end, as in training; `inside`: later queries, keys less than a window
        before them; `beyond`: later queries, keys at least a window before them.
        """
        cells = len(self.edges) - 1
        near = [cell for cell in range(cells) if self.edges[cell] < self.window]
        if group == "trained":
            return near
        return [cells + cell for cell in range(cells) if (cell in near) == (group == "inside")]

    def cell(self, cell: int) -> list[int]:
        """Return the rows of one distance cell, whatever the query's position."""
        return [cell, len(self.edges) - 1 + cell]


def pair_norms(states: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Return |q_j| of each rotated pair, which no rotation changes: `(..., rotary_dim / 2)`.

    Args:
        states: `(..., head_dim)` queries or keys.
        rotary_dim: rotated dimensions.
    """
    half = rotary_dim // 2
    return torch.hypot(states[..., :half], states[..., half:rotary_dim])


def largest_product(query: torch.Tensor, key: torch.Tensor, rotary_dim: int) -> float:
    """Return max|h_j| = max |q_j||k_j| over heads, pairs, queries and the keys before them.

    Args:
        query: `(heads, length, head_dim)`.
        key: `(heads, length, head_dim)`.
        rotary_dim: rotated dimensions of a head.
    """
    largest_before = pair_norms(key, rotary_dim).cummax(dim=1).values
    return float((pair_norms(query, rotary_dim) * largest_before).max())


def count_logits(
    model: Any, sequences: Sequence[Sequence[int]], counter: LogitCounter, advance: Callable[[float], None]
) -> None:
    """Read token sequences, one at a time, and count their logits.

    Args:
        model: a causal language model in eval mode, loaded with sdpa attention.
        sequences: of equal length, `counter.edges[-1]` tokens each.
        counter: what takes the counts.
        advance: called with 1 after each sequence.

    Raises:
        ValueError: If no layer of the model attends over the whole sequence with rotated keys.
    """
    for ids in sequences:
        with watched_attention(model, counter.watch), reading(model):
            model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
        if not counter.layers:
            raise ValueError(
                f"no layer of {type(model).__name__} rotates its keys and attends over all {len(ids)} tokens; "
                "use a --length within its sliding window"
            )
        advance(1)
