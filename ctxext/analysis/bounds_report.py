"""The score bounds of rotary frequencies as a report: the paper's, those that hold, what methods make of them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ctxext.analysis import bounds
from ctxext.positions import get_rope_method
from ctxext.positions.base import Extension, FloatArray, RopeScaling, nearest
from ctxext.positions.rope import Linear, Theta

FORMAT = "ctxext-score-bounds"
UNSCALED = "as it is"
LONGEST_REACH = 1 << 22
REACH_IN_LENGTHS = 32
DEFAULT_REACH = 1 << 18
MOST_FEATURES = 1 << 27
RIDGES = (1.0, 1e-3, 1e-6, 1e-9)


@dataclass(frozen=True, kw_only=True)
class BoundsOptions:
    """What bounds are computed of.

    Attributes:
        head_dim: rotated dimensions d of a head.
        theta: base b of the unscaled frequencies.
        length: tokens L that the model was trained to read.
        methods: names of position methods.
        factor: by which they extend the length; needed with methods.
        given: the methods' own options, None where not given.
        reach: distances up to which B(s) is searched; None for 32 lengths, at most 262144, but the extended length.
        ridge: of the fit drawn in the picture.
        seed: of the random scores that are fitted.
    """

    head_dim: int = 128
    theta: float = 10000.0
    length: int = 2048
    methods: tuple[str, ...] = ()
    factor: float | None = None
    given: dict[str, Any] = field(default_factory=dict)
    reach: int | None = None
    ridge: float = 1e-9
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            message
            for wrong, message in (
                (
                    self.head_dim < 2 or self.head_dim % 2,
                    f"--head-dim {self.head_dim} must be an even number of at least 2: dimensions turn in pairs",
                ),
                (not 1 < self.theta < 1e300, f"--theta {self.theta:g} must be a finite number above 1"),
                (self.length < 2, f"--length {self.length} must be at least 2 tokens"),
                (
                    self.factor is not None and not 1 < self.factor <= 1e6,
                    f"--factor {self.factor} must be a number above 1, at most a million",
                ),
                (
                    bool(self.methods) and self.factor is None,
                    f"--method {', '.join(self.methods)} needs --factor, the extended length over --length",
                ),
                (
                    not self.methods and self.factor is not None,
                    f"--factor {self.factor} has no effect without --method",
                ),
                (not 0 < self.ridge < 1e300, f"--ridge {self.ridge:g} must be a finite number above 0"),
                (self.seed < 0, f"--seed {self.seed} must be at least 0"),
            )
            if wrong
        ]
        if self.length * self.head_dim > MOST_FEATURES:
            problems.append(
                f"--length {self.length} times --head-dim {self.head_dim} must be at most {MOST_FEATURES}: the "
                "numbers that the fit of random scores holds"
            )
        if not problems and not self.compared_length <= self.searched <= LONGEST_REACH:
            problems.append(
                f"--reach {self.searched} must lie between {self.compared_length}, the length compared, and "
                f"{LONGEST_REACH}"
            )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def extended_length(self) -> int:
        """Tokens that the methods make the model read; L without methods."""
        return round(self.length * (self.factor or 1.0))

    @property
    def compared_length(self) -> int:
        """Tokens within which bounds are compared: the extended length, or without methods 2 L, as in the paper."""
        return self.extended_length if self.methods else 2 * self.length

    @property
    def searched(self) -> int:
        """The largest distance at which B(s) is computed."""
        usual = max(min(REACH_IN_LENGTHS * self.length, DEFAULT_REACH), self.compared_length)
        return usual if self.reach is None else self.reach


def scalings(options: BoundsOptions) -> dict[str, RopeScaling]:
    """Return the unscaled model and every method on top of it, by name.

    Raises:
        ValueError: With all that is wrong: an unknown method, a bias, an option that is missing or has no effect.
    """
    start = Theta(rope_theta=options.theta)
    to = Extension(window=options.length, length=options.extended_length, rotary_dim=options.head_dim)
    made: dict[str, RopeScaling] = {UNSCALED: start}
    known: dict[str, inspect.Parameter] = {}
    problems: list[str] = []
    given = {name: value for name, value in options.given.items() if value is not None}
    for name in options.methods:
        try:
            method = get_rope_method(name)
            known |= method.options()
            own = {key: value for key, value in given.items() if key in method.options()}
            made[method.name] = method.extend(start, to, **own)
        except ValueError as error:
            problems.append(str(error))
    useless = [name.replace("_", "-") for name in given if name not in known]
    words = [name.replace("_", "-") for name in known]
    with_methods = f"with --method {', '.join(options.methods)}" if options.methods else "without --method"
    problems += [f"--{name} has no effect {with_methods}{nearest(name, words)}" for name in useless]
    if problems:
        raise ValueError("; ".join(problems))
    return made


def closed_form_of(scaling: RopeScaling, rotary_dim: int) -> float | None:
    """Return the paper's closed form for a scaling, with its attention factor; None where the paper has none.

    It is stated for theta_j = b^(-2j/d). Dividing all frequencies by s divides second derivatives by s^2.
    """
    if isinstance(scaling, Linear):
        return bounds.closed_form(rotary_dim, scaling.rope_theta) / scaling.factor**2
    return bounds.closed_form(rotary_dim, scaling.rope_theta) if isinstance(scaling, Theta) else None


def unseen_pairs(frequencies: FloatArray, trained: FloatArray, length: int, window: int) -> int:
    """Return how many pairs turn to angles that training never reached: not one turn there, and further now.

    Args:
        frequencies: now, `(d / 2,)`.
        trained: in training, `(d / 2,)`.
        length: tokens read now.
        window: tokens read in training.
    """
    reached = trained * window
    return int(np.sum((reached < 2 * np.pi) & (frequencies * length > reached * (1 + 1e-9))))


def describe(
    name: str, frequencies: FloatArray, *, logit_factor: float, closed: float | None, length: int, reach: int
) -> dict[str, Any]:
    """Return the bounds of one set of frequencies, all in units of max|h_j|, h_j before the attention factor.

    Args:
        name: of the row.
        frequencies: `(d / 2,)`.
        logit_factor: what the method multiplies logits by: its attention factor squared.
        closed: the paper's closed form, or None.
        length: tokens; B(s) / d is searched from 0 to it.
        reach: tokens; B(s) / d is searched from 0 to it too.
    """
    dim = 2 * len(frequencies)
    ratio = bounds.partial_sums(frequencies, np.arange(reach + 1.0)) / dim
    inside, below = ratio[: length + 1], np.flatnonzero(ratio < 1)
    curvature = bounds.curvature_bound(frequencies)
    return {
        "name": name,
        "rotary_dim": dim,
        "logit_factor": logit_factor,
        "interpolation": {
            "closed_form": None if closed is None else closed * logit_factor,
            "bound": curvature * logit_factor,
            "reached": bounds.aligned_deviation(frequencies) * logit_factor,
        },
        "extrapolation": {
            "length": length,
            "min_ratio": float(inside.min()),
            "min_at": int(inside.argmin()),
            "reach": reach,
            "min_ratio_to_reach": float(ratio.min()),
            "min_at_to_reach": int(ratio.argmin()),
            "first_below_one": int(below[0]) if len(below) else None,
            "sum_of_products": dim / 2 * logit_factor,
        },
        "times_smaller": {
            "closed_form": None if closed is None else 2 * dim / closed,
            "bound": 2 * dim / curvature,
            "against_sum": dim / 2 / curvature,
        },
    }


def bounds_report(options: BoundsOptions) -> dict[str, Any]:
    """Return the bounds of the unscaled frequencies and of every method, as a JSON-serialisable dict.

    Raises:
        ValueError: As `scalings`.
    """
    from ctxext.evaluation.progress import progress_bar
    from ctxext.evaluation.result import versions

    length = options.compared_length
    made = scalings(options)
    trained = Theta(rope_theta=options.theta).inv_freq(options.head_dim)
    ridges = sorted({*RIDGES, options.ridge}, reverse=True)
    rows = []
    with progress_bar("score bounds", len(made) + 1) as advance:
        for name, scaling in made.items():
            rows.append(_describe_scaling(name, scaling, options))
            advance(1)
        fits = [fit.summary() for fit in bounds.fit_scores(trained, options.length, ridges=ridges, seed=options.seed)]
        advance(1)
    return {
        "format": FORMAT,
        "head_dim": options.head_dim,
        "rope_theta": options.theta,
        "length": options.length,
        "extended_length": length,
        "methods": list(options.methods),
        "factor": options.factor,
        "method_options": {key: value for key, value in options.given.items() if value is not None},
        "bounds": rows,
        "fit": {"seed": options.seed, "ridges": fits},
        "versions": versions(),
    }


def _describe_scaling(name: str, scaling: RopeScaling, options: BoundsOptions) -> dict[str, Any]:
    """Return the row of a method."""
    frequencies, length = frequencies_of(scaling, options), options.compared_length
    row = describe(
        name,
        frequencies,
        logit_factor=scaling.cos_sin_factor**2,
        closed=closed_form_of(scaling, options.head_dim),
        length=length,
        reach=max(options.searched, length),
    )
    trained = Theta(rope_theta=options.theta).inv_freq(options.head_dim)
    return {**row, "unseen_pairs": unseen_pairs(frequencies, trained, length, options.length)}


def frequencies_of(scaling: RopeScaling, options: BoundsOptions) -> FloatArray:
    """Return the frequencies at the extended length: `(d / 2,)`."""
    return scaling.inv_freq(options.head_dim, options.extended_length)


def render_bounds(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the bounds of several sets of frequencies as lines of text."""
    lines = [
        "between neighbouring distances: largest |a(s) - linear|, in units of max|h|",
        f"  {'':<16}{'closed form':>12}{'that holds':>12}{'reached':>10}{'unseen pairs':>14}",
    ]
    for row in rows:
        found = row["interpolation"]
        closed = "-" if found["closed_form"] is None else f"{found['closed_form']:.4g}"
        unseen = row.get("unseen_pairs", "-")
        lines.append(
            f"  {row['name'][:16]:<16}{closed:>12}{found['bound']:>12.4g}{found['reached']:>10.4g}{unseen:>14}"
        )
    lines += [
        "beyond: |a(s)| <= 2 max|h| B(s); smallest B(s)/d",
        f"  {'':<16}{'0 to':>9}{'':>8}{'at':>9}{'0 to':>11}{'':>8}{'at':>9}{'below 1 from':>14}",
    ]
    for row in rows:
        found = row["extrapolation"]
        first = "never" if found["first_below_one"] is None else found["first_below_one"]
        lines.append(
            f"  {row['name'][:16]:<16}{found['length']:>9}{found['min_ratio']:>8.3f}{found['min_at']:>9}"
            f"{found['reach']:>11}{found['min_ratio_to_reach']:>8.3f}{found['min_at_to_reach']:>9}{first:>14}"
        )
    return lines


def render_report(report: dict[str, Any]) -> str:
    """Return a report of `bounds_report` as text."""
    dim, first = report["head_dim"], report["bounds"][0]
    held, times = first["interpolation"], first["times_smaller"]
    verdict = "does not hold" if held["reached"] > held["closed_form"] else "is not exceeded here"
    lines = [
        f"head dim {dim}, theta {report['rope_theta']:g}, trained at {report['length']} tokens, "
        f"read to {report['extended_length']}",
        *render_bounds(report["bounds"]),
        f"{UNSCALED}: the closed form is d max|h| / {dim / held['closed_form']:.2f} and {verdict}: with all "
        f"phases aligned {held['reached']:.3f} max|h| is reached, against {held['closed_form']:.3f}.",
        f"  What holds is d max|h| / {dim / held['bound']:.1f}. It is {times['bound']:.0f} times below 2 d max|h| "
        f"(closed form: {times['closed_form']:.0f}), the bound beyond the window while B(s)/d >= 1,",
        f"  and {times['against_sum']:.0f} times below d/2 max|h|, which no score at any distance exceeds.",
        f"random scores on 0 to {report['length'] - 1}, fitted by least squares (seed {report['fit']['seed']}):",
        f"  {'ridge':>8}{'largest inside':>16}{'between':>10}{'to twice the length':>21}{'max|h|':>12}",
    ]
    lines += [
        f"  {fit['ridge']:>8g}{fit['largest_inside']:>16.3g}{fit['largest_between']:>10.3g}"
        f"{fit['largest_beyond']:>21.4g}{fit['max_product']:>12.4g}"
        for fit in report["fit"]["ridges"]
    ]
    return "\n".join(lines)
