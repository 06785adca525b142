"""Attention to a window and a memory (see `ctxext.reading.memory`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ctxext.reading.memory_pass import Found, Reading
from ctxext.reading.memory_state import best

NAME = "ctxext_memory"  # of the attention function
GATE = "memory_gate"  # the parameter on every attention module, `(heads,)`

Window = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # keys, values and what is visible
Note = Callable[[torch.Tensor, torch.Tensor], None]  # of weights, and of how many keys each query read


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    top_k: int | None,
    scaling: float,
    dropout: float,
    note: Note | None = None,
) -> torch.Tensor:
    """Attend to the k best keys: `(batch, heads, queries, head_dim)`.

    Args:
        query: `(batch, heads, queries, head_dim)`.
        key: `(batch, key heads, keys, head_dim)`.
        value: As `key`.
        visible: `(batch, 1, queries or 1, keys)` bool; a query that sees nothing, padding, reads no matter what.
        top_k: k; None reads all.
        scaling: Of the logits.
        dropout: Probability that a weight is dropped.
        note: Is told the weights and how many keys each query read.
    """
    visible = visible | ~visible.any(dim=-1, keepdim=True)  # a softmax of nothing is no number
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) if groups > 1 else states for states in (key, value))
    if note is None and (top_k is None or top_k >= key.shape[2]):
        return scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout, scale=scaling)
    wide = torch.promote_types(query.dtype, torch.float32)  # in bf16 different scores would be equal
    scores = (query.to(wide) * scaling) @ key.to(wide).transpose(-1, -2)
    weights = _weights(scores, visible, top_k, note)
    return torch.dropout(weights, dropout, dropout > 0.0).to(value.dtype) @ value


def attend_found(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    found: Found,
    *,
    top_k: int,
    scaling: float,
    dropout: float,
    note: Note | None = None,
) -> torch.Tensor:
    """Attend to the k best of what an index found and of other keys; arguments and result as `attend` has them."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) if groups > 1 else states for states in (key, value))
    visible = torch.cat([found.slots >= 0, visible.expand(-1, query.shape[1], query.shape[2], -1)], dim=-1)
    visible = visible | ~visible.any(dim=-1, keepdim=True)
    wide = torch.promote_types(query.dtype, torch.float32)
    turned, near = (states.to(wide) * scaling for states in (found.query, query))
    scores = torch.cat(
        [(found.key.to(wide) @ turned[..., None])[..., 0], near @ key.to(wide).transpose(-1, -2)], dim=-1
    )
    weights = torch.dropout(_weights(scores, visible, top_k, note), dropout, dropout > 0.0).to(value.dtype)
    remembered, window = weights.tensor_split([found.key.shape[3]], dim=-1)
    out: torch.Tensor = (remembered[..., None, :] @ found.value)[..., 0, :] + window @ value
    return out


def _weights(scores: torch.Tensor, visible: torch.Tensor, top_k: int | None, note: Note | None) -> torch.Tensor:
    """Return the softmax over the k best of the visible scores, `(batch, heads, queries, keys)`."""
    scores, read = scores.where(visible, -math.inf), visible.expand_as(scores)
    if top_k is not None and top_k < scores.shape[-1]:
        chosen = best(scores.detach(), top_k)
        scores, read = scores.where(chosen, -math.inf), visible & chosen
    weights = torch.softmax(scores, dim=-1)
    if note is not None:
        note(weights.detach(), read.sum(dim=-1, keepdim=True))
    return weights


def memory_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    reading: Reading | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to window and memory: the function that transformers' `AttentionInterface` calls.

    Args:
        module: The attention layer.
        query: `(batch, heads, queries, head_dim)`.
        key: `(batch, key heads, keys, head_dim)`, those of a cache included.
        value: As `key`.
        attention_mask: `(batch, 1, queries, keys)` bool.
        scaling: Of the logits; head_dim^-1/2 by default.
        dropout: Probability that a weight is dropped.
        reading: Of this forward pass.
        **kwargs: What else transformers hands on.

    Returns:
        `(batch, queries, heads, head_dim)`, and no weights.

    Raises:
        ValueError: If the model has no memory, or the mask is not bool.
    """
    if reading is None:
        raise ValueError(f"the attention {NAME!r} needs a memory: call ctxext.reading.memory.add_memory(model, ...)")
    if attention_mask.dtype != torch.bool:
        raise ValueError(f"a mask of queries by keys must be bool with a memory, not {attention_mask.dtype}")
    layer, config = int(module.layer_idx), reading.config  # type: ignore[arg-type]
    reading.take(layer, key, value)
    visible = reading.seen(attention_mask[..., : key.shape[2]].expand(len(query), -1, -1, -1))
    how: dict[str, Any] = {"scaling": query.shape[-1] ** -0.5 if scaling is None else scaling, "dropout": dropout}
    gate = getattr(module, GATE, None)
    read = _read_near if config.index == "approximate" else _read_all
    if gate is None:
        out = read(reading, layer, query, (key, value, visible), how)
        out = attend(query, key, value, visible, top_k=config.top_k, **how) if out is None else out
    else:
        out = attend(query, key, value, visible, top_k=None, **how)
        share = torch.sigmoid(gate)[None, :, None, None].to(out.dtype)
        remembered = read(reading, layer, query, None, how)
        if remembered is None:  # the gate stays in the graph: data parallel training waits for its gradient
            return (out + 0.0 * share).transpose(1, 2).contiguous(), None
        assert reading.remembered is not None
        some = reading.remembered.valid.any(dim=1).to(out.device)
        out = torch.lerp(out, remembered, share * some[:, None, None, None])
    return out.transpose(1, 2).contiguous(), None


def _read_all(
    reading: Reading, layer: int, query: torch.Tensor, window: Window | None, how: dict[str, Any]
) -> torch.Tensor | None:
    """Attend to the k best of all that is remembered and of a window; None where nothing is remembered.

    Args:
        reading: Of this forward pass.
        layer: Its number.
        query: `(batch, heads, queries, head_dim)`.
        window: Keys, values and what is visible, as `attend` has them; None to read the memory alone.
        how: Other arguments of `attend`.
    """
    recalled = reading.recall(layer, query)
    if recalled is None:
        return None
    key, value, visible = recalled
    slots = key.shape[2]
    if window is not None:
        key, value = torch.cat([key, window[0]], dim=2), torch.cat([value, window[1]], dim=2)
        visible = torch.cat([visible.expand(-1, -1, query.shape[2], -1), window[2]], dim=-1)
    note = _noting(reading, layer, slots, None)
    return attend(query, key, value, visible, top_k=reading.config.top_k, note=note, **how)


def _read_near(
    reading: Reading, layer: int, query: torch.Tensor, window: Window | None, how: dict[str, Any]
) -> torch.Tensor | None:
    """Attend to the k best of what the index finds and of a window; arguments and result as `_read_all` has them."""
    found = reading.find(layer, query)
    if found is None:
        return None
    assert reading.config.top_k is not None
    if window is None:
        none = found.key[:, :, 0, :0]
        window = none, none, found.slots.new_zeros(len(query), 1, 1, 0, dtype=torch.bool)
    slots = found.slots.clamp_min(0)
    note = _noting(reading, layer, slots.shape[-1], slots)
    return attend_found(query, *window, found, top_k=reading.config.top_k, note=note, **how)


def _noting(reading: Reading, layer: int, remembered: int, slots: torch.Tensor | None) -> Note | None:
    """Return what notes the weights of the first so many keys, where eviction asks for it."""
    if reading.config.eviction == "fifo":
        return None  # in every other pass weights are computed, whatever comes of them: layers may run again
    return lambda weights, read: reading.note(layer, weights[..., :remembered], read, slots)


def memory_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return `(batch, 1, queries, keys)` bool, never None: the mask function of `AttentionMaskInterface`."""
    mask: torch.Tensor = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    return mask


AttentionInterface.register(NAME, memory_attention)
AttentionMaskInterface.register(NAME, memory_mask)
