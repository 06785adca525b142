"""Decide from where to where a config is extended already, and say so where it cannot be known."""

from __future__ import annotations

import math
from typing import Any

from ctxext.positions.base import RopeScaling, check_length
from ctxext.positions.rope import Dynamic, Linear, Theta
from ctxext.positions.rope_by_parts import Yarn

Lengths = tuple[int, int, str | None]


def read_lengths(
    scaling: RopeScaling,
    max_length: int,
    has_original: bool,
    provenance: dict[str, Any] | None,
    stated: int | None,
) -> Lengths:
    """Return the window that a model reads now, the one before any scaling, and why they are a guess if they are.

    Args:
        scaling: What the config says.
        max_length: max_position_embeddings.
        has_original: Whether the config has an original_max_position_embeddings.
        provenance: What an earlier ctxext patch recorded.
        stated: The window before any scaling, as the user states it.

    Raises:
        ValueError: If `stated` contradicts the config, or the config itself.
    """
    if provenance is not None:
        window, original, ambiguity = _recorded_lengths(provenance, scaling, max_length)
    elif isinstance(scaling, Theta):
        window, original, ambiguity = max_length, max_length if stated is None else stated, None
        if original > max_length:
            raise ValueError(f"original_length is {stated}; the model reads max_position_embeddings {max_length} now")
    elif isinstance(scaling, Dynamic):
        window, original, ambiguity = round(max_length * scaling.factor), max_length, None
    elif isinstance(scaling, Linear):
        window, original, ambiguity = _linear_lengths(scaling.factor, max_length, stated)
    else:
        window, original, ambiguity = _scaled_lengths(scaling, max_length, has_original, stated)
    if stated is not None and stated != original:
        raise ValueError(f"original_length is {stated}; config.json says that it is {original}: leave it out")
    return window, original, ambiguity


def _linear_lengths(factor: float, max_length: int, stated: int | None) -> Lengths:
    """Return the lengths of an interpolated model, whose config does not say which of them it names."""
    before = max(1, round(max_length / factor))
    if factor == 1:
        return max_length, max_length, None
    if stated is None:
        reason = (
            f"a linear scaling with factor {factor} does not say whether max_position_embeddings {max_length} is "
            "the length before or after it; state the pretrained window with --original-length"
        )
        return max_length, before, reason
    if stated not in (before, max_length):
        raise ValueError(
            f"original_length is {stated}; with the linear factor {factor} and max_position_embeddings {max_length} "
            f"it must be {before} or {max_length}"
        )
    return (max_length if stated == before else round(stated * factor)), stated, None


def _scaled_lengths(scaling: RopeScaling, max_length: int, has_original: bool, stated: int | None) -> Lengths:
    """Return the lengths of a model whose scaling has a factor and an original window."""
    factor: float = getattr(scaling, "factor", 1.0)
    original: int = getattr(scaling, "original_max_position_embeddings", max_length)
    if original > max_length:
        raise ValueError(
            f"original_max_position_embeddings is {original}; it must be no more than max_position_embeddings, "
            f"{max_length}"
        )
    if max_length == original:  # the length before scaling, as Qwen's cards have it
        reason = None
        if factor > 1 and not has_original and stated is None:
            reason = (
                f"the {scaling.name} scaling has no original_max_position_embeddings, so loaders take "
                f"max_position_embeddings {max_length} for the pretrained window; confirm it with --original-length"
            )
        return round(original * factor), original, reason
    if isinstance(scaling, Yarn) and not math.isclose(factor, max_length / original):
        reason = (
            f"the yarn factor is {factor}, but max_position_embeddings {max_length} is {max_length / original:g} "
            f"times original_max_position_embeddings {original}: loaders scale by the factor; set "
            f"max_position_embeddings to {round(original * factor)} in SOURCE's config.json if it reads that far"
        )
        return max_length, original, reason
    return max_length, original, None


def _recorded_lengths(provenance: dict[str, Any], scaling: RopeScaling, max_length: int) -> Lengths:
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
