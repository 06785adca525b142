"""Summaries of long documents, scored by ROUGE (arXiv 2306.15595, section 3.5).

A document is cut to its first `truncate` tokens, put into the paper's prompt, and a summary is sampled. The scores are
F-measures of the rouge-score package, times 100, averaged over the documents: ROUGE-1, ROUGE-2 and ROUGE-L over the
whole text (`rougeL`, not the sentence-wise `rougeLsum`), words stemmed (Porter), and the geometric mean of the three
averages.

The draws of a document depend on the seed, the document and the step, not on the documents that it is read with.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from ctxext.data.documents import Document, documents_hash
from ctxext.data.pairs import PAIR_CORPORA, Pair, PairCorpus, Pairs, open_pairs
from ctxext.data.sources import Source
from ctxext.data.supervised import SUMMARY_PROMPT, encode_prompt, first_tokens, summary_prompt
from ctxext.evaluation.base import Evaluation, Plan, Session, Summary, Unit, option
from ctxext.evaluation.bos import BOS_HELP, bos_token, check_bos_rule
from ctxext.evaluation.corpus import check_data, naming
from ctxext.evaluation.prompts import end_tokens, without_own_generation_config

ROUGE = ("rouge1", "rouge2", "rougeL")
# The prompt around a document takes at most a token for each of its bytes, and one to begin with.
PROMPT_ROOM = len(SUMMARY_PROMPT.format(document="").encode()) + 1


@dataclass(frozen=True)
class Job:
    """A document to summarize.

    Attributes:
        pair: the document and its summary.
        prompt: the tokens to read.
        cut_off: tokens at the document's end that are not read.
    """

    pair: Pair
    prompt: list[int]
    cut_off: int


@dataclass(frozen=True, kw_only=True)
class Summarization(Evaluation):
    """ROUGE of sampled summaries."""

    name: ClassVar[str] = "summarization"
    description: ClassVar[str] = "summaries of long documents, by ROUGE"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "pi": {"truncate": 15000, "max_new_tokens": 1000, "temperature": 0.5, "top_p": 0.95, "bos": "auto"}
    }

    data: str = option(
        "govreport",
        "pairs by name (govreport, docstrings), or a .jsonl, .jsonl.zst, .json or .parquet file",
        scored=False,
    )
    truncate: int = option(15000, "read only the first tokens of each document")
    max_new_tokens: int = option(1000, "the most tokens of a summary")
    temperature: float = option(0.5, "of the sampling; 0 takes the likeliest token")
    top_p: float = option(0.95, "sample from the likeliest tokens with so much probability together")
    seed: int = option(0, "of the sampling, with each document's id")
    bos: str = option("auto", BOS_HELP.format(where="prompt's start"))
    limit: int = option(0, "use only the first documents with a summary; 0 uses all", scored=False)
    document_column: str | None = option(None, "the column of the document", scored=False)
    summary_column: str | None = option(None, "the column of the summary", scored=False)
    split: str | None = option(None, "another split of the corpus", scored=False)
    data_id: str | None = option(None, "another Hub repository for the corpus", scored=False)
    data_config: str | None = option(None, "another configuration of the Hub repository", scored=False)
    data_revision: str | None = option(None, "another revision of the Hub repository", scored=False)

    def __post_init__(self) -> None:
        wrong = [
            f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1"
            for name in ("truncate", "max_new_tokens")
            if getattr(self, name) < 1
        ]
        if self.limit < 0:
            wrong.append(f"--limit {self.limit} must not be negative")
        if not (0 <= self.temperature and math.isfinite(self.temperature)):
            wrong.append(f"--temperature {self.temperature} must be 0 or above")
        if not 0 < self.top_p <= 1:
            wrong.append(f"--top-p {self.top_p} must lie above 0 and be at most 1")
        wrong += check_bos_rule(self.bos)
        if wrong:
            raise ValueError("; ".join(wrong))

    def protocol(self) -> dict[str, Any]:
        """Return the options that change the score; with temperature 0 nothing is drawn."""
        drawn = {} if self.temperature else {"top_p": 1.0, "seed": 0}
        return {**super().protocol(), **drawn}

    def evaluated_length(self) -> int:
        """Return the most tokens of a prompt and its summary."""
        return self.truncate + PROMPT_ROOM + self.max_new_tokens

    def _open(self) -> Pairs:
        split = self.split or PAIR_CORPORA.get(self.data, PairCorpus()).split
        options = ("document_column", "summary_column", "data_id", "data_config", "data_revision")
        given = {name: getattr(self, name) for name in options}
        pairs = open_pairs(Source(data=self.data, kind="summary", split=split, **given))
        return replace(pairs, read=partial(naming, pairs.read, self.data))

    def check(self) -> None:
        """Look for rouge-score, and read the first document."""
        _require_rouge()
        check_data(self.data, self._open().read)

    def _kept(self, pairs: Pairs, plan: Plan) -> Iterator[Pair]:
        """Yield the pairs to score; count those without a summary to compare with in `plan`."""
        kept = 0
        for pair in pairs.read():
            if self.limit and kept == self.limit:
                return
            if pairs.is_long_enough(pair):
                kept += 1
                yield pair
            else:
                reason = f"documents_without_a_summary_of_{pairs.min_summary_words}_words"
                plan.skipped[reason] = plan.skipped.get(reason, 0) + 1
        if not kept:
            raise ValueError(
                f"no document of {self.data} has a summary of {pairs.min_summary_words} words: use other data"
            )

    def plan(self, session: Session) -> Plan:
        """Cut the documents, and batch those of similar length."""
        _require_rouge()
        plan = Plan(units=[])
        pairs = self._open()
        bos = bos_token(session.tokenizer, self.bos)
        jobs = []
        for pair in self._kept(pairs, plan):
            text, cut_off = first_tokens(pair.document, session.tokenizer, self.truncate)
            jobs.append(Job(pair, encode_prompt(summary_prompt(text), session.tokenizer, bos=bos), cut_off))
        used = [job.pair for job in jobs]
        plan.corpus = {
            "name": pairs.name,
            "source": pairs.source,
            "hash": documents_hash(Document(pair.id, f"{pair.document}\0{pair.summary}") for pair in used),
            "documents": len(jobs),
            "tokens": sum(len(job.prompt) for job in jobs),
        }
        plan.notes += self._notes(jobs, bos, session.batch_size)
        if any(job.cut_off for job in jobs):
            plan.skipped["tokens_cut_off_documents"] = sum(job.cut_off for job in jobs)
        plan.units = self._batches(jobs, session.batch_size)
        return plan

    def _notes(self, jobs: Sequence[Job], bos: int | None, batch_size: int) -> list[str]:
        cut = sum(job.cut_off > 0 for job in jobs)
        notes = [
            f"{cut} of {len(jobs)} documents cut to their first {self.truncate} tokens, by the protocol",
            f"begin-of-sequence token {'none' if bos is None else bos} at each prompt's start",
            "rougeL over the whole text, stemmed; geometric mean of the three averages",
        ]
        if batch_size > 1:
            notes.append(
                f"{batch_size} documents read at once, padded on the left: equal to one by one but for rounding"
            )
        return notes

    def _batches(self, jobs: Sequence[Job], size: int) -> list[Unit]:
        """Group documents of similar length, the longest first, so that memory runs out at once or never."""
        ordered = sorted(jobs, key=lambda job: -len(job.prompt))
        groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        return [
            Unit(
                f"{group[0].pair.id}..{group[-1].pair.id}",
                float(sum(len(job.prompt) + self.max_new_tokens for job in group)),
                group,
            )
            for group in groups
        ]

    def score(self, session: Session, unit: Unit) -> dict[str, Any]:
        """Summarize a batch of documents; return each one's summary and ROUGE."""
        from rouge_score.rouge_scorer import RougeScorer

        if "rouge" not in session.memo:
            session.memo["rouge"] = RougeScorer(list(ROUGE), use_stemmer=True)
        jobs: list[Job] = unit.work
        documents = {}
        for start in range(0, len(jobs), session.batch_size):
            batch = jobs[start : start + session.batch_size]
            for job, tokens in zip(batch, self._generate(session, batch), strict=True):
                text = str(session.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
                found = session.memo["rouge"].score(job.pair.summary, text)
                documents[job.pair.id] = {
                    "summary": text,
                    "tokens": len(tokens),
                    "cut_off": job.cut_off,
                    **{name: 100 * found[name].fmeasure for name in ROUGE},
                }
        return {"documents": documents}

    def _generate(self, session: Session, jobs: Sequence[Job]) -> list[list[int]]:
        """Return the tokens of a summary for each document, without the one that ends it."""
        import torch
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

        from ctxext.evaluation.scoring import reading

        model, longest = session.model, max(len(job.prompt) for job in jobs)
        pad = _pad_token(session)
        rows = [[pad] * (longest - len(job.prompt)) + job.prompt for job in jobs]
        mask = [[0] * (longest - len(job.prompt)) + [1] * len(job.prompt) for job in jobs]
        steps = LogitsProcessorList()
        if self.temperature:
            draws = [random.Random(f"{self.seed}/{job.pair.id}") for job in jobs]
            # TopPLogitsWarper refuses nothing at 1, but keeping all tokens needs no sort.
            nucleus = [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
            steps.extend([TemperatureLogitsWarper(self.temperature), *nucleus, _DrawnToken(draws)])
        ends = end_tokens(session)
        with reading(model), without_own_generation_config(model, pad, ends):
            output = model.generate(
                input_ids=torch.tensor(rows, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                logits_processor=steps,
            )
        return [_up_to_end(row, ends) for row in output[:, longest:].tolist()]

    def summarize(self, plan: Plan, scored: Sequence[Mapping[str, Any]]) -> Summary:
        """Average over the documents, in the corpus' order."""
        documents = {name: value for unit in scored for name, value in unit["documents"].items()}
        metrics = {name: math.fsum(value[name] for value in documents.values()) / len(documents) for name in ROUGE}
        geometric_mean = math.prod(metrics.values()) ** (1 / len(ROUGE))
        return Summary(
            metrics={"rouge_geometric_mean": geometric_mean, **metrics},
            tokens_scored=sum(value["tokens"] for value in documents.values()),
            details={
                "rouge_score": importlib.metadata.version("rouge-score"),
                "prompt": SUMMARY_PROMPT,
                "documents": documents,
            },
        )


class _DrawnToken:
    """Leaves each row of the logits the one token that its own draw falls on.

    A draw is a number in [0, 1) and falls on the token in whose stretch of the cumulated probabilities it lies, tokens
    in the order of their probability. `generate` then takes the likeliest token, which is the drawn one; its own
    sampling draws for all rows from one generator, so that a summary would depend on the batch.
    """

    def __init__(self, draws: Sequence[random.Random]) -> None:
        """Prepare the sampling of as many rows as there are generators."""
        self.draws = draws

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return `scores` `(batch, vocabulary)` with all but the drawn token of each row at minus infinity.

        Raises:
            ValueError: if the model gives no probabilities.
        """
        import torch

        if bool(scores.isnan().any()):
            raise ValueError("the logits are not numbers: try --dtype float32 or bfloat16, and run `ctxext doctor`")
        probabilities, order = scores.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        cumulated = probabilities.cumsum(dim=-1)
        drawn = torch.tensor([[draw.random()] for draw in self.draws], device=scores.device, dtype=cumulated.dtype)
        place = (cumulated <= drawn * cumulated[:, -1:]).sum(dim=-1, keepdim=True)
        # A draw next to 1 may round up to the whole: it falls on the last token that has a probability.
        last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
        token = order.gather(-1, torch.minimum(place, last))
        return torch.full_like(scores, -math.inf).scatter(-1, token, 0.0)


def _require_rouge() -> None:
    if importlib.util.find_spec("rouge_score") is None:
        raise ValueError("summarization needs rouge-score, which is not installed: pip install 'ctxext[eval]'")


def _pad_token(session: Session) -> int:
    """Return a token to fill shorter rows with; it is masked, so that any will do."""
    tokenizer = session.tokenizer
    found = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in found if token is not None)


def _up_to_end(tokens: Sequence[int], ends: set[int]) -> list[int]:
    """Return the tokens before the first that ends a summary."""
    stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[:stop])
