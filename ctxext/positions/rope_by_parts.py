"""RoPE methods that scale low frequencies and keep high ones, with a ramp between: YaRN, NTK-by-parts, Llama 3.1.

Symbols as in `ctxext.positions.rope`; r_j = L / lambda_j is how often pair j turns within the original window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ctxext.positions.base import (
    Extension,
    FloatArray,
    RopeScaling,
    check_length,
    check_number,
    unscaled_inv_freq,
)

_T = TypeVar("_T")


def _first(*values: _T | None) -> _T:
    """Return the first value that is not None: what the user gave, else what the model has, else the default."""
    return next(value for value in values if value is not None)


@dataclass(frozen=True, kw_only=True)
class Yarn(RopeScaling):
    """YaRN: high frequencies kept, low ones interpolated, a ramp between, cos and sin scaled (arXiv 2309.00071).

    The paper (definition 2) ramps over rotations r_j = L / lambda_j between beta_slow (its alpha) = 1 and beta_fast
    (its beta) = 32. The authors' code, transformers and every server ramp linearly over the dimension index j, between
    the indices at which those rotations are reached, rounded outwards unless `truncate` is off. So does this, for the
    checkpoint to mean the same everywhere.
    """

    name = "yarn"
    title = "YaRN"
    rope_type = "yarn"
    composes_with = ("theta", "yarn")

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("factor", self.factor, above=1.0, inclusive=True)
        check_length("original_max_position_embeddings", self.original_max_position_embeddings)
        check_number("attention_factor", self.attention_factor, above=0.0)
        check_number("beta_slow", self.beta_slow, above=0.0)
        if check_number("beta_fast", self.beta_fast, above=0.0) <= self.beta_slow:
            raise ValueError(
                f"beta_fast is {self.beta_fast} and beta_slow {self.beta_slow}; beta_fast must be the larger"
            )
        if not isinstance(self.truncate, bool):
            raise ValueError(f"truncate is {self.truncate!r}; it must be true or false")

    @property
    def has_default_attention_factor(self) -> bool:
        """Whether the attention factor is the one that the paper gives for the factor."""
        return math.isclose(self.attention_factor, yarn_attention_factor(self.factor), rel_tol=1e-6)

    @property
    def cos_sin_factor(self) -> float:
        """The attention factor, 0.1 ln(s) + 1 by default (arXiv 2309.00071, eq. 22)."""
        return self.attention_factor

    def ramp(self, rotary_dim: int) -> FloatArray:
        """Return how much of each frequency is kept, from 1 (highest) to 0: `(ceil(rotary_dim / 2),)`."""

        def dimension(rotations: float) -> float:
            """Return the (real) index j at which a dimension makes `rotations` turns within the original window."""
            turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return rotary_dim * math.log(turns) / (2 * math.log(self.rope_theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001  # a step, as in the reference
        index = np.arange(math.ceil(rotary_dim / 2), dtype=np.float64)
        return 1.0 - np.clip((index - low) / (high - low), 0.0, 1.0)

    def inv_freq(self, rotary_dim: int, seq_len: int | None = None) -> FloatArray:
        """Return (1 - gamma) * theta_j / s + gamma * theta_j: `(ceil(rotary_dim / 2),)`."""
        kept, base = self.ramp(rotary_dim), unscaled_inv_freq(self.rope_theta, rotary_dim)
        return (1.0 - kept) * base / self.factor + kept * base

    @classmethod
    def extend(
        cls,
        current: RopeScaling,
        to: Extension,
        *,
        attention_factor: float | None = None,
        beta_fast: float | None = None,
        beta_slow: float | None = None,
        truncate: bool | None = None,
    ) -> RopeScaling:
        """Scale from the original window; a YaRN scaling that is already there is restated with the total factor.

        Raises:
            ValueError: If the existing attention factor is not YaRN's own, so that its successor cannot be known.
        """
        start = current if isinstance(current, Yarn) else None
        if start and attention_factor is None and not start.has_default_attention_factor:
            raise ValueError(
                f"the model's YaRN scaling has attention_factor {start.attention_factor}, not YaRN's own "
                f"{yarn_attention_factor(start.factor):g} for factor {start.factor:g}; "
                "say the new one with --attention-factor"
            )
        original = start.original_max_position_embeddings if start else to.window
        factor = to.length / original
        return cls(
            rope_theta=current.rope_theta,
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=yarn_attention_factor(factor) if attention_factor is None else attention_factor,
            beta_fast=_first(beta_fast, start.beta_fast if start else None, 32.0),
            beta_slow=_first(beta_slow, start.beta_slow if start else None, 1.0),
            truncate=_first(truncate, start.truncate if start else None, True),
        )


@dataclass(frozen=True, kw_only=True)
class NTKByParts(Yarn):
    """NTK-by-parts: YaRN's frequencies without its attention factor, written as yarn with 1 (arXiv 2309.00071)."""

    name = "ntk_by_parts"
    title = "NTK-by-parts"
    composes_with = ("theta", "ntk_by_parts")

    @classmethod
    def extend(  # type: ignore[override]
        cls,
        current: RopeScaling,
        to: Extension,
        *,
        beta_fast: float | None = None,
        beta_slow: float | None = None,
        truncate: bool | None = None,
    ) -> RopeScaling:
        """Scale as YaRN with cos and sin left alone."""
        return super().extend(
            current,
            to,
            attention_factor=1.0,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            truncate=truncate,
        )


@dataclass(frozen=True, kw_only=True)
class Llama3(RopeScaling):
    """Llama 3.1: wavelengths below L / high_freq_factor kept, above L / low_freq_factor divided by s, smooth between.

    From Meta's reference code for Llama 3.1 (no paper gives the formula; arXiv 2407.21783 describes the model).
    """

    name = "llama3"
    title = "Llama 3.1 scaling"
    rope_type = "llama3"
    composes_with = ("theta", "llama3")

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("factor", self.factor, above=1.0, inclusive=True)
        check_length("original_max_position_embeddings", self.original_max_position_embeddings)
        check_number("low_freq_factor", self.low_freq_factor, above=0.0)
        if check_number("high_freq_factor", self.high_freq_factor, above=0.0) <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor} and low_freq_factor {self.low_freq_factor}; "
                "high_freq_factor must be the larger"
            )

    def inv_freq(self, rotary_dim: int, seq_len: int | None = None) -> FloatArray:
        """Return (1 - g) * theta_j / s + g * theta_j, g ramping over rotations: `(ceil(rotary_dim / 2),)`."""
        base = unscaled_inv_freq(self.rope_theta, rotary_dim)
        rotations = self.original_max_position_embeddings * base / (2 * math.pi)
        kept = np.clip((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return (1.0 - kept) * base / self.factor + kept * base

    @classmethod
    def extend(
        cls,
        current: RopeScaling,
        to: Extension,
        *,
        low_freq_factor: float | None = None,
        high_freq_factor: float | None = None,
    ) -> RopeScaling:
        """Scale from the original window; a llama3 scaling that is already there is restated with the total factor."""
        start = current if isinstance(current, Llama3) else None
        return cls(
            rope_theta=current.rope_theta,
            factor=(start.factor if start else 1.0) * to.factor,
            original_max_position_embeddings=start.original_max_position_embeddings if start else to.window,
            low_freq_factor=_first(low_freq_factor, start.low_freq_factor if start else None, 1.0),
            high_freq_factor=_first(high_freq_factor, start.high_freq_factor if start else None, 4.0),
        )


def yarn_attention_factor(factor: float) -> float:
    """Return 0.1 ln(s) + 1 (arXiv 2309.00071, eq. 22)."""
    return 0.1 * math.log(factor) + 1.0
