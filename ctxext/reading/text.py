"""A document that is tokenized where it is read: text that is skipped costs nothing.

What is read without a gap gives the tokens of the whole document. Each part is tokenized together with some of the
text before and behind it, for what a token is depends on its neighbours: on the letters before that it might merge
with, and on whether a word follows the last of several blanks. From that, only the tokens of the part itself are kept.
How many tokens lie in text that is skipped is not known; it is estimated from those that were read.
"""

from __future__ import annotations

import bisect
import re
import time
from typing import Any, NamedTuple

CHARACTERS_PER_TOKEN = 4.0  # before anything was read
_LEAST, _MOST = 64, 4096  # tokens read beyond what is asked for: ever more of them while nothing is skipped
_BEFORE = 16  # tokens, starting at one of which a tokenizer finds the next ones as in the whole text
_BEHIND = 256  # characters, more than any token has, behind which nothing changes the tokens
_LINE = re.compile(r"\n(?=\S)")
_WORD = re.compile(r"(?<=\S)(?=\s\S)")
_LOOK = 256  # characters in which a jump looks for a line's start, and then for a word's


class Token(NamedTuple):
    """A token and where it lies in the text, in characters."""

    id: int
    start: int
    end: int


class LazyText:
    """A place in a text, and the tokens from there on.

    Args:
        text: The document.
        tokenizer: A fast tokenizer of transformers: it says where in the text a token lies.

    Attributes:
        seconds: Spent on tokenizing.

    Raises:
        ValueError: If the tokenizer is not a fast one.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("reading a document in parts needs a fast tokenizer: one with a tokenizer.json")
        self.text, self.tokenizer = text, tokenizer
        self.seconds = 0.0
        self._ahead: list[Token] = []  # tokenized, and not taken yet
        self._origin = 0  # the first character that is tokenized along with the next part
        self._next = 0  # the first character that is not tokenized
        self._tokens = self._characters = 0  # of what was tokenized so far
        self._spare = _LEAST
        # Where a text begins, some tokenizers put a blank before it: within the document it goes to a line break.
        alone, behind = (tokenizer(some, add_special_tokens=False)["input_ids"] for some in ("a", "\na"))
        self._lead = "" if behind[-len(alone) :] == alone else "\n"

    @property
    def place(self) -> int:
        """Where the next token starts, in characters."""
        return self._ahead[0].start if self._ahead else self._next

    @property
    def characters_per_token(self) -> float:
        """Of what was tokenized so far."""
        return self._characters / self._tokens if self._tokens else CHARACTERS_PER_TOKEN

    def tokens_between(self, start: int, end: int) -> int:
        """Return about how many tokens lie between two places."""
        return round(max(0, end - start) / self.characters_per_token)

    def peek(self, count: int) -> list[Token]:
        """Return the next tokens, `count` of them or those up to the document's end, and stay there."""
        while len(self._ahead) < count and self._next < len(self.text):
            self._tokenize(count - len(self._ahead) + self._spare)
            self._spare = min(2 * self._spare, _MOST)
        return self._ahead[:count]

    def take(self, count: int) -> list[Token]:
        """Return the next tokens as `peek` does, and move behind them."""
        taken = self.peek(count)
        self._ahead = self._ahead[len(taken) :]
        return taken

    def jump(self, tokens: int, stop: int | None = None) -> None:
        """Move on by about so many tokens, to a line's start close behind, or else a word's.

        Args:
            tokens: How many, at least 0.
            stop: The character behind which not to land; the document's end by default.
        """
        limit = len(self.text) if stop is None else min(stop, len(self.text))
        if tokens <= len(self._ahead) or limit <= self._next:
            passed = [token for token in self._ahead[:tokens] if token.end <= limit]
            self._ahead = self._ahead[len(passed) :]
            return
        characters = round((tokens - len(self._ahead)) * self.characters_per_token)
        self._ahead = []
        self._next = min(self._boundary(self._next + max(1, characters)), limit)
        self._origin = self._next
        self._spare = _LEAST

    def _boundary(self, place: int) -> int:
        """Return the first line's start close behind a place, or else the first word's, or else the place."""
        line = _LINE.search(self.text, place - 1, place + _LOOK)
        if line is not None:
            return line.end()
        word = _WORD.search(self.text, place, place + _LOOK)
        return word.start() if word is not None else place

    def _tokenize(self, count: int) -> None:
        """Tokenize about `count` tokens more, or one that is longer."""
        began = time.perf_counter()
        start, characters = self._next, max(1, round(count * self.characters_per_token))
        while self._next == start:
            found = self._encode(start + characters)
            characters *= 2
        self._ahead += found
        self._tokens += len(found)
        self._characters += self._next - start
        self.seconds += time.perf_counter() - began

    def _encode(self, stop: int) -> list[Token]:
        """Tokenize the text up to about `stop` and move to where that ends; return the new tokens."""
        behind, lead = stop + _BEHIND, self._lead if self._origin else ""
        origin = self._origin - len(lead)
        encoded = self.tokenizer(
            lead + self.text[self._origin : behind],
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        ends = [origin + last for _, last in offsets]
        # A text's first token may stand for no character: it belongs to the document where nothing is before it.
        first = 0 if self._next == 0 else bisect.bisect_right(ends, self._next)
        last = len(ends) if behind >= len(self.text) else bisect.bisect_right(ends, stop)
        if behind >= len(self.text):
            self._next = len(self.text)
        elif first < last:
            self._next = ends[last - 1]
            self._origin = max(self._origin, origin + offsets[max(0, last - _BEFORE)][0])
        starts = [origin + start for start, _ in offsets[first:last]]
        return list(map(Token, ids[first:last], starts, ends[first:last]))
