"""Long prompts of an exact number of tokens, and the greedy answers to them.

Every piece of a prompt is tokenized on its own, so that its length is the sum of the pieces' with any tokenizer.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from ctxext.data.documents import Document
from ctxext.evaluation.base import Session
from ctxext.evaluation.prefix import Prefix, Reader, new_cache

if TYPE_CHECKING:
    import torch

    from ctxext.data.corpora import Corpus

# The filler of arXiv 2305.16300, one line each time.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
PIECES_AT_ONCE = 64


class TooLongError(ValueError):
    """What a prompt must hold does not fit into its length."""


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenize one piece, with no special token."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize many pieces, each on its own, with no special token."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return ids


class Haystack:
    """Running text as tokens, in which statements are hidden between two lines.

    Attributes:
        ids: the tokens.
        breaks: ascending positions in `ids` where a line ends or starts, 0 and the end among them.
    """

    def __init__(self, tokenizer: Any, ids: Sequence[int]) -> None:
        """Find the line breaks; tokens that hold a break in their middle are none."""
        self.ids = list(ids)
        texts = {token: str(tokenizer.decode([token])) for token in set(self.ids)}
        ends = {token for token, text in texts.items() if text.endswith("\n")}
        # Some tokenizers join a line break with the indentation after it: there the place is before the token.
        starts = {token for token, text in texts.items() if text.startswith("\n")} - ends
        inner = [at for at in range(1, len(self.ids)) if self.ids[at - 1] in ends or self.ids[at] in starts]
        self.breaks = [0, *inner, len(self.ids)]

    def place(self, depth: float, tokens: int) -> int:
        """Return the last line break at or before `depth` (0 to 1) of the first `tokens` tokens."""
        if depth >= 1:
            return tokens
        return self.breaks[bisect.bisect_right(self.breaks, int(depth * tokens)) - 1]

    def hide(self, statements: Sequence[tuple[float, Sequence[int]]], room: int) -> tuple[list[int], list[int]]:
        """Return exactly `room` tokens of text with statements in it.

        Args:
            statements: pairs of depth (0 to 1, of the text without statements) and tokens. Statements at the same
                place keep their order.
            room: tokens of text and statements together.

        Returns:
            The tokens `(room,)`, and where each statement starts in them, in the order given.

        Raises:
            TooLongError: if the statements alone are longer.
        """
        tokens = room - sum(len(ids) for _, ids in statements)
        if tokens < 0:
            raise TooLongError(f"statements of {room - tokens} tokens do not fit into {room}")
        assert tokens <= len(self.ids), f"the haystack has {len(self.ids)} tokens, not {tokens}"
        places = [self.place(depth, tokens) for depth, _ in statements]
        starts = [0] * len(statements)
        hidden: list[int] = []
        done = 0
        for index in sorted(range(len(statements)), key=lambda index: places[index]):
            hidden += self.ids[done : places[index]]
            done = places[index]
            starts[index] = len(hidden)
            hidden += statements[index][1]
        return hidden + self.ids[done:tokens], starts


def noise_tokens(tokenizer: Any, count: int) -> list[int]:
    """Return `count` tokens of the repeated filler sentences."""
    once = encode(tokenizer, NOISE)
    return encode(tokenizer, NOISE * (count // max(1, len(once) - 1) + 2))[:count]


def corpus_tokens(tokenizer: Any, corpus: Corpus, count: int) -> tuple[list[int], list[Document]]:
    """Return the first `count` tokens of a corpus, and the documents they come from.

    Raises:
        ValueError: if the corpus is shorter.
    """
    ids: list[int] = []
    used: list[Document] = []
    for document in corpus.documents():
        ids += encode(tokenizer, document.text.rstrip("\n") + "\n")
        used.append(document)
        if len(ids) >= count:
            return ids[:count], used
    raise ValueError(
        f"{corpus.name} holds {len(ids)} tokens, fewer than the {count} to hide statements in: "
        "use a smaller length, or a larger corpus with --data"
    )


def fill(tokenizer: Any, make: Callable[[], str], room: int) -> Iterator[tuple[str, list[int]]]:
    """Yield pieces that `make` gives, as text and tokens, for as long as all of them fit into `room` tokens."""
    while True:
        texts = [make() for _ in range(PIECES_AT_ONCE)]
        for text, ids in zip(texts, encode_all(tokenizer, texts), strict=True):
            room -= len(ids)
            if room < 0:
                return
            yield text, ids


def end_tokens(session: Session) -> set[int]:
    """Return the tokens that end an answer: the tokenizer's and those of the model's generation config."""
    config = getattr(session.model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    ends = set(found) if isinstance(found, list | tuple) else {found}
    return {int(token) for token in ends | {session.tokenizer.eos_token_id} if token is not None}


@contextmanager
def without_own_generation_config(model: Any, pad: int, ends: set[int]) -> Iterator[None]:
    """Hide the model's own generation config, whose penalties and limits `generate` would add to the protocol."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=pad, eos_token_id=sorted(ends) or None)
    try:
        yield
    finally:
        model.generation_config = own


def _greedy(reader: Reader, logits: torch.Tensor, cache: Any, count: int, ends: set[int]) -> list[list[int]]:
    """Return the most likely next tokens of each row, at most `count`, up to but without a token that ends it."""
    rows: list[list[int]] = [[] for _ in range(len(logits))]
    running = set(range(len(rows)))
    for step in range(count):
        chosen = logits.argmax(dim=-1, keepdim=True)
        for row, token in enumerate(chosen[:, 0].tolist()):
            if row in running and token in ends:
                running.discard(row)
            elif row in running:
                rows[row].append(token)
        if not running or step + 1 == count:
            break
        logits = reader.read(chosen, cache)
    return rows


def answer(session: Session, prompts: Sequence[Sequence[int]], count: int, prefix: Prefix | None = None) -> list[str]:
    """Return the model's greedy answers to prompts of equal length, read as one batch.

    Args:
        session: model and tokenizer.
        prompts: `(batch, tokens)`.
        count: the most tokens to generate; an end-of-sequence token ends an answer before.
        prefix: tokens that many prompts start with; what a batch has in common with them is read once for all batches.
    """
    import torch

    shared = 0
    if prefix is None:
        reader, cache = Reader(session.model), new_cache(session.model)
    else:
        reader = prefix.reader
        # One token is left to read, because its logits are needed.
        shared = min(len(commonprefix([prefix.input_ids, *map(list, prompts)])), len(prompts[0]) - 1)
        cache = prefix.branch(shared, len(prompts))
    logits = reader.read(torch.tensor([list(ids)[shared:] for ids in prompts], dtype=torch.long), cache)
    rows = _greedy(reader, logits, cache, count, end_tokens(session))
    return [str(session.tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
