"""Read a shared prefix once, branch off it at any position, and decode greedily from there.

A branch costs nothing until it is read on: the keys and values of the prefix are sliced and expanded, not copied, and
the cache's own update makes new tensors, so the prefix stays as it was.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ctxext.evaluation.scoring import check_finite, reading

if TYPE_CHECKING:
    import torch

# Queries read at once. Longer stretches are read in pieces, which bounds the attention mask and the activations, and
# skips the masked half of the scores.
TOKENS_AT_ONCE = 2048


def new_cache(model: Any) -> Any:
    """Return an empty cache that keeps every key, also for layers with a sliding window, so that it can be cropped.

    Raises:
        ValueError: if the model keeps a state that is no list of keys (linear attention), which cannot be cropped.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    usual = DynamicCache(config=model.config)
    foreign = {type(layer).__name__ for layer in usual.layers} - {
        DynamicLayer.__name__,
        DynamicSlidingWindowLayer.__name__,
    }
    if foreign:
        raise ValueError(
            f"{model.config.model_type} keeps {', '.join(sorted(foreign))} states, which cannot be cut back to a "
            "prefix: this evaluation needs a model whose layers all keep keys and values"
        )
    return DynamicCache()


class Reader:
    """Reads tokens into caches with one model."""

    def __init__(self, model: Any) -> None:
        """Prepare reading with `model`, which should be in eval mode."""
        self.model = model
        # transformers renames `past_key_values` to `cache` (5.24); both are in use.
        names = inspect.signature(type(model).forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"

    def read(self, input_ids: torch.Tensor, cache: Any, at_once: int = TOKENS_AT_ONCE) -> torch.Tensor:
        """Read `input_ids` `(batch, tokens)` after what is in `cache`, which grows.

        Returns:
            The logits after the last token, float32, `(batch, vocabulary)`.

        Raises:
            ValueError: if the logits hold a NaN or infinity.
        """
        assert input_ids.shape[1] > 0, "there is nothing to read"
        tokens = input_ids.to(self.model.device)
        with reading(self.model):
            for start in range(0, tokens.shape[1], at_once):
                piece = tokens[:, start : start + at_once]
                output = self.model(input_ids=piece, use_cache=True, logits_to_keep=1, **{self.cache_name: cache})
        last: torch.Tensor = output.logits[:, -1].float()
        check_finite(last, self.model)
        return last

    def greedy(self, logits: torch.Tensor, cache: Any, count: int) -> torch.Tensor:
        """Return the `count` most likely next tokens, one after the other, `(batch, count)`."""
        import torch

        tokens = [logits.argmax(dim=-1, keepdim=True)]
        while len(tokens) < count:
            tokens.append(self.read(tokens[-1], cache).argmax(dim=-1, keepdim=True))
        return torch.cat(tokens, dim=1).cpu()


class Prefix:
    """A token sequence that is read as far as needed, once, and branched off at any position."""

    def __init__(self, reader: Reader, input_ids: Sequence[int]) -> None:
        """Prepare the prefix `input_ids`; nothing is read yet."""
        self.reader = reader
        self.input_ids = list(input_ids)
        self.cache = new_cache(reader.model)
        self.length = 0

    def _read_to(self, length: int) -> None:
        import torch

        if length > self.length:
            self.reader.read(torch.tensor([self.input_ids[self.length : length]]), self.cache)
            self.length = length

    def branch(self, length: int, batch: int) -> Any:
        """Return a cache for `batch` sequences that holds the first `length` tokens of the prefix."""
        assert 0 <= length <= len(self.input_ids), f"{length} is not within the prefix of {len(self.input_ids)} tokens"
        self._read_to(length)
        return branch(self.cache, length, batch)


def branch(cache: Any, length: int, batch: int | None = None) -> Any:
    """Return a cache that holds the first `length` tokens of `cache`, which stays as it is.

    Args:
        cache: a `DynamicCache` whose layers all keep every key.
        length: tokens to keep.
        batch: sequences to expand a single one to; None keeps the cache's own.
    """
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in twin.layers:
        keys, values = layer.keys[..., :length, :], layer.values[..., :length, :]
        layer.keys = keys if batch is None else keys.expand(batch, -1, -1, -1)
        layer.values = values if batch is None else values.expand(batch, -1, -1, -1)
    return twin
