"""A LLaMA with sinusoidal position embeddings (arXiv 1706.03762, section 3.5): the baseline of the bias papers.

Importing this registers it with transformers. It is made for training and reading whole sequences, without a cache.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from ctxext.modeling.modeling_ctxext import NoRotation


class SinusoidalLlamaConfig(LlamaConfig):  # type: ignore[misc]
    """Config of `SinusoidalLlamaForCausalLM`."""

    model_type = "sinusoidal_llama"


class SinusoidalLlamaModel(LlamaModel):  # type: ignore[misc]
    """A decoder that adds sinusoids to its token embeddings, which are multiplied by the root of their width."""

    config_class = SinusoidalLlamaConfig

    def __init__(self, config: SinusoidalLlamaConfig) -> None:
        super().__init__(config)
        self.rotary_emb = NoRotation(config.head_dim)

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Read tokens `(batch, length)` from the start of their sequences."""
        if kwargs.get("use_cache"):
            raise ValueError("SinusoidalLlamaModel has no cache: call it with use_cache=False")
        width = self.config.hidden_size
        places = sinusoids(input_ids.shape[1], width).to(input_ids.device, self.embed_tokens.weight.dtype)
        hidden = self.embed_tokens(input_ids) * math.sqrt(width) + places
        given = {**kwargs, "inputs_embeds": hidden, "use_cache": False}
        return super().forward(**given)


def sinusoids(length: int, width: int) -> torch.Tensor:
    """Return sin and cos of position x 10000^(-2i / width): `(length, width)`, float32, sines first."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


class SinusoidalLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """A causal language model with sinusoidal positions."""

    config_class = SinusoidalLlamaConfig

    def __init__(self, config: SinusoidalLlamaConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = SinusoidalLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register("sinusoidal_llama", SinusoidalLlamaConfig)
AutoModel.register(SinusoidalLlamaConfig, SinusoidalLlamaModel)
AutoModelForCausalLM.register(SinusoidalLlamaConfig, SinusoidalLlamaForCausalLM)
