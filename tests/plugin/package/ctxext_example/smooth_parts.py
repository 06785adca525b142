"""A position method of our own: NTK-by-parts with a smooth step in place of the linear ramp."""

import math
from dataclasses import dataclass

import numpy as np

from ctxext.positions.base import Extension, RopeScaling, check_length, check_number, unscaled_inv_freq


@dataclass(frozen=True, kw_only=True)
class SmoothParts(RopeScaling):
    """Keep what turns `most` times within the window, divide what turns once by s, 3t^2 - 2t^3 between."""

    name = "smooth_parts"
    title = "NTK-by-parts with a smooth step"

    factor: float
    original_max_position_embeddings: int
    most: float = 32.0

    def __post_init__(self):
        super().__post_init__()
        check_number("factor", self.factor, above=1.0, inclusive=True)
        check_length("original_max_position_embeddings", self.original_max_position_embeddings)
        check_number("most", self.most, above=1.0)

    def inv_freq(self, rotary_dim, seq_len=None):
        """Return the frequencies: `(rotary_dim / 2,)`, radians per token."""
        base = unscaled_inv_freq(self.rope_theta, rotary_dim)
        turns = self.original_max_position_embeddings * base / (2 * math.pi)
        t = np.clip((turns - 1.0) / (self.most - 1.0), 0.0, 1.0)
        kept = 3 * t**2 - 2 * t**3
        return (1 - kept) * base / self.factor + kept * base

    @classmethod
    def extend(cls, current, to: Extension, *, most: float = 32.0):
        """Scale from the window; `most` is the method's option."""
        return cls(
            rope_theta=current.rope_theta, factor=to.factor, original_max_position_embeddings=to.window, most=most
        )
