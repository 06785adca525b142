"""How large an attention score can become between positions and beyond them (arXiv 2306.15595, sections 2.2 and 2.3).

With h_j the complex product of query pair j and the conjugate key pair j, the score at distance s is
a(s) = Re sum_j h_j exp(i s theta_j). Every bound is given for max|h_j| = 1 and is to be multiplied by it. Symbols: d
rotated dimensions of a head, theta_j = b^(-2j/d) for j = 0 .. d/2 - 1 unless a method changes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ctxext.positions.base import FloatArray

ComplexArray = npt.NDArray[np.complex128]

_TERMS_AT_ONCE = 1 << 18


def attention_score(products: ComplexArray, frequencies: FloatArray, distances: FloatArray) -> FloatArray:
    """Return a(s) = Re sum_j h_j exp(i s theta_j): `(distances,)`.

    Args:
        products: h_j, `(d / 2,)`.
        frequencies: theta_j, `(d / 2,)` in radians per token.
        distances: s, `(distances,)` in tokens, whole or not.
    """
    return np.real(np.exp(1j * np.outer(distances, frequencies)) @ products)


def closed_form(rotary_dim: int, rope_theta: float, fraction: float = 0.5) -> float:
    """Return the paper's bound on |a(s) - a_linear(s)|, d (s - s1)(s2 - s) / (8 ln b); s2 = s1 + 1 (theorem 2.1).

    It does not hold as stated: its proof needs b^x <= 1 + x ln b, which runs the other way. `aligned_deviation`
    exceeds it; `curvature_bound` is what holds.

    Args:
        rotary_dim: d.
        rope_theta: b.
        fraction: s - s1, from 0 to 1; half-way the bound is largest, d / (32 ln b).
    """
    return rotary_dim * fraction * (1 - fraction) / (8 * math.log(rope_theta))


def curvature_bound(frequencies: FloatArray, fraction: float = 0.5) -> float:
    """Return a bound on |a(s) - a_linear(s)| that holds for any frequencies: sum_j theta_j^2 (s - s1)(s2 - s) / 2.

    |a''| <= sum_j |h_j| theta_j^2 in the remainder of linear interpolation between s1 and s2 = s1 + 1.

    Args:
        frequencies: theta_j, `(d / 2,)`.
        fraction: s - s1, from 0 to 1.
    """
    return float(np.sum(np.square(frequencies)) * fraction * (1 - fraction) / 2)


def aligned_deviation(frequencies: FloatArray, fraction: float = 0.5) -> float:
    """Return the largest |a(s) - a_linear(s)| that there is, sum_j |1 - (1-t) exp(-i t theta) - t exp(i (1-t) theta)|.

    It is reached by the h_j of `aligned_products`, so no bound for these frequencies can be below it.

    Args:
        frequencies: theta_j, `(d / 2,)`.
        fraction: t = s - s1, from 0 to 1.
    """
    return float(np.sum(np.abs(_chord_errors(frequencies, fraction))))


def aligned_products(frequencies: FloatArray, distance: float) -> ComplexArray:
    """Return the h_j, |h_j| = 1, whose terms of a(s) - a_linear(s) all point the same way at `distance`: `(d / 2,)`.

    Half-way between two whole distances they are exp(-i s theta_j), so that a(s) = d / 2 there.
    """
    errors = _chord_errors(frequencies, distance - math.floor(distance))
    phases = np.where(np.abs(errors) > 0, errors / np.maximum(np.abs(errors), 1e-300), 1.0)
    return np.asarray(np.conj(phases) * np.exp(-1j * distance * frequencies))


def _chord_errors(frequencies: FloatArray, fraction: float) -> ComplexArray:
    """Return what a unit vector at angle 0 differs by from the chord between its neighbours: `(d / 2,)`."""
    before, after = np.exp(-1j * fraction * frequencies), np.exp(1j * (1 - fraction) * frequencies)
    return np.asarray(1 - (1 - fraction) * before - fraction * after)


def partial_sums(frequencies: FloatArray, distances: FloatArray) -> FloatArray:
    """Return B(s) = sum_{k=1..d/2} |A_k(s)|, A_k(s) = sum_{j<k} exp(i s theta_j): `(distances,)`.

    Summation by parts gives |a(s)| <= 2 max|h_j| B(s), the paper's bound on extrapolated scores (section 2.3).

    Args:
        frequencies: theta_j, `(d / 2,)`, in the order of the pairs.
        distances: s, `(distances,)` in tokens.
    """
    parts = np.array_split(distances, -(-len(distances) * len(frequencies) // _TERMS_AT_ONCE))
    return np.concatenate(
        [np.abs(np.cumsum(np.exp(1j * np.outer(part, frequencies)), axis=1)).sum(axis=1) for part in parts]
    )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Random scores on [0, L) and the least-squares fit of the rotary features to them (Figure 2).

    Attributes:
        scores: the random scores at 0 .. L - 1, `(L,)`.
        frequencies: theta_j, `(d / 2,)`.
        products: the fitted h_j, `(d / 2,)`.
        ridge: weight of the squared coefficients beside that of the squared errors.
        seed: of the scores.
    """

    scores: FloatArray
    frequencies: FloatArray
    products: ComplexArray
    ridge: float
    seed: int

    def at(self, distances: FloatArray) -> FloatArray:
        """Return the fitted score at any distances: `(distances,)`."""
        return attention_score(self.products, self.frequencies, distances)

    def summary(self) -> dict[str, float]:
        """Return the largest |score| inside [0, L), beyond it in [L, 2 L) and between whole distances, and max|h|."""
        length = len(self.scores)
        between = np.arange(0, length - 1, 0.125)
        whole = self.at(np.arange(2.0 * length))
        return {
            "ridge": self.ridge,
            "largest_inside": float(np.abs(whole[:length]).max()),
            "largest_beyond": float(np.abs(whole[length:]).max()),
            "largest_between": float(np.abs(self.at(between)).max()),
            "max_product": float(np.abs(self.products).max()),
        }


def fit_scores(frequencies: FloatArray, length: int, *, ridges: Sequence[float], seed: int) -> list[Fit]:
    """Fit sum_j c_j cos(s theta_j) + d_j sin(s theta_j) to random normal scores at s = 0 .. L - 1.

    Least squares regularized by each of `ridges` times the squared coefficients, by orthogonal factors alone: the
    features are so nearly dependent that their normal equations have no correct digit in float64.

    Args:
        frequencies: theta_j, `(d / 2,)`.
        length: L in tokens.
        ridges: weights of the squared coefficients, above 0.
        seed: of the scores, drawn from a standard normal distribution.
    """
    scores = np.random.default_rng(seed).standard_normal(length)
    angles = np.outer(np.arange(length), frequencies)
    orthogonal, features = np.linalg.qr(np.concatenate([np.cos(angles), np.sin(angles)], axis=1))
    size = features.shape[1]
    wanted = np.concatenate([orthogonal.T @ scores, np.zeros(size)])
    fits = []
    for ridge in ridges:
        padded = np.concatenate([features, math.sqrt(ridge) * np.eye(size)])
        cosines, sines = np.split(np.linalg.lstsq(padded, wanted, rcond=None)[0], 2)
        products = cosines - 1j * sines  # Re((c - i s)(cos + i sin)) = c cos + s sin
        fits.append(Fit(scores=scores, frequencies=frequencies, products=products, ridge=ridge, seed=seed))
    return fits
