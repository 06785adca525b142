"""Tiny models with a bias whose weights are large enough that attention, and so the bias, matters to the logits.

And what counts the memory of attention.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from reference import CASES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ctxext.modeling

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
BACKENDS = ("sdpa", "eager", "flex_attention")
VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def bias_class(family: str, kind: str) -> Any:
    """`kind` is Config, Model or ForCausalLM."""
    return getattr(ctxext.modeling, f"Ctxext{FAMILIES[family]}{kind}")


def stock_class(family: str, kind: str) -> Any:
    return getattr(transformers, FAMILIES[family] + kind)


def bias_config(family: str, parameters: dict[str, Any], **overrides: Any) -> Any:
    return bias_class(family, "Config")(**{**SHAPE, **overrides}, bias_parameters=parameters)


def bias_model(
    case: str = "alibi", family: str = "llama", backend: str = "sdpa", bias: dict[str, Any] | None = None, **more: Any
) -> Any:
    """A causal language model in eval mode, learned values moved off their start; `bias` is added to the case."""
    config = bias_config(family, {**CASES[case], **(bias or {})}, **more)
    torch.manual_seed(0)
    model = bias_class(family, "ForCausalLM")(config).eval()
    model.set_attn_implementation(backend)
    with torch.no_grad():
        for parameter in model.model.score_bias.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def tokens(length: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def alone(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits `(rows, length, vocabulary)` without a cache, padding or neighbours."""
    return model(ids, use_cache=False).logits


def in_pieces(
    model: Any, ids: torch.Tensor, ends: list[int], cache: Any, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The same logits, read up to each of `ends` on a cache."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # from 5.24
    logits, start = [], 0
    for end in ends:
        seen = None if mask is None else mask[:, :end]
        answer = model(ids[:, start:end], attention_mask=seen, use_cache=True, **{name: cache})
        logits.append(answer.logits)
        start = end
    return torch.cat(logits, dim=1)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest memory that any tensor of a computation, views aside, lies in."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.size = max(self.size, leaf.untyped_storage().nbytes())
        return out
