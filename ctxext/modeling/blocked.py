"""Attention with a bias by distance, in linear memory: scaled_dot_product_attention, a block of queries at a time.

With the queries of a block in reversed order, the bias of row r and key j depends on r + j alone. The bias block is
then an overlapping strided view of one vector per head, and no matrix of queries by keys exists. Keys after a block,
and those before its window, are not read at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from .bias import TAIL

_WRITTEN_OUT = 128  # rows of a block whose weights are written out: few, so that they stay in the cores' caches


@dataclass(frozen=True)
class Layout:
    """Which keys the queries see.

    Attributes:
        offset: Place of the first query's own key among the keys.
        first: `(batch, queries)` the first key that each query sees, or None where that is the first of all.
        window: Keys that a query sees at most, its own included, or None.
    """

    offset: int
    first: torch.Tensor | None = None
    window: int | None = None


@dataclass(frozen=True)
class Block:
    """Queries `start` to `stop`, and the keys from `low` to `high` that they see."""

    start: int
    stop: int
    low: int
    high: int


def blocks(queries: int, layout: Layout, rows: int) -> Iterator[Block]:
    """Yield the blocks of a sequence of queries, `rows` each."""
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        low = 0 if layout.window is None else max(0, layout.offset + start - layout.window + 1)
        if layout.first is not None:
            low = max(low, int(layout.first[:, start:stop].min()))
        yield Block(start, stop, low, layout.offset + stop)


def block_rows(queries: int, window: int | None) -> int:
    """Return how many queries a block has: few enough that little is read in vain, enough to keep the cores busy."""
    if window is not None:
        return max(64, min(TAIL, window))
    return max(128, min(TAIL, queries // 8))


def block_bias(row: torch.Tensor, block: Block, layout: Layout) -> torch.Tensor:
    """Return the bias of a block, its queries in reversed order.

    Args:
        row: `(heads, n + TAIL)` of `ScoreBias`.
        block: Which queries and keys.
        layout: Which keys each of them sees.

    Returns:
        `(1, heads, rows, keys)`, a view of `row`; or `(batch, heads, rows, keys)` where queries start at other keys.
    """
    rows, keys = block.stop - block.start, block.high - block.low
    at = row.shape[1] - TAIL - 1 - (layout.offset + block.stop - 1 - block.low)
    bias = row.as_strided((1, row.shape[0], rows, keys), (0, row.stride(0), 1, 1), row.storage_offset() + at)
    if layout.first is None:
        return bias
    first = layout.first[:, block.start : block.stop].flip(1)[:, None, :, None]
    return torch.where(torch.arange(block.low, block.high, device=row.device) >= first, bias, -math.inf)


def blocked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: torch.Tensor,
    layout: Layout,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return softmax(q k^T scaling + bias) v.

    Args:
        query: `(batch, heads, queries, head_dim)`.
        key: `(batch, heads, keys, head_dim)`.
        value: `(batch, heads, keys, head_dim)`.
        row: `(heads, n + TAIL)` of `ScoreBias`, n at least the number of keys; gets gradients if it asks for them.
        layout: Which keys the queries see.
        scaling: Of the logits.
        dropout: Probability that a weight is dropped.

    Returns:
        `(batch, heads, queries, head_dim)`.
    """
    if dropout > 0.0:
        return _with_dropout(query, key, value, row, layout, scaling, dropout)
    if row.requires_grad and torch.is_grad_enabled():
        out: torch.Tensor = _LearnedBias.apply(query, key, value, row, layout, scaling)  # type: ignore[no-untyped-call]
        return out
    return _fixed(query, key, value, row, layout, scaling)


def _fixed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: torch.Tensor, layout: Layout, scaling: float
) -> torch.Tensor:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Block) -> Any:
        bias = block_bias(row, at, layout)
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)

    # Where queries start at other keys, the bias of a block is a tensor of its own: not kept for the backward pass.
    forget = layout.first is not None and torch.is_grad_enabled()
    parts = []
    for block in blocks(query.shape[2], layout, block_rows(query.shape[2], layout.window)):
        given = (
            query[:, :, block.start : block.stop].flip(2),
            key[:, :, block.low : block.high],
            value[:, :, block.low : block.high],
            block,
        )
        out = checkpoint(attend, *given, use_reentrant=False) if forget else attend(*given)
        parts.append(out.flip(2))
    return torch.cat(parts, dim=2)


def _with_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: torch.Tensor,
    layout: Layout,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """Attend with dropout: the weights of one block at a time exist, and are computed again in the backward pass."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: torch.Tensor, at: Block) -> Any:
        weights = _weights(query, key, block_bias(row, at, layout), scaling)
        return torch.dropout(weights, dropout, True).to(value.dtype) @ value

    parts = []
    for block in blocks(query.shape[2], layout, _WRITTEN_OUT):
        part = checkpoint(
            attend,
            query[:, :, block.start : block.stop].flip(2),
            key[:, :, block.low : block.high],
            value[:, :, block.low : block.high],
            row,
            block,
            use_reentrant=False,
        )
        parts.append(part.flip(2))
    return torch.cat(parts, dim=2)


def _weights(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the attention weights of a block: `(batch, heads, rows, keys)`, float32 (float64 for float64 inputs)."""
    scores = (query * scaling) @ key.transpose(-1, -2)
    return torch.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)) + bias, dim=-1)


class _LearnedBias(torch.autograd.Function):
    """Attention whose bias gets gradients: a block's weights are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        row: torch.Tensor,
        layout: Layout,
        scaling: float,
    ) -> torch.Tensor:
        out = _fixed(query, key, value, row, layout, scaling)
        ctx.save_for_backward(query, key, value, row, out)
        ctx.layout, ctx.scaling = layout, scaling
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, row, out = ctx.saved_tensors
        scaling, layout = ctx.scaling, ctx.layout
        query_grad, row_grad = torch.empty_like(query), torch.zeros_like(row)
        key_grad, value_grad = torch.zeros_like(key), torch.zeros_like(value)
        pulled = (grad * out).sum(dim=-1, keepdim=True)  # of the softmax: sum over keys of weight times its gradient
        for block in blocks(query.shape[2], layout, _WRITTEN_OUT):
            rows, keys = slice(block.start, block.stop), slice(block.low, block.high)
            block_query, block_grad = query[:, :, rows].flip(2), grad[:, :, rows].flip(2)
            weights = _weights(block_query, key[:, :, keys], block_bias(row, block, layout), scaling)
            value_grad[:, :, keys] += weights.to(value.dtype).transpose(-1, -2) @ block_grad
            scores = block_grad @ value[:, :, keys].transpose(-1, -2)
            scores = weights.mul_(scores.to(weights.dtype).sub_(pulled[:, :, rows].flip(2)))
            at = row.shape[1] - TAIL - 1 - (layout.offset + block.stop - 1 - block.low)
            sums = _diagonal_sums(scores.sum(dim=0))
            row_grad[:, at : at + sums.shape[1]] += sums.to(row.dtype)
            scores = scores.to(query.dtype)
            query_grad[:, :, rows] = ((scores @ key[:, :, keys]) * scaling).flip(2)
            key_grad[:, :, keys] += (scores.transpose(-1, -2) @ block_query) * scaling
        return query_grad, key_grad, value_grad, row_grad, None, None


def _diagonal_sums(matrix: torch.Tensor) -> torch.Tensor:
    """Return, for each r + j, the sum of the entries (r, j): `(heads, rows, keys)` to `(heads, rows + keys - 1)`.

    Each row is followed by `rows` zeros; read on in lines one entry shorter, each row moves one further right.
    """
    heads, rows, keys = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, rows)).reshape(heads, -1)
    return padded[:, :-rows].reshape(heads, rows, rows + keys - 1).sum(dim=1)
