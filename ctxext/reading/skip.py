"""How far to skip after a window: the policy of random-access reading (arXiv 2405.13216, section 3).

After a window of L tokens that begins at token S of X, with pooled loss C, the next one begins at S + L + D:

    D = K min(floor((|X| - S - L) / K), floor(alpha / C))        (equation 1)

K is the skipping rate in tokens and alpha the skipping threshold, in nats. K = 0 reads everything in order. When K is
larger than what remains of X, D is 0: on documents shorter than K nothing is ever skipped, so that K matters only
where X, one document or a stream of them, is longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ctxext.positions.base import nearest

POOLINGS = ("mean", "exponential-decay", "last")


@dataclass(frozen=True, kw_only=True)
class SkipPolicy:
    """The rule by which a reader skips.

    Attributes:
        rate: K, tokens; skips are multiples of it, and 0 skips nothing.
        threshold: alpha, nats: a window of pooled loss C is followed by floor(alpha / C) times the rate.
        pooling: how the losses of a window become C: their `mean`, a mean with `exponential-decay` towards the
            window's beginning, or the `last` one.
        decay: `exponential-decay`: the weight of a loss over that of the one after it, between 0 and 1.
    """

    rate: int = 0
    threshold: float = 6.0
    pooling: str = "mean"
    decay: float = 0.99

    def __post_init__(self) -> None:
        wrong = []
        if self.rate < 0:
            wrong.append(f"rate {self.rate} must be 0 (read everything) or a number of tokens")
        if not (self.threshold >= 0 and math.isfinite(self.threshold)):
            wrong.append(f"threshold {self.threshold} must be 0 or above, in nats")
        if self.pooling not in POOLINGS:
            wrong.append(f"pooling {self.pooling!r}{nearest(self.pooling, POOLINGS)} is none of {', '.join(POOLINGS)}")
        if not 0 < self.decay < 1:
            wrong.append(f"decay {self.decay} must lie between 0 and 1")
        if wrong:
            raise ValueError("; ".join(wrong))

    def pool(self, losses: Sequence[float]) -> float:
        """Return C of a window.

        Args:
            losses: Of its predictions, in nats, in order; at least one.

        Raises:
            ValueError: If there is none, or one is negative or not a number.
        """
        if not losses or not all(loss >= 0 for loss in losses):
            bad = next((loss for loss in losses if not loss >= 0), None)
            raise ValueError(f"a window's losses are nats, at least 0, and there is at least one; not {bad}")
        if self.pooling == "last":
            return float(losses[-1])
        if self.pooling == "mean":
            return math.fsum(losses) / len(losses)
        weights = [self.decay**age for age in range(len(losses) - 1, -1, -1)]
        return math.fsum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / math.fsum(weights)

    def skip(self, confidence: float, remaining: int) -> int:
        """Return D, the tokens to skip (equation 1): a multiple of the rate, and never more than remain.

        Args:
            confidence: C, nats, at least 0; the smaller, the surer the model is of what it reads.
            remaining: |X| - S - L, the tokens behind the window; nothing is skipped where it is not above 0.

        Raises:
            ValueError: If C is negative or not a number.
        """
        if not confidence >= 0:
            raise ValueError(f"a pooled loss of {confidence} is not a number of nats, at least 0")
        if self.rate == 0 or remaining <= 0:
            return 0
        by_length = remaining // self.rate
        # Compared before it is rounded: next to a loss of 0 the quotient is beyond all numbers.
        by_loss = self.threshold / confidence if confidence > 0 else math.inf
        return self.rate * (by_length if by_loss >= by_length else math.floor(by_loss))


def log_probability_confidence(log_probabilities: Sequence[float]) -> list[float]:
    """Return losses without labels: those of the model's own most likely next tokens, in nats.

    At inference nothing says which token is right. What a model is sure of, it gives nearly all probability, and the
    loss of its own choice is small. A reader that sees the document may use the true tokens' losses instead.

    Args:
        log_probabilities: Of the most likely token after each token read.
    """
    return [-value for value in log_probabilities]
