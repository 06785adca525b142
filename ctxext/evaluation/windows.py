"""Which window scores which token: the rules behind the perplexities that people publish.

- `once`: a window reads up to `length` tokens and predicts the token after each of them; windows start every `stride`
  tokens. Every token but a document's first is scored exactly once, by the first window that predicts it, which is
  the one in which it has the most context: at least `length - stride + 1` tokens once the document is longer than one
  window. With `stride == length` windows do not overlap, and still no token is lost.
- `first`: the first `length` tokens of each document are one window, and all but the first of them are scored.
- `every-token`: windows of `length` tokens start every `stride` tokens, and each scores all its tokens but the first,
  so that most tokens are scored `length / stride` times; the last window is left out.

In the last two a window holds its last target, as where labels are a copy of the input: it reads `length - 1` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Tokens:
    """Tokens that windows run over: a document, or all of them in a row.

    Attributes:
        name: the document's id, or `stream`.
        ids: the tokens.
        inserted: positions of begin-of-sequence tokens that stand between documents; they are read, never scored.
    """

    name: str
    ids: list[int]
    inserted: frozenset[int] = field(default_factory=frozenset)


def joined(sequences: list[Tokens], head: int) -> Tokens:
    """Join documents into one stream.

    Args:
        sequences: the documents.
        head: begin-of-sequence tokens at each one's start (0 or 1); those after the first are not scored.
    """
    ids: list[int] = []
    inserted = []
    for sequence in sequences:
        if head and ids:
            inserted.append(len(ids))
        ids.extend(sequence.ids)
    return Tokens("stream", ids, frozenset(inserted))


@dataclass(frozen=True)
class Window:
    """A stretch of one token sequence.

    Attributes:
        start: the first token read.
        stop: one past the last token read; `tokens[stop]` is the last token predicted.
        first: the first token scored; tokens from there to `stop`, inclusive, are scored by this window.
    """

    start: int
    stop: int
    first: int

    @property
    def scored(self) -> int:
        """The number of tokens scored."""
        return self.stop - self.first + 1

    @property
    def read(self) -> int:
        """The number of tokens read."""
        return self.stop - self.start


def plan_windows(tokens: int, length: int, stride: int) -> list[Window]:
    """Return the windows over a sequence (sliding-window perplexity of arXiv 2306.15595, section 3.2).

    Args:
        tokens: in the sequence.
        length: most tokens read by a window.
        stride: from one window's start to the next one's, at most `length`.

    Raises:
        ValueError: if `length` or `stride` is out of range.
    """
    if length < 1:
        raise ValueError(f"length {length} must be at least 1")
    if not 1 <= stride <= length:
        raise ValueError(f"stride {stride} must lie between 1 and the length {length}: tokens would be left out")
    windows = []
    scored_up_to = 0
    for start in range(0, tokens, stride):
        stop = min(start + length, tokens - 1)
        if stop <= scored_up_to:
            break
        windows.append(Window(start, stop, scored_up_to + 1))
        scored_up_to = stop
    return windows


def first_window(tokens: int, length: int, stride: int) -> list[Window]:
    """Return the window over a document's first `length` tokens (YaRN's evaluation with `--truncate`)."""
    stop = min(tokens, length) - 1
    return [Window(0, stop, 1)] if stop >= 1 else []


def every_token_windows(tokens: int, length: int, stride: int) -> list[Window]:
    """Return the windows of LongLoRA's evaluation over one stream of tokens."""
    starts = list(range(0, tokens - length, stride))[:-1]
    return [Window(start, start + length - 1, start + 1) for start in starts]


WINDOW_RULES: dict[str, Callable[[int, int, int], list[Window]]] = {
    "once": plan_windows,
    "first": first_window,
    "every-token": every_token_windows,
}


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """Return at most `wanted` indices spread evenly over `range(count)`, first and last included.

    A single wanted index is the middle one.
    """
    if wanted <= 0 or wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [count // 2]
    return [round(index * (count - 1) / (wanted - 1)) for index in range(wanted)]
