"""Write a position method into a config, in both dialects, as each family spells it."""

from __future__ import annotations

import copy
import math
from typing import Any

from ctxext.checkpoint.rope_config import RopeConfig, merged_parameters, read_head_dim, text_section
from ctxext.positions.base import RopeScaling
from ctxext.positions.rope import Dynamic, LongRoPE, Theta, longrope_attention_factor

OLD_TWO_KEY_TYPES = ("linear", "dynamic")

# Where they are there, servers take the smallest of these and max_position_embeddings for the model's length.
_OTHER_LENGTHS = {
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "model_max_length",
    "n_positions",
    "seq_len",
    "seq_length",
}


def write_rope(config: dict[str, Any], rope: RopeConfig, scaling: RopeScaling, length: int) -> dict[str, Any]:
    """Return a copy of a config with `scaling` and `length` written in both dialects.

    Args:
        config: The parsed `config.json`; not changed.
        rope: What `read_rope` made of it.
        scaling: The method and numbers to write.
        length: Tokens that the model is meant to read.

    Raises:
        ValueError: If the family's config cannot express the method.
    """
    written = copy.deepcopy(config)
    section, family = text_section(written), rope.family
    native = scaling.rope_parameters(rope.rotary_dim, rope.original_length)
    if family.only_longrope:
        native, original = _as_three_keys(scaling, rope, length)
    else:
        original = native.get("original_max_position_embeddings") if native["rope_type"] == "longrope" else None
    old = {key: value for key, value in native.items() if key != "rope_theta"}
    section[family.theta_key] = scaling.rope_theta
    if "rope_theta" in section:
        section["rope_theta"] = scaling.rope_theta
    if family.old_two_keys and old["rope_type"] in OLD_TWO_KEY_TYPES:
        old = {"type": old["rope_type"], "factor": old["factor"]}
    section["rope_scaling"] = None if native.get("rope_type") == "default" else old
    new = dict(native)
    if family.partial_key:
        share = merged_parameters(text_section(config), family).get("partial_rotary_factor", family.default_partial)
        section[family.partial_key] = new["partial_rotary_factor"] = share
    if family.per_layer_type:
        sliding = _sliding_parameters(section)
        section["rope_local_base_freq"] = sliding["rope_theta"]  # where transformers 4 reads it
        new = {"sliding_attention": sliding, "full_attention": new}
        if "truncate" in native:
            new["truncate"] = native["truncate"]  # transformers 5.24 reads it here, whatever the attention type
    section["rope_parameters"] = new
    section["max_position_embeddings"] = rope.original_length if isinstance(scaling, Dynamic) else length
    section.pop("original_max_position_embeddings", None)
    if original is not None:
        section["original_max_position_embeddings"] = original
    for key in _OTHER_LENGTHS & section.keys():
        section[key] = length
    if section.get("head_dim") is None and (family.writes_head_dim or "head_dim" in section):
        section["head_dim"] = read_head_dim(section, family)
    return written


def _as_three_keys(scaling: RopeScaling, rope: RopeConfig, length: int) -> tuple[dict[str, Any], int | None]:
    """Write a scaling as phi3 reads it: default, or longrope with two lists of factors and nothing else.

    The attention factor follows from max_position_embeddings / original_max_position_embeddings there, so it is either
    LongRoPE's own or, with both lengths equal, 1.

    Raises:
        ValueError: If the scaling needs another attention factor, or changes with the sequence length.
    """
    if isinstance(scaling, Theta):
        return scaling.rope_parameters(rope.rotary_dim, rope.original_length), None
    if isinstance(scaling, LongRoPE):
        original = scaling.original_max_position_embeddings
        own = longrope_attention_factor(max(length / original, 1.0), original)
        if not math.isclose(scaling.attention_factor, own, rel_tol=1e-6):
            raise ValueError(
                f"attention_factor is {scaling.attention_factor:g}; phi3 configs have no place for it and mean {own:g}"
            )
        keys = scaling.rope_parameters(rope.rotary_dim, original)
    elif scaling.is_static and scaling.cos_sin_factor == 1.0:
        original = length
        keys = scaling.longrope_parameters(rope.rotary_dim, original)
    else:
        raise ValueError(
            f"method {scaling.name!r} cannot be written for phi3, whose config reads only longrope factors without an "
            "attention factor of their own; use linear, theta, ntk, ntk_by_parts, llama3 or longrope"
        )
    kept = ("rope_theta", "short_factor", "long_factor")
    return {"type": "longrope", **{key: keys[key] for key in kept}}, original


def _sliding_parameters(section: dict[str, Any]) -> dict[str, Any]:
    """Return what the layers that slide turn with, untouched; from the old dialect where there is no new one."""
    given = (section.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta = section.get("rope_local_base_freq") or 10000.0
    return {"rope_type": "default", "rope_theta": theta, **given}
