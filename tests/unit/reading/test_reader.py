"""DocumentReader against a plain loop of model forwards, the paper's equation worked out here, and generate()."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import BOS, byte_tokenizer, tiny_model
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig

from ctxext.reading.memory import MemoryConfig, add_memory
from ctxext.reading.reader import DocumentReader, WindowRead
from ctxext.reading.skip import SkipPolicy

WINDOW = 16
TEXT = "".join(random.Random(3).choices("abcdefgh", k=600))  # a byte is a token, and no line or word ends


@pytest.fixture
def model() -> Any:
    return tiny_model(vocab_size=300)


@pytest.fixture
def tokenizer() -> Any:
    return byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return list(byte_tokenizer()(text, add_special_tokens=False)["input_ids"])


def losses_of(model: Any, ids: list[int], targets: list[int]) -> list[float]:
    """Losses of targets, each that of the position with its number."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, : len(targets)]
    return [float(loss) for loss in cross_entropy(logits, torch.tensor(targets, dtype=torch.long), reduction="none")]


def pooled(losses: list[float], pooling: str) -> float:
    if pooling == "last":
        return losses[-1]
    weights = [1.0 if pooling == "mean" else 0.9 ** (len(losses) - 1 - n) for n in range(len(losses))]
    return sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)


def plain(model: Any, text: str, rate: int, alpha: float, pooling: str, bos: int | None) -> Iterator[WindowRead]:
    """Equation 1 over the bytes of a text without words, where a skip lands exactly."""
    ids, start = ids_of(text), 0
    lead = [] if bos is None else [bos]
    while start < len(ids):
        end = min(len(ids), start + WINDOW - len(lead))
        read = lead + ids[start:end]
        targets = (read + ids[end : end + 1])[1:]
        loss = pooled(losses_of(model, read, targets), pooling) if targets else None
        remaining = len(ids) - end
        skip = 0
        if loss is not None and rate and remaining > 0:
            skip = rate * min(remaining // rate, math.floor(alpha / loss))
        yield WindowRead(start, end, end - start, pytest.approx(loss, rel=1e-4), skip, end + skip)
        start, lead = end + skip, []


def read_by(model: Any, text: str, **options: Any) -> tuple[list[WindowRead], DocumentReader]:
    given = {"policy": SkipPolicy(), "window": WINDOW, **options}
    with DocumentReader(model, byte_tokenizer(), **given) as reader:
        windows = list(reader.read(text))
    return windows, reader


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("pooling", ["mean", "exponential-decay", "last"])
@pytest.mark.parametrize(("rate", "alpha"), [(0, 6.0), (7, 20.0), (5, 40.0), (1000, 6.0)])
def test_reading_is_a_loop_of_forwards_and_the_papers_equation(
    model: Any, rate: int, alpha: float, pooling: str, bos: int | None
) -> None:
    policy = SkipPolicy(rate=rate, threshold=alpha, pooling=pooling, decay=0.9)
    windows, reader = read_by(model, TEXT, policy=policy, bos=bos)
    assert windows == list(plain(model, TEXT, rate, alpha, pooling, bos))
    assert reader.tokens_read == sum(window.tokens for window in windows)
    assert reader.tokens_skipped == sum(window.skipped for window in windows)
    assert (reader.tokens_skipped > 0) == (rate in (5, 7)) and reader.tokenizing_seconds > 0
    if not reader.tokens_skipped:
        assert reader.tokens_read == len(TEXT)


def test_far_skips_land_where_a_line_begins_and_are_counted_by_the_equation(model: Any) -> None:
    text = "".join(random.Random(5).choices(["abc def\n", "gh\n", "aaaa bbbb cccc dddd\n"], k=400))
    windows, reader = read_by(model, text, policy=SkipPolicy(rate=200, threshold=20.0))
    assert len(windows) > 3 and all(window.skipped for window in windows[:3])
    for window, following in zip(windows, windows[1:], strict=False):
        assert window.loss is not None
        assert window.skipped == 200 * min((len(text) - window.end) // 200, math.floor(20.0 / window.loss))
        assert following.start == window.next
        if window.skipped:
            assert 0 <= window.next - window.end - window.skipped < 20 and text[window.next - 1] == "\n"
    assert reader.tokens_read + reader.tokens_skipped <= len(text)


def test_the_models_own_confidence_is_that_of_its_best_token(model: Any) -> None:
    windows, _ = read_by(model, TEXT[:40], confidence="model")
    ids = ids_of(TEXT)
    for window, (start, end) in zip(windows, [(0, 16), (16, 32), (32, 40)], strict=True):
        with torch.no_grad():
            best = -model(torch.tensor([ids[start:end]])).logits[0].log_softmax(-1).amax(-1)
        scored = best if end < 40 else best[:-1]
        assert window.loss == pytest.approx(float(scored.mean()), rel=1e-4)


@pytest.mark.parametrize("config", [MemoryConfig(size=40), MemoryConfig(size=40, top_k=5, sinks=2)])
def test_with_a_memory_a_window_reads_what_was_read_before(model: Any, config: MemoryConfig) -> None:
    windows, reader = read_by(model, TEXT[:100], memory=config, bos=BOS)
    assert reader.memory is not None
    ids = [BOS, *ids_of(TEXT[:100])]
    memory = add_memory(model, config)
    try:
        for number, window in enumerate(windows):
            part = ids[16 * number : 16 * number + 17]
            expected = losses_of(model, part[:16], part[1:])
            assert window.loss == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    finally:
        memory.remove()
    without, _ = read_by(model, TEXT[:100], bos=BOS)
    assert without[1].loss != pytest.approx(windows[1].loss, rel=1e-6)


def test_a_document_forgets_the_one_before_and_the_model_is_given_back(model: Any, tokenizer: Any) -> None:
    ids = torch.tensor([ids_of(TEXT[:20])])
    before = model(ids).logits
    policy = SkipPolicy()
    with DocumentReader(model, tokenizer, policy=policy, window=WINDOW, memory=MemoryConfig(size=30)) as reader:
        first = list(reader.read(TEXT[:50]))
        list(reader.read(TEXT[50:200]))
        assert list(reader.read(TEXT[:50])) == first
    assert torch.equal(model(ids).logits, before)


def answered(model: Any, ids: list[int], count: int) -> str:
    """Greedy decoding of one token after the other, up to byte-level end of sequence (257)."""
    new: list[int] = []
    with torch.no_grad():
        while len(new) < count:
            token = int(model(torch.tensor([ids + new])).logits[0, -1].argmax())
            if token == 257:
                break
            new.append(token)
    return str(byte_tokenizer().decode(new, skip_special_tokens=True))


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize(("length", "context"), [(20, 128), (300, 64)])
def test_without_a_memory_a_question_stands_behind_what_was_read_last(
    model: Any, tokenizer: Any, bos: int | None, length: int, context: int
) -> None:
    question, before = "who?", "say: "
    reader = DocumentReader(model, tokenizer, policy=SkipPolicy(), window=WINDOW, bos=bos, context=context)
    list(reader.read(TEXT[:length]))
    lead = [] if bos is None else [bos]
    room = context - 8 - len(question) - len(before) - len(lead)
    assert reader.room(question, 8, before) == room
    seen = TEXT[:length][-room:]
    assert reader.ask(question, 8, before) == answered(model, [*lead, *ids_of(before + seen + question)], 8)
    seen = TEXT[:length][-(room + len(before)) :]
    assert reader.ask(question, 8) == answered(model, [*lead, *ids_of(seen + question)], 8)


def test_what_is_skipped_leaves_room_for_more_of_the_document(model: Any, tokenizer: Any) -> None:
    policy = SkipPolicy(rate=7, threshold=20.0)
    reader = DocumentReader(model, tokenizer, policy=policy, window=WINDOW, context=64)
    windows = list(reader.read(TEXT))
    seen = "".join(TEXT[window.start : window.end] for window in windows)[-(64 - 8 - 4) :]
    assert reader.tokens_skipped > 0
    assert reader.ask("who?", 8) == answered(model, ids_of(seen + "who?"), 8)


def test_a_checkpoints_own_generation_config_has_no_part_in_answers(model: Any, tokenizer: Any) -> None:
    reader = DocumentReader(model, tokenizer, policy=SkipPolicy(), window=WINDOW, context=64)
    list(reader.read(TEXT[:60]))
    plain, own = reader.ask("who?", 12), model.generation_config
    try:
        model.generation_config = GenerationConfig(repetition_penalty=50.0, min_new_tokens=3, forced_eos_token_id=65)
        assert reader.ask("who?", 12) == plain and model.generation_config.repetition_penalty == 50.0
    finally:
        model.generation_config = own


def test_with_a_memory_a_question_is_a_window_that_reads_it_and_is_not_remembered(model: Any, tokenizer: Any) -> None:
    config = MemoryConfig(size=40)
    with DocumentReader(
        model, tokenizer, policy=SkipPolicy(), window=WINDOW, memory=config, bos=BOS, context=64
    ) as reader:
        list(reader.read(TEXT[:90]))
        answers = [reader.ask("who?", 8) for _ in range(2)]
        assert reader.room("who?", 8) == 0
    memory = add_memory(model, config)
    ids = [BOS, *ids_of(TEXT[:90])]
    with torch.no_grad():
        for start in range(0, len(ids), WINDOW):
            model(torch.tensor([ids[start : start + WINDOW]]))
    with memory.frozen():
        expected = answered(model, [BOS, *ids_of("who?")], 8)
    memory.remove()
    assert answers == [expected, expected]


def test_a_question_that_begins_with_bos_gets_no_second_one(model: Any, tokenizer: Any) -> None:
    reader = DocumentReader(model, tokenizer, policy=SkipPolicy(), window=WINDOW, bos=BOS)
    list(reader.read("abc"))
    assert reader.ask("?", 4, before="<s>[") == answered(model, [BOS, *ids_of("[abc?")], 4)


def test_no_skip_passes_the_start_of_a_section(model: Any, tokenizer: Any) -> None:
    """Sections begin at 100 and 333; the rest of a section is the rest of the document in the equation."""
    policy, stops = SkipPolicy(rate=3, threshold=1e6), (100, 333)
    reader = DocumentReader(model, tokenizer, policy=policy, window=WINDOW)
    windows = list(reader.read(TEXT, stops))
    starts = {window.start for window in windows}
    assert len(windows) < 12
    for window in windows:
        stop = next(stop for stop in (*stops, len(TEXT)) if stop >= window.end)
        assert window.skipped == 3 * ((stop - window.end) // 3) == window.next - window.end
    # A section is entered within K tokens before its start, and reading across it is not a skip.
    assert all(any(stop - 3 < start <= stop for start in starts) for stop in stops)


def test_a_section_that_begins_behind_a_window_or_within_a_word_is_met(model: Any, tokenizer: Any) -> None:
    """From 32 on, all up to 403 is skipped, and not on to the word's end at 404."""
    reader = DocumentReader(model, tokenizer, policy=SkipPolicy(rate=1, threshold=1e6), window=WINDOW)
    windows = list(reader.read("word " * 200, (16, 403)))
    assert [(window.start, window.next) for window in windows[:2]] == [(0, 16), (16, 403)]


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("memory", [None, MemoryConfig(size=8)])
def test_documents_of_no_one_and_two_tokens(model: Any, bos: int | None, memory: MemoryConfig | None) -> None:
    policy = SkipPolicy(rate=1, threshold=1e9)
    nothing, reader = read_by(model, "", policy=policy, bos=bos, memory=memory)
    assert nothing == [] and reader.tokens_read == 0
    expected = ids_of("ab") if bos is None else [bos, *ids_of("ab")]
    for text, ids in (("a", expected[:-1]), ("ab", expected)):
        windows, reader = read_by(model, text, policy=policy, bos=bos, memory=memory)
        losses = losses_of(model, ids, ids[1:])
        loss = pytest.approx(sum(losses) / len(losses), rel=1e-4) if losses else None
        assert windows == [WindowRead(0, len(text), len(text), loss, 0, len(text))]
        assert (reader.tokens_read, reader.tokens_skipped) == (len(text), 0)


def test_a_single_token_is_remembered(model: Any, tokenizer: Any) -> None:
    with DocumentReader(model, tokenizer, policy=SkipPolicy(), window=WINDOW, memory=MemoryConfig(size=8)) as reader:
        list(reader.read("a"))
        assert reader.memory is not None and reader.memory.tokens == [1]


def test_all_that_is_wrong_is_said_at_once(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError) as error:
        DocumentReader(model, tokenizer, policy=SkipPolicy(), window=129, confidence="sure", context=0)
    for part in ("window 129 is longer than the model's, 128", "'sure' is none of document, model", "context 0"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="window 1 must be at least 2 tokens, with bos"):
        DocumentReader(model, tokenizer, policy=SkipPolicy(), window=1, bos=BOS)
    reader = DocumentReader(model, tokenizer, policy=SkipPolicy(), window=1)
    assert [window.tokens for window in reader.read("abc")] == [1, 1, 1]
    with pytest.raises(ValueError, match=r"the question has 100 tokens and asks for 64 more: 36 too many for .* 128"):
        reader.ask("q" * 100)
    list(reader.read(""))
    with pytest.raises(ValueError, match="nothing to answer"):
        reader.ask("")
