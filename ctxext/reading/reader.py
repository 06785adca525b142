"""Read a document longer than any window, skipping what the model finds easy, and answer questions about it.

Random-access reading at inference (arXiv 2405.13216, section 3): one forward pass for each window of L tokens, the
skip policy after it, the memory carried on. The window's confidence is the loss of the document's own tokens, as in
training, or that of the tokens that the model would have chosen, which needs no labels.

With a memory, a question is a window of its own that reads the memory. Without one, it stands behind the last tokens
that were read, as many as the model's context takes: what was skipped leaves room for more of the document.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ctxext.evaluation.base import Session
from ctxext.evaluation.prompts import encode, end_tokens, without_own_generation_config
from ctxext.evaluation.scoring import TokenScorer, reading
from ctxext.reading.memory import MemoryConfig, add_memory
from ctxext.reading.skip import SkipPolicy
from ctxext.reading.text import LazyText

CONFIDENCES = ("document", "model")


@dataclass(frozen=True)
class WindowRead:
    """A window that was read, and what was skipped behind it.

    Attributes:
        start: Its first character in the document.
        end: The character behind its last.
        tokens: Read in it.
        loss: C, the pooled loss of its predictions, nats; None where it has none.
        skipped: D, the tokens skipped behind it, about.
        next: The character where reading goes on.
    """

    start: int
    end: int
    tokens: int
    loss: float | None
    skipped: int
    next: int


class DocumentReader:
    """Reads documents with a model, which it changes as long as it has a memory: use it in a `with` statement.

    Args:
        model: A causal language model of transformers, in eval mode.
        tokenizer: Its fast tokenizer.
        policy: How far to skip.
        window: L, tokens read in one forward pass.
        memory: What to remember at every layer; None for no memory.
        confidence: `document`, the loss of the document's tokens, or `model`, that of the model's own choices.
        context: Tokens of document and question together in `ask` without a memory; by default the model's window.
        bos: The token before a document and before a question; None for none.

    Attributes:
        tokens_read: Of the document that was read last.
        tokens_skipped: Of the same, about.
        tokenizing_seconds: Spent on tokenizing it.

    Raises:
        ValueError: If an argument is out of range, the tokenizer is slow, or the model can have no memory.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        policy: SkipPolicy,
        window: int,
        memory: MemoryConfig | None = None,
        confidence: str = "document",
        context: int | None = None,
        bos: int | None = None,
    ) -> None:
        wrong = []
        self.context = int(context if context is not None else model.config.max_position_embeddings)
        least = 1 if bos is None else 2
        if window < least:
            wrong.append(f"window {window} must be at least {least} tokens{', with bos' if least == 2 else ''}")
        elif window > model.config.max_position_embeddings:
            wrong.append(f"window {window} is longer than the model's, {model.config.max_position_embeddings} tokens")
        if confidence not in CONFIDENCES:
            wrong.append(f"confidence {confidence!r} is none of {', '.join(CONFIDENCES)}")
        if self.context < 1:
            wrong.append(f"context {self.context} must be at least 1 token")
        if not getattr(tokenizer, "is_fast", False):
            wrong.append("reading in parts needs a fast tokenizer: one with a tokenizer.json")
        if wrong:
            raise ValueError("; ".join(wrong))
        self.model, self.tokenizer, self.policy, self.window, self.bos = model, tokenizer, policy, window, bos
        self.confidence = confidence
        self._scorer = TokenScorer(model)  # which tries the model: before it remembers anything
        self.memory = None if memory is None else add_memory(model, memory)
        self._recent: list[int] = []
        self.tokens_read = self.tokens_skipped = 0
        self.tokenizing_seconds = 0.0

    def __enter__(self) -> DocumentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the model back as it was."""
        if self.memory is not None:
            self.memory.remove()

    def read(self, text: str, stops: Sequence[int] = ()) -> Iterator[WindowRead]:
        """Read a document from its start to its end, a window at each step; forget the one before.

        Args:
            text: The document.
            stops: Characters that no skip passes, ascending: the starts of sections. The rest of the section takes
                the place of the rest of the document in the policy.

        Yields:
            Each window as it was read.
        """
        document = LazyText(text, self.tokenizer)
        self._recent, self.tokens_read, self.tokens_skipped, self.tokenizing_seconds = [], 0, 0, 0.0
        if self.memory is not None:
            self.memory.reset()
        lead = [] if self.bos is None else [self.bos]
        while tokens := document.take(self.window - len(lead)):
            ahead = document.peek(1)
            ids = [token.id for token in tokens]
            self._recent = (self._recent + ids)[-self.context :]
            loss = self._read_window(lead + ids, ahead[0].id if ahead else None)
            end = tokens[-1].end
            skipped = self._skip(document, loss, end, stops)
            document.peek(self.window)  # where reading goes on is where a token starts
            self.tokens_read += len(tokens)
            self.tokens_skipped += skipped
            self.tokenizing_seconds = document.seconds
            yield WindowRead(tokens[0].start, end, len(tokens), loss, skipped, document.place)
            lead = []

    def _read_window(self, ids: list[int], following: int | None) -> float | None:
        """Read a window; return its pooled loss, None if it has nothing to predict."""
        import torch

        targets = torch.tensor([[*ids[1:], -1 if following is None else following]])
        if not bool((targets >= 0).any()):
            if self.memory is not None:
                with reading(self.model):
                    self.model(input_ids=torch.tensor([ids], device=self.model.device), use_cache=False)
            return None
        losses = self._scorer.nll(torch.tensor([ids]), targets, own=self.confidence == "model")
        return self.policy.pool(losses.clamp_min(0).tolist())

    def _skip(self, document: LazyText, loss: float | None, end: int, stops: Sequence[int]) -> int:
        """Move behind what the policy skips; return how many tokens that is, about."""
        if loss is None or self.policy.rate == 0:
            return 0
        number = bisect.bisect_left(stops, end)
        stop = stops[number] if number < len(stops) else len(document.text)
        skipped = self.policy.skip(loss, document.tokens_between(end, stop))
        document.jump(skipped, stop)
        return skipped

    def room(self, question: str, max_new_tokens: int = 64, before: str = "") -> int:
        """Return how many tokens of a document stand beside a question in `ask`; arguments and errors as there."""
        parts = [encode(self.tokenizer, text) for text in (before, question)]
        asked = sum(map(len, parts)) + len(self._lead)
        if asked + max_new_tokens > self.context:
            raise ValueError(
                f"the question has {asked} tokens and asks for {max_new_tokens} more: "
                f"{asked + max_new_tokens - self.context} too many for a context of {self.context}"
            )
        return 0 if self.memory is not None else self.context - asked - max_new_tokens

    @property
    def _lead(self) -> list[int]:
        """What a prompt begins with: nothing after a memory, for its window is one further on in the document."""
        return [] if self.bos is None or self.memory is not None else [self.bos]

    def ask(self, question: str, max_new_tokens: int = 64, before: str = "") -> str:
        """Return the model's greedy answer to a question about what was read.

        Args:
            question: What stands behind the document, as text.
            max_new_tokens: The most tokens to generate.
            before: What stands in front of the document, as a chat's opening does.

        Raises:
            ValueError: If the question alone does not fit into the model's context, or there is nothing at all.
        """
        import torch

        room = self.room(question, max_new_tokens, before)
        lead = self._lead
        head, tail = encode(self.tokenizer, before), encode(self.tokenizer, question)
        recent = self._recent[max(0, len(self._recent) - room) :]
        ids = head + recent + tail
        if ids[: len(lead)] != lead:
            ids = lead + ids
        if not ids:
            raise ValueError("there is nothing to answer: neither a question nor a document that was read")
        prompt = torch.tensor([ids], device=self.model.device)
        ends = end_tokens(Session(self.model, self.tokenizer))
        with (
            nullcontext() if self.memory is None else self.memory.frozen(),
            without_own_generation_config(self.model, 0, ends),
        ):
            output = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False
            )
        return str(self.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))
