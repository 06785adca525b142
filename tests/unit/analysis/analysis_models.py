"""Tiny models whose receptive field is known, with weights large enough that attention matters."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM

import ctxext.modeling

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def biased(layers: int = 2, dtype: torch.dtype = torch.float32, **parameters: Any) -> Any:
    """A random llama with an attention bias."""
    torch.manual_seed(0)
    shape = {**SHAPE, "num_hidden_layers": layers}
    config = ctxext.modeling.CtxextLlamaConfig(**shape, bias_parameters=parameters)
    return ctxext.modeling.CtxextLlamaForCausalLM(config).eval().to(dtype)


def sliding(window: int, layers: int = 2) -> Any:
    """A random Mistral of transformers whose layers all slide over `window` tokens, the query's own among them."""
    torch.manual_seed(0)
    config = MistralConfig(**{**SHAPE, "num_hidden_layers": layers}, sliding_window=window)
    return MistralForCausalLM(config).eval()


def tokens(length: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))
