"""Loss by position of a checkpoint, with bands over documents, and where it breaks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ctxext.analysis.breaking import THRESHOLD, Band, Breaking, band, breaking
from ctxext.data.documents import Document, documents_hash
from ctxext.evaluation.base import Plan, Plot, Session, Summary, Unit, option
from ctxext.evaluation.bos import BOS_HELP, bos_token, check_bos_rule
from ctxext.evaluation.corpus import CorpusEvaluation
from ctxext.evaluation.loading import original_window, rope_parameters
from ctxext.evaluation.paired import FEWEST_ITEMS
from ctxext.evaluation.scoring import bucket_edges, position_loss

CURVE_ID = "position-loss"


@dataclass(frozen=True, kw_only=True)
class PositionLoss(CorpusEvaluation):
    """Mean loss by position over the first tokens of documents, each read in one pass."""

    name: ClassVar[str] = "position-loss"
    description: ClassVar[str] = "loss by position with bands over documents, and where it breaks"

    length: int = option(16384, "tokens read of each document")
    documents: int = option(8, "most documents to read, of those that are long enough; 0 reads all", scored=False)
    buckets: str = option("64", "a number of even buckets, or edges such as 256,1024,4096")
    window: int = option(0, "tokens of the original window; 0: what the checkpoint says")
    threshold: float = option(THRESHOLD, "nats per token above the window's own loss that count as broken")
    bos: str = option("auto", BOS_HELP.format(where="document's start"))

    def __post_init__(self) -> None:
        wrong = []
        if self.length < 2:
            wrong.append(f"--length {self.length} must be at least 2")
        for name in ("documents", "window"):
            if getattr(self, name) < 0:
                wrong.append(f"--{name} {getattr(self, name)} must not be negative")
        if not self.threshold > 0:
            wrong.append(f"--threshold {self.threshold} must be above 0 nats per token")
        wrong += check_bos_rule(self.bos)
        try:
            bucket_edges(max(self.length, 2), self.buckets)
        except ValueError as error:
            wrong.append(f"--{error}")
        if wrong:
            raise ValueError("; ".join(wrong))

    def edges(self, window: int | None) -> list[int]:
        """Return the bucket edges, with the window and its half among them where both lie within the length."""
        edges = set(bucket_edges(self.length, self.buckets))
        if window is not None and 2 <= window < self.length:
            edges |= {window // 2, window}
        return sorted(edges)

    def plan(self, session: Session) -> Plan:
        """Take the first documents that are long enough; each is a unit."""
        config = session.model.config
        window = self.window or original_window(config, rope_parameters(config))
        session.memo["window"] = window
        bos = bos_token(session.tokenizer, self.bos)
        head = [] if bos is None else [bos]
        corpus = self.open_corpus()
        plan = Plan(units=[], notes=[f"begin-of-sequence token {'none' if bos is None else bos} at each start"])
        used: list[Document] = []
        tokens = longest = 0
        for document in corpus.documents():
            if self.documents and len(used) == self.documents:
                break
            ids = session.tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
            longest = max(longest, len(ids))
            ids = (head + ids)[: self.length + 1]
            if len(ids) <= self.length:
                plan.skipped["documents_too_short"] = plan.skipped.get("documents_too_short", 0) + 1
                continue
            used.append(document)
            tokens += len(ids)
            plan.units.append(Unit(f"{document.id}@{window}", float(self.length), (document.id, ids)))
        if not used:
            raise ValueError(
                f"{self.data} has no document with more than {self.length} tokens, the longest has {longest}: "
                "use a smaller --length or more data"
            )
        plan.corpus = {
            "name": corpus.name,
            "source": corpus.source,
            "hash": documents_hash(used),
            "documents": len(used),
            "tokens": tokens,
        }
        return plan

    def score(self, session: Session, unit: Unit) -> dict[str, Any]:
        """Read one document; return its mean loss by bucket."""
        name, ids = unit.work
        window = session.memo["window"]
        edges = self.edges(window)
        digest = hashlib.sha256(np.array(ids, dtype=np.int64).tobytes()).hexdigest()
        losses = position_loss(session.model, ids, edges)
        return {"document": name, "losses": losses, "window": window, "tokens_hash": digest}

    def summarize(self, plan: Plan, scored: Sequence[Mapping[str, Any]]) -> Summary:
        """Average over documents, and find where the model breaks."""
        window = scored[0]["window"]
        edges = self.edges(window)
        losses = np.array([unit["losses"] for unit in scored])
        means = band(losses)
        beyond = window is not None and 2 <= window < self.length
        found = breaking(losses, edges, window, self.threshold) if beyond else None
        notes = []
        if found is None:
            notes.append(f"window {window}, read at {self.length} tokens: nothing beyond the window to break at")
        if len(scored) < FEWEST_ITEMS:
            says = "no interval" if len(scored) == 1 else "an interval that is too narrow"
            notes.append(f"{len(scored)} {'document gives' if len(scored) == 1 else 'documents give'} {says}")
        centres = [(low + high) / 2 for low, high in zip(edges[:-1], edges[1:], strict=True)]
        return Summary(
            metrics={
                "loss": float(means.mean @ np.diff(edges) / self.length),
                "loss_in_window": None if found is None else found.inside,
                "loss_beyond": None if found is None else found.beyond,
                "break_position": None if found is None else found.break_position,
                "effective_length": None if found is None else found.effective,
            },
            tokens_scored=self.length * len(scored),
            details=_details(scored, edges, means, found, window),
            plots=[_plot(centres, means)],
            notes=notes,
        )


def _band_json(values: Band) -> dict[str, list[float]]:
    parts = {"mean": values.mean, "low": values.low, "high": values.high}
    return {name: part.tolist() for name, part in parts.items() if part is not None}


def _details(
    scored: Sequence[Mapping[str, Any]], edges: Sequence[int], means: Band, found: Breaking | None, window: int | None
) -> dict[str, Any]:
    return {
        "window": window,
        "bucket_edges": list(edges),
        "loss": _band_json(means),
        "excess": None if found is None else _band_json(found.excess),
        "documents_loss": {unit["document"]: unit["losses"] for unit in scored},
        "tokens_hash": hashlib.sha256("".join(unit["tokens_hash"] for unit in scored).encode()).hexdigest(),
    }


def _plot(centres: Sequence[float], means: Band) -> Plot:
    return Plot(
        id=CURVE_ID,
        title="Loss by position",
        x_label="position (tokens)",
        y_label="loss (nats per token)",
        x=centres,
        y=means.mean.tolist(),
        mark_window=True,
    )
