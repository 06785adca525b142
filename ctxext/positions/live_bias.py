"""Attention biases on a model in memory: give it one, and check the one that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ctxext.positions.bias import AttentionBias

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_CHECKED = 4096  # distances whose bias is compared


def add_bias(model: PreTrainedModel, config: dict[str, Any]) -> PreTrainedModel:
    """Turn a model of a stock family into the one with an attention bias; changes and returns `model`.

    Its classes become those of `ctxext.modeling`, its parameters stay the same objects, and a learned bias adds some.

    Args:
        model: A causal language model of a family that has code for biases.
        config: What `ctxext.checkpoint.plan` writes for it.

    Raises:
        ValueError: If the model is of another class.
    """
    from ctxext.modeling import classes_of
    from ctxext.modeling.modeling_ctxext import put_bias

    kind, decoder, causal = classes_of(config["model_type"])
    stock = causal.__bases__[-1]
    if type(model) is not stock:
        raise ValueError(
            f"the model is a {type(model).__name__}; a bias can be put into a {stock.__name__} of stock transformers: "
            "patch the checkpoint instead, and load that"
        )
    given = {key: value for key, value in config.items() if key not in ("model_type", "transformers_version")}
    new = kind.from_dict({**model.config.to_dict(), **given, "model_type": kind.model_type})
    attention, old = model.config._attn_implementation, model.config
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new
    model.__class__, model.model.__class__ = causal, decoder
    put_bias(model.model, new)
    model.model.score_bias.to(model.device)
    new._attn_implementation_internal = model._check_and_adjust_attn_implementation(attention)
    return model


def check_bias(model: nn.Module, bias: AttentionBias) -> None:
    """Assert that a live model adds the bias that was asked for; a learned one, only that it is there.

    Args:
        model: A causal language model.
        bias: What was asked for.

    Raises:
        ValueError: If it does not, with the largest deviation.
    """
    import torch

    found: list[Any] = [module for module in model.modules() if type(module).__name__ == "ScoreBias"]
    if len(found) != 1 or found[0].bias_type != bias.name:
        raise ValueError(f"the model has {[module.bias_type for module in found] or 'no bias'}; {bias.name} was asked")
    rotary = any(hasattr(module, "rope_type") for module in model.modules())
    if rotary != bias.keep_rotary:
        raise ValueError(f"the rotary embedding is {'there' if rotary else 'gone'}; keep_rotary is {bias.keep_rotary}")
    if bias.learned:
        return
    distance = np.arange(_CHECKED)
    with torch.no_grad():
        live = found[0].table(torch.from_numpy(distance)).double().numpy()
    expected = bias.bias(distance, found[0].num_heads)
    if not np.array_equal(live, expected):
        raise ValueError(f"the live bias differs from that of {bias.name} by {np.nanmax(np.abs(live - expected)):.2g}")
