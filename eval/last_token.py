"""Perplexity of the same last tokens by how many tokens are read before them (arXiv 2212.10356, section 3.2).

N segments are taken from long documents. Of each only the last token is scored, once for every length of a grid: read
with that many tokens before it. So every length scores the same tokens, and no average over positions hides how a
model uses what lies far back. The histories of a segment share their end, not their beginning, so every length is a
forward of its own; the paper's grid is every length from 1 on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ctxext.evaluation.base import Plan, Plot, Session, Summary, Unit, option
from ctxext.evaluation.corpus import CorpusEvaluation
from ctxext.evaluation.scoring import TokenScorer

SEGMENTS = 1000
TOKENS_AT_ONCE = 16384


def parse_lengths(text: str) -> list[int]:
    """Return the ascending lengths of a comma-separated list.

    Raises:
        ValueError: if one is no positive whole number.
    """
    try:
        lengths = sorted({int(word) for word in text.split(",")})
    except ValueError:
        lengths = [0]
    if lengths[0] < 1:
        raise ValueError(
            f"--lengths {text!r} must be whole numbers from 1 on with commas between, such as 64,256,1024"
        )
    return lengths


@dataclass(frozen=True, kw_only=True)
class LastToken(CorpusEvaluation):
    """Perplexity of last tokens by the number of tokens before them."""

    name: ClassVar[str] = "last-token"
    description: ClassVar[str] = "perplexity of the same tokens by how many are read before them"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"sandwich": {"segments": SEGMENTS}}

    lengths: str = option("256,512,1024,2048", "tokens read before the scored one, comma-separated")
    segments: int = option(SEGMENTS, "segments, evenly spaced over the documents")

    def __post_init__(self) -> None:
        parse_lengths(self.lengths)
        if self.segments < 1:
            raise ValueError(f"--segments {self.segments} must be at least 1")

    def protocol(self) -> dict[str, Any]:
        """Return the options that change the score, the grid in order."""
        return {**super().protocol(), "lengths": "+".join(map(str, parse_lengths(self.lengths)))}

    def evaluated_length(self) -> int:
        """Return the longest history."""
        return parse_lengths(self.lengths)[-1]

    def plan(self, session: Session) -> Plan:
        """Choose the segments: evenly spaced over all tokens that have the longest history before them."""
        plan = Plan(units=[])
        segments = self.spaced_segments(session.tokenizer, plan, self.evaluated_length(), self.segments)
        for length in parse_lengths(self.lengths):
            rows = max(1, TOKENS_AT_ONCE // length)
            for start in range(0, len(segments), rows):
                part = [segment[-length - 1 :] for segment in segments[start : start + rows]]
                plan.units.append(Unit(f"{length}@{start}", float(length * len(part)), (length, part)))
        return plan

    def score(self, session: Session, unit: Unit) -> dict[str, Any]:
        """Read some segments with one length of history; return the sum of their last tokens' losses."""
        import torch

        length, part = unit.work
        scorer = session.memo.setdefault("scorer", None) or TokenScorer(session.model)
        session.memo["scorer"] = scorer
        total = 0.0
        for start in range(0, len(part), session.batch_size):
            tokens = torch.tensor(part[start : start + session.batch_size], dtype=torch.long)
            targets = torch.full_like(tokens[:, 1:], -1)
            targets[:, -1] = tokens[:, -1]
            total += float(scorer.nll(tokens[:, :-1], targets).double().sum())
        return {"length": length, "nll": total, "tokens": len(part)}

    def summarize(self, plan: Plan, scored: Sequence[Mapping[str, Any]]) -> Summary:
        """Return the perplexity by length; the headline is that of the longest."""
        lengths = parse_lengths(self.lengths)
        loss = {
            length: math.fsum(unit["nll"] for unit in scored if unit["length"] == length) / self.segments
            for length in lengths
        }
        best = min(lengths, key=lambda length: loss[length])
        curve = Plot(
            id="last-token",
            title="Perplexity of the same tokens by how many are read before them",
            x_label="tokens read before",
            y_label="perplexity",
            x=lengths,
            y=[math.exp(loss[length]) for length in lengths],
            kind="log-line",
            mark_window=True,
        )
        return Summary(
            metrics={"perplexity": math.exp(loss[lengths[-1]]), "best_length": best, "best": math.exp(loss[best])},
            tokens_scored=self.segments * len(lengths),
            details={"perplexity": {str(length): math.exp(loss[length]) for length in lengths}},
            plots=[curve],
        )
