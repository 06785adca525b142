"""What the Position Interpolation paper claims (arXiv 2306.15595), as checks on the measurements of `reproduce pi`.

The thresholds were committed before the first full run. A check that fails stays in the table as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EXTRAPOLATION_AT_LEAST = 3.0  # times the perplexity inside the window
ORIGINAL_WINDOW_AT_MOST = 1.02  # times the perplexity before
OTHER_CORPUS_AT_MOST = 1.05  # times the perplexity after tuning on the first corpus
KMAX_BY = 200
KMAX_AT_THE_LATEST = 1000


@dataclass(frozen=True)
class Measurement:
    """One model, measured once.

    Attributes:
        method: `direct`, `linear`, ...
        factor: s = L' / L.
        seed: Of the fine-tuning data's order.
        corpus: That it was tuned on.
        step: Steps of fine-tuning; 0 is the patched model.
        perplexity: On held-out text, by window in tokens.
        k_max: By the paper's rule, at L' tokens; L' itself where every feasible distance is found.
        success: Share of all passkeys found, where the whole grid was tried.
    """

    method: str
    factor: int
    seed: int
    corpus: str
    step: int
    perplexity: Mapping[int, float]
    k_max: int
    success: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it with the windows as text, as JSON has it."""
        return {**vars(self), "perplexity": {str(window): value for window, value in self.perplexity.items()}}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measurement:
        """Return what `to_json` was called on."""
        return cls(**{**row, "perplexity": {int(window): value for window, value in row["perplexity"].items()}})


@dataclass
class Claim:
    """A claim of the paper and what was found.

    Attributes:
        text: What is claimed, with its threshold.
        found: One line for each model that it was tried on: its name, the figure, and whether it holds.
        holds: None where nothing of this run could decide it.
    """

    text: str
    found: list[dict[str, Any]] = field(default_factory=list)

    @property
    def holds(self) -> bool | None:
        """Say whether it holds for every model that it was tried on."""
        return all(row["holds"] for row in self.found) if self.found else None

    def add(self, where: str, figure: str, holds: bool) -> None:
        """Note what one model showed."""
        self.found.append({"where": where, "figure": figure, "holds": holds})

    def to_json(self) -> dict[str, Any]:
        """Return the claim as a JSON object."""
        return {"text": self.text, "holds": self.holds, "found": self.found}


class Measured:
    """The measurements of a run, and the lengths that they speak of."""

    def __init__(self, window: int, corpus: str, rows: Iterable[Measurement]) -> None:
        self.window, self.corpus = window, corpus
        self.rows = {(row.method, row.factor, row.seed, row.corpus, row.step): row for row in rows}

    def get(self, method: str, factor: int, seed: int, step: int, corpus: str | None = None) -> Measurement | None:
        """Return one measurement, or None."""
        return self.rows.get((method, factor, seed, corpus or self.corpus, step))

    def runs(self, method: str) -> list[tuple[int, int]]:
        """Return (factor, seed) of every run of a method on the first corpus."""
        return sorted({(f, s) for m, f, s, corpus, _ in self.rows if m == method and corpus == self.corpus})

    def steps(self, method: str, factor: int, seed: int) -> list[Measurement]:
        """Return a run's measurements by step."""
        found = [
            row for (m, f, s, c, _), row in self.rows.items() if (m, f, s, c) == (method, factor, seed, self.corpus)
        ]
        return sorted(found, key=lambda row: row.step)


def check_claims(measured: Measured) -> list[Claim]:
    """Return every claim with what the measurements say about it."""
    return [check(measured) for check in CHECKS]


def _name(method: str, factor: int, seed: int) -> str:
    return f"{method} x{factor} seed {seed}"


def direct_extrapolation_fails(measured: Measured) -> Claim:
    """Section 3.2, table 1: beyond its window the unchanged model breaks."""
    claim = Claim(
        f"before tuning, the unchanged model's perplexity at L' is at least {EXTRAPOLATION_AT_LEAST:g} times that at L"
    )
    for factor in sorted({factor for factor, _ in measured.runs("direct")}):
        row = _before(measured, "direct", factor)
        if row is not None:
            ratio = row.perplexity[factor * measured.window] / row.perplexity[measured.window]
            claim.add(f"direct x{factor}", f"{ratio:.2f} times", ratio >= EXTRAPOLATION_AT_LEAST)
    return claim


def interpolation_starts_below(measured: Measured) -> Claim:
    """Section 3.2, table 5 (16.10 after no step, where the unchanged model exceeds 1000)."""
    claim = Claim("before tuning, linear's perplexity at L' is below the unchanged model's")
    for factor in sorted({factor for factor, _ in measured.runs("linear")}):
        linear, direct = _before(measured, "linear", factor), _before(measured, "direct", factor)
        if linear is not None and direct is not None:
            ours, theirs = (row.perplexity[factor * measured.window] for row in (linear, direct))
            claim.add(f"linear x{factor}", f"{ours:.1f} against {theirs:.1f}", ours < theirs)
    return claim


def interpolation_retrieves(measured: Measured) -> Claim:
    """Section 3.3, table 4: k_max = L' after 200 steps, for every length."""
    claim = Claim(f"linear reaches k_max = L' by step {KMAX_BY} ({KMAX_AT_THE_LATEST} at the latest)")
    for factor, seed in measured.runs("linear"):
        rows = [row for row in measured.steps("linear", factor, seed) if row.step]
        if not rows:
            continue
        reached = [row.step for row in rows if row.k_max >= factor * measured.window]
        best = max(rows, key=lambda row: row.k_max)
        figure = f"at step {reached[0]}" if reached else f"at most {best.k_max} (step {best.step})"
        if reached or rows[-1].step >= KMAX_AT_THE_LATEST:
            claim.add(_name("linear", factor, seed), figure, bool(reached) and reached[0] <= KMAX_AT_THE_LATEST)
    return claim


def direct_tuning_does_not(measured: Measured) -> Claim:
    """Section 3.3, table 4: direct fine-tuning reaches 2560 of 8192 after 10000 steps."""
    claim = Claim(f"direct fine-tuning stays below k_max = L'/2 at step {KMAX_AT_THE_LATEST}")
    for factor, seed in measured.runs("direct"):
        row = measured.get("direct", factor, seed, KMAX_AT_THE_LATEST)
        if row is not None:
            claim.add(_name("direct", factor, seed), str(row.k_max), row.k_max < factor * measured.window / 2)
    return claim


def longer_context_helps(measured: Measured) -> Claim:
    """Section 3.2, table 1: perplexity falls with the evaluated window."""
    claim = Claim("after tuning, linear's perplexity falls with every doubling of the window from L to L'")
    for row in _tuned(measured, "linear"):
        windows = [window for window in sorted(row.perplexity) if window >= measured.window]
        values = [row.perplexity[window] for window in windows]
        falls = all(later < earlier for earlier, later in zip(values[:-1], values[1:], strict=True))
        claim.add(_name("linear", row.factor, row.seed), " > ".join(f"{value:.2f}" for value in values), falls)
    return claim


def original_window_is_kept(measured: Measured) -> Claim:
    """Section 3.4: inside the original window the extended model is nearly as good."""
    claim = Claim(
        f"after tuning, linear's perplexity at L is at most {ORIGINAL_WINDOW_AT_MOST:g} times the original's"
    )
    for row in _tuned(measured, "linear"):
        base = _before(measured, "direct", row.factor)
        if base is not None:
            ratio = row.perplexity[measured.window] / base.perplexity[measured.window]
            claim.add(_name("linear", row.factor, row.seed), f"{ratio:.3f} times", ratio <= ORIGINAL_WINDOW_AT_MOST)
    return claim


def examples_do_not_matter(measured: Measured) -> Claim:
    """Section 3.1: the result is insensitive to the choice of examples."""
    claim = Claim(
        f"tuned on another corpus, linear reaches the same k_max, and at most {OTHER_CORPUS_AT_MOST:g} times the "
        "perplexity at L' on the first"
    )
    for method, factor, seed, corpus, step in sorted(measured.rows):
        first = measured.get(method, factor, seed, step)
        if corpus == measured.corpus or step < KMAX_AT_THE_LATEST or first is None:
            continue
        other = measured.rows[method, factor, seed, corpus, step]
        length = factor * measured.window
        ratio = other.perplexity[length] / first.perplexity[length]
        claim.add(
            f"{_name(method, factor, seed)} on {corpus}",
            f"k_max {other.k_max} against {first.k_max}, {ratio:.3f} times",
            other.k_max == first.k_max and ratio <= OTHER_CORPUS_AT_MOST,
        )
    return claim


CHECKS: Sequence[Callable[[Measured], Claim]] = (
    direct_extrapolation_fails,
    interpolation_starts_below,
    interpolation_retrieves,
    direct_tuning_does_not,
    longer_context_helps,
    original_window_is_kept,
    examples_do_not_matter,
)


def _before(measured: Measured, method: str, factor: int) -> Measurement | None:
    """Return a method's measurement before tuning, which no seed changes."""
    found = [
        row
        for (m, f, _, c, step), row in measured.rows.items()
        if (m, f, c, step) == (method, factor, measured.corpus, 0)
    ]
    return found[0] if found else None


def _tuned(measured: Measured, method: str) -> list[Measurement]:
    """Return the last measurement of every run of a method that was tuned to the end."""
    last = [measured.steps(method, factor, seed)[-1] for factor, seed in measured.runs(method)]
    return [row for row in last if row.step >= KMAX_AT_THE_LATEST]
