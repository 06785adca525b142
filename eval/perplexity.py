"""Sliding-window perplexity (arXiv 2306.15595, section 3.2) with the loss by position that explains it.

perplexity = exp(total negative log-likelihood / number of scored tokens), token-weighted over all documents; a mean of
window or document means is another number. Every scored token is scored once: see `ctxext.evaluation.windows`. The
presets are the protocols of published tables, these and others, so that a new number can stand beside an old one:

- `pi`, `pi-proof-pile`: document by document, stride 256 (arXiv 2306.15595, section 3.2).
- `alibi-nonoverlapping`, `alibi-sliding`: one stream without begin-of-sequence tokens, windows side by side or moved
  by one token (arXiv 2108.12409, section 2.1 and appendix B).
- `yarn-truncate`: the first `length` tokens of each document, begin-of-sequence token included, and the mean of the
  documents' means (jquesnelle/yarn, eval/perplexity.py --truncate).
- `longlora-all-tokens`: one stream, stride 256, all tokens of every window, and the mean of the windows' means
  (dvlab-research/LongLoRA, eval.py).

The Sandwich paper's protocol is the evaluation `last-token`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ctxext.data.corpora import Corpus
from ctxext.data.documents import Document, documents_hash
from ctxext.evaluation.base import Plan, Plot, Session, Summary, Unit, option
from ctxext.evaluation.bos import BOS_HELP, bos_token, check_bos_rule
from ctxext.evaluation.corpus import CorpusEvaluation
from ctxext.evaluation.scoring import TokenScorer, bucket_edges
from ctxext.evaluation.windows import WINDOW_RULES, Tokens, Window, evenly_spaced, joined

MAX_EXPONENT = 700.0
MEANS = ("tokens", "windows")
# What the presets share unless they say otherwise: whole documents, all windows, every token once, equally weighted.
WHOLE: Mapping[str, Any] = {"truncate": 0, "max_windows": 0, "windows": "once", "mean": "tokens"}


@dataclass(frozen=True)
class Job:
    """One window of one sequence."""

    sequence: Tokens
    window: Window


@dataclass(frozen=True, kw_only=True)
class Perplexity(CorpusEvaluation):
    """Perplexity and loss by position on a corpus."""

    name: ClassVar[str] = "perplexity"
    description: ClassVar[str] = "sliding-window perplexity and loss by position on a corpus"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "pi": {**WHOLE, "stream": False, "stride": 256, "bos": "auto"},
        "pi-proof-pile": {
            **{**WHOLE, "stream": False, "stride": 256, "bos": "auto"},
            **{"data": "proof-pile", "limit": 128, "min_tokens": 32768, "truncate": 32768},
        },
        "alibi-nonoverlapping": {**WHOLE, "stream": True, "stride": 0, "bos": "never"},
        "alibi-sliding": {**WHOLE, "stream": True, "stride": 1, "bos": "never"},
        "yarn-truncate": {**WHOLE, "stream": False, "stride": 0, "windows": "first", "mean": "windows", "bos": "auto"},
        "longlora-all-tokens": {**WHOLE, "stream": True, "stride": 256, "windows": "every-token", "mean": "windows"},
        "non-overlapping": {"stride": 0},
    }

    length: int = option(2048, "window: the most tokens read before a prediction")
    stride: int = option(256, "tokens from one window to the next; 0 means the length (windows do not overlap)")
    windows: str = option(
        "once",
        "which tokens a window scores: once (each by the window with the most context), first (only the first "
        "--length tokens of a document), every-token (all but the first of every window)",
    )
    mean: str = option("tokens", "what weighs equally: tokens, or windows (a mean of the windows' means)")
    stream: bool = option(False, "one long stream of all documents instead of document by document")
    truncate: int = option(0, "read only the first tokens of each document; 0 reads all")
    min_tokens: int = option(0, "skip documents with fewer tokens; 0 means the length (a stream skips none)")
    bos: str = option("auto", BOS_HELP.format(where="document's start"))
    max_windows: int = option(0, "score only so many windows, evenly spaced over all; 0 scores all")
    limit: int = option(0, "use only the first documents that are long enough; 0 uses all", scored=False)
    buckets: str = option(
        "16", "loss by position: a number of even buckets, or edges such as 256,1024,4096", scored=False
    )

    def __post_init__(self) -> None:
        wrong = []
        if self.length < 1:
            wrong.append(f"--length {self.length} must be at least 1")
        if not 0 <= self.stride <= self.length:
            wrong.append(f"--stride {self.stride} must lie between 1 and --length {self.length} (0 means the length)")
        for name in ("truncate", "min_tokens", "max_windows", "limit"):
            if getattr(self, name) < 0:
                wrong.append(f"--{name.replace('_', '-')} {getattr(self, name)} must not be negative")
        if self.truncate and self.truncate < max(self._min_tokens(), 2):
            wrong.append(f"--truncate {self.truncate} leaves less than the {max(self._min_tokens(), 2)} tokens needed")
        for name, allowed in (("windows", WINDOW_RULES), ("mean", MEANS)):
            if getattr(self, name) not in allowed:
                wrong.append(f"--{name} {getattr(self, name)!r} is not known; allowed: {', '.join(allowed)}")
        wrong += check_bos_rule(self.bos)
        if wrong:
            raise ValueError("; ".join(wrong))
        bucket_edges(self.length, self.buckets)

    def protocol(self) -> dict[str, Any]:
        """Return the options that change the score, with the zeros that mean something else resolved."""
        stride = self.length if self.windows == "first" else self.stride or self.length
        resolved = {"stride": stride, "min_tokens": self._min_tokens()}
        return {**super().protocol(), **resolved}

    def _min_tokens(self) -> int:
        return self.min_tokens or (1 if self.stream else self.length)

    def _kept(self, corpus: Corpus, tokenizer: Any, plan: Plan) -> Iterator[tuple[Document, list[int]]]:
        """Yield the documents that are long enough, with their tokens; count those that are not in `plan`."""
        least = max(self._min_tokens(), corpus.min_tokens)
        longest = kept = 0
        for document in corpus.documents():
            if self.limit and kept == self.limit:
                return
            ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
            longest = max(longest, len(ids))
            if len(ids) < least:
                plan.skipped["documents_too_short"] = plan.skipped.get("documents_too_short", 0) + 1
                plan.skipped["tokens_in_short_documents"] = plan.skipped.get("tokens_in_short_documents", 0) + len(ids)
                continue
            kept += 1
            yield document, ids[: self.truncate] if self.truncate else ids
        if not kept:
            raise ValueError(
                f"no document of {self.data} has {least} tokens, the longest has {longest}: "
                "use a smaller --length, --min-tokens, or --stream"
            )

    def _sequences(self, session: Session, plan: Plan) -> list[Tokens]:
        """Read the corpus; return what windows will run over, and state in `plan` what was read."""
        corpus = self.open_corpus()
        bos = bos_token(session.tokenizer, self.bos)
        head = [] if bos is None else [bos]
        plan.notes.append(f"begin-of-sequence token {'none' if bos is None else bos} at each document's start")
        used: list[Document] = []
        sequences: list[Tokens] = []
        for document, ids in self._kept(corpus, session.tokenizer, plan):
            used.append(document)
            sequences.append(Tokens(document.id, head + ids))
        tokens = sum(len(sequence.ids) - len(head) for sequence in sequences)
        plan.corpus = {
            "name": corpus.name,
            "source": corpus.source,
            "hash": documents_hash(used),
            "documents": len(used),
            "tokens": tokens,
        }
        return [joined(sequences, len(head))] if self.stream else sequences

    def plan(self, session: Session) -> Plan:
        """Cut the corpus into windows, choose the wanted ones, and batch neighbours of equal length."""
        plan = Plan(units=[])
        sequences = self._sequences(session, plan)
        longest = max(len(sequence.ids) - 1 for sequence in sequences)
        if longest + 1 < self.length:
            raise ValueError(
                f"--length {self.length} is longer than {self.data}, which gives {longest} tokens to read: "
                "use a smaller --length or more data"
            )
        stride = self.stride or self.length
        rule = WINDOW_RULES[self.windows]
        jobs = [Job(one, window) for one in sequences for window in rule(len(one.ids), self.length, stride)]
        if not jobs:
            raise ValueError(
                f"{self.data} leaves no window to score with --windows {self.windows}: "
                "use more data or a smaller --length"
            )
        if bos_token(session.tokenizer, self.bos) is None:
            plan.skipped["first_tokens_without_context"] = len(sequences)
        chosen = [jobs[index] for index in evenly_spaced(len(jobs), self.max_windows)]
        if len(chosen) < len(jobs):
            left_out = sum(job.window.scored for job in jobs) - sum(job.window.scored for job in chosen)
            plan.skipped["tokens_in_windows_left_out"] = left_out
            plan.notes.append(f"{len(chosen)} of {len(jobs)} windows, evenly spaced")
        plan.units = _batches(chosen, session.batch_size)
        return plan

    def score(self, session: Session, unit: Unit) -> dict[str, Any]:
        """Read a batch of windows; return loss sums and counts by window, document and position."""
        import torch

        jobs: list[Job] = unit.work
        parts = [
            self._losses(session, jobs[start : start + session.batch_size])
            for start in range(0, len(jobs), session.batch_size)
        ]
        losses, positions = ([item for part in parts for item in part[which]] for which in (0, 1))
        return self._sums(jobs, losses, torch.cat(losses), torch.cat(positions))

    def _losses(self, session: Session, jobs: Sequence[Job]) -> tuple[list[Any], list[Any]]:
        """Return the losses of each window, float64, and how far into the window the last token read lies for each."""
        import torch

        rows = [job.sequence.ids[job.window.start : job.window.stop + 1] for job in jobs]
        tokens = torch.tensor(rows, dtype=torch.long)
        targets = tokens[:, 1:].clone()
        for row, job in enumerate(jobs):
            targets[row, : job.window.first - 1 - job.window.start] = -1
            for position in job.sequence.inserted & set(range(job.window.first, job.window.stop + 1)):
                targets[row, position - 1 - job.window.start] = -1
        losses = _scorer(session).nll(tokens[:, :-1], targets).double()
        counts = (targets >= 0).sum(dim=1).tolist()
        return list(losses.split(counts)), [(row >= 0).nonzero()[:, 0] for row in targets]

    def _sums(self, jobs: Sequence[Job], by_window: Sequence[Any], losses: Any, positions: Any) -> dict[str, Any]:
        """Sum losses by window and document (`by_window`) and by position bucket (`losses` at `positions`)."""
        import torch

        edges = torch.tensor(bucket_edges(self.length, self.buckets))
        bucket = torch.bucketize(positions, edges[1:-1], right=True)
        count = len(edges) - 1
        windows = [[float(row.sum()), len(row)] for row in by_window]
        documents: dict[str, list[float]] = {}
        for job, (nll, tokens) in zip(jobs, windows, strict=True):
            sums = documents.setdefault(job.sequence.name, [0.0, 0])
            sums[0] += nll
            sums[1] += tokens
        return {
            "documents": documents,
            "bucket_nll": torch.zeros(count, dtype=torch.double).index_add(0, bucket, losses).tolist(),
            "bucket_tokens": torch.bincount(bucket, minlength=count).tolist(),
            "little_context": int((positions < self.length // 10).sum()),
            **({"windows": windows} if self.mean == "windows" else {}),
        }

    def summarize(self, plan: Plan, scored: Sequence[Mapping[str, Any]]) -> Summary:
        """Weigh every token, or every window, equally."""
        edges = bucket_edges(self.length, self.buckets)
        bucket_nll = [math.fsum(unit["bucket_nll"][i] for unit in scored) for i in range(len(edges) - 1)]
        bucket_tokens = [sum(unit["bucket_tokens"][i] for unit in scored) for i in range(len(edges) - 1)]
        by_document: dict[str, list[float]] = {}
        for unit in scored:
            for name, (nll, count) in unit["documents"].items():
                sums = by_document.setdefault(name, [0.0, 0])
                sums[0] += nll
                sums[1] += count
        tokens = sum(bucket_tokens)
        loss = math.fsum(bucket_nll) / tokens
        if self.mean == "windows":
            means = [nll / count for unit in scored for nll, count in unit["windows"] if count]
            loss = math.fsum(means) / len(means)
        little = sum(unit["little_context"] for unit in scored) / tokens
        by_position = [nll / count if count else None for nll, count in zip(bucket_nll, bucket_tokens, strict=True)]
        curve = Plot(
            id="loss-by-position",
            title="Loss by tokens of context",
            x_label="tokens of context",
            y_label="loss (nats per token)",
            x=[(low + high) / 2 for low, high in zip(edges[:-1], edges[1:], strict=True)],
            y=by_position,
            mark_window=True,
        )
        return Summary(
            metrics={"perplexity": math.exp(min(loss, MAX_EXPONENT)), "loss": loss},
            tokens_scored=tokens,
            details={
                "bucket_edges": edges,
                "bucket_loss": by_position,
                "bucket_tokens": bucket_tokens,
                "documents": {name: {"nll": nll, "tokens": count} for name, (nll, count) in by_document.items()},
            },
            plots=[curve],
            notes=[f"{little:.1%} of the predictions had at most {self.length // 10} tokens of context"],
        )


def _scorer(session: Session) -> TokenScorer:
    """Return the session's scorer, whose set-up is paid once."""
    if "scorer" not in session.memo:
        session.memo["scorer"] = TokenScorer(session.model)
    scorer: TokenScorer = session.memo["scorer"]
    return scorer


def _batches(jobs: Sequence[Job], size: int) -> list[Unit]:
    """Group neighbouring windows that read equally many tokens, at most `size` of them."""
    groups: list[list[Job]] = []
    for job in jobs:
        if groups and len(groups[-1]) < size and groups[-1][0].window.read == job.window.read:
            groups[-1].append(job)
        else:
            groups.append([job])
    units = []
    for group in groups:
        first, last = group[0], group[-1]
        name = f"{first.sequence.name}@{first.window.start}..{last.sequence.name}@{last.window.start}"
        units.append(Unit(name, float(sum(job.window.read for job in group)), group))
    return units
