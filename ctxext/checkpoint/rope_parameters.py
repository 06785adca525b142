"""Parse one `rope_parameters` dict into the position method that it spells."""

from __future__ import annotations

import math
from typing import Any

from ctxext.checkpoint.families import Family, nearest_key
from ctxext.positions.base import RopeScaling, check_length, check_number, nearest
from ctxext.positions.rope import Dynamic, Linear, LongRoPE, Theta, longrope_attention_factor
from ctxext.positions.rope_by_parts import Llama3, NTKByParts, Yarn, yarn_attention_factor

_SHARED_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
    },
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
}


def allowed_keys(rope_type: str) -> set[str]:
    """Return the keys that some loader reads in a scaling of `rope_type`."""
    return _SHARED_KEYS | _KEYS[rope_type]


def parse_scaling(
    parameters: dict[str, Any], family: Family, max_length: int, top_original: int | None
) -> RopeScaling:
    """Return the method that a merged `rope_parameters` dict spells.

    Args:
        parameters: As `merged_parameters` returns it.
        family: Of the model; phi3 calls its longrope by older names.
        max_length: max_position_embeddings.
        top_original: original_max_position_embeddings at the top level of the config, which comes first.

    Raises:
        ValueError: Names an unknown type or key with the nearest match, a missing key, or a value out of range.
    """
    rope_type = parameters["rope_type"]
    if rope_type == "su" or (family.only_longrope and rope_type == "yarn"):
        rope_type = "longrope"
    known = ["default", "longrope"] if family.only_longrope else list(_KEYS)
    if not isinstance(rope_type, str) or rope_type not in known:
        guess = nearest(str(rope_type), known)
        raise ValueError(
            f"rope_type is {rope_type!r}{guess}; for this model type it must be one of {', '.join(known)}"
        )
    for key, value in parameters.items():
        if key not in _SHARED_KEYS | _KEYS[rope_type]:
            allowed = sorted(_SHARED_KEYS | _KEYS[rope_type])
            raise ValueError(
                f"the {rope_type} scaling has a key {key!r}{nearest(key, allowed)}, {value!r}, that no loader reads; "
                f"correct or delete it: a {rope_type} scaling has {', '.join(allowed)}"
            )
    name = "rope_theta" if family.theta_key == "rope_theta" else f"rope_theta ({family.theta_key})"
    theta = check_number(name, parameters["rope_theta"], above=1.0)
    own = parameters.get("original_max_position_embeddings")
    if own is not None and top_original is not None and own != top_original:
        raise ValueError(
            f"original_max_position_embeddings is {top_original!r} at the top level and {own!r} in the scaling, and "
            "loaders differ in which they read; make them equal"
        )
    original = next(value for value in (top_original, own, max_length) if value is not None)
    original = check_length("original_max_position_embeddings", original)
    return _PARSERS[rope_type](parameters, theta, max_length, original)


def _need(parameters: dict[str, Any], key: str) -> Any:
    if key not in parameters:
        guess = nearest_key(key, parameters)
        raise ValueError(f"rope_type is {parameters['rope_type']!r}, which needs {key}, and there is none{guess}")
    return parameters[key]


def _parse_theta(parameters: dict[str, Any], theta: float, max_length: int, original: int) -> RopeScaling:
    return Theta(rope_theta=theta)


def _parse_linear(parameters: dict[str, Any], theta: float, max_length: int, original: int) -> RopeScaling:
    return Linear(rope_theta=theta, factor=_need(parameters, "factor"))


def _parse_dynamic(parameters: dict[str, Any], theta: float, max_length: int, original: int) -> RopeScaling:
    factor = _need(parameters, "factor")
    return Dynamic(rope_theta=theta, factor=factor, original_max_position_embeddings=max_length)


def _parse_yarn(parameters: dict[str, Any], theta: float, max_length: int, original: int) -> RopeScaling:
    factor = check_number("factor", _need(parameters, "factor"), above=1.0, inclusive=True)
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = yarn_attention_factor(factor)
        mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and mscale_all_dim:  # DeepSeek's form: (0.1 m ln s + 1) / (0.1 m_all ln s + 1)
            scales = [check_number(k, parameters[k], above=0.0) for k in ("mscale", "mscale_all_dim")]
            attention = (0.1 * scales[0] * math.log(factor) + 1) / (0.1 * scales[1] * math.log(factor) + 1)
    method = NTKByParts if attention == 1.0 and factor > 1 else Yarn
    return method(
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=parameters.get("truncate", True),
    )


def _parse_longrope(parameters: dict[str, Any], theta: float, max_length: int, original: int) -> RopeScaling:
    factor = parameters.get("factor", max(max_length / original, 1.0))
    factor = check_number("factor", factor, above=1.0, inclusive=True)
    return LongRoPE(
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=parameters.get("attention_factor", longrope_attention_factor(factor, original)),
        short_factor=_need(parameters, "short_factor"),
        long_factor=_need(parameters, "long_factor"),
    )


def _parse_llama3(parameters: dict[str, Any], theta: float, max_length: int, original: int) -> RopeScaling:
    return Llama3(
        rope_theta=theta,
        factor=_need(parameters, "factor"),
        original_max_position_embeddings=original,
        low_freq_factor=_need(parameters, "low_freq_factor"),
        high_freq_factor=_need(parameters, "high_freq_factor"),
    )


_PARSERS = {
    "default": _parse_theta,
    "linear": _parse_linear,
    "dynamic": _parse_dynamic,
    "yarn": _parse_yarn,
    "longrope": _parse_longrope,
    "llama3": _parse_llama3,
}
