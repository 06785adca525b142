"""What the paper on random-access reading claims (arXiv 2405.13216), as checks on small models.

The thresholds were committed before the first full run. A check that fails stays in the table as failed. Perplexity is
that of long held-out documents read in order, window by window, whatever was skipped in training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from ctxext.reproduce.pi_claims import Claim
from ctxext.reproduce.reading import POOLINGS, SHORT, Results, Run, Settings, arms, swept

POOLINGS_DIFFER_AT_MOST = 1.02  # the largest perplexity of the three over the smallest
PARTS = 4  # a run's first and last quarter are compared


class Perplexities:
    """What was measured.

    Args:
        results: As `run_all` returns them.
        settings: Of the experiment.
    """

    def __init__(self, results: Results, settings: Settings) -> None:
        self.results, self.settings = results, settings

    def of(self, run: Run) -> dict[int, float]:
        """Return the perplexity of a model by seed."""
        return {row["seed"]: row["perplexity"] for row in self.results.get(run.label, [])}

    def rows(self, *runs: Run) -> Iterator[tuple[int, list[float]]]:
        """Yield each seed that all of these models have, with their perplexities."""
        found = [self.of(run) for run in runs]
        for seed in sorted(set.intersection(*(set(one) for one in found))):
            yield seed, [one[seed] for one in found]


def _below(claim: Claim, found: Perplexities, run: Run, *others: Run) -> Claim:
    """Note for every seed whether a model's perplexity is below that of all others."""
    for seed, (value, *rest) in found.rows(run, *others):
        told = f"{value:.2f} against {', '.join(f'{other:.2f}' for other in rest)}"
        claim.add(f"seed {seed}", told, value < min(rest))
    return claim


def middle_rate_is_best(found: Perplexities) -> Claim:
    """Section 4.2, figure 2: K = 256 is below 0, 1 and 100000 after enough training."""
    settings = found.settings
    claim = Claim("from random weights: perplexity with K = L/2 is below that with K = 0, 1 and 195 L (of a stream)")
    others = (Run(rate=0), Run(rate=1), Run(rate=settings.far, scope="stream"))
    return _below(claim, found, Run(rate=settings.middle), *others)


def short_text_is_worse_than_nothing(found: Perplexities) -> Claim:
    """Section 4.2, figure 3: 831.31 after pretraining on short text, 366.50 with random weights."""
    claim = Claim("on long documents a model of shuffled short text is worse than random weights")
    return _below(claim, found, Run(read=False), Run(start=SHORT, read=False))


def skipping_tunes_better(found: Perplexities) -> Claim:
    """Section 4.2, figure 3: fine-tuned with K = 256 16.97, with K = 0 19.10."""
    claim = Claim("a model of short text, tuned on long documents: K = L/2 is below K = 0")
    return _below(claim, found, Run(start=SHORT, rate=found.settings.middle), Run(start=SHORT, rate=0))


def tuning_beats_training(found: Perplexities) -> Claim:
    """Section 4.2, figure 3: 16.97 against 35.59 of the best model trained on long documents from the start."""
    settings = found.settings
    claim = Claim("a model of short text tuned with K = L/2 is below every model trained from random weights")
    others = [run for run in arms(settings) if run.read and run.start != SHORT and not run.memory]
    return _below(claim, found, Run(start=SHORT, rate=settings.middle), *others)


def skips_grow(found: Perplexities) -> Claim:
    """Section 4.2, figure 4: the average number of skipped tokens increases in all skipping scenarios."""
    claim = Claim("from random weights: more tokens are skipped in the last quarter of training than in the first")
    settings = found.settings
    for run in (Run(rate=1), Run(rate=settings.middle), Run(rate=settings.far, scope="stream")):
        for row in found.results.get(run.label, []):
            values = [value for _, value in row["skips"]]
            part = max(1, len(values) // PARTS)
            first, last = statistics.fmean(values[:part]), statistics.fmean(values[-part:])
            claim.add(f"K = {run.rate} seed {row['seed']}", f"{first:.1f} to {last:.1f} a window", last > first)
    return claim


def pooling_does_not_matter(found: Perplexities) -> Claim:
    """Section 4.2: it seems that all pooling methods work equally well."""
    claim = Claim(f"mean, exponential decay, last token: perplexities within {POOLINGS_DIFFER_AT_MOST:g} times")
    runs = [Run(rate=found.settings.middle, pooling=pooling) for pooling in POOLINGS]
    for seed, values in found.rows(*runs):
        told = ", ".join(f"{value:.2f}" for value in values)
        claim.add(f"seed {seed}", told, max(values) <= POOLINGS_DIFFER_AT_MOST * min(values))
    return claim


def skipping_helps_a_memory(found: Perplexities) -> Claim:
    """Section 4.2, table 1: a memory with skipping 14.15, without 14.97, although it is read in order."""
    claim = Claim("with a memory: K = L/2 is below K = 0")
    return _below(claim, found, Run(rate=found.settings.middle, memory=True), Run(rate=0, memory=True))


def memory_helps_skipping(found: Perplexities) -> Claim:
    """Section 4.2, table 1: with a memory 14.15, without 35.59."""
    claim = Claim("K = L/2: with a memory is below without one")
    middle = found.settings.middle
    return _below(claim, found, Run(rate=middle, memory=True), Run(rate=middle))


CHECKS: tuple[Callable[[Perplexities], Claim], ...] = (
    middle_rate_is_best,
    short_text_is_worse_than_nothing,
    skipping_tunes_better,
    tuning_beats_training,
    skips_grow,
    pooling_does_not_matter,
    skipping_helps_a_memory,
    memory_helps_skipping,
)


def check(results: Results, settings: Settings) -> list[Claim]:
    """Return every claim with what was found."""
    found = Perplexities(results, settings)
    return [one(found) for one in CHECKS]


def wanted(seeds: Sequence[int], settings: Settings) -> list[Run]:
    """Return the models of an experiment; alpha is swept with the first seed."""
    from dataclasses import replace

    runs = [replace(run, seed=seed) for seed in seeds for run in arms(settings)]
    return [*runs, *(replace(run, seed=seeds[0]) for run in swept(settings))]
