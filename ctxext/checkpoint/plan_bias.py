"""Decide what giving a model an attention bias writes, from a config alone."""

from __future__ import annotations

import inspect
from typing import Any

from ctxext.checkpoint.bias_config import write_bias
from ctxext.checkpoint.rope_config import RopeConfig
from ctxext.checkpoint.rope_write import write_rope
from ctxext.positions.base import RopeScaling
from ctxext.positions.bias import AttentionBias
from ctxext.positions.rope import Theta


def choose_bias(chosen: type[AttentionBias], options: dict[str, Any]) -> AttentionBias:
    """Return the bias with its options.

    Raises:
        ValueError: If one is missing or not allowed.
    """
    for name, parameter in chosen.options().items():
        if parameter.default is inspect.Parameter.empty and name not in options:
            raise ValueError(f"method {chosen.name!r} needs --{name.replace('_', '-')}")
    return chosen.from_options(**options)


def check_start(rope: RopeConfig, bias: AttentionBias, length: int) -> None:
    """Refuse a start that a bias is not defined on.

    Raises:
        ValueError: If the length is below the window, cannot be known, or the rotary embedding to be kept changes
            with the length.
    """
    if rope.ambiguity is not None:
        raise ValueError(rope.ambiguity)
    if length < rope.window:
        raise ValueError(f"length is {length}; the model reads {rope.window} tokens already, so ask for that or more")
    if bias.keep_rotary and not rope.scaling.is_static:
        raise ValueError(
            f"the rotary embedding to be kept has a {rope.scaling.name} scaling, which changes with the length; start "
            "from the unscaled base, or leave --keep-rotary out"
        )


def biased_config(
    config: dict[str, Any], rope: RopeConfig, bias: AttentionBias, length: int
) -> tuple[dict[str, Any], RopeScaling]:
    """Return the config of the model with the bias, and the scaling of the rotary embedding in it.

    A rotary embedding that the bias replaces is written unscaled: nothing reads it.
    """
    scaling = rope.scaling if bias.keep_rotary else Theta(rope_theta=rope.scaling.rope_theta)
    return write_bias(write_rope(config, rope, scaling, length), bias), scaling


def bias_notes(bias: AttentionBias, rope: RopeConfig, length: int) -> list[str]:
    """Return what the user should know of a model with this bias, a sentence each."""
    notes = []
    if bias.keep_rotary:
        if length > rope.window:
            notes.append(
                f"the rotary embedding stays as it is: beyond {rope.window} tokens it turns to angles that the model "
                "has not seen"
            )
    else:
        notes.append("the rotary embedding is replaced: fine-tune the model before you use it")
    if bias.learned:
        notes.append("the bias has parameters of its own, in one more weight file, and learns when the model does")
    notes.append(
        "load it with trust_remote_code=True, or after `import ctxext.modeling` without; vLLM, llama.cpp and "
        "transformers 4 refuse it"
    )
    return notes
