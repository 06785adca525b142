"""The evolutionary search on made fitness functions: bounds, order, seeds, budget, and that it beats chance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxext.analysis.longrope_operators import Candidate, Evolution, Space, best_of, evolve

SPACE = Space(dimensions=8, largest=5.0, unscaled=(0, 4, 16))
OPTIMUM = np.array([1.0, 1.0, 1.2, 1.9, 2.6, 3.4, 4.0, 4.0])


def distance(candidates):
    return [float(np.abs(np.array(one.factors) - OPTIMUM).sum() + one.unscaled / 100) for one in candidates]


def linear_start():
    return [SPACE.repaired(np.full(8, 4.0), 0)]


@given(
    factors=st.lists(st.lists(st.floats(0.01, 50.0), min_size=8, max_size=8), min_size=2, max_size=2),
    seed=st.integers(0, 1000),
    largest=st.floats(1.0, 40.0),
)
def test_operators_keep_order_bounds_and_step(factors, seed, largest):
    space = Space(dimensions=8, largest=largest, unscaled=(0, 2))
    generator = np.random.default_rng(seed)
    first, second = (space.repaired(np.array(values), 0) for values in factors)
    for child in (first, space.mutated(first, generator), space.crossed(first, second, generator)):
        assert list(child.factors) == sorted(child.factors)
        assert 1.0 <= child.factors[0] and child.factors[-1] <= largest
        assert all(abs(100 * factor - round(100 * factor)) < 1e-9 for factor in child.factors)
        assert child.unscaled in (0, 2)


def test_a_crossover_takes_from_both_and_nothing_else():
    first, second = Candidate(factors=(1.0,) * 8), Candidate(factors=(3.0,) * 8, unscaled=4)
    made = [SPACE.crossed(first, second, np.random.default_rng(seed)) for seed in range(30)]
    assert {factor for child in made for factor in child.factors} == {1.0, 3.0}
    assert {child.unscaled for child in made} == {0, 4}


def test_it_finds_a_known_optimum_better_than_chance():
    """From one far start, on the mean of five seeds; sorted uniform draws are near this optimum by their nature."""
    found, chance = [], []
    for seed in range(40, 45):
        found.append(best_of(evolve(SPACE, linear_start(), distance, 600, Evolution(seed=seed)))[1])
        generator = np.random.default_rng(seed)
        chance.append(min(distance([SPACE.repaired(generator.uniform(1.0, 5.0, 8), 0) for _ in range(600)])))
    assert np.mean(found) < np.mean(chance)


def test_from_the_starts_of_a_real_search_it_improves_on_all_of_them_and_on_chance():
    """32 dimensions, an optimum between the factors of ntk and of yarn, with 400 candidates."""
    place = np.linspace(0, 1, 32)
    linear, ntk, yarn = np.full(32, 4.0), 4.0**place, 1 + 3 * np.clip((place - 0.3) / 0.4, 0, 1)
    optimum, space = (ntk + yarn) / 2, Space(dimensions=32, largest=5.0)

    def far(candidates):
        return [float(np.abs(np.array(one.factors) - optimum).mean()) for one in candidates]

    starts = [space.repaired(factors, 0) for factors in (linear, ntk, yarn)]
    found = best_of(evolve(space, starts, far, 400, Evolution()))[1]
    generator = np.random.default_rng(0)
    chance = min(far([space.repaired(generator.uniform(1.0, 5.0, 32), 0) for _ in range(400)]))
    assert found < 0.7 * min(far(starts)) and found < chance


def test_nothing_is_evaluated_twice_and_the_budget_holds():
    asked = []

    def evaluate(candidates):
        asked.extend(one.key for one in candidates)
        return distance(candidates)

    how = Evolution(population=10, iterations=40, mutations=4, crossovers=4, parents=5)
    generations = evolve(SPACE, linear_start() * 2, evaluate, 61, how)
    assert len(asked) == len(set(asked)) == 61
    assert [len(generation) for generation in generations] == [10, *[8] * 6, 3]
    assert generations[0][0][0] == linear_start()[0], "the starts come first"


def test_iterations_end_it_too():
    how = Evolution(population=10, iterations=2, mutations=3, crossovers=2, parents=5)
    assert [len(generation) for generation in evolve(SPACE, linear_start(), distance, 99, how)] == [10, 5, 5]


def test_seeds():
    small = {"population": 12, "iterations": 3}
    first, again, other = (
        evolve(SPACE, linear_start(), distance, 100, Evolution(seed=seed, **small)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_space_of_one_point_is_exhausted():
    single = Space(dimensions=3, largest=1.0)
    start = [single.repaired(np.ones(3), 0)]
    assert evolve(single, start, lambda some: [1.0] * len(some), 50, Evolution(population=4)) == [[(start[0], 1.0)]]


def test_wrong_numbers_are_all_named():
    with pytest.raises(ValueError, match="--population 1 .*; --parents 0"):
        Evolution(population=1, parents=0)
    with pytest.raises(ValueError, match="9 candidates, a population of 10"):
        evolve(SPACE, linear_start(), distance, 9, Evolution(population=10))
    with pytest.raises(ValueError, match="no candidate has 7"):
        best_of([[(Candidate(factors=(1.0,)), 2.0)]], unscaled=7)
