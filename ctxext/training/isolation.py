"""Keep packed documents apart in attention, whatever mask the model is called with.

transformers 5 finds packed documents by position ids that restart, but only where it is given neither an attention
mask nor a cache: an all-ones mask, which many collators add, lets every document read the ones before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_CACHES = ("past_key_values", "cache")  # the names before and since transformers 5.24


def document_starts(position_ids: torch.Tensor) -> torch.Tensor:
    """Return where documents start: `(batch, length)` bool, true where a position does not follow on the one before.

    Args:
        position_ids: `(batch, length)`.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def isolated_positions(position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return position ids from which transformers isolates documents and padding by itself.

    Where a two-dimensional mask changes between reading and ignoring, a new document starts: padding is then never
    read, and no mask is needed.

    Args:
        position_ids: `(batch, length)`; each document counts up by one.
        attention_mask: `(batch, length)`, 0 for padding, or None.

    Returns:
        `(batch, length)`.
    """
    if attention_mask is None or bool((attention_mask != 0).all()):
        return position_ids
    starts = document_starts(position_ids)
    starts[:, 1:] |= (attention_mask[:, 1:] != 0) != (attention_mask[:, :-1] != 0)
    places = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    first = torch.where(starts, places, torch.zeros_like(places)).cummax(dim=1).values
    return places - first


def isolate_documents(model: nn.Module) -> Any:
    """Make a model of transformers isolate documents whenever position ids restart; return the hook's handle.

    The hook takes away a two-dimensional attention mask and the cache that would switch the isolation off. A call
    whose positions do not restart, such as generation, is left as it is.

    Args:
        model: A causal language model of transformers; below a peft model, its base model.
    """
    return model.register_forward_pre_hook(_prepare, with_kwargs=True)


def _prepare(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    cached = any(kwargs.get(name) is not None for name in _CACHES)
    if positions is None or positions.dim() != 2 or cached:
        return args, kwargs
    flat = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    if isinstance(mask, torch.Tensor) and flat is None:
        return args, kwargs  # a mask of queries by keys says everything itself
    if flat is not None and flat.shape != positions.shape:
        positions = positions.expand_as(flat)
    positions = isolated_positions(positions, flat)
    if not bool(document_starts(positions)[:, 1:].any()):
        return args, kwargs
    return args, {**kwargs, "position_ids": positions, "attention_mask": None, "use_cache": False}
