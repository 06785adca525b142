"""The evolutionary search of LongRoPE over factors of the frequencies (arXiv 2402.13753, section 3.1, algorithm 1).

Nothing here knows a model: a candidate is a list of factors and a number of unscaled first tokens, and its fitness is
whatever loss the caller gives. The paper leaves open how a mutated vector stays monotone; here it is sorted, which
keeps every factor within its bounds, and rounded to the paper's step of 0.01, which makes "the same candidate" exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ctxext.positions.base import FloatArray

DECIMALS = 2  # the paper's step size is 0.01
SLACK = 1.25  # the paper's upper bound is 1.25 s
CHANGE_PROBABILITY = 0.3  # the paper's mutation probability
# Standard deviation of the logarithm of a mutated factor's change, drawn anew for each child between these on a log
# scale: large steps cross the space, small ones settle, and neither needs a schedule.
CHANGE_SPREADS = (0.05, 0.8)
ATTEMPTS = 100  # at a child that is new, before the space counts as exhausted


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A point of the search.

    Attributes:
        factors: what each frequency is divided by, from the highest frequency to the lowest.
        unscaled: how many of the first tokens keep the frequencies of the original model.
    """

    factors: tuple[float, ...]
    unscaled: int = 0

    @property
    def key(self) -> str:
        """A name of the candidate, equal for equal candidates."""
        return f"{self.unscaled}:" + ",".join(f"{factor:.{DECIMALS}f}" for factor in self.factors)


@dataclass(frozen=True, kw_only=True)
class Evolution:
    """How the search goes; the defaults are the paper's.

    Attributes:
        population: candidates of the first generation.
        iterations: generations after it, at most.
        mutations: children by mutation in each of them.
        crossovers: children by crossover in each.
        parents: the best candidates so far, from which children are made.
        seed: of every random choice.
    """

    population: int = 64
    iterations: int = 40
    mutations: int = 16
    crossovers: int = 16
    parents: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        lowest = {"population": 2, "iterations": 0, "mutations": 0, "crossovers": 0, "parents": 2, "seed": 0}
        wrong = [
            f"--{name} {getattr(self, name)} must be at least {least}"
            for name, least in lowest.items()
            if getattr(self, name) < least
        ]
        if wrong:
            raise ValueError("; ".join(wrong))


@dataclass(frozen=True, kw_only=True)
class Space:
    """Where candidates lie: 1 <= factor <= `largest`, not decreasing over dimensions; `unscaled` has the choices."""

    dimensions: int
    largest: float
    unscaled: tuple[int, ...] = (0,)

    def repaired(self, factors: FloatArray, unscaled: int) -> Candidate:
        """Return the candidate of this space made from any positive factors: clipped, rounded, sorted."""
        top = np.floor(self.largest * 10**DECIMALS) / 10**DECIMALS
        inside = np.sort(np.clip(np.round(factors, DECIMALS), 1.0, top))
        return Candidate(factors=tuple(float(factor) for factor in inside), unscaled=unscaled)

    def mutated(self, parent: Candidate, generator: np.random.Generator) -> Candidate:
        """Return a child: each factor and the number of unscaled tokens are changed with probability 0.3."""
        chosen = generator.random(self.dimensions) < CHANGE_PROBABILITY
        spread = np.exp(generator.uniform(*np.log(CHANGE_SPREADS)))
        change = np.exp(generator.normal(0.0, spread, self.dimensions))
        factors = np.where(chosen, np.array(parent.factors) * change, parent.factors)
        anew = generator.random() < CHANGE_PROBABILITY
        unscaled = int(generator.choice(self.unscaled)) if anew else parent.unscaled
        return self.repaired(factors, unscaled)

    def crossed(self, first: Candidate, second: Candidate, generator: np.random.Generator) -> Candidate:
        """Return a child that has each factor, and the number of unscaled tokens, from either parent."""
        mask = generator.random(self.dimensions) < 0.5
        unscaled = first.unscaled if generator.random() < 0.5 else second.unscaled
        return self.repaired(np.where(mask, first.factors, second.factors), unscaled)


Evaluate = Callable[[Sequence[Candidate]], Sequence[float]]
Generation = list[tuple[Candidate, float]]


def _children(make: Callable[[], Candidate], count: int, seen: set[str]) -> list[Candidate]:
    """Return up to `count` candidates that were not seen, adding them to `seen`."""
    made: list[Candidate] = []
    for _ in range(count * ATTEMPTS):
        if len(made) == count:
            break
        child = make()
        if child.key not in seen:
            seen.add(child.key)
            made.append(child)
    return made


def evolve(
    space: Space, starts: Sequence[Candidate], evaluate: Evaluate, candidates: int, how: Evolution
) -> list[Generation]:
    """Search for the candidate of the least loss.

    The choices of a generation depend on the seed, its number and the losses so far, and on nothing else: with the
    same losses the same search comes out, wherever it was interrupted and however many processes measure.

    Args:
        space: where candidates lie.
        starts: the first candidates of the first generation, which their mutations fill up.
        evaluate: gives the losses of new candidates, lower is better; never called twice for the same one.
        candidates: how many may be evaluated in all.
        how: sizes and seed.

    Returns:
        The new candidates of each generation with their losses.

    Raises:
        ValueError: if `candidates` is fewer than the population, or there are no starts or more than that.
    """
    first = list({start.key: start for start in starts}.values())
    if not 1 <= len(first) <= how.population <= candidates:
        raise ValueError(
            f"{candidates} candidates, a population of {how.population} and {len(first)} different starts: "
            "there must be a start, no more of them than the population, and no larger population than candidates"
        )
    seen = {start.key for start in first}
    generator, roots = np.random.default_rng([how.seed, 0]), tuple(first)
    first += _children(
        lambda: space.mutated(roots[generator.integers(len(roots))], generator), how.population - len(first), seen
    )
    generations = [list(zip(first, evaluate(first), strict=True))]
    left = candidates - len(first)
    for number in range(1, how.iterations + 1):
        generator = np.random.default_rng([how.seed, number])
        known = [scored for generation in generations for scored in generation]
        best = [candidate for candidate, _ in sorted(known, key=lambda scored: scored[1])[: how.parents]]
        proposed = _proposals(space, best, generator, seen, how)[:left]
        if not proposed:
            break
        generations.append(list(zip(proposed, evaluate(proposed), strict=True)))
        left -= len(proposed)
    return generations


def _proposals(
    space: Space, parents: Sequence[Candidate], generator: np.random.Generator, seen: set[str], how: Evolution
) -> list[Candidate]:
    """Return the children of a generation: mutations, then crossovers of two different parents."""

    def mutation() -> Candidate:
        return space.mutated(parents[int(generator.integers(len(parents)))], generator)

    def crossover() -> Candidate:
        first, second = generator.choice(len(parents), size=2, replace=False)
        return space.crossed(parents[first], parents[second], generator)

    made = _children(mutation, how.mutations, seen)
    return made + (_children(crossover, how.crossovers, seen) if len(parents) > 1 else [])


def best_of(generations: Sequence[Generation], unscaled: int | None = None) -> tuple[Candidate, float]:
    """Return the candidate of the least loss, among those with `unscaled` unscaled tokens if that is given.

    Raises:
        ValueError: if there is none.
    """
    known = [scored for generation in generations for scored in generation if unscaled in (None, scored[0].unscaled)]
    if not known:
        raise ValueError(f"no candidate has {unscaled} unscaled first tokens")
    return min(known, key=lambda scored: scored[1])
