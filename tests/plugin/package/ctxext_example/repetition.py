"""An evaluation of our own: how much better does a model predict random tokens when it reads them again?"""

import random
from dataclasses import dataclass

from ctxext.evaluation.base import Evaluation, Plan, Summary, Unit, option


@dataclass(frozen=True, kw_only=True)
class Repetition(Evaluation):
    """Loss on a random sequence, and on its repetition right after it."""

    name = "repetition"
    description = "loss on random tokens and on their repetition"

    length: int = option(64, "tokens of the sequence and its repetition together")
    trials: int = option(2, "random sequences")
    seed: int = option(0, "of the random sequences")

    def __post_init__(self):
        if self.length < 4 or self.trials < 1:
            raise ValueError(f"--length {self.length} must be at least 4 and --trials {self.trials} at least 1")

    def plan(self, session):
        """One unit for each random sequence."""
        return Plan(units=[Unit(f"trial-{i}", cost=self.length, work=i) for i in range(self.trials)])

    def score(self, session, unit):
        """Read a random half twice in a row."""
        from ctxext.evaluation.scoring import position_loss

        half = self.length // 2
        source = random.Random(f"{self.seed}-{unit.work}")
        tokens = [source.randrange(session.model.config.vocab_size) for _ in range(half)] * 2
        first, second = position_loss(session.model, tokens, [0, half - 1, 2 * half - 1])
        return {"first": first, "second": second}

    def summarize(self, plan, scored):
        """Average over the sequences."""
        first, second = (sum(unit[key] for unit in scored) / len(scored) for key in ("first", "second"))
        return Summary(
            metrics={"gain": first - second, "first": first, "second": second},
            tokens_scored=len(scored) * (self.length // 2 * 2 - 1),
        )
