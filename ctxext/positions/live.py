"""Position methods on a model in memory: patch it, read its live frequencies, fix them for a length."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxext.positions.base import FloatArray, RopeScaling, check_length

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

FULL_ATTENTION = "full_attention"


def rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the rotary embedding modules of a model by name.

    Raises:
        ValueError: If it has none.
    """
    found = {name: module for name, module in model.named_modules() if hasattr(module, "rope_type")}
    if not found:
        raise ValueError(f"{type(model).__name__} has no rotary embedding module; ctxext patches RoPE models")
    return found


def live_frequencies(module: nn.Module) -> tuple[FloatArray, float]:
    """Return what a rotary module turns with now, on the layers whose attention reaches over the whole sequence.

    Returns:
        Angular frequencies, `(rotary_dim / 2,)` float64 in radians per token, and the factor on cos and sin.
    """
    prefix = f"{FULL_ATTENTION}_" if isinstance(module.rope_type, dict) else ""
    frequencies = getattr(module, f"{prefix}inv_freq").detach().float().cpu().double().numpy()
    return frequencies, float(getattr(module, f"{prefix}attention_scaling"))


def check_frequencies(model: nn.Module, scaling: RopeScaling, rotary_dim: int, length: int) -> None:
    """Assert that a live model turns with the frequencies of `scaling` and multiplies cos and sin by its factor.

    A method that changes with the sequence length is checked at a single token and at `length` tokens.

    Args:
        model: Any model with rotary modules.
        scaling: What was asked for.
        rotary_dim: Rotated dimensions of a head.
        length: Tokens that the model is meant to read.

    Raises:
        ValueError: If it does not, with the largest deviation.
    """
    for name, module in rotary_modules(model).items():
        _compare(name, module, scaling, scaling.inv_freq(rotary_dim))
        if not scaling.is_static:
            _compare(name, _at_length(module, length), scaling, scaling.inv_freq(rotary_dim, length))


def _at_length(module: nn.Module, length: int) -> nn.Module:
    """Return a copy of a rotary module that has seen a sequence of `length` tokens."""
    import torch

    copied = copy.deepcopy(module)
    positions = torch.tensor([[length - 1]], device=next(copied.buffers()).device)
    layer = {"layer_type": FULL_ATTENTION} if isinstance(copied.rope_type, dict) else {}
    copied(torch.zeros(1, device=positions.device), positions, **layer)
    return copied


def _compare(name: str, module: nn.Module, scaling: RopeScaling, expected: FloatArray) -> None:
    frequencies, factor = live_frequencies(module)
    asked = f"method {scaling.name!r}"
    if frequencies.shape != expected.shape:
        raise ValueError(f"{name} has {len(frequencies)} frequencies; {asked} gives {len(expected)}")
    deviation = float(np.max(np.abs(frequencies / expected - 1.0)))
    if not deviation < 1e-5:
        raise ValueError(f"the frequencies of {name} differ from those of {asked} by {deviation:.2g} (relative)")
    if not abs(factor - scaling.cos_sin_factor) < 1e-5:
        raise ValueError(f"{name} multiplies cos and sin by {factor:g}; {asked} gives {scaling.cos_sin_factor:g}")


def patch(
    model: PreTrainedModel, *, method: str, length: int, original_length: int | None = None, **options: Any
) -> PreTrainedModel:
    """Extend a model in memory, as `ctxext patch` does a checkpoint; changes and returns `model`.

    The config is changed and the rotary modules are rebuilt from it in float32, whatever the model's dtype; then the
    live frequencies are compared with the formula's. For an attention bias the model's classes become those of
    `ctxext.modeling`. Cast a model before this, not after: `model.bfloat16()` rounds
    the frequencies too, which `from_pretrained(dtype=...)` does not. `save_pretrained` writes the dialect of
    transformers 5 only; `ctxext.checkpoint.normalize` adds the other.

    Args:
        model: A RoPE model of a supported family.
        method: As after `--method`.
        length: Tokens that the model shall read.
        original_length: The pretrained window, in tokens, where the config is ambiguous.
        **options: The method's own options.

    Raises:
        ValueError: As `ctxext patch` does, before anything is changed.
    """
    from ctxext.checkpoint.plan import plan_patch
    from ctxext.checkpoint.rope_config import text_section

    plan = plan_patch(model.config.to_dict(), method=method, length=length, original_length=original_length, **options)
    if plan.bias is not None:
        from ctxext.positions.live_bias import add_bias, check_bias

        _limit_generation(model, length)
        add_bias(model, plan.config)
        check_bias(model, plan.bias)
        return model
    section = text_section(plan.config)
    config = model.config.get_text_config()
    vars(config).pop("original_max_position_embeddings", None)  # it would override what the new scaling says
    for key in ("rope_parameters", "max_position_embeddings", "head_dim", "original_max_position_embeddings"):
        if section.get(key) is not None:
            setattr(config, key, section[key])
    model.config.ctxext = plan.config["ctxext"]
    _limit_generation(model, length)
    config.standardize_rope_params()
    config.validate_rope()
    for name, module in rotary_modules(model).items():
        parent, _, leaf = name.rpartition(".")
        device = next(module.buffers()).device
        setattr(model.get_submodule(parent), leaf, type(module)(config=config).to(device))
    check_frequencies(model, plan.scaling, plan.rope.rotary_dim, length)
    return model


def _limit_generation(model: PreTrainedModel, length: int) -> None:
    generation = getattr(model, "generation_config", None)
    if generation is not None and generation.max_length is not None:
        generation.max_length = length


def fit_length(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """Fix the rotary factors of a model for sequences of up to `length` tokens; changes and returns `model`.

    Stock `dynamic` and `longrope` change the frequencies with the sequence length, so that keys cached under one set
    meet queries under another, and one long row changes every other row of its batch. After this call the frequencies
    are those for `length` and stay. Other methods have fixed frequencies: for them this does nothing.

    Args:
        model: A RoPE model of a supported family.
        length: Tokens of the longest sequence, prompt and generated tokens together.

    Raises:
        ValueError: If `length` is no positive whole number.
    """
    import torch

    from ctxext.checkpoint.rope_config import read_rope

    check_length("length", length)
    rope = read_rope(model.config.to_dict())
    if rope.scaling.is_static:
        return model
    frequencies = torch.tensor(rope.scaling.inv_freq(rope.rotary_dim, length), dtype=torch.float32)
    for module in rotary_modules(model).values():
        prefix = f"{FULL_ATTENTION}_" if isinstance(module.rope_type, dict) else ""
        for buffer in ("inv_freq", "original_inv_freq"):
            old = getattr(module, f"{prefix}{buffer}")
            module.register_buffer(f"{prefix}{buffer}", frequencies.to(old.device, copy=True), persistent=False)
        # The type decides whether the forward pass recomputes the frequencies; the config keeps what the model is.
        fixed: Any = {**vars(module)["rope_type"], FULL_ATTENTION: "default"} if prefix else "default"
        vars(module)["rope_type"] = fixed
    return model
