"""The RoPE rescaling methods, written from their papers.

Symbols: L pretrained length, L' target length, s = L'/L factor, d rotated dimensions of a head, b rope_theta,
theta_j = b^(-2j/d) for j = 0 .. d/2 - 1, wavelength lambda_j = 2 pi / theta_j.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ctxext.positions.base import Extension, FloatArray, RopeScaling, check_length, check_number, unscaled_inv_freq
from ctxext.positions.rope_by_parts import Llama3, NTKByParts, Yarn


@dataclass(frozen=True, kw_only=True)
class Theta(RopeScaling):
    """Adjusted base frequency: a new rope_theta and nothing else (arXiv 2309.16039, section 2.2)."""

    name = "theta"
    title = "adjusted base frequency"
    rope_type = "default"
    composes_with = ("theta", "linear", "llama3")
    may_keep_length = True

    def inv_freq(self, rotary_dim: int, seq_len: int | None = None) -> FloatArray:
        """Return b^(-2j/d): `(ceil(rotary_dim / 2),)`."""
        return unscaled_inv_freq(self.rope_theta, rotary_dim)

    @classmethod
    def extend(
        cls,
        current: RopeScaling,
        to: Extension,
        *,
        rope_theta: float | None = None,
    ) -> RopeScaling:
        """Replace the base, keeping what else scales the model.

        Raises:
            ValueError: Without `rope_theta`, or with one that is not larger; suggests the NTK-aware value.
        """
        suggestion = ntk_theta(current.rope_theta, to.factor, to.rotary_dim)
        hint = f"the NTK-aware value for this model and length is {suggestion:.0f}"
        if rope_theta is None:
            raise ValueError(f"method 'theta' needs --rope-theta, the new base; {hint}")
        if check_number("rope_theta", rope_theta, above=1.0) <= current.rope_theta:
            raise ValueError(
                f"rope_theta is {rope_theta:g}; to read further it must be above {current.rope_theta:g}; {hint}"
            )
        return dataclasses.replace(current, rope_theta=float(rope_theta))


@dataclass(frozen=True, kw_only=True)
class NTK(Theta):
    """NTK-aware scaling: the base grows so that the lowest frequency is divided by exactly s.

    b' = b * s^(d / (d - 2)) (described in arXiv 2309.00071, section 3.1, eq. 16).
    """

    name = "ntk"
    title = "NTK-aware base"
    may_keep_length = False

    @classmethod
    def extend(cls, current: RopeScaling, to: Extension) -> RopeScaling:  # type: ignore[override]
        """Set the base to its NTK-aware value for s = length / window."""
        return dataclasses.replace(current, rope_theta=ntk_theta(current.rope_theta, to.factor, to.rotary_dim))


@dataclass(frozen=True, kw_only=True)
class Linear(RopeScaling):
    """Position Interpolation: position m becomes m / s (arXiv 2306.15595, eq. 4).

    The same as dividing every frequency by s, which is how it is written.
    """

    name = "linear"
    title = "Position Interpolation"
    rope_type = "linear"
    composes_with = ("theta", "linear")

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("factor", self.factor, above=1.0, inclusive=True)

    def inv_freq(self, rotary_dim: int, seq_len: int | None = None) -> FloatArray:
        """Return theta_j / s: `(ceil(rotary_dim / 2),)`."""
        return unscaled_inv_freq(self.rope_theta, rotary_dim) / self.factor

    @classmethod
    def extend(cls, current: RopeScaling, to: Extension) -> RopeScaling:
        """Interpolate by length / window; an interpolation that is already there is multiplied."""
        prior = current.factor if isinstance(current, Linear) else 1.0
        return cls(rope_theta=current.rope_theta, factor=prior * to.factor)


@dataclass(frozen=True, kw_only=True)
class Dynamic(RopeScaling):
    """Dynamic NTK: the base grows with the current length l > L.

    b' = b * (s * l / L - (s - 1))^(d / (d - 2)), and b up to L (arXiv 2309.00071, section 3.3, in transformers' form).
    `original_max_position_embeddings` is L; transformers reads it from `max_position_embeddings`, which stays L.
    """

    name = "dynamic"
    title = "dynamic NTK"
    rope_type = "dynamic"
    composes_with = ("theta", "dynamic")
    is_static = False

    factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("factor", self.factor, above=1.0, inclusive=True)
        check_length("original_max_position_embeddings", self.original_max_position_embeddings)

    def inv_freq(self, rotary_dim: int, seq_len: int | None = None) -> FloatArray:
        """Return the frequencies for a sequence of `seq_len` tokens: `(ceil(rotary_dim / 2),)`."""
        window = self.original_max_position_embeddings
        stretch = self.factor * max(seq_len or window, window) / window - (self.factor - 1)
        return unscaled_inv_freq(ntk_theta(self.rope_theta, stretch, rotary_dim), rotary_dim)

    @classmethod
    def extend(cls, current: RopeScaling, to: Extension) -> RopeScaling:
        """Let the base grow from the original window on; a dynamic scaling that is already there is extended."""
        original = current.original_max_position_embeddings if isinstance(current, Dynamic) else to.window
        factor = to.length / original
        return cls(rope_theta=current.rope_theta, factor=factor, original_max_position_embeddings=original)

    def rope_parameters(self, rotary_dim: int, original_length: int) -> dict[str, Any]:
        """Return the dict without L, which transformers takes from `max_position_embeddings`."""
        parameters = super().rope_parameters(rotary_dim, original_length)
        del parameters["original_max_position_embeddings"]
        return parameters


@dataclass(frozen=True, kw_only=True)
class LongRoPE(RopeScaling):
    """LongRoPE: one factor for each frequency, a long set beyond the original window and a short one within it.

    theta'_j = theta_j / lambda_j with searched lambda_j; attention factor sqrt(1 + ln s / ln L) (arXiv 2402.13753,
    section 3.2 and its code).
    """

    name = "longrope"
    title = "LongRoPE"
    rope_type = "longrope"
    composes_with = ("theta", "longrope")
    is_static = False

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("factor", self.factor, above=1.0, inclusive=True)
        check_length("original_max_position_embeddings", self.original_max_position_embeddings)
        check_number("attention_factor", self.attention_factor, above=0.0)
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if not isinstance(values, (list, tuple)) or not values:
                raise ValueError(
                    f"{name} is {values!r}; it must be a list of positive numbers, one for each frequency"
                )
            numbers = tuple(check_number(f"{name}[{i}]", value, above=0.0) for i, value in enumerate(values))
            object.__setattr__(self, name, numbers)

    @property
    def cos_sin_factor(self) -> float:
        """The attention factor, sqrt(1 + ln s / ln L) by default."""
        return self.attention_factor

    def inv_freq(self, rotary_dim: int, seq_len: int | None = None) -> FloatArray:
        """Return theta_j over the factors that a sequence of `seq_len` tokens uses: `(ceil(rotary_dim / 2),)`."""
        is_long = seq_len is not None and seq_len > self.original_max_position_embeddings
        name, factors = ("long_factor", self.long_factor) if is_long else ("short_factor", self.short_factor)
        base = unscaled_inv_freq(self.rope_theta, rotary_dim)
        if len(factors) != len(base):
            raise ValueError(
                f"{name} has {len(factors)} numbers; this model needs {len(base)}, one for each frequency"
            )
        return base / np.asarray(factors, dtype=np.float64)

    @classmethod
    def extend(
        cls,
        current: RopeScaling,
        to: Extension,
        *,
        long_factor: tuple[float, ...] | None = None,
        short_factor: tuple[float, ...] | None = None,
        attention_factor: float | None = None,
    ) -> RopeScaling:
        """Take the factors as given, relative to the unscaled base; existing LongRoPE factors are replaced.

        Raises:
            ValueError: Without `long_factor`, or with lists of the wrong length.
        """
        count = math.ceil(to.rotary_dim / 2)
        if long_factor is None:
            raise ValueError(
                f"method 'longrope' needs --long-factor: {count} numbers, as a comma-separated list or a JSON file"
            )
        original = current.original_max_position_embeddings if isinstance(current, LongRoPE) else to.window
        factor = to.length / original
        scaling = cls(
            rope_theta=current.rope_theta,
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=longrope_attention_factor(factor, original)
            if attention_factor is None
            else attention_factor,
            short_factor=(1.0,) * count if short_factor is None else short_factor,
            long_factor=long_factor,
        )
        for seq_len in (original, to.length):  # refuses a list of the wrong length
            scaling.inv_freq(to.rotary_dim, seq_len)
        return scaling


def ntk_theta(rope_theta: float, factor: float, rotary_dim: int) -> float:
    """Return b * s^(d / (d - 2)), the base whose lowest frequency is the old one over s (arXiv 2309.00071, eq. 16).

    Raises:
        ValueError: If the head rotates so few dimensions that there is no lowest frequency to divide.
    """
    if rotary_dim <= 2:
        raise ValueError(f"NTK scaling needs more than 2 rotated dimensions; this model rotates {rotary_dim}")
    return float(rope_theta * factor ** (rotary_dim / (rotary_dim - 2)))


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """Return sqrt(1 + ln s / ln L), 1 for s <= 1 (LongRoPE's code, as in transformers)."""
    return math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 else 1.0


BUILT_IN: dict[str, type[RopeScaling]] = {
    "linear": Linear,
    "theta": Theta,
    "ntk": NTK,
    "dynamic": Dynamic,
    "ntk_by_parts": NTKByParts,
    "yarn": Yarn,
    "longrope": LongRoPE,
    "llama3": Llama3,
}
ALIASES: dict[str, str] = {"pi": "linear"}
