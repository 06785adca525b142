"""What the ALiBi and Sandwich papers claim (arXiv 2108.12409, arXiv 2212.10356), as checks on small models.

The thresholds were committed before the first full run. A check that fails stays in the table as failed.

`L` is the training length. A model extrapolates to a length when its perplexity there is no more than KEPT times that
at L; it fails when it is at least BROKEN times that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ctxext.reproduce.pi_claims import Claim
from ctxext.reproduce.scratch import Model, Results

KEPT, BROKEN = 1.05, 1.5
FLAT = 1.03  # sliding-window perplexity of ALiBi at any length, over that at L
EQUAL = 1.02  # ALiBi trained at L and read at 2 L, over sinusoidal trained at 2 L
COST = 0.95  # time and memory of a step with ALiBi at L, over those with sinusoids at 2 L

WINDOWS = (16, 32, 64, 96)  # w at L = 128
SHIFTS = (-3.0, 4.0, 8.0)  # Delta; 0 is ALiBi itself
SHARED = (2.0, 8.0)  # one h for all heads
REPAIR = 4  # the failures are trained again at this many L

ALIBI_MODELS = (
    Model("sinusoidal"),
    Model("rotary"),
    Model("t5"),
    Model("alibi"),
    Model("sinusoidal", stretch=2),
)
MAIN = ("sinusoidal", "rotary", "alibi", "sandwich", "smoothed_sandwich", "t5", "kerple_log", "kerple_power")
TABLE_1 = (
    *(Model("alibi", (("slope_shift", shift),)) for shift in SHIFTS),
    *(Model("alibi", (("shared_exponent", exponent),)) for exponent in SHARED),
    *(Model("windowed", (("window", window),)) for window in WINDOWS),
)
TABLE_2 = (
    Model("windowed", (("window", WINDOWS[-1]),), stretch=REPAIR),
    Model("alibi", (("slope_shift", SHIFTS[-1]),), stretch=REPAIR),
)
SANDWICH_MODELS = (*(Model(name) for name in MAIN), *TABLE_1, *TABLE_2)


class Curves:
    """Perplexity by length of the models of an experiment.

    Args:
        results: As `run_models` returns them.
        window: L.
    """

    def __init__(self, results: Results, window: int) -> None:
        self.results, self.window = results, window

    def of(self, model: Model, protocol: str) -> list[tuple[str, dict[int, float]]]:
        """Return name and perplexity by length of every seed of a model."""
        return [
            (f"{model.label} seed {row['seed']}", {int(length): value for length, value in row[protocol].items()})
            for row in self.results.get(model.label, [])
        ]

    def ratios(self, model: Model, protocol: str, stretch: int) -> list[tuple[str, float]]:
        """Return, for every seed, perplexity at `stretch` L over that at L."""
        return [(name, curve[stretch * self.window] / curve[self.window]) for name, curve in self.of(model, protocol)]

    def reach(self, model: Model) -> list[tuple[int, int]]:
        """Return seed and longest length whose non-overlapping perplexity is no more than that at L."""
        found = []
        for row in self.results.get(model.label, []):
            curve = {int(length): value for length, value in row["nonoverlapping"].items()}
            kept = [length for length in sorted(curve) if length >= self.window]
            reached = self.window
            for length in kept:
                if curve[length] > curve[self.window]:
                    break
                reached = length
            found.append((row["seed"], reached))
        return found


def _bounded(claim: Claim, ratios: Sequence[tuple[str, float]], limit: float, most: bool) -> None:
    for name, ratio in ratios:
        claim.add(name, f"{ratio:.3f} times", ratio <= limit if most else ratio >= limit)


def alibi_falls_by_the_curse(curves: Curves) -> Claim:
    """ALiBi, section 4 and appendix B: longer non-overlapping windows have fewer tokens with little before them."""
    claim = Claim("ALiBi: non-overlapping perplexity at 2 L is below that at L")
    _bounded(claim, curves.ratios(Model("alibi"), "nonoverlapping", 2), 0.9999, True)
    return claim


def alibi_is_flat_without_it(curves: Curves) -> Claim:
    """ALiBi, appendix B.2: with every token's context as long as the window, perplexity stays what it is at L."""
    claim = Claim(f"ALiBi: sliding-window perplexity at 2 L to 16 L stays within {FLAT:g} times that at L")
    for stretch in (2, 16):
        _bounded(claim, curves.ratios(Model("alibi"), "sliding", stretch), FLAT, True)
    return claim


def alibi_equals_twice_the_training(curves: Curves) -> Claim:
    """ALiBi, figure 1 and table 2: trained at 1024, read at 2048, as good as sinusoidal trained at 2048."""
    claim = Claim(f"ALiBi trained at L, read at 2 L: at most {EQUAL:g} times sinusoidal trained at 2 L")
    twice = 2 * curves.window
    rivals = dict((row["seed"], row) for row in curves.results.get(Model("sinusoidal", stretch=2).label, []))
    for row in curves.results.get(Model("alibi").label, []):
        if row["seed"] in rivals:
            ratio = row["nonoverlapping"][str(twice)] / rivals[row["seed"]]["nonoverlapping"][str(twice)]
            claim.add(f"seed {row['seed']}", f"{ratio:.3f} times", ratio <= EQUAL)
    return claim


def reach_by_method(curves: Curves) -> Claim:
    """ALiBi, section 3 (figure 1): sinusoidal gains a few dozen tokens, rotary 100-200, T5 600-800, ALiBi most."""
    order = ("sinusoidal", "rotary", "t5", "alibi")
    claim = Claim("how far perplexity is no worse than at L: sinusoidal <= rotary <= T5 <= ALiBi, ALiBi at least 8 L")
    reached = {name: dict(curves.reach(Model(name))) for name in order}
    for seed in reached["alibi"]:
        if all(seed in reached[name] for name in order):
            lengths = [reached[name][seed] for name in order]
            told = ", ".join(f"{name} {length}" for name, length in zip(order, lengths, strict=True))
            claim.add(f"seed {seed}", told, lengths == sorted(lengths) and lengths[-1] >= 8 * curves.window)
    return claim


def alibi_costs_less(cost: dict[str, float]) -> Claim:
    """ALiBi, figure 2: 11% faster and 11% less memory than sinusoidal at twice the length."""
    claim = Claim(f"a step with ALiBi at 1024 takes at most {COST:g} of time and memory of one with sinusoids at 2048")
    for name in ("time", "memory"):
        if name in cost:
            claim.add(name, f"{cost[name]:.3f}", cost[name] <= COST)
    return claim


def steep_slopes_extrapolate(curves: Curves) -> Claim:
    """Sandwich, table 1: shifted towards steep slopes ALiBi plateaus; towards flat ones it breaks."""
    claim = Claim(f"last token, 16 L over L: ALiBi, Delta {SHIFTS[0]:g} at most {KEPT:g}, Delta {SHIFTS[-1]:g} above")
    return _one_keeps_one_does_not(claim, curves, "slope_shift", SHIFTS)


def one_slope_must_be_steep(curves: Curves) -> Claim:
    """Sandwich, table 1: with one slope for all heads only large ones extrapolate."""
    claim = Claim(f"last token, 16 L over L: one h = {SHARED[0]:g} at most {KEPT:g}, one h = {SHARED[-1]:g} above")
    return _one_keeps_one_does_not(claim, curves, "shared_exponent", SHARED)


def _one_keeps_one_does_not(claim: Claim, curves: Curves, option: str, values: Sequence[float]) -> Claim:
    """Note for ALiBi with the first value that it extrapolates to 16 L, and with the last that it does not."""
    first, last = (Model("alibi", ((option, value),)) for value in (values[0], values[-1]))
    _bounded(claim, curves.ratios(first, "last_token", 16), KEPT, True)
    for name, ratio in curves.ratios(last, "last_token", 16):
        claim.add(name, f"{ratio:.3f} times", ratio > KEPT)
    return claim


def narrow_windows_extrapolate(curves: Curves) -> Claim:
    """Sandwich, table 1: windows whose receptive field L covers extrapolate, wide ones break."""
    narrow, wide = WINDOWS[0], WINDOWS[-1]
    claim = Claim(f"last token, 16 L over L: a window of {narrow} at most {KEPT:g}, one of {wide} at least {BROKEN:g}")
    _bounded(claim, curves.ratios(Model("windowed", (("window", narrow),)), "last_token", 16), KEPT, True)
    _bounded(claim, curves.ratios(Model("windowed", (("window", wide),)), "last_token", 16), BROKEN, False)
    return claim


def longer_training_repairs(curves: Curves) -> Claim:
    """Sandwich, table 2: a training length that covers the receptive field repairs what failed."""
    claim = Claim(f"last token, trained at {REPAIR} L: perplexity at 16 L at most {KEPT:g} times that at {REPAIR} L")
    for model in TABLE_2:
        for name, curve in curves.of(model, "last_token"):
            ratio = curve[16 * curves.window] / curve[REPAIR * curves.window]
            claim.add(name, f"{ratio:.3f} times", ratio <= KEPT)
    return claim


def absolute_and_rotary_break(curves: Curves) -> Claim:
    """Sandwich, table 3, and section 5.2: neither keeps its receptive field within L."""
    claim = Claim(f"last token, 4 L over L: sinusoidal and rotary at least {BROKEN:g}")
    for name in ("sinusoidal", "rotary"):
        _bounded(claim, curves.ratios(Model(name), "last_token", 4), BROKEN, False)
    return claim


def sandwich_uses_more(curves: Curves) -> Claim:
    """Sandwich, section 6: the first without parameters that makes use of tokens beyond the training length."""
    claim = Claim("last token: Sandwich's lowest perplexity is at more than L tokens, and at 16 L still below ALiBi's")
    rivals = dict(curves.of(Model("alibi"), "last_token"))
    for name, curve in curves.of(Model("sandwich"), "last_token"):
        best = min(curve, key=lambda length: curve[length])
        rival = rivals[name.replace("sandwich", "alibi")]
        longest = 16 * curves.window
        told = f"lowest at {best}; at {longest} {curve[longest]:.2f} against {rival[longest]:.2f}"
        claim.add(name, told, best > curves.window and curve[longest] < rival[longest])
    return claim


def learned_ones_are_better(curves: Curves) -> Claim:
    """Sandwich, table 3: the models with learned biases have lower perplexity than those without."""
    claim = Claim("last token at 4 L: the best of KERPLE and T5 is below the best of ALiBi, Sandwich and smoothed")
    at = 4 * curves.window
    seeds = {row["seed"] for rows in curves.results.values() for row in rows}
    for seed in sorted(seeds):

        def best(names: Sequence[str], seed: int = seed) -> float | None:
            rows = [row for name in names for row in curves.results.get(name, []) if row["seed"] == seed]
            return min((row["last_token"][str(at)] for row in rows), default=None)

        learned, plain = best(("t5", "kerple_log", "kerple_power")), best(("alibi", "sandwich", "smoothed_sandwich"))
        if learned is not None and plain is not None:
            claim.add(f"seed {seed}", f"{learned:.2f} against {plain:.2f}", learned < plain)
    return claim


ALIBI_CHECKS: tuple[Callable[[Curves], Claim], ...] = (
    alibi_falls_by_the_curse,
    alibi_is_flat_without_it,
    alibi_equals_twice_the_training,
    reach_by_method,
)
SANDWICH_CHECKS: tuple[Callable[[Curves], Claim], ...] = (
    steep_slopes_extrapolate,
    one_slope_must_be_steep,
    narrow_windows_extrapolate,
    longer_training_repairs,
    absolute_and_rotary_break,
    sandwich_uses_more,
    learned_ones_are_better,
)


def check(results: Results, window: int, checks: Sequence[Callable[[Curves], Claim]], cost: Any = None) -> list[Claim]:
    """Return every claim with what was found; with `cost`, ALiBi's on time and memory too."""
    curves = Curves(results, window)
    found = [one(curves) for one in checks]
    return [*found, alibi_costs_less(cost)] if cost is not None else found
