"""Which keys each query sees, as a range of keys instead of a matrix: linear memory for any causal mask.

Under a causal mask, with padding, packed documents or a sliding window, the keys that a query sees are those from some
first one up to its own. The mask function that transformers calls therefore returns, as the attention mask,
`(batch, 1, queries, 2)` int32: the first key and the query's own, both as places in the keys that attention is given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

_ROWS = 512  # queries whose full mask is looked at at once


def range_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return what each query sees: the mask function that transformers' `AttentionMaskInterface` calls.

    Args:
        batch_size: Sequences.
        q_length: Queries of a sequence.
        kv_length: Keys of a sequence, those of a static cache that are not filled yet included.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: transformers' description of the pattern.
        attention_mask: `(batch, positions)`, false for padding, or None.
        use_vmap: Whether `mask_function` takes single indices only.
        device: Of the result.
        **kwargs: Whatever else transformers hands to mask functions.

    Returns:
        None where every query sees all keys up to its own and the last query's own key is the last;
        `(batch, 1, queries, 2)` int32 ranges; or `(batch, 1, queries, keys)` bool where what a query sees has a hole.
    """
    padded = attention_mask is not None and (_traced(attention_mask) or not bool(attention_mask.all()))
    plain = mask_function is causal_mask_function and not padded
    if plain and isinstance(q_offset, int) and q_offset - kv_offset + q_length == kv_length:
        return None
    own = torch.arange(q_length, device=device) + q_offset - kv_offset
    if plain:
        ranges = torch.stack([torch.zeros_like(own), own], dim=-1)
        return ranges.to(torch.int32).expand(batch_size, 1, q_length, 2)
    whole_mask = partial(
        sdpa_mask,
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    first, whole = _look(whole_mask, own, q_offset)
    if _traced(whole):
        torch._assert_async(whole, "a compiled model cannot read an attention mask with holes: pad at one side")
    elif not bool(whole):
        matrix: torch.Tensor = whole_mask(q_length=q_length, q_offset=q_offset).clone()
        places = own[None, None, :, None].expand(batch_size, 1, q_length, 1)
        return matrix.scatter_(-1, places, True)  # padding sees itself: a row of nothing would be no number
    return torch.stack([first, own.expand_as(first)], dim=-1).to(torch.int32)[:, None]


def _look(
    whole_mask: Callable[..., torch.Tensor], own: torch.Tensor, q_offset: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `_ranges` does for all queries, of whose mask a few rows exist at a time.

    Args:
        whole_mask: Makes the mask of some queries.
        own: `(queries,)`, each query's own key.
        q_offset: Position of the first query.
    """
    firsts, whole = [], []
    for start in range(0, len(own), _ROWS):
        places = own[start : start + _ROWS]
        seen = whole_mask(q_length=len(places), q_offset=q_offset + start)
        first, without_hole = _ranges(seen, places)
        firsts.append(first)
        whole.append(without_hole)
    return torch.cat(firsts, dim=1), torch.stack(whole).all()


def _ranges(seen: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first key that each query sees, and whether all of them see every key from there to their own.

    A query whose own key is padding is padding itself: it is given its own key alone.

    Args:
        seen: `(batch, 1, queries, keys)` bool.
        own: `(queries,)`, each query's own key.

    Returns:
        `(batch, queries)` int64, and a bool scalar.
    """
    seen = seen[:, 0]
    place = own.expand(seen.shape[:2])
    real = seen.gather(-1, place[..., None])[..., 0]
    first = torch.where(real, seen.int().argmax(dim=-1), place)
    count = seen.sum(dim=-1)
    return first, ((count == place - first + 1) | ~real).all()


def _traced(tensor: torch.Tensor) -> bool:
    return torch.compiler.is_compiling() or isinstance(tensor, torch._subclasses.FakeTensor)
