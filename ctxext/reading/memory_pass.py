"""One forward pass: what it knows of the memory, and what it adds (see `ctxext.reading.memory`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ctxext.reading.memory_state import Remembered, Uses, add_uses, attended, keep

if TYPE_CHECKING:
    from ctxext.reading.memory import MemoryConfig
    from ctxext.reading.memory_index import RowIndex


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
        waits: Whether the window is read again, by queries that have waited for the tokens behind them.
        added: Keys without rotation and values of the window, by layer.
        uses: How its queries attended what is remembered, by layer.
        found: Slots that the index gave, by layer: layers that run again need not search again.
    """

    config: MemoryConfig
    remembered: Remembered | None
    appends: bool
    mask: Any = None
    window: tuple[torch.Tensor, torch.Tensor] | None = None
    before: tuple[torch.Tensor, torch.Tensor] | None = None
    real: torch.Tensor | None = None
    waits: bool = False
    added: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    uses: dict[int, Uses] = field(default_factory=dict)
    found: dict[int, torch.Tensor] = field(default_factory=dict)

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

    def again(self) -> Reading:
        """Return the second reading of the window, which waits; what the first saw of the memory counts for both."""
        return replace(self, waits=True, added={}, found={})

    def seen(self, visible: torch.Tensor) -> torch.Tensor:
        """Return what the window's queries see of it, given what they see without waiting.

        Args:
            visible: `(batch, 1, queries, keys)`; the result too.
        """
        if not self.waits or self.real is None:
            return visible
        place, real = torch.arange(visible.shape[-1], device=visible.device), self.real.to(visible.device)
        ahead = place[None, :] - place[:, None]
        near = (ahead > 0) & (ahead <= self.config.wait)
        return visible | (near & (real[:, None, :] & real[:, :, None]))[:, None]

    def note(self, layer: int, weights: torch.Tensor, read: torch.Tensor, slots: torch.Tensor | None) -> None:
        """Keep how the memory was attended, for `append`; arguments as `attended` has them."""
        if not self.appends or self.waits:
            return
        assert self.real is not None and self.remembered is not None
        count = self.remembered.valid.shape[1]
        self.uses[layer] = attended(weights.detach(), read, self.real.to(weights.device), slots, count)

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

    def find(self, layer: int, query: torch.Tensor) -> Found | None:
        """Return what the index gives of a layer's memory, None where nothing is remembered.

        Args:
            layer: Its number.
            query: `(batch, heads, queries, head_dim)`.
        """
        if self.remembered is None or self.before is None or self.config.top_k is None:
            return None
        keys, values = self.remembered.layers[layer]
        batch, heads, queries = query.shape[:3]
        cos, sin = (part.to(query.device) for part in self.before)
        turned = rotate(query, cos, -sin)
        slots = self.found.get(layer)
        if slots is None:
            asked = turned.detach().reshape(batch, keys.shape[1], -1, query.shape[-1])
            rows = zip(self.remembered.indexes[layer], keys, asked, strict=True)
            share, count = self.config.probed, min(self.config.top_k, keys.shape[2])
            each = [index.search(stored, queried, count, share) for index, stored, queried in rows]
            slots = torch.from_numpy(np.stack(each)).sort(dim=-1).values.view(batch, heads, queries, -1)
            self.found[layer] = slots
        shared = slots.clamp_min(0).view(batch, keys.shape[1], -1)  # one behind another, by key head
        key, value = (
            _at(states, shared).to(query.device, query.dtype).view(*slots.shape, -1) for states in (keys, values)
        )
        return Found(turned, key, value, slots.to(query.device))

    def append(self) -> Remembered | None:
        """Return the memory with the window appended and what is beyond its size evicted."""
        if not self.added or self.real is None:
            return self.remembered
        old, config, real = self.remembered, self.config, self.real
        slots = 0 if old is None else old.valid.shape[1]
        valid = real if old is None else torch.cat([old.valid.to(real.device), real], dim=1)
        layers, kept_uses, indexes = [], [], []
        for layer in sorted(self.added):
            uses = None
            if config.eviction != "fifo":
                before = old.uses[layer] if old is not None else None
                now = self.uses.get(layer)
                before, now = (
                    None if u is None else Uses(*(part.to(real.device) for part in u)) for u in (before, now)
                )
                uses = add_uses(config.eviction, before, now, real)
            if layer == 0 or uses is not None:
                order, kept = keep(
                    valid, uses, policy=config.eviction, new=real.shape[1], size=config.size, sinks=config.sinks
                )
            if uses is not None:
                kept_uses.append(Uses(*(part.gather(1, order) for part in uses)))
            layers.append(self._kept(layer, order))
            if config.index == "approximate":
                indexes.append(self._indexed(layer, order, kept, slots, layers[-1][0]))
        return Remembered(layers, kept, kept_uses, indexes)

    def _kept(self, layer: int, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer in an order of slots, `(batch, kept)`."""
        states = []
        for number, new in enumerate(self.added[layer]):
            where = torch.device("cpu") if self.config.offload else new.device
            old = self.remembered
            both = new.to(where) if old is None else torch.cat([old.layers[layer][number], new.to(where)], dim=2)
            states.append(_at(both, order[:, None]))
        return states[0], states[1]

    def _indexed(
        self, layer: int, order: torch.Tensor, kept: torch.Tensor, slots: int, keys: torch.Tensor
    ) -> list[RowIndex]:
        """Return the indexes of a layer's rows behind the window."""
        from ctxext.reading.memory_index import RowIndex

        empty = RowIndex.of(0, np.zeros((keys.shape[1], 1, keys.shape[3]), dtype=np.float32))
        before = [empty] * len(keys) if self.remembered is None else self.remembered.indexes[layer]
        rows = zip(before, order, kept, keys, strict=True)
        return [index.follow(row[real].cpu().numpy(), slots, states) for index, row, real, states in rows]

    def finish(self) -> None:
        """Let go of what the pass added; layers that run again in the backward pass add nothing."""
        self.appends, self.mask, self.window = False, None, None
        self.added, self.uses = {}, {}
        if not torch.is_grad_enabled():  # then no layer runs again
            self.found = {}


@dataclass(frozen=True)
class Found:
    """What an index found for every query of a layer.

    Attributes:
        query: `(batch, heads, queries, head_dim)`, turned back by the memory's position.
        key: `(batch, heads, queries, found, head_dim)`, without rotation.
        value: As `key`.
        slots: `(batch, heads, queries, found)`, oldest first; -1 where it found fewer.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor


def _at(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return keys or values at slots: `(batch, heads, found, head_dim)`.

    Args:
        states: `(batch, heads, slots, head_dim)`.
        slots: `(batch, heads or 1, found)`.
    """
    batch, heads, count, width = states.shape
    first = torch.arange(batch * heads, device=states.device).view(batch, heads, 1) * count
    places = (first + slots.to(states.device)).flatten()
    # Rows are copied whole: a gather goes by element and takes several times as long.
    return states.reshape(-1, width).index_select(0, places).view(batch, heads, -1, width)


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
