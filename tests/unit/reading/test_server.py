"""The data server against a plain loop over one row, and what must hold for any rows, processes and interruptions."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from ctxext.reading.server import DataServer, Documents, collate
from ctxext.reading.skip import SkipPolicy


class Counted(Documents):
    """Documents whose tokens tell where they stand: token t of document n is 1000 n + t."""

    def __init__(self, lengths, question=0):
        self.lengths, self.tokens, self.asked = lengths, sum(lengths), question

    def question(self, number):
        return self.asked

    def __getitem__(self, number):
        return 1000 * number + np.arange(self.lengths[number % len(self.lengths)])


def confidence(window):
    """A loss that depends on what is read, so that a wrong window leads astray."""
    return 0.3 + (int(window.tokens[0]) * 7919 % 100) / 25


def served(server, times):
    """Read so many windows by every row; return (row, document, start, tokens, fresh) and the skips."""
    seen = []
    for _ in range(times):
        windows = server.windows()
        skips = server.advance([confidence(window) for window in windows])
        for row, (window, skipped) in enumerate(zip(windows, skips, strict=True)):
            seen.append((row, window.document, window.start, window.tokens.tolist(), window.fresh, skipped))
    return seen


def plain(documents, numbers, window, rate, threshold):
    """Equation 1, document by document, for one row."""
    for number in numbers:
        tokens = documents[number].tolist()
        start, fresh = 0, True
        while start + 1 < len(tokens):
            part = tokens[start : start + window + 1]
            loss = 0.3 + (part[0] * 7919 % 100) / 25
            remaining = len(tokens) - start - window
            skipped = rate * min(remaining // rate, int(threshold // loss)) if rate and remaining > 0 else 0
            yield number, start, part, fresh, skipped
            start, fresh = start + window + skipped, False


@pytest.mark.parametrize("rate", [0, 1, 5, 100_000])
def test_a_document_is_read_as_equation_1_says(rate):
    documents = Counted([90, 3, 0, 41, 1, 8, 300])
    server = DataServer(documents, rows=1, window=8, policy=SkipPolicy(rate=rate, threshold=2.0))
    wanted = plain(documents, range(100), 8, rate, 2.0)
    for row, *found in served(server, 60):
        assert (row, tuple(found)) == (0, next(wanted))


def test_rows_and_processes_share_the_documents_out():
    documents = Counted([40, 17, 60, 5])
    policy = SkipPolicy(rate=3, threshold=2.0)
    for rank in (0, 1, 2):
        server = DataServer(documents, rows=2, window=8, policy=policy, rank=rank, processes=3)
        seen = served(server, 25)
        for row in (0, 1):
            wanted = plain(documents, range(2 * rank + row, 1000, 6), 8, 3, 2.0)
            for at, *found in seen:
                if at == row:
                    assert tuple(found) == next(wanted)


def test_beyond_the_longest_document_the_rate_is_0():
    """The papers' identity: with K larger than what remains, D = 0; in a stream of documents it is another reading."""
    documents = Counted([90, 41, 300])

    def read(scope, rate):
        server = DataServer(documents, rows=1, window=8, policy=SkipPolicy(rate=rate), scope=scope)
        return [found[:-1] for found in served(server, 40)], server.skipped

    assert read("document", 1000) == read("document", 0)
    sequential, skipping = read("stream", 0), read("stream", 100)
    assert sequential[1] == 0 and skipping[1] > 0 and skipping[1] % 100 == 0 and skipping[0] != sequential[0]


def test_a_question_is_a_window_of_its_own_and_never_skipped():
    documents = Counted([50], question=6)  # 44 tokens of text
    server = DataServer(documents, rows=1, window=8, policy=SkipPolicy(rate=5, threshold=1e9))
    seen = []
    while server.windows()[0].document == 0:
        (window,) = server.windows()
        (skipped,) = server.advance([1.0])
        seen.append((window.start, len(window.tokens), window.counts, skipped))
    # After 8 tokens 36 remain before the question, 7 times 5 of them are skipped; the last one stands alone.
    assert seen == [(0, 9, False, 35), (44, 6, True, 0)]
    assert server.windows()[0].fresh and server.windows()[0].start == 0

    server = DataServer(documents, rows=1, window=8, policy=SkipPolicy())
    seen = []
    while server.windows()[0].document == 0:
        (window,) = server.windows()
        server.advance([1.0])
        seen.append((window.start, window.tokens.tolist(), window.counts))
    assert [start for start, *_ in seen] == [0, 8, 16, 24, 32, 40, 44]
    assert seen[-2] == (40, [40, 41, 42, 43], False) and seen[-1] == (44, [44, 45, 46, 47, 48, 49], True)


def test_a_long_question_is_read_in_order():
    server = DataServer(Counted([30], question=20), rows=1, window=8, policy=SkipPolicy(rate=1, threshold=1e9))
    seen = []
    while server.windows()[0].document == 0:
        (window,) = server.windows()
        seen.append((window.start, len(window.tokens), window.counts, *server.advance([1.0])))
    assert seen == [(0, 9, False, 2), (10, 9, True, 0), (18, 9, True, 0), (26, 4, True, 0)]


def test_only_questions_count():
    server = DataServer(Counted([9], question=3), rows=1, window=4, policy=SkipPolicy())
    batches = []
    for _ in range(3):
        batches.append(collate(server.windows(), 4, pad=99))
        server.advance([1.0])
    assert batches[0]["shift_labels"].tolist() == [[-100] * 4] and batches[0]["labels"].tolist() == [[0, 1, 2, 3]]
    assert [batch["input_ids"].tolist() for batch in batches[1:]] == [[[4, 99, 99, 99]], [[6, 7, 99, 99]]]
    assert [batch["shift_labels"].tolist() for batch in batches[1:]] == [[[-100] * 4], [[7, 8, -100, -100]]]


def test_a_stream_goes_on_over_the_ends_of_documents():
    documents = Counted([5, 0, 4, 6])
    server = DataServer(documents, rows=1, window=4, policy=SkipPolicy(), scope="stream")
    stream = [int(token) for number in range(40) for token in documents[number]]
    seen = served(server, 30)
    assert [tokens for _, _, _, tokens, _, _ in seen] == [stream[at : at + 5] for at in range(0, 120, 4)]
    assert [fresh for *_, fresh, _ in seen[:9]] == [True, False, False, False, True, False, False, False, True]


def test_a_stream_ends_where_a_pass_does():
    documents = Counted([50, 30])  # |X| = 80
    policy = SkipPolicy(rate=10, threshold=1e9)
    server = DataServer(documents, rows=1, window=5, policy=policy, scope="stream")
    assert server.advance([1e-300]) == [70], "floor((80 - 0 - 5) / 10) steps"
    (window,) = server.windows()
    assert (window.document, window.start, window.fresh) == (1, 25, False)
    assert server.advance([1e-300]) == [0]
    (window,) = server.windows()
    assert (window.document, window.start, window.fresh) == (2, 0, True)


@pytest.mark.parametrize("scope", ["document", "stream"])
def test_a_state_is_taken_up(scope):
    documents = Counted([90, 3, 41, 8, 300])
    settings = {"rows": 3, "window": 8, "policy": SkipPolicy(rate=4, threshold=2.0), "scope": scope}
    whole = DataServer(documents, **settings)
    unbroken = served(whole, 40)
    first = DataServer(documents, **settings)
    seen = served(first, 13)
    first.windows()  # asked for and never told of: it will be served again
    second = DataServer(documents, **settings)
    second.load_state(json.loads(json.dumps(first.state())))
    assert seen + served(second, 27) == unbroken
    assert (second.read, second.skipped) == (whole.read, whole.skipped) and whole.skipped > 0
    with pytest.raises(ValueError, match=r"another reader: rows 3 \(now 2\), policy .*'rate': 4.*now .*'rate': 0"):
        DataServer(documents, **{**settings, "rows": 2, "policy": SkipPolicy()}).load_state(first.state())


def test_reading_ends_in_finitely_many_steps():
    draw = random.Random(3)
    for _ in range(50):
        length, window = draw.randrange(2, 400), draw.randrange(1, 50)
        policy = SkipPolicy(rate=draw.choice([0, 1, 7, 1000]), threshold=draw.choice([0.0, 1.0, 1e6]))
        server = DataServer(Counted([length]), rows=1, window=window, policy=policy)
        steps = 0
        while server.windows()[0].document == 0:
            server.advance([draw.choice([0.0, 1e-9, 1.0, 50.0])])
            steps += 1
            assert steps <= -(-(length - 1) // window), "no more windows than without skipping"
        assert server.read + server.skipped <= length and server.windows()[0].fresh


def test_batches():
    server = DataServer(Counted([3, 40]), rows=2, window=4, policy=SkipPolicy())
    batch = collate(server.windows(), 4, pad=7)
    assert batch["input_ids"].tolist() == [[0, 1, 7, 7], [1000, 1001, 1002, 1003]]
    assert batch["labels"].tolist() == [[0, 1, -100, -100], [1000, 1001, 1002, 1003]]
    assert batch["shift_labels"].tolist() == [[1, 2, -100, -100], [1001, 1002, 1003, 1004]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 2 and batch["labels"].dtype == torch.int64


def test_what_cannot_be():
    with pytest.raises(ValueError, match="rows 0 must be at least 1; scope 'book' is none of .*; rank 2 must"):
        DataServer(Counted([9]), rows=0, window=4, policy=SkipPolicy(), scope="book", rank=2, processes=2)
    server = DataServer(Counted([90]), rows=2, window=4, policy=SkipPolicy(rate=2))
    before = server.state()
    with pytest.raises(ValueError, match="1 confidences for 2 rows"):
        server.advance([1.0])
    with pytest.raises(ValueError, match="a pooled loss of -1.0"):
        server.advance([1.0, -1.0])
    assert server.state() == before, "no row has moved"
