"""The attention functions of bias checkpoints, registered with transformers under their names.

`sdpa`, `eager` and `flex_attention` are what users ask for; on a bias model each means the function here that computes
it with the bias, and any other attention is refused: it would leave the bias out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from .bias import TAIL, ScoreBias
from .blocked import Layout, blocked_attention
from .masks import range_mask

AUTO = "ctxext"  # flex_attention on accelerators, sdpa elsewhere
BACKENDS = {"sdpa": "ctxext_sdpa", "eager": "ctxext_eager", "flex_attention": "ctxext_flex"}
_HIDDEN = -1000.0  # an additive mask hides what it lowers by as much
_SHORT = 8  # queries up to which the bias of a whole call is gathered: decoding


class BiasRows:
    """The bias of one forward pass, for all layers of a model.

    Attributes:
        bias: The model's module.
        block_masks: What flex attention skips, by shape and mask; the same in all layers of a kind.
    """

    def __init__(self, bias: ScoreBias) -> None:
        self.bias = bias
        self.block_masks: dict[Any, Any] = {}
        self._row: torch.Tensor | None = None

    def row(self, length: int, device: torch.device) -> torch.Tensor:
        """Return `ScoreBias`'s row; it is computed once where nothing learns from it."""
        if torch.is_grad_enabled():
            row: torch.Tensor = self.bias(length, device)
            return row
        if self._row is None or self._row.shape[1] < length + TAIL or self._row.device != device:
            self._row = self.bias(length, device)
        return self._row

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, or None."""
        window: int | None = self.bias.window
        return window


def is_ranges(mask: torch.Tensor) -> bool:
    """Return whether a mask is one of `range_mask`'s ranges, and not a matrix of queries by keys."""
    return mask.dtype == torch.int32 and mask.shape[-1] == 2


def own_keys(mask: torch.Tensor | None, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return the place of each query's own key among the keys: `(queries,)`, int64.

    With a matrix for a mask it is the last key that the query sees.

    Args:
        mask: As `range_mask` returns it, or a matrix of queries by keys.
        queries: Of a sequence.
        keys: Of a sequence.
        device: Of the result.
    """
    if mask is None:
        return torch.arange(keys - queries, keys, device=device)
    if is_ranges(mask):
        return mask[0, 0, :, 1].long()
    seen = mask > _HIDDEN if mask.is_floating_point() else mask != 0
    seen = seen[:, 0, :, :keys].any(dim=0)
    return (keys - 1 - seen.flip(-1).int().argmax(dim=-1)).long()


def gathered_bias(row: torch.Tensor, own: torch.Tensor, keys: int) -> torch.Tensor:
    """Return the bias of every query and key: `(1, heads, queries, keys)`, minus infinity after the query.

    Args:
        row: `(heads, n + TAIL)` of `ScoreBias`.
        own: `(queries,)`, each query's own key.
        keys: Of a sequence.
    """
    last = row.shape[1] - TAIL - 1
    places = last - own[:, None] + torch.arange(keys, device=row.device)
    return row[:, places.clamp(max=last + 1)][None]


def add_mask(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return a gathered bias with what the mask hides at minus infinity: `(batch or 1, heads, queries, keys)`."""
    if mask is None:
        return bias
    keys = bias.shape[-1]
    if is_ranges(mask):
        return torch.where(torch.arange(keys, device=bias.device) >= mask[..., :1], bias, -math.inf)
    mask = mask[..., :keys]
    bias = bias + mask.to(bias.dtype) if mask.is_floating_point() else torch.where(mask != 0, bias, -math.inf)
    return torch.where((bias == -math.inf).all(dim=-1, keepdim=True), 0.0, bias)  # a row of nothing is no number


def repeated(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Return keys or values once for every query head: `(batch, heads, keys, head_dim)`."""
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


def eager_bias_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    score_bias: BiasRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with whole matrices: the only one that returns weights; memory grows with the square of the length.

    Args:
        module: The attention layer.
        query: `(batch, heads, queries, head_dim)`.
        key: `(batch, key heads, keys, head_dim)`.
        value: `(batch, key heads, keys, head_dim)`.
        attention_mask: None, ranges of `range_mask`, or `(batch, 1, queries, keys)` bool or additive.
        scaling: Of the logits; head_dim^-1/2 by default.
        dropout: Probability that a weight is dropped.
        score_bias: Of this forward pass.
        **kwargs: What else transformers hands on.

    Returns:
        `(batch, queries, heads, head_dim)`, and the weights `(batch, heads, queries, keys)`.
    """
    bias = _whole_bias(query, key, attention_mask, _given(score_bias))
    groups = query.shape[1] // key.shape[1]
    scores = (query * _scaling(query, scaling)) @ repeated(key, groups).transpose(-1, -2)
    weights = torch.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)) + bias, dim=-1)
    weights = torch.dropout(weights, dropout, dropout > 0.0).to(value.dtype)
    return (weights @ repeated(value, groups)).transpose(1, 2).contiguous(), weights


def sdpa_bias_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    score_bias: BiasRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in blocks of queries, in linear memory; arguments as `eager_bias_attention`, without the weights.

    A few queries, as in decoding, are read at once. A mask with holes is too, and then memory is not linear.
    """
    rows, scale = _given(score_bias), _scaling(query, scaling)
    groups = query.shape[1] // key.shape[1]
    matrix = attention_mask is not None and not is_ranges(attention_mask)
    if query.shape[2] <= _SHORT or matrix:
        bias = _whole_bias(query, key, attention_mask, rows)
        return _attend_at_once(query, key, value, bias, scale, dropout, groups), None
    layout = Layout(key.shape[2] - query.shape[2], window=rows.window)
    if attention_mask is not None:
        first = attention_mask[:, 0, :, 0]
        layout = Layout(int(attention_mask[0, 0, 0, 1]), first if bool(first.any()) else None, rows.window)
    out = blocked_attention(
        query,
        repeated(key, groups),
        repeated(value, groups),
        rows.row(key.shape[2], query.device),
        layout,
        scale,
        dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def _attend_at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    scaling: float,
    dropout: float,
    groups: int,
) -> torch.Tensor:
    """Attend with a bias of queries by keys; a single query's heads are packed, so that no key is copied."""
    batch, heads, queries, width = query.shape
    if queries == 1:
        query = query.reshape(batch, heads // groups, groups, width)
        bias = bias.reshape(bias.shape[0], heads // groups, groups, -1)
    else:
        key, value = repeated(key, groups), repeated(value, groups)
    out = scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=scaling)
    return out.reshape(batch, heads, queries, width).transpose(1, 2).contiguous()


def flex_bias_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    score_bias: BiasRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by flex_attention, compiled on accelerators; arguments as `eager_bias_attention`, without the weights.

    Raises:
        ValueError: With dropout, or a mask that is no range of keys: flex_attention has none.
    """
    from torch.nn.attention.flex_attention import flex_attention

    rows = _given(score_bias)
    if dropout > 0.0:
        raise ValueError(
            "flex_attention has no dropout: set attention_dropout to 0, or use attn_implementation 'sdpa'"
        )
    if query.shape[2] <= _SHORT:
        return sdpa_bias_attention(module, query, key, value, attention_mask, scaling, dropout, rows)
    if attention_mask is not None and not is_ranges(attention_mask):
        raise ValueError("flex attention with a bias reads ranges of keys only; use attn_implementation 'sdpa'")
    row = rows.row(key.shape[2], query.device)
    own = own_keys(attention_mask, query.shape[2], key.shape[2], query.device)
    last = row.shape[1] - TAIL - 1

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + row[h, torch.clamp(last - own[q] + k, max=last + 1)]

    attend = _compiled(flex_attention) if query.device.type != "cpu" else flex_attention
    out = attend(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=_block_mask(rows, attention_mask, own, query, key.shape[2]),
        scale=_scaling(query, scaling),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def auto_bias_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as suits the device; arguments as `eager_bias_attention`, without the weights.

    flex_attention where there is CUDA, but for what it has not: dropout, masks with holes.
    """
    ranges = attention_mask is None or is_ranges(attention_mask)
    flex = query.device.type == "cuda" and ranges and not kwargs.get("dropout")
    attend = flex_bias_attention if flex else sdpa_bias_attention
    return attend(module, query, key, value, attention_mask, **kwargs)


_COMPILED: dict[Any, Any] = {}


def _compiled(function: Any) -> Any:
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function)
    return _COMPILED[function]


def _block_mask(rows: BiasRows, mask: torch.Tensor | None, own: torch.Tensor, query: torch.Tensor, keys: int) -> Any:
    """Return which blocks flex attention reads; made once in a forward pass."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, queries, window = query.shape[0], query.shape[2], rows.window
    at = (queries, keys, query.device, id(mask))  # layers of one model may slide and not: each kind has its mask
    if at not in rows.block_masks:
        first = None if mask is None else mask[:, 0, :, 0].contiguous()

        def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            seen = k <= own[q]
            if window is not None:
                seen = seen & (own[q] - k < window)
            return seen if first is None else seen & (k >= first[b, q])

        shape = (None if first is None else batch, None, queries, keys)
        rows.block_masks[at] = mask, create_block_mask(mask_mod, *shape, device=query.device)  # mask: kept alive
    return rows.block_masks[at][1]


def _whole_bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, rows: BiasRows) -> torch.Tensor:
    keys = key.shape[2]
    row = rows.row(keys, query.device)
    if mask is None and query.shape[2] == 1:  # decoding: the bias lies there as it is needed
        return row[None, :, None, row.shape[1] - TAIL - keys : row.shape[1] - TAIL]
    own = own_keys(mask, query.shape[2], keys, query.device)
    return add_mask(gathered_bias(row, own, keys), mask)


def _given(rows: BiasRows | None) -> BiasRows:
    if rows is None:
        raise ValueError("this attention needs the bias of a ctxext checkpoint; use 'sdpa' with other models")
    return rows


def _scaling(query: torch.Tensor, scaling: float | None) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else scaling


FUNCTIONS = {
    AUTO: auto_bias_attention,
    "ctxext_sdpa": sdpa_bias_attention,
    "ctxext_eager": eager_bias_attention,
    "ctxext_flex": flex_bias_attention,
}
for _name, _function in FUNCTIONS.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, range_mask)
