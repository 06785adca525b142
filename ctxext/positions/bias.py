"""Attention biases as position methods: what a bias checkpoint persists. The formulas are in `ctxext.modeling.bias`.

Each is one number for every head and distance, added to the scaled logits in place of the rotary embedding, as in the
papers, or beside it.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ctxext.positions.base import FloatArray, PositionMethod, check_length, check_number


@dataclass(frozen=True, kw_only=True)
class AttentionBias(PositionMethod):
    """A bias by head and distance.

    Attributes:
        learned: Whether it has parameters, which the checkpoint keeps with the weights.
        keep_rotary: Whether the rotary embedding stays; otherwise the bias replaces it.
    """

    learned: ClassVar[bool] = False

    keep_rotary: bool = False

    def __post_init__(self) -> None:
        check_flag("keep_rotary", self.keep_rotary)

    @classmethod
    def from_options(cls, **options: Any) -> AttentionBias:
        """Return the bias with the options that a user gave; the parameters of this function are the options.

        Raises:
            ValueError: Names the option, its value and what is allowed.
        """
        return cls(**options)

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """Return the options of the method by name."""
        kinds = (inspect.Parameter.VAR_KEYWORD,)
        own = inspect.signature(cls.from_options).parameters
        extra = {name: parameter for name, parameter in own.items() if parameter.kind not in kinds}
        return {**inspect.signature(cls).parameters, **extra}

    def bias_parameters(self) -> dict[str, Any]:
        """Return the `bias_parameters` that a config keeps."""
        return {"bias_type": self.name, **dataclasses.asdict(self)}

    def bias(self, distance: npt.NDArray[np.int64], num_heads: int) -> FloatArray:
        """Return what is added to the logits; for a learned bias, what it starts from.

        Args:
            distance: `(n,)`, query position - key position in tokens, from 0.
            num_heads: Query heads.

        Returns:
            `(num_heads, n)`, float64 from a float32 table.
        """
        import torch

        from ctxext.modeling.bias import ScoreBias

        module = ScoreBias(self.bias_parameters(), num_heads)
        with torch.no_grad():
            table = module.table(torch.from_numpy(np.asarray(distance, dtype=np.int64)))
        return np.asarray(table.double().numpy(), dtype=np.float64)


def check_flag(name: str, value: object) -> None:
    """Refuse a value that is neither true nor false.

    Raises:
        ValueError: Names it.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")


@dataclass(frozen=True, kw_only=True)
class Alibi(AttentionBias):
    """-2^-h distance, h = 8n/H (arXiv 2108.12409, section 3).

    Attributes:
        slope_shift: Delta, added to every h (arXiv 2212.10356, section 4, which finds -3 to 4 usable and 6, 8 not).
        shared_exponent: One h for all heads, in place of 8n/H (same section: only small ones extrapolate).
    """

    name = "alibi"
    title = "ALiBi"

    slope_shift: float = 0.0
    shared_exponent: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("slope_shift", self.slope_shift, above=-64.0)
        if self.shared_exponent is not None:
            check_number("shared_exponent", self.shared_exponent, above=-64.0)


@dataclass(frozen=True, kw_only=True)
class Sandwich(AttentionBias):
    """(p_m . p_n - dbar/2) / h, an inner product of sinusoidal embeddings (arXiv 2212.10356, eq. 5 and 6).

    Attributes:
        dimension: dbar; larger ones make the window narrower.
        base: Of the sinusoids.
    """

    name = "sandwich"
    title = "Sandwich"

    dimension: int = 128
    base: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_length("dimension", self.dimension) % 2:
            raise ValueError(f"dimension is {self.dimension}; it must be even")
        check_number("base", self.base, above=1.0)


@dataclass(frozen=True, kw_only=True)
class SmoothedSandwich(AttentionBias):
    """-(log_slope ln(1 + distance) + offset) 8/h, the log curve that fits Sandwich (arXiv 2212.10356, section 6).

    Attributes:
        log_slope: At h = 8; 0.825 is the published fit.
        offset: At h = 8; 0.8 is the published fit.
    """

    name = "smoothed_sandwich"
    title = "smoothed Sandwich"

    log_slope: float = 0.825
    offset: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("log_slope", self.log_slope, above=0.0)
        check_number("offset", self.offset, above=-1e6)

    @classmethod
    def from_options(cls, *, fit_points: int | None = None, **options: Any) -> AttentionBias:
        """Return the bias with the options given.

        Args:
            fit_points: Fit the curve to Sandwich at the distances 0 .. fit_points - 1 by least squares, in place of
                the published coefficients; the paper's footnote 7 fits 50.
            **options: The fields.

        Raises:
            ValueError: If both a fit and coefficients are asked for, or there are too few points for two numbers.
        """
        if fit_points is None:
            return cls(**options)
        given = sorted({"log_slope", "offset"} & options.keys())
        if given:
            raise ValueError(f"fit_points computes {' and '.join(given)}: give one or the other")
        if check_length("fit_points", fit_points) < 3:
            raise ValueError(f"fit_points is {fit_points}; two coefficients need at least 3")
        log_slope, offset = fit_log_curve(fit_points)
        return cls(log_slope=log_slope, offset=offset, **options)


def fit_log_curve(points: int) -> tuple[float, float]:
    """Return the least-squares log_slope and offset of Sandwich (dbar 128, h = 8) at distances 0 .. points - 1."""
    distance = np.arange(points)
    target = Sandwich().bias(distance, 1)[0]
    features = np.stack([-np.log1p(distance), -np.ones(points)], axis=1)
    log_slope, offset = np.linalg.lstsq(features, target, rcond=None)[0]
    return float(log_slope), float(offset)


@dataclass(frozen=True, kw_only=True)
class Windowed(AttentionBias):
    """Nothing beyond the last `window` tokens (arXiv 2212.10356, eq. 3), and within it nothing or ALiBi.

    Attributes:
        window: w, tokens, the own one included.
        with_alibi: Whether ALiBi acts within the window.
    """

    name = "windowed"
    title = "windowed attention"

    window: int
    with_alibi: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length("window", self.window)
        check_flag("with_alibi", self.with_alibi)


@dataclass(frozen=True, kw_only=True)
class KerpleLog(AttentionBias):
    """-r1 ln(1 + r2 distance), r1 and r2 learned (arXiv 2205.09921, the logarithmic variant)."""

    name = "kerple_log"
    title = "KERPLE, logarithmic"
    learned = True


@dataclass(frozen=True, kw_only=True)
class KerplePower(AttentionBias):
    """-r1 distance^r2, r1 and r2 learned (arXiv 2205.09921, the power variant)."""

    name = "kerple_power"
    title = "KERPLE, power"
    learned = True


@dataclass(frozen=True, kw_only=True)
class T5(AttentionBias):
    """One learned number for each head and bucket of distances (arXiv 1910.10683, section 2.1).

    Attributes:
        num_buckets: Of a head; the first half holds one distance each.
        max_distance: Where the last bucket starts, tokens.
    """

    name = "t5"
    title = "T5 buckets"
    learned = True

    num_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_length("num_buckets", self.num_buckets) < 2 or self.num_buckets % 2:
            raise ValueError(f"num_buckets is {self.num_buckets}; it must be even, 2 or more")
        if check_length("max_distance", self.max_distance) <= self.num_buckets // 2:
            raise ValueError(
                f"max_distance is {self.max_distance}; it must be above num_buckets / 2, {self.num_buckets // 2}, "
                "the distances that have buckets of their own"
            )


BIASES: dict[str, type[AttentionBias]] = {
    "alibi": Alibi,
    "sandwich": Sandwich,
    "smoothed_sandwich": SmoothedSandwich,
    "windowed": Windowed,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "t5": T5,
}
