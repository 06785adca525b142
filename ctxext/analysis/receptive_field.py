"""The empirical receptive field of a checkpoint on a corpus, and whether its training length covers it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ctxext.analysis.attention_mass import attention_mass, powers_of_two, summarize_mass
from ctxext.analysis.field import ERF_THRESHOLD, bootstrap, cumulative_gradient, empirical_receptive_field
from ctxext.analysis.gradients import check_causal, gradient_norms
from ctxext.analysis.verdict import perplexity_ratio, verdict
from ctxext.evaluation.base import Plan, Plot, Session, Summary, Unit, option
from ctxext.evaluation.corpus import CorpusEvaluation
from ctxext.evaluation.loading import original_window, rope_parameters
from ctxext.evaluation.paired import MAX_EXPONENT
from ctxext.evaluation.scoring import TokenScorer

DIGITS = 9
POINTS = 120
CURVE_ID = "receptive-field"


@dataclass(frozen=True, kw_only=True)
class ReceptiveField(CorpusEvaluation):
    """Normalised gradient of the next prediction by input token (arXiv 2212.10356, section 5.1)."""

    name: ClassVar[str] = "receptive-field"
    description: ClassVar[str] = "how many of the most recent tokens a prediction rests on"

    length: int = option(2048, "tokens read before the prediction")
    segments: int = option(64, "segments, evenly spaced over the documents")
    train_length: int = option(0, "tokens that the model was trained with; 0: its original window")
    thresholds: tuple[float, ...] = option((0.5, 0.9, ERF_THRESHOLD), "shares of the gradient", scored=False)
    attention_mass: bool = option(False, "attention by distance too", scored=False)

    def __post_init__(self) -> None:
        wrong = []
        if self.length < 2:
            wrong.append(f"--length {self.length} must be at least 2")
        if self.segments < 1:
            wrong.append(f"--segments {self.segments} must be at least 1")
        if self.train_length < 0:
            wrong.append(f"--train-length {self.train_length} must not be negative (0: the original window)")
        wrong += [f"--threshold {one:g} must lie between 0 and 1" for one in self.thresholds if not 0 < one < 1]
        if wrong:
            raise ValueError("; ".join(wrong))

    def all_thresholds(self) -> tuple[float, ...]:
        """Return the thresholds, ascending, the paper's among them."""
        return tuple(sorted({*self.thresholds, ERF_THRESHOLD}))

    def trained_with(self, model: Any) -> int | None:
        """Return the training length in tokens: what was given, or what the checkpoint says."""
        return self.train_length or original_window(model.config, rope_parameters(model.config))

    def plan(self, session: Session) -> Plan:
        """Choose the segments, evenly spaced over all tokens with `length` tokens before them in their document."""
        check_causal(session.model)
        plan = Plan(units=[], notes=["segments start within documents, without a begin-of-sequence token"])
        rows = self.spaced_segments(session.tokenizer, plan, self.length, self.segments)
        trained = self.trained_with(session.model)
        for start in range(0, len(rows), session.batch_size):
            part = rows[start : start + session.batch_size]
            plan.units.append(Unit(f"{start}+{len(part)}@{trained}", float(len(part)), part))
        session.memo["train_length"] = trained
        return plan

    def score(self, session: Session, unit: Unit) -> dict[str, Any]:
        """Return each segment's cumulative gradient, and its loss at both lengths."""
        import torch

        segments = []
        for start in range(0, len(unit.work), session.batch_size):
            tokens = torch.tensor(unit.work[start : start + session.batch_size], dtype=torch.long)
            norms = gradient_norms(session.model, tokens[:, :-1]).numpy()
            losses = self._losses(session, tokens)
            for row, curve in enumerate(cumulative_gradient(norms)):
                segment = {
                    "cumulative": [round(share, DIGITS) for share in curve.tolist()],
                    "reach": int(self.length - np.flatnonzero(norms[row])[0]),
                    **{name: values[row] for name, values in losses.items()},
                }
                if self.attention_mass:
                    segment["attention"] = self._attention(session.model, tokens[row, :-1])
                segments.append(segment)
        return {"segments": segments, "train_length": session.memo["train_length"]}

    def _losses(self, session: Session, tokens: Any) -> dict[str, list[float]]:
        """Return the summed losses of each segment's last tokens, read at both lengths; {} within the training length.

        They are the last half of a training length: the short reading has at least that much context for each.
        """
        trained = session.memo["train_length"]
        if trained is None or trained >= self.length:
            return {}
        if "scorer" not in session.memo:
            session.memo["scorer"] = TokenScorer(session.model)
        scored = scored_tokens(trained)
        sums = {}
        for name, length in (("nll", self.length), ("nll_train_length", trained)):
            window = tokens[:, -length - 1 :]
            targets = window[:, 1:].clone()
            targets[:, :-scored] = -1
            losses = session.memo["scorer"].nll(window[:, :-1], targets).double()
            sums[name] = losses.view(len(tokens), scored).sum(dim=1).tolist()
        return sums

    def _attention(self, model: Any, input_ids: Any) -> dict[str, Any]:
        summary = summarize_mass(attention_mass(model, input_ids))
        return {name: np.round(getattr(summary, name), DIGITS).tolist() for name in summary.__dataclass_fields__}

    def summarize(self, plan: Plan, scored: Sequence[Mapping[str, Any]]) -> Summary:
        """Average over segments and judge."""
        segments = [segment for unit in scored for segment in unit["segments"]]
        trained = scored[0]["train_length"]
        curves = np.array([segment["cumulative"] for segment in segments])
        mean = curves.mean(axis=0)
        sure = bootstrap(curves, self.all_thresholds())
        fields = {one: empirical_receptive_field(mean, one) for one in self.all_thresholds()}
        intervals = dict.fromkeys(fields) if sure is None else sure[1]
        perplexity = _perplexity(segments, trained)
        judged = verdict(trained, self.length, fields[ERF_THRESHOLD], intervals[ERF_THRESHOLD], perplexity)
        curve = _curve(mean, None if sure is None else sure[0])
        details = {
            "train_length": trained,
            "fields": {f"{one:g}": {"erf": field, "interval": intervals[one]} for one, field in fields.items()},
            "reach": max(segment["reach"] for segment in segments),
            "perplexity": perplexity,
            "verdict": judged,
            "curve": curve,
        }
        if self.attention_mass:
            details["attention"] = _mean_attention([segment["attention"] for segment in segments], self.length)
        return Summary(
            metrics={
                "erf": fields[ERF_THRESHOLD],
                **{f"erf_{one:g}": field for one, field in fields.items() if one != ERF_THRESHOLD},
            },
            tokens_scored=len(segments),
            details=details,
            plots=[_plot(curve)],
            notes=["differentiated: the log-probability of the token that the model finds most likely next"],
        )


def scored_tokens(train_length: int) -> int:
    """Return how many of a segment's last tokens are scored at both lengths."""
    return max(1, train_length // 2)


def _perplexity(segments: Sequence[Mapping[str, Any]], train_length: int | None) -> dict[str, Any] | None:
    """Return perplexities at both lengths and their ratio; None where segments were read at one length only."""
    if train_length is None or "nll" not in segments[0]:
        return None
    tokens = scored_tokens(train_length)
    long, short = ([one[name] for one in segments] for name in ("nll", "nll_train_length"))
    ratio, low, high = perplexity_ratio(long, short, tokens)
    count = tokens * len(segments)
    return {
        "at_length": math.exp(min(math.fsum(long) / count, MAX_EXPONENT)),
        "at_train_length": math.exp(min(math.fsum(short) / count, MAX_EXPONENT)),
        "ratio": ratio,
        "ratio_interval": [low, high],
        "tokens": count,
    }


def curve_places(length: int) -> list[int]:
    """Return indices of a curve to keep: all of a short one, else evenly and close together towards both ends."""
    ends = np.geomspace(1, length, POINTS).round() - 1
    chosen = np.concatenate([ends, length - 1 - ends, np.linspace(0, length - 1, POINTS).round()])
    return [int(place) for place in np.unique(chosen)]


def _curve(mean: Any, ends: Any) -> dict[str, list[float]]:
    places = curve_places(len(mean))
    interval = {} if ends is None else {"low": ends[0, places].tolist(), "high": ends[1, places].tolist()}
    return {"recent_tokens": [place + 1 for place in places], "share": mean[places].tolist(), **interval}


def _mean_attention(segments: Sequence[Mapping[str, Any]], length: int) -> dict[str, Any]:
    means = {name: np.mean([segment[name] for segment in segments], axis=0).tolist() for name in segments[0]}
    return {**means, "powers": powers_of_two(length)}


def _plot(curve: Mapping[str, Any]) -> Plot:
    return Plot(
        id=CURVE_ID,
        title="Share of the gradient on the most recent tokens",
        x_label="most recent tokens",
        y_label="share of the gradient",
        x=curve["recent_tokens"],
        y=curve["share"],
        mark_window=True,
    )
