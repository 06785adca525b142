"""Retrieval that is harder than the passkey: longer keys, several keys, distractors, key-value pairs, real text.

A prompt has exactly `length` tokens. What is asked for is stated at one of `depths` places, evenly spread from the
start (0%) to the end (100%) of the text, at a line break. The model answers greedily, with at most twice the tokens of
a right answer.

A trial succeeds if the first number in the answer is the key (`digits`, `several`, `distractors`), the first UUID in
it the value (`key_value`), or the first pair of a colour and an animal of ours in it the needle's (`needle`: one of
256, so 0.4% by luck). With `--ask all`, every key must be a number of the answer, in any order, whatever else is
there.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ctxext.data.corpora import Corpus
from ctxext.data.documents import documents_hash
from ctxext.evals.retrieval_variants import VARIANTS, Trial, Variant
from ctxext.evals.ruler_words import NOUNS
from ctxext.evaluation.base import Evaluation, Plan, Plot, Session, Summary, Unit, option
from ctxext.evaluation.bos import BOS_HELP, bos_token, check_bos_rule
from ctxext.evaluation.corpus import check_data, open_named
from ctxext.evaluation.heatmap import DEPTH_LABEL
from ctxext.evaluation.prefix import Prefix, Reader
from ctxext.evaluation.prompts import TooLongError, answer, corpus_tokens, encode

OF_VARIANTS = ("digits", "keys", "ask", "distractors", "data", "split", "column")
# Beyond that, tokens of a key alone fill a usual window.
MOST_DIGITS = 1000


def _uses(variant: str) -> dict[str, Any]:
    """Return the options that a variant uses, with their defaults."""
    defaults = dict(VARIANTS[variant].defaults)
    return {**defaults, "split": None, "column": None} if "data" in defaults else defaults


@dataclass(frozen=True, kw_only=True)
class Retrieval(Evaluation):
    """Retrieval variants by depth."""

    name: ClassVar[str] = "retrieval"
    description: ClassVar[str] = "harder passkeys: more digits, several keys, distractors, key-value pairs, a needle"

    variant: str = option("distractors", f"what is hidden: {', '.join(VARIANTS)}")
    length: int = option(2048, "tokens in the prompt, exactly")
    depths: int = option(10, "places of what is asked for, evenly spread from start to end")
    trials: int = option(5, "prompts at each depth, each with random keys")
    seed: int = option(0, "of everything that is random")
    bos: str = option("auto", BOS_HELP.format(where="prompt's start"))
    digits: int | None = option(None, "digits of a key [default: digits 20; several, distractors 5]")
    keys: int | None = option(None, "several: keys that are stated [default: 4]")
    ask: str | None = option(None, "several: one or all of the keys [default: one]")
    distractors: int | None = option(None, "distractors: keys of other names [default: 8]")
    data: str | None = option(
        None, "needle: a corpus by name, or a file or folder of text [default: sympy-source]", scored=False
    )
    split: str | None = option(None, "needle: another split of the corpus", scored=False)
    column: str | None = option(None, "needle: the column that holds the text", scored=False)

    def __post_init__(self) -> None:
        counts = ("length", "depths", "trials")
        wrong = [f"--{name} {getattr(self, name)} must be at least 1" for name in counts if getattr(self, name) < 1]
        wrong += check_bos_rule(self.bos)
        if self.variant in VARIANTS:
            wrong += self._wrong_options()
        else:
            close = difflib.get_close_matches(self.variant, VARIANTS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            wrong.append(f"--variant {self.variant!r} is not known{hint} Allowed: {', '.join(VARIANTS)}")
        if wrong:
            raise ValueError("; ".join(wrong))

    def _wrong_options(self) -> list[str]:
        used = _uses(self.variant)
        useless = [name for name in OF_VARIANTS if getattr(self, name) is not None and name not in used]
        wrong = [f"--{name} has no effect with --variant {self.variant}: leave it out" for name in useless]
        given = {**used, **{name: getattr(self, name) for name in used if getattr(self, name) is not None}}
        digits, keys, others = (given.get(name, 1) for name in ("digits", "keys", "distractors"))
        if not 1 <= digits <= MOST_DIGITS:
            wrong.append(f"--digits {digits} must lie between 1 and {MOST_DIGITS}")
        elif max(keys, 1 + given.get("distractors", 0)) > 9 * 10 ** (digits - 1):
            wrong.append(f"--digits {digits} gives only {9 * 10 ** (digits - 1)} different keys: use more digits")
        if keys < 1 or (self.variant == "several" and keys < 2):
            wrong.append(f"--keys {keys} must be at least 2")
        if not 1 <= others <= len(NOUNS):
            wrong.append(f"--distractors {others} must lie between 1 and {len(NOUNS)}")
        if given.get("ask", "one") not in ("one", "all"):
            wrong.append(f"--ask {given['ask']!r} is not known; allowed: one, all")
        return wrong

    def used_options(self) -> dict[str, Any]:
        """Return the options that the variant uses, None replaced by what it stands for."""
        given = {name: getattr(self, name) for name in _uses(self.variant) if getattr(self, name) is not None}
        return {**_uses(self.variant), **given}

    def protocol(self) -> dict[str, Any]:
        """Return the options that change the score: those of other variants are left out."""
        scored = {name: value for name, value in super().protocol().items() if name not in OF_VARIANTS}
        corpus = ("data", "split", "column")
        return {**scored, **{name: value for name, value in self.used_options().items() if name not in corpus}}

    def _open(self, used: Mapping[str, Any]) -> Corpus:
        return open_named(used["data"], split=used["split"], column=used["column"])

    def check(self) -> None:
        """Read the first document of the text that a needle is hidden in."""
        used = self.used_options()
        if "data" in used:
            check_data(used["data"], self._open(used).documents)

    def plan(self, session: Session) -> Plan:
        """Make the variant, check that every trial fits, and lay out the depths from the start on."""
        bos = bos_token(session.tokenizer, self.bos)
        plan = Plan(units=[])
        plan.notes.append(f"begin-of-sequence token {'none' if bos is None else bos} at the prompt's start")
        text = self._text(session, plan)
        made = VARIANTS[self.variant](session.tokenizer, self.length, bos, self.used_options(), text)
        depths = [0.5] if self.depths == 1 else [index / (self.depths - 1) for index in range(self.depths)]
        try:
            for depth in depths:
                for trial in range(self.trials):
                    made.check(self._draw(depth, trial))
        except TooLongError as error:
            raise ValueError(
                f"--length {self.length} is too short for --variant {self.variant}: {error}; use a longer --length"
            ) from error
        session.memo["variant"] = made
        session.memo["prefix"] = Prefix(Reader(session.model), made.prefix())
        plan.units = [Unit(f"depth={100 * depth:.2f}%", float(self.trials), depth) for depth in depths]
        return plan

    def _text(self, session: Session, plan: Plan) -> list[int]:
        """Return the tokens of the corpus to hide in, none for the variants that hide in noise."""
        used = self.used_options()
        if "data" not in used:
            return []
        corpus = self._open(used)
        ids, documents = corpus_tokens(session.tokenizer, corpus, self.length)
        plan.corpus = {
            "name": corpus.name,
            "source": corpus.source,
            "hash": documents_hash(documents),
            "documents": len(documents),
            "tokens": len(ids),
        }
        return ids

    def _draw(self, depth: float, trial: int) -> random.Random:
        return random.Random(f"{self.seed}/{depth:.6f}/{trial}")

    def score(self, session: Session, unit: Unit) -> dict[str, Any]:
        """Ask for what lies at one depth, in batches that branch off what their prompts share."""
        made: Variant = session.memo["variant"]
        trials = [made.trial(unit.work, self._draw(unit.work, trial)) for trial in range(self.trials)]
        answers: list[str] = []
        for start in range(0, len(trials), session.batch_size):
            batch = trials[start : start + session.batch_size]
            count = 2 * max(_answer_tokens(session.tokenizer, trial) for trial in batch)
            answers += answer(session, [trial.ids for trial in batch], count, session.memo["prefix"])
        found = [made.found(text, trial.expected) for text, trial in zip(answers, trials, strict=True)]
        return {
            "depth": 100 * unit.work,
            "hits": sum(share == 1 for share in found),
            "tried": len(trials),
            "found": found,
            "positions": [trial.position for trial in trials],
            "expected": [list(trial.expected) for trial in trials],
            "answers": answers,
        }

    def summarize(self, plan: Plan, scored: Sequence[Mapping[str, Any]]) -> Summary:
        """Count successes by depth."""
        rates = [unit["hits"] / unit["tried"] for unit in scored]
        tried = sum(unit["tried"] for unit in scored)
        metrics = {"success": sum(unit["hits"] for unit in scored) / tried, "worst_depth": min(rates)}
        if self.used_options().get("ask") == "all":
            metrics["found"] = sum(sum(unit["found"]) for unit in scored) / tried
        heat = Plot(
            id=f"retrieval-{self.variant}",
            title=f"Retrieval ({self.variant.replace('_', '-')}) by depth",
            x_label=DEPTH_LABEL,
            y_label="success rate",
            x=[unit["depth"] for unit in scored],
            y=rates,
            kind="heat",
        )
        items = {
            f"{unit.id}/{trial}": float(share == 1)
            for unit, score in zip(plan.units, scored, strict=True)
            for trial, share in enumerate(score["found"])
        }
        details = {"depths": [dict(unit) for unit in scored], "items": items}
        return Summary(metrics=metrics, tokens_scored=tried * self.length, details=details, plots=[heat])


def _answer_tokens(tokenizer: Any, trial: Trial) -> int:
    return len(encode(tokenizer, " " + ", ".join(trial.expected)))
