"""Read and write how a config spells its rotary embedding: both dialects, every family, one place.

transformers 5 reads `rope_parameters`; transformers 4 and most servers read `rope_theta` and `rope_scaling` and
silently fall back to a default base without them. Everything that ctxext writes has both, saying the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ctxext.checkpoint.families import Family, find_family, nearest_key
from ctxext.checkpoint.rope_parameters import parse_scaling
from ctxext.positions.base import RopeScaling, check_length, check_number
from ctxext.positions.rope import Dynamic, Linear, Theta
from ctxext.positions.rope_by_parts import Yarn


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """What a config says about positions, with every dialect resolved.

    Attributes:
        family: How the config spells it.
        scaling: The method and its numbers.
        rotary_dim: Rotated dimensions of a head.
        max_position_embeddings: As the config has it.
        window: Tokens that the model is meant to read now.
        original_length: Tokens that it read before any scaling.
        ambiguity: Why `window` and `original_length` are a guess, or None where the config settles them.
        provenance: What an earlier ctxext patch recorded, or None.
    """

    family: Family
    scaling: RopeScaling
    rotary_dim: int
    max_position_embeddings: int
    window: int
    original_length: int
    ambiguity: str | None
    provenance: dict[str, Any] | None


def text_section(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that describes the language model: itself, or a multimodal config's section.

    Raises:
        ValueError: If the family is not supported or its section is missing.
    """
    family = find_family(config)
    if family.text_section is None:
        return config
    section = config.get(family.text_section)
    if not isinstance(section, dict):
        raise ValueError(f"{family.text_section} is {section!r}; a {config['model_type']} config keeps a dict there")
    return section


def read_rope(config: dict[str, Any], original_length: int | None = None) -> RopeConfig:
    """Resolve what a `config.json` says about positions.

    Args:
        config: The parsed file.
        original_length: The window before any scaling, in tokens, where the user states it.

    Raises:
        ValueError: Names the key at fault, its value and what is allowed.
    """
    family = find_family(config)
    section = text_section(config)
    max_length = check_length("max_position_embeddings", require(section, "max_position_embeddings"))
    provenance = config.get("ctxext")
    if provenance is not None and not isinstance(provenance, dict):
        raise ValueError(f"ctxext is {provenance!r} in config.json; it must be the dict that a patch records")
    parameters = merged_parameters(section, family)
    rotary_dim = read_rotary_dim(section, family, parameters)
    top_original = section.get("original_max_position_embeddings")
    if top_original is not None:
        check_length("original_max_position_embeddings", top_original)
    scaling = parse_scaling(parameters, family, max_length, top_original)
    scaling.inv_freq(rotary_dim, max_length)  # refuses factor lists of the wrong length
    window, original, ambiguity = _lengths(scaling, max_length, provenance, parameters, original_length)
    return RopeConfig(
        family=family,
        scaling=scaling,
        rotary_dim=rotary_dim,
        max_position_embeddings=max_length,
        window=window,
        original_length=original,
        ambiguity=ambiguity,
        provenance=provenance,
    )


def require(section: dict[str, Any], key: str) -> Any:
    """Return `section[key]`.

    Raises:
        ValueError: If it is missing; names a key that looks like it.
    """
    if section.get(key) is None:
        raise ValueError(f"config.json has no {key}{nearest_key(key, section)}; ctxext does not guess it")
    return section[key]


def read_rotary_dim(section: dict[str, Any], family: Family, parameters: dict[str, Any]) -> int:
    """Return the rotated dimensions of a head: head_dim times the rotated share, an even number.

    Raises:
        ValueError: Names the key at fault.
    """
    head_dim = section.get("head_dim")
    head_dim = family.default_head_dim if head_dim is None else head_dim
    if head_dim is None:
        hidden = check_length("hidden_size", require(section, "hidden_size"))
        heads = check_length("num_attention_heads", require(section, "num_attention_heads"))
        if hidden % heads:
            raise ValueError(f"hidden_size is {hidden}; it must be a multiple of num_attention_heads, {heads}")
        head_dim = hidden // heads
    head_dim = check_length("head_dim", head_dim)
    share = parameters.get("partial_rotary_factor")
    if family.partial_key is None:
        if share not in (None, 1.0):
            raise ValueError(f"partial_rotary_factor is {share!r}; this model type rotates whole heads: leave it out")
        share = 1.0
    share = check_number("partial_rotary_factor", family.default_partial if share is None else share, above=0.0)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"head_dim {head_dim} with partial_rotary_factor {share:g} rotates {rotary_dim} dimensions; it must be an "
            f"even number from 2 to {head_dim}"
        )
    return rotary_dim


def dialects(section: dict[str, Any], family: Family) -> dict[str, dict[str, Any]]:
    """Return what each dialect of a config says, by the key that says it; None values count as absent.

    Raises:
        ValueError: If one of them is not a dict.
    """
    found: dict[str, dict[str, Any]] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = section.get(key)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{key} is {value!r}; it must be a dict or null")
        if value and key == "rope_parameters" and family.per_layer_type:
            value = value.get("full_attention")
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"rope_parameters.full_attention is {value!r}; it must be a dict or null")
        if value:
            found[key] = {name: item for name, item in value.items() if item is not None}
    return found


def merged_parameters(section: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return one `rope_parameters` dict, base and rotated share included, from whichever dialects there are.

    Raises:
        ValueError: If the dialects contradict each other; stock transformers 4 and 5 would read different models.
    """
    found = dialects(section, family)
    shared = {"rope_theta": section.get(family.theta_key)}
    if family.partial_key:
        shared["partial_rotary_factor"] = section.get(family.partial_key)
    elif section.get("partial_rotary_factor") is not None:
        shared["partial_rotary_factor"] = section["partial_rotary_factor"]
    defaults = {"rope_theta": family.default_theta}
    readings: dict[str, dict[str, Any]] = {}
    for key, parameters in found.items():
        reading = {k: v for k, v in {**defaults, **_without_none(shared), **parameters}.items() if k != "type"}
        reading["rope_type"] = parameters.get("rope_type", parameters.get("type", "default"))
        readings[key] = reading
    if len(readings) == 2:
        _refuse_contradiction(readings["rope_scaling"], readings["rope_parameters"])
        return {**readings["rope_scaling"], **readings["rope_parameters"]}
    if readings:
        reading = next(iter(readings.values()))
    else:
        reading = {"rope_type": "default", **defaults, **_without_none(shared)}
    own = found.get("rope_parameters", {}).get("rope_theta")
    if own is not None and shared["rope_theta"] is not None and own != shared["rope_theta"]:
        raise ValueError(
            f"{family.theta_key} is {shared['rope_theta']!r} but rope_parameters.rope_theta is {own!r}: transformers "
            "4 would read the first and 5 the second; make them equal"
        )
    return reading


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _refuse_contradiction(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse two dialects of which one says other than the other; a key that only one has is no contradiction."""
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            raise ValueError(
                f"config.json contradicts itself: rope_scaling says {key} {old[key]!r}, rope_parameters says "
                f"{new[key]!r}; delete the wrong one (transformers 5 reads the first, and servers either)"
            )


def _lengths(
    scaling: RopeScaling,
    max_length: int,
    provenance: dict[str, Any] | None,
    parameters: dict[str, Any],
    stated: int | None,
) -> tuple[int, int, str | None]:
    """Return the window that the model reads now, the one before any scaling, and why they are a guess if they are."""
    factor = getattr(scaling, "factor", 1.0)
    original: int = stated if stated is not None else getattr(scaling, "original_max_position_embeddings", max_length)
    if provenance is not None:
        return _recorded_lengths(provenance, scaling, max_length)
    if isinstance(scaling, Theta):
        return max_length, original, None
    if isinstance(scaling, Dynamic):
        return round(max_length * factor), max_length, None
    if isinstance(scaling, Linear):
        if stated is not None:
            return round(stated * factor), stated, None
        reason = (
            f"a linear scaling with factor {factor:g} does not say whether max_position_embeddings {max_length} is "
            "the length before or after it; state the pretrained window with --original-length"
        )
        return max_length, max(1, round(max_length / factor)), reason
    if isinstance(scaling, Yarn) and max_length != original and not math.isclose(factor, max_length / original):
        reason = (
            f"the yarn factor {factor:g} is not max_position_embeddings {max_length} over the original {original}: "
            "transformers 5 reads the factor, transformers 4 the ratio; make them agree"
        )
        return max_length, original, reason
    if max_length != original:
        return max_length, original, None
    if stated is None and factor > 1 and "original_max_position_embeddings" not in parameters:
        reason = (
            f"the {scaling.name} scaling has no original_max_position_embeddings, so loaders take {max_length} for "
            "the pretrained window; state it with --original-length"
        )
        return max_length, original, reason
    return round(original * factor), original, None


def _recorded_lengths(
    provenance: dict[str, Any], scaling: RopeScaling, max_length: int
) -> tuple[int, int, str | None]:
    """Return the lengths that an earlier patch recorded, with a reason where the config was changed since."""
    length = check_length("ctxext.length", provenance.get("length"))
    original = check_length("ctxext.original_length", provenance.get("original_length"))
    written = original if isinstance(scaling, Dynamic) else length
    if max_length != written:
        reason = (
            f"ctxext recorded length {length}, but max_position_embeddings is {max_length}: the config was changed "
            "since; restore it, or delete the ctxext entry"
        )
        return max_length, original, reason
    return length, original, None
