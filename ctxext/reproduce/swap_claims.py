"""Which biases are worth swapping into a pretrained model: `ctxext reproduce swap`, which no paper shows.

The thresholds were committed before the first full run.
"""

from __future__ import annotations

from ctxext.positions import BIASES
from ctxext.reproduce.pi_claims import Claim, Measured

RIVAL = "linear"  # Position Interpolation, tuned for as many steps on the same data
WORTH_AT_MOST = 1.02  # times its perplexity, at L' and inside the original window
FOUND_AT_LEAST = 0.9  # times its share of passkeys


def check_swaps(measured: Measured) -> list[Claim]:
    """Return, for every bias that was tuned, whether it is worth the swap."""
    methods = [method for method in BIASES if measured.runs(method)]
    return [_worth_it(measured, method) for method in methods]


def _worth_it(measured: Measured, method: str) -> Claim:
    claim = Claim(
        f"{method} is worth it: after as many steps perplexity at L and at L' is at most {WORTH_AT_MOST:g} times "
        f"{RIVAL}'s, and passkeys are at least {FOUND_AT_LEAST:g} times as many"
    )
    for factor, seed in measured.runs(method):
        last = measured.steps(method, factor, seed)[-1]
        rival = measured.get(RIVAL, factor, seed, last.step)
        if last.step == 0 or rival is None:
            continue
        near, far = (last.perplexity[at] / rival.perplexity[at] for at in (measured.window, factor * measured.window))
        found, theirs = last.success or 0.0, rival.success or 0.0
        holds = max(near, far) <= WORTH_AT_MOST and found >= FOUND_AT_LEAST * theirs
        figure = f"{near:.3f} and {far:.3f} times, passkeys {found:.0%} against {theirs:.0%}"
        claim.add(f"x{factor} seed {seed}, {last.step} steps", figure, holds)
    return claim
