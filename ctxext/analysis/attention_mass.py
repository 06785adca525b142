"""How far back each attention head looks: attention mass by distance, in linear memory.

All but the last queries are read into a cache with the model's usual attention; the last ones are then read with
eager attention, whose weights are `(queries, length)` per head and not `(length, length)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

QUERIES = 64
MASS_THRESHOLD = 0.99

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MassSummary:
    """What is kept of one segment's attention.

    Attributes:
        mean_distance: by layer and head, tokens, `(layers, heads)`.
        distance_99: the smallest distance within which 99% of the mass lies, tokens, `(layers, heads)`.
        within: mass at distances below 1, 2, 4, ..., averaged over a layer's heads, `(layers, powers)`.
    """

    mean_distance: Floats
    distance_99: Floats
    within: Floats


@contextmanager
def _eager_weights(model: Any) -> Iterator[list[torch.Tensor]]:
    """Put the weights of every attention layer that is run into a list, in the order in which they are run."""
    usual = model.config._attn_implementation
    kept: list[torch.Tensor] = []
    handles: list[Any] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        weights: Any = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if getattr(weights, "ndim", 0) == 4:
            kept.append(weights[0].double().cpu())

    model.set_attn_implementation("eager")
    try:
        handles = [
            module.register_forward_hook(keep)
            for module in model.modules()
            if type(module).__name__.endswith("Attention")
        ]
        yield kept
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(usual)


def attention_mass(model: Any, input_ids: torch.Tensor, queries: int = QUERIES) -> Floats:
    """Return the mean attention of a segment's last queries by distance.

    Args:
        model: a causal language model of transformers in eval mode, whose attention can be run as `eager`.
        input_ids: tokens, `(length,)`.
        queries: how many of the last tokens are averaged over, fewer if there are fewer.

    Returns:
        Weights that sum to 1 over distances 0, 1, 2, ... from the query: `(layers, heads, length)`.

    Raises:
        ValueError: if no layer gives weights, or the model keeps no cache of keys.
    """
    import torch

    from ctxext.evaluation.prefix import Reader, new_cache

    length = len(input_ids)
    count = min(queries, length)
    reader, cache = Reader(model), new_cache(model)
    if count < length:
        reader.read(input_ids[None, :-count], cache)
    with _eager_weights(model) as kept:
        reader.read(input_ids[None, -count:], cache)
    if not kept:
        raise ValueError(f"{type(model).__name__} gives no attention weights: leave out --attention-mass")
    weights = torch.stack(kept)
    mass = torch.zeros(*weights.shape[:2], length, dtype=torch.double)
    for row in range(count):
        last = length - count + row  # the query's own key
        mass[..., : last + 1] += weights[..., row, : last + 1].flip(-1)
    normalised: Floats = (mass / mass.sum(dim=-1, keepdim=True)).numpy()
    return normalised


def powers_of_two(length: int) -> list[int]:
    """Return 1, 2, 4, ... below `length`, and `length`."""
    return [1 << power for power in range((length - 1).bit_length())] + [length]


def summarize_mass(mass: Floats) -> MassSummary:
    """Return mean distance, 99% distance and mass within powers of two of `(layers, heads, length)` masses."""
    length = mass.shape[-1]
    total = mass.cumsum(axis=-1)
    reached = (total < MASS_THRESHOLD).sum(axis=-1)
    return MassSummary(
        mean_distance=mass @ np.arange(length),
        distance_99=np.minimum(reached, length - 1).astype(np.float64),
        within=total[..., [power - 1 for power in powers_of_two(length)]].mean(axis=1),
    )
