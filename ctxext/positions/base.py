"""What a position method is: a frozen dataclass that holds exactly what a checkpoint persists."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def nearest(given: str, allowed: list[str] | tuple[str, ...]) -> str:
    """Return ` (did you mean 'x'?)` for the closest of `allowed`, or an empty string when none is close."""
    match = difflib.get_close_matches(given, allowed, n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""


def check_number(name: str, value: object, *, above: float, inclusive: bool = False) -> float:
    """Return `value` as a float.

    Args:
        name: The key the number came from, for the message.
        value: What was given; a bool, a string or a number that is not finite is refused.
        above: The lower limit.
        inclusive: Whether the limit itself is allowed.

    Raises:
        ValueError: Names the key, its value and what is allowed.
    """
    allowed = f"a finite number {'of at least' if inclusive else 'above'} {above:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")
    if abs(value) > 1e300 or not math.isfinite(value) or value < above or (value == above and not inclusive):
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")
    return float(value)


def check_length(name: str, value: object) -> int:
    """Return `value` as a positive integer; a float is refused, as loaders do, even where it is whole.

    Raises:
        ValueError: Names the key, its value and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**40:
        raise ValueError(f"{name} is {value!r}; it must be a whole number (no float) from 1 to 2**40")
    return value


@dataclass(frozen=True, kw_only=True)
class Extension:
    """From where to where a model is extended.

    Attributes:
        window: Tokens that the model reads now.
        length: Tokens that it shall read: `window`, or more.
        rotary_dim: Rotated dimensions of a head.
    """

    window: int
    length: int
    rotary_dim: int

    @property
    def factor(self) -> float:
        """Return s = length / window."""
        return self.length / self.window


@dataclass(frozen=True, kw_only=True)
class PositionMethod:
    """A way to tell a model where its tokens stand.

    Attributes:
        name: What users type after `--method`.
        title: One line for tables and help.
    """

    name: ClassVar[str]
    title: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class RopeScaling(PositionMethod):
    """A rescaling of rotary position embeddings: which frequency each rotated pair of dimensions turns with.

    Attributes:
        rope_theta: Base b of the unscaled frequencies b^(-2j/d), j = 0 .. d/2 - 1 (arXiv 2104.09864, eq. 15).
        rope_type: The `rope_type` that transformers knows the method by, or None where transformers has none; such a
            method is written as `longrope` with equal short and long factors, which expresses any fixed frequencies.
        composes_with: Names of the methods on top of which this one is defined; an unscaled model counts as `theta`.
        is_static: Whether the frequencies are the same for every sequence length.
        may_keep_length: Whether it may change a model at the length that it reads already.
    """

    rope_type: ClassVar[str | None] = None
    composes_with: ClassVar[tuple[str, ...]] = ("theta",)
    is_static: ClassVar[bool] = True
    may_keep_length: ClassVar[bool] = False

    rope_theta: float

    def __post_init__(self) -> None:
        check_number("rope_theta", self.rope_theta, above=1.0)

    def inv_freq(self, rotary_dim: int, seq_len: int | None = None) -> FloatArray:
        """Return the angular frequency of each rotated pair.

        Args:
            rotary_dim: Rotated dimensions d of a head.
            seq_len: Length of the sequence in tokens; read only by methods that are not static.

        Returns:
            `(ceil(rotary_dim / 2),)`, float64, radians per token.
        """
        raise NotImplementedError(f"{type(self).__name__} must define inv_freq")

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by: the attention factor of YaRN and LongRoPE, 1 elsewhere."""
        return 1.0

    @classmethod
    def extend(cls, current: RopeScaling, to: Extension) -> RopeScaling:
        """Return the scaling that makes a model of `to.window` tokens read `to.length` tokens.

        Subclasses declare further keyword-only parameters: these are the method's options.

        Args:
            current: The scaling that the model has now; its name is in `composes_with`.
            to: From where to where.
        """
        raise NotImplementedError(f"{cls.__name__} must define extend")

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """Return the options of the method: the keyword-only parameters that its `extend` adds."""
        own = inspect.signature(cls.extend).parameters
        base = inspect.signature(RopeScaling.extend).parameters
        return {name: parameter for name, parameter in own.items() if name not in base}

    def rope_parameters(self, rotary_dim: int, original_length: int) -> dict[str, Any]:
        """Return the `rope_parameters` dict that stock transformers reads the method from.

        Args:
            rotary_dim: Rotated dimensions of a head; read where the method is written as `longrope` factors.
            original_length: Tokens that the model read before any scaling; read there too.
        """
        if self.rope_type is None:
            return self.longrope_parameters(rotary_dim, original_length)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"rope_type": self.rope_type, **{k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}}

    def longrope_parameters(self, rotary_dim: int, original_length: int) -> dict[str, Any]:
        """Write a static method as `longrope`, whose factors divide each frequency separately.

        Raises:
            ValueError: If the frequencies depend on the sequence length.
        """
        if not self.is_static:
            raise ValueError(f"{self.name} changes with the sequence length, so fixed factors cannot express it")
        factors = [float(f) for f in unscaled_inv_freq(self.rope_theta, rotary_dim) / self.inv_freq(rotary_dim)]
        return {
            "rope_type": "longrope",
            "rope_theta": self.rope_theta,
            "short_factor": factors,
            "long_factor": list(factors),
            "original_max_position_embeddings": original_length,
            "attention_factor": self.cos_sin_factor,
        }


def unscaled_inv_freq(rope_theta: float, rotary_dim: int) -> FloatArray:
    """Return b^(-2j/d) for j = 0 .. ceil(d/2) - 1 (arXiv 2104.09864, eq. 15): `(ceil(rotary_dim / 2),)`, float64."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    return np.asarray(float(rope_theta) ** -exponents, dtype=np.float64)
