"""Read and write how a config spells its rotary embedding: both dialects, every family, one place.

transformers 5 reads `rope_parameters`; transformers 4 and most servers read `rope_theta` and `rope_scaling` and
silently fall back to a default base without them. Everything that ctxext writes has both, saying the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ctxext.checkpoint.families import Family, find_family, nearest_key
from ctxext.checkpoint.rope_lengths import read_lengths
from ctxext.checkpoint.rope_parameters import parse_scaling
from ctxext.positions.base import RopeScaling, check_length, check_number


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
    max_length = check_length("max_position_embeddings", _max_position_embeddings(section, family))
    provenance = config.get("ctxext")
    if provenance is not None and not isinstance(provenance, dict):
        raise ValueError(f"ctxext is {provenance!r} in config.json; it must be the dict that a patch records")
    top_original = section.get("original_max_position_embeddings")
    if top_original is None:
        top_original = family.default_original
    readings = read_dialects(section, family)
    scalings = {
        key: parse_scaling(parameters, family, max_length, top_original) for key, parameters in readings.items()
    }
    _refuse_contradiction(readings, scalings)
    parameters, scaling = next(iter(readings.values())), next(iter(scalings.values()))
    rotary_dim = read_rotary_dim(section, family, parameters)
    scaling.inv_freq(rotary_dim, max_length)  # refuses factor lists of the wrong length
    has_original = top_original is not None or "original_max_position_embeddings" in parameters
    window, original, ambiguity = read_lengths(scaling, max_length, has_original, provenance, original_length)
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


def _max_position_embeddings(section: dict[str, Any], family: Family) -> Any:
    value = section.get("max_position_embeddings")
    if value is None and family.default_window is not None:
        return family.default_window
    return require(section, "max_position_embeddings")


def read_head_dim(section: dict[str, Any], family: Family) -> int:
    """Return the dimensions of a head.

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
    return check_length("head_dim", head_dim)


def read_rotary_dim(section: dict[str, Any], family: Family, parameters: dict[str, Any]) -> int:
    """Return the rotated dimensions of a head: head_dim times the rotated share, an even number.

    Raises:
        ValueError: Names the key at fault.
    """
    head_dim = read_head_dim(section, family)
    share = parameters.get("partial_rotary_factor")
    if family.partial_key is None:
        if share not in (None, 1.0):
            raise ValueError(f"partial_rotary_factor is {share!r}; this model type rotates whole heads: leave it out")
        share = 1.0
    name = f"partial_rotary_factor ({family.partial_key})"
    share = check_number(name, family.default_partial if share is None else share, above=0.0)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"head_dim is {head_dim} and {name} {share:g}, which rotates {rotary_dim} dimensions; it must be an even "
            f"number from 2 to {head_dim}"
        )
    return rotary_dim


LAYER_KINDS = ("full_attention", "sliding_attention")


def dialects(section: dict[str, Any], family: Family) -> dict[str, dict[str, Any]]:
    """Return what each dialect of a config says, by the key that says it; None values count as absent.

    `rope_scaling` comes first: where both are there, that is the one which transformers 4 and 5 read.

    Raises:
        ValueError: If one of them is not a dict.
    """
    found: dict[str, dict[str, Any]] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = section.get(key)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{key} is {value!r}; it must be a dict or null")
        if value and key == "rope_parameters" and family.per_layer_type:
            value = _full_attention(value, section.get("rope_local_base_freq"))
        said = {name: item for name, item in (value or {}).items() if item is not None}
        if said:
            found[key] = said
    return found


def _full_attention(nested: dict[str, Any], local_theta: Any) -> dict[str, Any] | None:
    """Return what `rope_parameters` with one dict for each attention type says of the layers that see everything."""
    for key, value in nested.items():
        if key not in (*LAYER_KINDS, "truncate"):
            guess = nearest_key(key, dict.fromkeys(LAYER_KINDS))
            raise ValueError(
                f"rope_parameters has a key {key!r}{guess}, {value!r}; this model type has {', '.join(LAYER_KINDS)}"
            )
        if key in LAYER_KINDS and value is not None and not isinstance(value, dict):
            raise ValueError(f"rope_parameters.{key} is {value!r}; it must be a dict or null")
    new_theta = (nested.get("sliding_attention") or {}).get("rope_theta", local_theta)
    if local_theta is not None and new_theta != local_theta:
        raise ValueError(
            f"config.json contradicts itself: rope_local_base_freq is {local_theta!r} but "
            f"rope_parameters.sliding_attention.rope_theta is {new_theta!r}, and loaders differ in which they read; "
            "make them equal"
        )
    full: dict[str, Any] | None = nested.get("full_attention")
    if full and ("truncate" in full or "truncate" in nested):
        return {**full, "truncate": nested.get("truncate", True)}  # where transformers 5 reads it
    return full


def read_dialects(section: dict[str, Any], family: Family) -> dict[str, dict[str, Any]]:
    """Return each dialect as one whole `rope_parameters` dict, base and rotated share included.

    The keys are `rope_scaling` and `rope_parameters`, in this order, or `config` where there is neither.

    Raises:
        ValueError: If one names a base or a share other than the top level does: transformers 4 reads that one.
    """
    shared = {"rope_theta": section.get(family.theta_key)}
    share_key = family.partial_key or "partial_rotary_factor"
    shared["partial_rotary_factor"] = section.get(share_key)
    top = {key: value for key, value in shared.items() if value is not None}
    names = {"rope_theta": family.theta_key, "partial_rotary_factor": share_key}
    readings: dict[str, dict[str, Any]] = {}
    for key, parameters in (dialects(section, family) or {"config": {}}).items():
        for name, value in top.items():
            if name in parameters and parameters[name] != value:
                raise ValueError(
                    f"config.json contradicts itself: {names[name]} is {value!r} but {key}.{name} is "
                    f"{parameters[name]!r}, and loaders differ in which they read; make them equal"
                )
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if "type" in parameters and parameters["type"] != rope_type:
            raise ValueError(f"{key} has rope_type {rope_type!r} but type {parameters['type']!r}; make them equal")
        reading = {"rope_theta": family.default_theta, **top, **parameters, "rope_type": rope_type}
        reading.pop("type", None)
        readings[key] = reading
    return readings


def merged_parameters(section: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the `rope_parameters` dict that loaders make of a section, base and rotated share included."""
    return next(iter(read_dialects(section, family).values()))


def _refuse_contradiction(readings: dict[str, dict[str, Any]], scalings: dict[str, RopeScaling]) -> None:
    """Refuse two dialects that mean different things: which of them is read depends on the loader."""
    if len(scalings) < 2 or scalings["rope_scaling"] == scalings["rope_parameters"]:
        return
    old, new = readings["rope_scaling"], readings["rope_parameters"]
    said = [f"{key} {old.get(key)!r} and {new.get(key)!r}" for key in {**old, **new} if old.get(key) != new.get(key)]
    raise ValueError(
        f"config.json contradicts itself: rope_scaling and rope_parameters say {', '.join(said)}, and loaders differ "
        "in which they read; delete the wrong one"
    )
