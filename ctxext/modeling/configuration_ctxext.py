"""Configs of bias checkpoints: the family's own, with `bias_parameters` and a `model_type` that no loader mistakes."""

from typing import Any

import transformers
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

# This file is loaded first.
if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(f"this model needs transformers 5.17 or newer; {transformers.__version__} is installed")


class CtxextLlamaConfig(LlamaConfig):
    """A LLaMA with an attention bias; `bias_parameters` as `ScoreBias` takes them."""

    model_type = "ctxext_llama"
    bias_parameters: dict[str, Any] | None = None


class CtxextMistralConfig(MistralConfig):
    """A Mistral with an attention bias; `bias_parameters` as `ScoreBias` takes them."""

    model_type = "ctxext_mistral"
    bias_parameters: dict[str, Any] | None = None


class CtxextQwen2Config(Qwen2Config):
    """A Qwen2 with an attention bias; `bias_parameters` as `ScoreBias` takes them."""

    model_type = "ctxext_qwen2"
    bias_parameters: dict[str, Any] | None = None


class CtxextQwen3Config(Qwen3Config):
    """A Qwen3 with an attention bias; `bias_parameters` as `ScoreBias` takes them."""

    model_type = "ctxext_qwen3"
    bias_parameters: dict[str, Any] | None = None
