"""Streamed documents against files read by hand: their order, what is kept, taking up a state, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import random
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from helpers import BOS, EOS, byte_tokenizer

from ctxext.data.offline import python_docs
from ctxext.data.order import pass_order
from ctxext.data.sources import Source
from ctxext.data.tokens import TokenRules
from ctxext.reading.server import DataServer
from ctxext.reading.skip import SkipPolicy
from ctxext.reading.stream import StreamedDocuments, _Document

TEXTS = [f"{number:02} " + "abcdefghij"[number % 10] * (7 * number % 45) for number in range(23)]
TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """`datasets` tells a server which of its readers are used."""
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", False)


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Source(data=str(path))


def streamed(*sources, **options):
    return StreamedDocuments(sources, TOKENIZER, TokenRules(), **{"seed": 3, "buffer": 5, **options})


def bytes_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def tokens_of(text):
    return [BOS, *bytes_of(text), EOS]


def text_of(tokens):
    assert (tokens[0], tokens[-1]) == (BOS, EOS)
    return TOKENIZER.decode(tokens[1:-1].tolist())


def drawn(documents, count, begin=0):
    """Return the texts of so many documents, each left at once."""
    texts = []
    for number in range(begin, begin + count):
        texts.append(text_of(documents[number]))
        documents.leave(number)
    return texts


def confidence(window):
    """A loss that depends on what is read, so that a wrong window leads astray."""
    return 0.3 + (int(window.tokens.sum()) * 7919 % 100) / 25


def served(server, steps):
    seen = []
    for _ in range(steps):
        windows = server.windows()
        skips = server.advance([confidence(window) for window in windows])
        seen.append([(w.tokens.tolist(), w.start, w.fresh, d) for w, d in zip(windows, skips, strict=True)])
    return seen


def test_documents_come_in_shuffled_blocks(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    wanted, block = [], 0
    for _ in range(3):  # passes
        for start in range(0, 23, 5):
            numbers = np.arange(len(TEXTS[start : start + 5]))
            wanted += [TEXTS[start + number] for number in pass_order(numbers, 3, 0, block)]
            block += 1
    assert drawn(streamed(source), 69) == wanted
    assert wanted[:23] != wanted[23:46] and sorted(wanted[:23]) == sorted(wanted[23:46]) == TEXTS
    assert drawn(streamed(source, buffer=1), 46) == TEXTS * 2
    assert drawn(streamed(source, seed=4), 23) != wanted[:23]


def test_a_row_takes_the_next_document_when_its_own_has_ended(tmp_path):
    """Two rows by hand: with a buffer of 1 documents come as they stand in the file."""
    server = DataServer(
        streamed(write_jsonl(tmp_path / "a.jsonl", TEXTS), buffer=1),
        rows=2,
        window=8,
        policy=SkipPolicy(rate=3, threshold=4.0),
    )
    coming = iter([tokens_of(text) for text in TEXTS * 9])
    reading, starts = [next(coming), next(coming)], [0, 0]
    for step in served(server, 60):
        for row, (tokens, start, fresh, skipped) in enumerate(step):
            assert (tokens, start, fresh) == (
                reading[row][starts[row] : starts[row] + 9],
                starts[row],
                starts[row] == 0,
            )
            loss = 0.3 + (sum(tokens) * 7919 % 100) / 25
            remaining = len(reading[row]) - start - 8
            assert skipped == (3 * min(remaining // 3, int(4.0 // loss)) if remaining > 0 else 0)
            starts[row] += 8 + skipped
            if starts[row] > len(reading[row]) - 2:
                reading[row], starts[row] = next(coming), 0
    assert server.skipped > 50


def kinds(folder):
    """Write the same texts as files of every kind; return the source of each."""
    lines = write_jsonl(folder / "a.jsonl", TEXTS)
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress((folder / "a.jsonl").read_bytes()))
    table = pyarrow.table({"id": list(range(23)), "body": TEXTS})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=4)
    for name in ("texts", "hub"):
        (folder / name).mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number}.txt").write_text(text)
    for number in range(4):
        write_jsonl(folder / "hub" / f"train-{number}.jsonl", TEXTS[number::4])
    return {
        "jsonl": lines,
        "zst": Source(data=str(folder / "a.jsonl.zst")),
        "parquet": Source(data=str(folder / "a.parquet"), column="body"),
        "texts": Source(data=str(folder / "texts")),
        "hub": Source(data="pile", data_id=str(folder / "hub")),
    }


KINDS = ["jsonl", "zst", "parquet", "texts", "hub"]


def passes(documents, count):
    """Return the texts of each of the first passes."""
    read, stream = [[] for _ in range(count)], documents.streams[0]
    while True:
        (text,) = drawn(documents, 1)
        if stream.at.number == count:
            return read
        read[stream.at.number].append(text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_corpus_is_read_whole_and_shared_out(tmp_path, kind):
    source = kinds(tmp_path)[kind]
    first, second = passes(streamed(source), 2)
    assert sorted(first) == sorted(second) == TEXTS and first != second
    for processes in (2, 3):
        shares = [passes(streamed(source, rank=rank, processes=processes), 2) for rank in range(processes)]
        for number in (0, 1):
            assert sorted(text for share in shares for text in share[number]) == TEXTS, "none twice, none left out"
        assert all(abs(len(share[0]) - 23 / processes) < 2 for share in shares)
    if kind in ("texts", "hub"):  # of several files, whose order changes too
        first, second = passes(streamed(source, buffer=1), 2)
        assert first != second and first != passes(streamed(source, buffer=1, seed=4), 1)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stream_is_taken_up_anywhere(tmp_path, kind, processes):
    source = kinds(tmp_path)[kind]
    options = {"rank": processes - 1, "processes": processes}
    documents = streamed(source, **options)
    states, texts = [], []
    for number in range(40):
        states.append(json.dumps(documents.state()))
        texts += drawn(documents, 1, number)
    assert documents.streams[0].at.number == (1 if processes == 1 else 3)
    for number in range(0, 36, 5):
        resumed = streamed(source, **options)
        resumed.load_state(json.loads(states[number]))
        assert drawn(resumed, 4, number) == texts[number : number + 4]


@pytest.mark.parametrize("scope", ["document", "stream"])
def test_a_killed_and_resumed_server_reads_what_the_unbroken_one_reads(tmp_path, scope):
    """At every step: two sources in different passes, documents half read, windows asked for but not read."""
    sources = [
        write_jsonl(tmp_path / "a.jsonl", TEXTS).model_copy(update={"weight": 2.0, "min_tokens": 15}),
        write_jsonl(tmp_path / "b.jsonl", [text[::-1] * 3 for text in TEXTS[:7]]),
    ]

    def server():
        options = {"rows": 3, "window": 8, "policy": SkipPolicy(rate=2, threshold=3.0), "scope": scope}
        return DataServer(streamed(*sources, tokens=900), **options)

    whole, states = server(), []
    unbroken = []
    for step in range(90):
        if step % 2:
            whole.windows()
        states.append(json.dumps(whole.state()))
        unbroken += served(whole, 1)
    assert all(stream.at.number > 0 for stream in whole.documents.streams) and whole.skipped > 100
    for step, state in enumerate(states):
        resumed = server()
        resumed.load_state(json.loads(state))
        assert served(resumed, 2) == unbroken[step : step + 2] or step == 89
    ended = server()
    ended.load_state(json.loads(states[-1]))
    assert served(ended, 1) == unbroken[-1:]
    assert json.dumps(ended.state()) == json.dumps(whole.state())


def test_sources_come_by_their_weights(tmp_path):
    draw = random.Random(1)
    sources = [
        write_jsonl(tmp_path / f"{name}.jsonl", [name * draw.randint(5, 60) for _ in range(40)]).model_copy(
            update={"weight": weight}
        )
        for name, weight in (("a", 3.0), ("b", 1.0))
    ]
    texts = drawn(streamed(*sources), 300)
    tokens = {name: sum(len(text) + 2 for text in texts if text[0] == name) for name in "ab"}
    assert tokens["a"] / tokens["b"] == pytest.approx(3, rel=0.05)


def test_short_documents_are_left_out(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS).model_copy(update={"min_tokens": 30})
    (read,) = passes(streamed(source), 1)
    assert sorted(read) == [text for text in TEXTS if len(text) + 2 >= 30] and len(read) < 15


def test_named_corpora_are_streamed():
    (read,) = passes(streamed(Source(data="python-docs", min_tokens=2000)), 1)
    wanted = [document.text for document in python_docs("train") if len(document.text.encode()) + 2 >= 2000]
    assert sorted(read) == sorted(wanted) and len(wanted) > 20


def live():
    gc.collect()
    return sum(type(found) is _Document for found in gc.get_objects())


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Rows of very different speed, the first of which never leaves its document; 4 MB of text, 40 kB of it held."""
    texts = [f"{number:06} " * (40_000 if number == 0 else 300) for number in range(2000)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=10)
    others = live()
    server = DataServer(streamed(Source(data=str(path)), buffer=10), rows=4, window=512, policy=SkipPolicy())
    most = 0
    tracemalloc.start()
    for step in range(400):
        server.windows()
        server.advance([1.0] * 4)
        most = max(most, len(server.documents._read))
        if step == 40:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[1]
    grown = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert server.documents.streams[0].at.seen > 200, "documents that other rows read meanwhile"
    assert most == 4 and live() - others == 4
    assert grown < 300_000


def test_questions_behind_documents_are_windows_of_their_own(tmp_path):
    path = tmp_path / "asked.jsonl"
    rows = [{"text": f"document {number}", "ask": f" what? {number}"} for number in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source(data=str(path), kind="completion", prompt_column="text", completion_column="ask")
    server = DataServer(streamed(source, buffer=1), rows=1, window=64, policy=SkipPolicy())
    for row in rows * 2:
        for text, counts in ((row["text"], False), (row["ask"], True)):
            (window,) = server.windows()
            wanted = [*bytes_of(text), EOS] if counts else [BOS, *bytes_of(text)]
            assert (window.tokens.tolist(), window.counts) == (wanted, counts)
            server.advance([1.0])


def test_a_name_is_not_a_pattern(tmp_path):
    write_jsonl(tmp_path / "a1.jsonl", ["another"])
    (read,) = passes(streamed(write_jsonl(tmp_path / "a[1]*.jsonl", TEXTS)), 1)
    assert sorted(read) == TEXTS


def test_a_file_that_changed_is_found(tmp_path):
    path = tmp_path / "a.jsonl"
    source = write_jsonl(path, TEXTS)
    documents = streamed(source)
    drawn(documents, 7)
    state = json.loads(json.dumps(documents.state()))
    write_jsonl(path, [*TEXTS, "one more"])
    with pytest.raises(ValueError, match=r"a.jsonl' has changed since this run began.*put back what was there, or"):
        streamed(source).load_state(state)
    with pytest.raises(ValueError, match="has changed"):
        drawn(documents, 30)  # the next pass
    os.remove(path)
    with pytest.raises(ValueError, match="has vanished since this run began"):
        streamed(source).load_state(state)
    other = write_jsonl(tmp_path / "b.jsonl", TEXTS)
    with pytest.raises(ValueError, match="not of these streamed sources"):
        streamed(other, source).load_state(state)


def test_another_commit_of_the_hub_is_found(tmp_path, monkeypatch):
    source = kinds(tmp_path)["hub"]
    monkeypatch.setattr("ctxext.data.corpora._hub_commit", lambda corpus: "1" * 40)
    state = streamed(source).state()
    monkeypatch.setattr("ctxext.data.corpora._hub_commit", lambda corpus: "2" * 40)
    with pytest.raises(
        ValueError, match=f"'pile' has changed since .* state data_revision: {'1' * 40}, or begin anew"
    ):
        streamed(source).load_state(state)


def test_what_cannot_be(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    short = source.model_copy(update={"min_tokens": 90})
    with pytest.raises(
        ValueError, match=r"leaves no document to train on: 23 were read, the longest has 48 tokens; at"
    ):
        DataServer(streamed(short), rows=1, window=8, policy=SkipPolicy())
    with pytest.raises(ValueError, match="in the share of process 2 of 3: 0 were read"):
        streamed(write_jsonl(tmp_path / "two.jsonl", TEXTS[:2]), rank=2, processes=3)[0]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none' has no .txt files"):
        streamed(Source(data=str(tmp_path / "none")))[0]
    with pytest.raises(ValueError, match="a row of .*a.jsonl has no column 'txt'; it has text"):
        streamed(source.model_copy(update={"column": "txt"}))[0]
    with pytest.raises(ValueError, match="no corpus and no file is called 'c5-4k'"):
        streamed(Source(data="c5-4k"))[0]
    with pytest.raises(ValueError, match="buffer 0 must be at least 1 document; .*sources of kind chat"):
        streamed(Source(data="pile", kind="chat"), buffer=0)
    with pytest.raises(ValueError, match="scope 'stream' needs to know how many tokens the documents have"):
        DataServer(streamed(source), rows=1, window=8, policy=SkipPolicy(), scope="stream")
