"""Models with an attention bias. Importing this registers them with transformers.

The files of this folder import only torch and transformers; a bias checkpoint carries copies of them as its remote
code, so that it loads with `trust_remote_code=True` where ctxext is not installed. After `import ctxext.modeling` the
classes here are used, and no flag is needed.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_ctxext import CtxextLlamaConfig, CtxextMistralConfig, CtxextQwen2Config, CtxextQwen3Config
from .modeling_ctxext import (
    CtxextLlamaForCausalLM,
    CtxextLlamaModel,
    CtxextMistralForCausalLM,
    CtxextMistralModel,
    CtxextQwen2ForCausalLM,
    CtxextQwen2Model,
    CtxextQwen3ForCausalLM,
    CtxextQwen3Model,
)

_CLASSES = (
    (CtxextLlamaConfig, CtxextLlamaModel, CtxextLlamaForCausalLM),
    (CtxextMistralConfig, CtxextMistralModel, CtxextMistralForCausalLM),
    (CtxextQwen2Config, CtxextQwen2Model, CtxextQwen2ForCausalLM),
    (CtxextQwen3Config, CtxextQwen3Model, CtxextQwen3ForCausalLM),
)
for _config, _decoder, _model in _CLASSES:
    AutoConfig.register(_config.model_type, _config)
    AutoModel.register(_config, _decoder)
    AutoModelForCausalLM.register(_config, _model)
    _config.register_for_auto_class()  # saving copies the code beside the weights
    _decoder.register_for_auto_class("AutoModel")
    _model.register_for_auto_class("AutoModelForCausalLM")


def classes_of(model_type: str) -> tuple[Any, Any, Any]:
    """Return the config, the decoder and the causal language model of a `model_type` such as `ctxext_llama`."""
    return next(classes for classes in _CLASSES if classes[0].model_type == model_type)
