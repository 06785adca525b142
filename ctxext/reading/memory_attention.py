"""Attention to a window and a memory, and what one forward pass knows of the memory (see `ctxext.reading.memory`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from ctxext.reading.memory import MemoryConfig

NAME = "ctxext_memory"  # of the attention function
GATE = "memory_gate"  # the parameter on every attention module, `(heads,)`


@dataclass(frozen=True)
class Remembered:
    """What the rows remember; never changed in place, so that a forward pass keeps what it began with.

    Attributes:
        layers: Keys without rotation and values of each layer, `(batch, key heads, slots, head_dim)` each.
        valid: `(batch, slots)`, false where a row remembers less than others. Oldest first.
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    valid: torch.Tensor


@dataclass
class Reading:
    """One forward pass: the memory as it was when it began, and what it will add.

    Attributes:
        config: Of the memory.
        remembered: None where nothing is.
        appends: Whether the pass reads a window that is to be remembered.
        mask: The attention mask that the model was called with.
        window: Cosines and sines of the window, `(batch or 1, tokens, head_dim)`.
        before: Cosines and sines of the position where each row's memory stands, `(batch, 1, head_dim)`.
        real: `(batch, tokens)`, false for padding.
        added: Keys without rotation and values of the window, by layer.
    """

    config: MemoryConfig
    remembered: Remembered | None
    appends: bool
    mask: Any = None
    window: tuple[torch.Tensor, torch.Tensor] | None = None
    before: tuple[torch.Tensor, torch.Tensor] | None = None
    real: torch.Tensor | None = None
    added: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def place(self, rotary: Any, states: torch.Tensor, positions: torch.Tensor) -> None:
        """Note where each row's window begins.

        Args:
            rotary: The model's rotary embedding.
            states: `(batch, tokens, width)`.
            positions: `(batch or 1, tokens)`.

        Raises:
            ValueError: If a row holds more than one sequence, or not the rows that the memory has.
        """
        batch, tokens = states.shape[:2]
        if self.remembered is not None and len(self.remembered.valid) != batch:
            rows = len(self.remembered.valid)
            raise ValueError(f"a batch of {batch} rows, but the memory is of {rows}: reset() it first")
        self.real = _real(self.mask, batch, tokens, states.device)
        positions = positions.expand(batch, tokens)
        both = self.real[:, 1:] & self.real[:, :-1]
        if bool((both & (positions.diff(dim=1) != 1)).any()):
            raise ValueError("a row's positions jump: a window with memory holds one sequence a row, none packed")
        first = positions.masked_fill(~self.real, torch.iinfo(positions.dtype).max).amin(dim=1)
        first = first.where(self.real.any(dim=1), 0)  # a row of padding alone reads as any other
        angles = (first - self.config.distance)[:, None, None].float() * rotary.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        self.before = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling

    def take(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the window's keys and values of a layer, `(batch, key heads, keys, head_dim)`, for `append`."""
        if not self.appends or self.window is None:
            return
        tokens = self.window[0].shape[1]  # a static cache has more keys, which are not filled yet
        unrotated = unrotate(key[:, :, :tokens].detach(), *self.window)
        self.added[layer] = unrotated, value[:, :, :tokens].detach()

    def recall(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return keys, rotated to before the window, and values of a layer, and `(batch, 1, 1, slots)` what is valid.

        Args:
            layer: Its number.
            like: Has the device and dtype of the result.
        """
        if self.remembered is None or self.before is None:
            return None
        key, value = (states.to(like.device, like.dtype) for states in self.remembered.layers[layer])
        cos, sin = (part.to(like.device) for part in self.before)
        return rotate(key, cos, sin), value, self.remembered.valid.to(like.device)[:, None, None, :]

    def append(self) -> Remembered | None:
        """Return the memory with the window appended and the oldest tokens beyond its size evicted, but the sinks."""
        if not self.added or self.real is None:
            return self.remembered
        old, size, sinks = self.remembered, self.config.size, self.config.sinks
        valid = self.real if old is None else torch.cat([old.valid.to(self.real.device), self.real], dim=1)
        rank = valid.cumsum(dim=1) - 1
        kept = valid & ((rank < sinks) | (rank >= valid.sum(dim=1, keepdim=True) - (size - sinks)))
        order = (~kept).int().argsort(dim=1, stable=True)[:, :size]
        layers = []
        for layer in sorted(self.added):
            states = []
            for number, new in enumerate(self.added[layer]):
                where = torch.device("cpu") if self.config.offload else new.device
                both = new.to(where) if old is None else torch.cat([old.layers[layer][number], new.to(where)], dim=2)
                index = order.to(where)[:, None, :, None].expand(-1, both.shape[1], -1, both.shape[3])
                states.append(both.gather(2, index))
            layers.append((states[0], states[1]))
        return Remembered(layers, kept.gather(1, order))

    def finish(self) -> None:
        """Let go of what the pass added; layers that run again in the backward pass add nothing."""
        self.appends, self.mask, self.window = False, None, None
        self.added = {}


def _real(mask: Any, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Return `(batch, tokens)`, false for padding, from any attention mask that a model takes."""
    if isinstance(mask, dict):  # one for each kind of layer
        mask = next(iter(mask.values()))
    if mask is None:
        return torch.ones(batch, tokens, dtype=torch.bool, device=device)
    if mask.ndim == 4:  # padding does not see itself
        if mask.dtype != torch.bool:
            raise ValueError(f"a mask of queries by keys must be bool with a memory, not {mask.dtype}")
        mask = mask[:, 0, :, :tokens].diagonal(dim1=1, dim2=2)
    real: torch.Tensor = mask[:, -tokens:].to(device) != 0
    return real.expand(batch, tokens)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return keys rotated as LLaMA rotates them, computed in float32 or better.

    Args:
        states: `(batch, heads, keys, head_dim)`.
        cos: `(batch or 1, keys or 1, head_dim)`, times the attention factor.
        sin: As `cos`.
    """
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    one, other = wide.chunk(2, dim=-1)
    return (wide * cos[:, None] + torch.cat((-other, one), dim=-1) * sin[:, None]).to(states.dtype)


def unrotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return keys as they were before `rotate`; arguments as there. The attention factor is taken out too."""
    cos, sin = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (cos, sin))
    squared = cos**2 + sin**2
    return rotate(states, cos / squared, -sin / squared)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return which keys are the best: `(..., keys)` bool; of equal scores the last ones.

    Args:
        scores: `(..., keys)`, minus infinity for what is hidden.
        count: k, at most as many as there are keys.

    Returns:
        `count` true ones in a row; all of a row that sees fewer keys than that, hidden ones too.
    """
    least = scores.topk(count, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    among = scores >= least
    tied = (among.sum(dim=-1, keepdim=True) > count) & (least > -math.inf)
    if scores.device.type == "cpu" and not tied.any():  # of a GPU, asking would wait for it
        return among
    equal = scores == least
    room = count - (among & ~equal).sum(dim=-1, keepdim=True)
    from_the_end = equal.flip(-1).cumsum(dim=-1, dtype=torch.int32).flip(-1)
    return among & (~tied | ~equal | (from_the_end <= room))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    top_k: int | None,
    scaling: float,
    dropout: float,
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
    """
    visible = visible | ~visible.any(dim=-1, keepdim=True)  # a softmax of nothing is no number
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) if groups > 1 else states for states in (key, value))
    if top_k is None or top_k >= key.shape[2]:
        return scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout, scale=scaling)
    wide = torch.promote_types(query.dtype, torch.float32)  # in bf16 different scores would be equal
    scores = (query.to(wide) * scaling) @ key.to(wide).transpose(-1, -2)
    with torch.no_grad():
        read = visible & best(scores.masked_fill(~visible, -math.inf), top_k)
    scores = scores.masked_fill(~read, -math.inf)
    weights = torch.dropout(torch.softmax(scores, dim=-1), dropout, dropout > 0.0)
    return weights.to(value.dtype) @ value


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
    layer, top_k = int(module.layer_idx), reading.config.top_k  # type: ignore[arg-type]
    reading.take(layer, key, value)
    recalled, gate = reading.recall(layer, key), getattr(module, GATE, None)
    visible = attention_mask[..., : key.shape[2]].expand(len(query), -1, -1, -1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if gate is None:
        if recalled is not None:
            key, value = torch.cat([recalled[0], key], dim=2), torch.cat([recalled[1], value], dim=2)
            visible = torch.cat([recalled[2].expand(-1, -1, query.shape[2], -1), visible], dim=-1)
        out = attend(query, key, value, visible, top_k=top_k, scaling=scaling, dropout=dropout)
    else:
        out = attend(query, key, value, visible, top_k=None, scaling=scaling, dropout=dropout)
        share = torch.sigmoid(gate)[None, :, None, None].to(out.dtype)
        if recalled is None:  # the gate stays in the graph: data parallel training waits for its gradient
            return (out + 0.0 * share).transpose(1, 2).contiguous(), None
        share = share * recalled[2].any(dim=-1, keepdim=True)
        out = torch.lerp(out, attend(query, *recalled, top_k=top_k, scaling=scaling, dropout=dropout), share)
    return out.transpose(1, 2).contiguous(), None


def memory_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return `(batch, 1, queries, keys)` bool, never None: the mask function of `AttentionMaskInterface`."""
    mask: torch.Tensor = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    return mask


AttentionInterface.register(NAME, memory_attention)
AttentionMaskInterface.register(NAME, memory_mask)
