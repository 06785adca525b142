"""Models with an attention bias: the families of transformers, whose forward passes are used as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    MistralForCausalLM,
    MistralModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from .attention import AUTO, BACKENDS, BiasRows
from .bias import LearnedBias, ScoreBias
from .configuration_ctxext import CtxextLlamaConfig, CtxextMistralConfig, CtxextQwen2Config, CtxextQwen3Config


class NoRotation(nn.Module):
    """Stands where the rotary embedding was: cos 1 and sin 0 turn nothing."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, both `(1, 1, head_dim)`, in the dtype of `hidden`."""
        return hidden.new_ones(1, 1, self.head_dim), hidden.new_zeros(1, 1, self.head_dim)


class BiasMixin:
    """What every model with a bias does alike."""

    _keep_in_fp32_modules_strict = ["score_bias"]

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """Return the attention that honours the bias; transformers asks for it when it loads or switches.

        Raises:
            ValueError: If there is none of that name.
        """
        if attn_implementation is None:
            return AUTO
        if attn_implementation in (AUTO, *BACKENDS.values()):
            return attn_implementation
        if attn_implementation not in BACKENDS:
            raise ValueError(
                f"attn_implementation is {attn_implementation!r}, which would leave the attention bias out; "
                f"use {', '.join(BACKENDS)}, or none for the one that suits the device"
            )
        return BACKENDS[attn_implementation]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, LearnedBias):
            module.initialize()
        else:
            super()._init_weights(module)  # type: ignore[misc]


class BiasDecoderMixin(BiasMixin):
    """A decoder whose attention is given the bias, and whose rotary embedding may be switched off."""

    score_bias: ScoreBias

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        put_bias(self, config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the family's own forward pass; its layers hand `score_bias` on to the attention."""
        return super().forward(*args, score_bias=BiasRows(self.score_bias), **kwargs)  # type: ignore[misc]


def put_bias(decoder: Any, config: Any) -> None:
    """Give a decoder the bias of a config, and take its rotary embedding away unless the config keeps it."""
    parameters = config.bias_parameters or {}
    decoder.score_bias = ScoreBias(parameters, config.num_attention_heads)
    if not parameters.get("keep_rotary", False):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        decoder.rotary_emb = NoRotation(head_dim)


class CtxextLlamaModel(BiasDecoderMixin, LlamaModel):
    """The decoder of a LLaMA with an attention bias."""

    config_class = CtxextLlamaConfig


class CtxextLlamaForCausalLM(BiasMixin, LlamaForCausalLM):
    """A LLaMA with an attention bias."""

    config_class = CtxextLlamaConfig

    def __init__(self, config: CtxextLlamaConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        _assemble(self, CtxextLlamaModel(config), config)


class CtxextMistralModel(BiasDecoderMixin, MistralModel):
    """The decoder of a Mistral with an attention bias."""

    config_class = CtxextMistralConfig


class CtxextMistralForCausalLM(BiasMixin, MistralForCausalLM):
    """A Mistral with an attention bias."""

    config_class = CtxextMistralConfig

    def __init__(self, config: CtxextMistralConfig) -> None:
        super(MistralForCausalLM, self).__init__(config)
        _assemble(self, CtxextMistralModel(config), config)


class CtxextQwen2Model(BiasDecoderMixin, Qwen2Model):
    """The decoder of a Qwen2 with an attention bias."""

    config_class = CtxextQwen2Config


class CtxextQwen2ForCausalLM(BiasMixin, Qwen2ForCausalLM):
    """A Qwen2 with an attention bias."""

    config_class = CtxextQwen2Config

    def __init__(self, config: CtxextQwen2Config) -> None:
        super(Qwen2ForCausalLM, self).__init__(config)
        _assemble(self, CtxextQwen2Model(config), config)


class CtxextQwen3Model(BiasDecoderMixin, Qwen3Model):
    """The decoder of a Qwen3 with an attention bias."""

    config_class = CtxextQwen3Config


class CtxextQwen3ForCausalLM(BiasMixin, Qwen3ForCausalLM):
    """A Qwen3 with an attention bias."""

    config_class = CtxextQwen3Config

    def __init__(self, config: CtxextQwen3Config) -> None:
        super(Qwen3ForCausalLM, self).__init__(config)
        _assemble(self, CtxextQwen3Model(config), config)


def _assemble(model: Any, decoder: nn.Module, config: Any) -> None:
    """Put decoder and output head into a causal language model, as the families' own `__init__` do."""
    model.model = decoder
    model.vocab_size = config.vocab_size
    model.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    model.post_init()
