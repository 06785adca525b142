"""Passkey retrieval (format of arXiv 2305.16300) and k_max (arXiv 2306.15595, section 3.3).

A prompt of exactly `length` tokens hides a five-digit key in filler. k is the key's distance from the end: the tokens
from the start of the key sentence to the end of the prompt. Success: the five digits are the first number the model
generates, greedily. k_max is the largest tested k such that every tested k' <= k succeeds in at least 20% of the
trials; when all do, it is the whole length. (k = length itself is impossible, because of the header.)
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from ctxext.evaluation.base import Evaluation, Plan, Plot, Session, Summary, Unit, option
from ctxext.evaluation.bos import BOS_HELP, bos_token, check_bos_rule
from ctxext.evaluation.prefix import Prefix, Reader

HEADER = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
KEY_SENTENCE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
SMALLEST_KEY, LARGEST_KEY = 10000, 99999
FULL_DEPTHS, FULL_TRIALS = 32, 10
# 20%: the success rate that counts, as a fraction so that no rounding decides a depth.
NEEDED_OF, NEEDED = 10, 2


def hits_needed(trials: int) -> int:
    """Return the fewest hits of `trials` that are at least 20%."""
    return -(-trials * NEEDED // NEEDED_OF)


def spread(low: int, high: int, count: int) -> list[int]:
    """Return `count` integers evenly spaced from `low` to `high`, both included (only `high` for a count of one)."""
    if count == 1:
        return [high]
    return [low + round(index * (high - low) / (count - 1)) for index in range(count)]


class PromptMaker:
    """Builds prompts of an exact number of tokens; every piece is tokenized separately.

    A prompt is `header + filler + key sentence + filler + question`. The filler is cut by whole tokens, and both
    stretches start at its beginning.
    """

    def __init__(self, tokenizer: Any, length: int, bos: int | None) -> None:
        """Tokenize the pieces of prompts with `length` tokens, the token `bos` first if there is one."""
        self.tokenizer = tokenizer
        self.length = length
        self.header = ([] if bos is None else [bos]) + self.encode(HEADER)
        self.question = self.encode(QUESTION)
        once = self.encode(FILLER)
        self.filler = self.encode(FILLER * (length // max(1, len(once) - 1) + 2))

    def encode(self, text: str) -> list[int]:
        """Tokenize one piece, with no special token."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @cached_property
    def key_room(self) -> int:
        """The most tokens that a key sentence takes, over a fixed sample of keys."""
        sample = [*range(11111, LARGEST_KEY + 1, 11111), *range(SMALLEST_KEY, LARGEST_KEY + 1, 997)]
        return max(len(self.encode(KEY_SENTENCE.format(key=key))) for key in sample)

    def range_of_k(self) -> tuple[int, int]:
        """Return the smallest and largest feasible k in tokens."""
        return self.key_room + len(self.question), self.length - len(self.header)

    def prefix(self) -> list[int]:
        """Return header and filler of the deepest need: every prompt starts with a stretch of it."""
        low, _ = self.range_of_k()
        return (self.header + self.filler)[: self.length - low]

    def suffix(self, k: int, key: int) -> list[int]:
        """Return the last `k` tokens of a prompt: the key sentence, filler and the question."""
        sentence = self.encode(KEY_SENTENCE.format(key=key))
        room = k - len(sentence) - len(self.question)
        assert room >= 0, f"k = {k} leaves no room for a key sentence of {len(sentence)} tokens"
        return sentence + self.filler[:room] + self.question

    def fits(self, k: int, key: int) -> bool:
        """Say whether the sentence of `key` and the question fit into the last `k` tokens."""
        return len(self.encode(KEY_SENTENCE.format(key=key))) + len(self.question) <= k

    def answer(self, key: int) -> list[int]:
        """Return the tokens of a right answer."""
        return self.encode(f" {key}")


@dataclass(frozen=True, kw_only=True)
class PasskeyRetrieval(Evaluation):
    """Passkey retrieval by distance, and k_max."""

    name: ClassVar[str] = "passkey"
    description: ClassVar[str] = "find a five-digit key in filler, by distance; k_max"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"pi": {"depths": FULL_DEPTHS, "trials": FULL_TRIALS}}

    length: int = option(2048, "tokens in the prompt, exactly")
    depths: int = option(FULL_DEPTHS, "distances k, evenly spaced over the feasible ones")
    trials: int = option(FULL_TRIALS, "prompts at each distance, each with a random key")
    seed: int = option(0, "of the random keys")
    bos: str = option("auto", BOS_HELP.format(where="prompt's start"))
    kmax_only: bool = option(
        False, "only find k_max: a distance ends once it is settled, the sweep at the first failure"
    )

    def __post_init__(self) -> None:
        counts = ("length", "depths", "trials")
        wrong = [f"--{name} {getattr(self, name)} must be at least 1" for name in counts if getattr(self, name) < 1]
        wrong += check_bos_rule(self.bos)
        if wrong:
            raise ValueError("; ".join(wrong))

    def plan(self, session: Session) -> Plan:
        """Spread the distances; with `kmax_only` from the nearest, else from the farthest (the prefix only grows)."""
        bos = bos_token(session.tokenizer, self.bos)
        maker = PromptMaker(session.tokenizer, self.length, bos)
        low, high = maker.range_of_k()
        if high - low + 1 < self.depths:
            raise ValueError(
                f"--length {self.length} leaves {max(0, high - low + 1)} distances for the key "
                f"({low} to {high} tokens from the end), fewer than --depths {self.depths}: use a longer --length "
                "or fewer --depths"
            )
        session.memo["maker"] = maker
        session.memo["prefix"] = Prefix(Reader(session.model), maker.prefix())
        plan = Plan(
            units=[], notes=[f"begin-of-sequence token {'none' if bos is None else bos} at the prompt's start"]
        )
        if self.depths < FULL_DEPTHS or self.trials < FULL_TRIALS:
            plan.notes.append(
                f"reduced grid: {self.depths} depths x {self.trials} trials ({FULL_DEPTHS} x {FULL_TRIALS})"
            )
        distances = spread(low, high, self.depths)
        for k in distances if self.kmax_only else distances[::-1]:
            plan.units.append(Unit(f"k={k}", float(k * self.trials), k))
        return plan

    def keys(self, maker: PromptMaker, k: int) -> list[int]:
        """Return the keys of the trials at distance `k`, which depend on the seed, k and the trial only."""
        keys = []
        for trial in range(self.trials):
            draw = random.Random(f"{self.seed}/{k}/{trial}")
            key = draw.randint(SMALLEST_KEY, LARGEST_KEY)
            # At the smallest k, a key of unusually many tokens has no room.
            while not maker.fits(k, key):
                key = draw.randint(SMALLEST_KEY, LARGEST_KEY)
            keys.append(key)
        return keys

    def score(self, session: Session, unit: Unit) -> dict[str, Any]:
        """Try the keys at one distance, in batches that branch off the shared prefix."""
        k = unit.work
        keys = self.keys(session.memo["maker"], k)
        answers: list[str] = []
        hits = 0
        for batch in self._batches(keys, session.batch_size):
            for key, answer in zip(batch, self._generate(session, k, batch), strict=True):
                answers.append(answer)
                hits += is_hit(answer, key)
                if self._settled(hits, len(answers)):
                    return {
                        "k": k,
                        "hits": hits,
                        "tried": len(answers),
                        "keys": keys[: len(answers)],
                        "answers": answers,
                    }
        return {"k": k, "hits": hits, "tried": len(answers), "keys": keys, "answers": answers}

    def _batches(self, keys: Sequence[int], size: int) -> Iterator[Sequence[int]]:
        """Cut the trials into batches; the first of `kmax_only` is as small as can settle a distance."""
        start = 0
        while start < len(keys):
            wanted = min(size, hits_needed(self.trials)) if self.kmax_only and start == 0 else size
            yield keys[start : start + wanted]
            start += wanted

    def _settled(self, hits: int, tried: int) -> bool:
        """Say whether more trials cannot change the verdict: enough hits, or too many misses."""
        enough = hits_needed(self.trials)
        return self.kmax_only and (hits >= enough or tried - hits > self.trials - enough)

    def _generate(self, session: Session, k: int, keys: Sequence[int]) -> list[str]:
        """Return the model's greedy answers to prompts with `keys` at distance `k`, one batch."""
        import torch

        maker: PromptMaker = session.memo["maker"]
        prefix: Prefix = session.memo["prefix"]
        expected = [maker.answer(key) for key in keys]
        # One more token than the answer, so that a longer number shows itself.
        count = max(len(ids) for ids in expected) + 1
        cache = prefix.branch(self.length - k, len(keys))
        suffixes = torch.tensor([maker.suffix(k, key) for key in keys], dtype=torch.long)
        tokens = prefix.reader.greedy(prefix.reader.read(suffixes, cache), cache, count)
        return [str(session.tokenizer.decode(row, skip_special_tokens=True)) for row in tokens]

    def finished(self, scored: Sequence[Mapping[str, Any]]) -> bool:
        """End at the first failed distance when only k_max is wanted."""
        return self.kmax_only and bool(scored) and scored[-1]["hits"] < hits_needed(self.trials)

    def summarize(self, plan: Plan, scored: Sequence[Mapping[str, Any]]) -> Summary:
        """Find k_max and count hits by distance."""
        by_distance = sorted(scored, key=lambda unit: unit["k"])
        good = 0
        while good < len(by_distance) and by_distance[good]["hits"] >= hits_needed(self.trials):
            good += 1
        everywhere = good == self.depths
        k_max = self.length if everywhere else (by_distance[good - 1]["k"] if good else 0)
        rates = [unit["hits"] / unit["tried"] for unit in by_distance]
        hits, tried = sum(unit["hits"] for unit in scored), sum(unit["tried"] for unit in scored)
        curve = Plot(
            id="passkey",
            title="Passkey retrieval by the key's distance",
            x_label="distance of the key from the end of the prompt (tokens)",
            y_label="success rate",
            x=[unit["k"] for unit in by_distance],
            y=rates,
            kind="heat",
            mark_window=True,
        )
        metrics: dict[str, Any] = {"k_max": k_max, "all_feasible": everywhere}
        if not self.kmax_only:
            metrics["success"] = hits / tried
        reduced = self.depths < FULL_DEPTHS or self.trials < FULL_TRIALS
        return Summary(
            metrics=metrics,
            tokens_scored=tried * self.length,
            details={
                "reduced": reduced,
                "hits": hits,
                "tried": tried,
                "distances": [dict(unit) for unit in by_distance],
            },
            plots=[curve],
        )


def is_hit(answer: str, key: int) -> bool:
    """Say whether the first number in `answer` is the key."""
    number = re.search(r"\d+", answer)
    return number is not None and number.group() == str(key)
