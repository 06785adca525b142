"""Question answering: a model that knows what it was shown."""

import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import BOS, byte_tokenizer
from reading_model import ReadingModel, planted

from ctxext.evals.qa_readers import CONFIDENCES, bm25_scores, cut_chunks, joined, kept_parts
from ctxext.evals.question_answering import QuestionAnswering, chance_seen
from ctxext.evaluation.base import Session
from ctxext.evaluation.compare import compare_results
from ctxext.evaluation.loading import RunSettings
from ctxext.evaluation.prompts import encode
from ctxext.evaluation.runner import evaluate, run_evaluation
from ctxext.reading.memory import MemoryConfig
from ctxext.reading.reader import CONFIDENCES as READER_CONFIDENCES
from ctxext.reading.reader import DocumentReader
from ctxext.reading.skip import SkipPolicy


def ask(text, model=None, **options):
    """Evaluate a model that answers what it was shown; return the summary and the questions' scores."""
    model = model or ReadingModel()
    options = {"text": text, "length": 2000, "depths": 5, "trials": 2, "distractors": 2, **options}
    if "memory_size" not in options:
        options.setdefault("context", 10_000)
    summary = evaluate(QuestionAnswering(**options), Session(model, model.tokenizer))
    json.dumps(summary.details)
    return summary, list(summary.details["questions"].values())


def found(questions):
    return [question["exact_match"] for question in questions]


def test_truncation_finds_what_it_keeps(text):
    context = 1000
    for keep, kept in (
        ("start", lambda d, room: d[:room]),
        ("end", lambda d, room: d[-room:]),
        ("middle-out", lambda d, room: d[: room - room // 2] + "\0" + d[len(d) - room // 2 :]),
    ):
        summary, questions = ask(text, reader="truncate", keep=keep, context=context, depths=9)
        documents = planted(byte_tokenizer(), text, length=2000, depths=9, distractors=2)
        # the answer has 6 bytes, twice those are asked for, and one token begins the prompt
        room = context - 12 - len(documents[0].prompt) - 1
        inside = [
            float(question.document[slice(*question.statements[0])] in kept(question.document, room))
            for question in documents
        ]
        assert found(questions) == inside == [float(question["copies_seen"]) for question in questions]
        assert 0 < sum(inside) < len(inside)
        assert {question["tokens_read"] for question in questions} == {room}
        assert summary.metrics["share_read"] == pytest.approx(room / 2000) == summary.metrics["chance_seen"]
        assert summary.metrics["seen"] == summary.metrics["exact_match"] and summary.metrics["answered_of_seen"] == 1


def test_reading_in_order_sees_everything(text):
    model = ReadingModel()
    summary, questions = ask(text, model, reader="in-order", repeats=3)
    assert found(questions) == [1.0] * 10 and {question["copies_seen"] for question in questions} == {3}
    assert summary.metrics["share_read"] == summary.metrics["chance_seen"] == 1
    # a window has 128 tokens, the first of them the one that begins a document
    assert {question["windows"] for question in questions} == {16} and {len(ids) for ids in model.windows} == {128, 81}
    assert all(ids[0] == BOS for ids in model.windows[::16])
    # in a short context only what was read last stands before the question
    late, questions = ask(text, reader="in-order", context=500)
    assert late.metrics["seen"] == 1 and late.metrics["answered_of_seen"] == late.metrics["exact_match"]
    rows = late.details["found_by_depth"]
    assert [row["depth"] for row in rows] == [0, 25, 50, 75, 100]
    assert [row["found"] for row in rows] == [0, 0, 0, 0, 1]
    assert all((row["seen"], row["questions"]) == (1, 2) for row in rows)
    assert late.plots[1].kind == "heat" and late.plots[1].y == [0, 0, 0, 0, 1]


def test_skipping_sees_what_was_read(text):
    """Each prediction costs ln 300 = 5.70 nats: a threshold of 6 skips once the rate, one of 5 never."""
    model = ReadingModel()
    options = {"depths": 9, "trials": 3, "length": 3000, "skip_rate": 256}
    summary, questions = ask(text, model, reader="skip", alpha=6.0, **options)
    documents = planted(byte_tokenizer(), text, length=3000, depths=9, trials=3, distractors=2)
    windows = iter(model.windows)
    for question, document in zip(questions, documents, strict=True):
        ids = [next(windows) for _ in range(question["windows"])]
        texts = [byte_tokenizer().decode(tokens).removeprefix("<s>") for tokens in ids]
        assert question["tokens_read"] == sum(map(len, texts)) and question["document_tokens"] == 3000
        statement = document.document[slice(*document.statements[0])]
        # windows that touch read a statement together: only the last ones, where less than the rate remains
        shown = "".join(texts)
        assert question["exact_match"] == question["copies_seen"] == float(statement in shown)
        # each window but the last is followed by a skip of 256 tokens, and on to the next line
        skips = len(texts) - 1 - sum(a + b in document.document for a, b in zip(texts, texts[1:], strict=False))
        assert 5 <= skips <= 3000 / (128 + 256)
    assert 0 < summary.metrics["seen"] < 1 and summary.metrics["answered_of_seen"] == 1
    assert 0.2 < summary.metrics["share_read"] < 0.5
    mean = math.fsum(q["tokens_read"] for q in questions) / len(questions)
    assert summary.metrics["tokens_read"] == mean == pytest.approx(3000 * summary.metrics["share_read"])
    everything, _ = ask(text, reader="skip", alpha=5.0, **options)
    assert everything.metrics["share_read"] == everything.metrics["exact_match"] == 1
    blind, _ = ask(text, ReadingModel(lambda prompt: " 7"), reader="skip", alpha=6.0, **options)
    assert (blind.metrics["seen"], blind.metrics["answered_of_seen"]) == (summary.metrics["seen"], 0)


def test_the_chance_to_have_seen_a_fact_by_hand(text):
    assert [chance_seen(0.25, r) for r in (1, 2)] == [0.25, 0.4375] and chance_seen(0.5, 4) == 0.9375
    assert chance_seen(0.0, 16) == 0 and chance_seen(1.0, 16) == 1
    summary, questions = ask(text, reader="truncate", context=1000, repeats=4)
    room = 1000 - 12 - len("\nWhat is the pass key? The pass key is") - 1
    assert summary.metrics["chance_seen"] == pytest.approx(1 - (1 - room / 2000) ** 4)


def test_nothing_seen_is_not_a_rate_of_zero(text):
    summary, _ = ask(text, reader="truncate", context=200, depths=1)
    assert summary.metrics["seen"] == 0 and summary.metrics["answered_of_seen"] is None


def test_bm25_by_an_independent_computation():
    texts = ["Red fox, red den", "the blue fox sleeps in the blue den", "green grass", "a red red red barn"]
    scores = bm25_scores("What colour is the red fox?", texts)
    stop = {"what", "is", "the", "in", "a"}
    words = [[w for w in re.findall(r"\w\w+", text.lower()) if w not in stop] for text in texts]
    mean = sum(map(len, words)) / len(words)
    for text, score in zip(words, scores, strict=True):
        wanted = 0.0
        for word in ("colour", "red", "fox"):
            have = sum(word in other for other in words)
            idf = math.log(1 + (len(words) - have + 0.5) / (have + 0.5))
            count = text.count(word)
            wanted += idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(text) / mean))
        assert score == pytest.approx(wanted, rel=1e-5)
    assert bm25_scores("zebra", texts) == bm25_scores("the", texts) == [0.0] * 4
    assert bm25_scores("fox", ["...", "!!"]) == [0.0, 0.0]


def test_parts_and_chunks_by_hand():
    assert kept_parts(5, 5, "end") == [(0, 5)] and kept_parts(4, 9, "middle-out") == [(0, 4)]
    assert kept_parts(10, 3, "start") == [(0, 3)] and kept_parts(10, 3, "end") == [(7, 10)]
    assert kept_parts(10, 3, "middle-out") == [(0, 2), (9, 10)] and kept_parts(10, 1, "middle-out") == [(0, 1)]
    assert joined([(0, 3), (3, 5), (6, 7)]) == ((0, 5), (6, 7))
    text = "ab\ncdef\nghijklmn\no"
    bytes_ = [(at, at + 1) for at in range(len(text))]
    # lines of 3, 5, 9 and 1 bytes; a chunk ends before a line break too, where some tokenizers join it to what follows
    assert [text[a:b] for a, b in cut_chunks(text, bytes_, 8)] == ["ab\ncdef\n", "ghijklmn", "\no"]
    assert [text[a:b] for a, b in cut_chunks(text, bytes_, 4)] == ["ab\n", "cdef", "\n", "ghij", "klmn", "\no"]
    assert cut_chunks("", [], 4) == []


def test_bm25_reads_the_chunks_with_the_fact(text):
    summary, questions = ask(text, reader="bm25", context=600, window=150, fact="needle", repeats=2, length=3000)
    assert summary.metrics["exact_match"] == summary.metrics["seen"] == 1
    assert all(300 < question["tokens_read"] < 500 for question in questions)
    prompts = []
    model = ReadingModel(lambda prompt: prompts.append(prompt) or " none")
    ask(text, model, reader="bm25", context=600, window=150, depths=1, trials=1)
    (document,) = planted(byte_tokenizer(), text, length=2000, depths=1, trials=1, distractors=2)
    lines = prompts[0].removeprefix("<s>").removesuffix(document.prompt).splitlines()
    places = [document.document.index(line) for line in lines if len(line) > 30]
    assert places == sorted(places) and len(lines) > 3, "the document's order, not that of the scores"
    assert prompts[0].endswith(document.prompt)


@pytest.mark.parametrize("reader", ["truncate", "in-order", "bm25"])
def test_readers_agree_on_a_document_that_fits(byte_session, text, reader):
    """The prompt is the whole document and then the question; the answer that of a plain loop."""
    session = byte_session(initializer_range=0.2, max_position_embeddings=512)
    options = {"length": 300, "depths": 2, "trials": 2, "distractors": 0}
    evaluation = QuestionAnswering(reader=reader, text=text, **options)
    answers = [q["generation"] for q in evaluate(evaluation, session).details["questions"].values()]
    for document, answer in zip(planted(session.tokenizer, text, **options), answers, strict=True):
        ids = [BOS, *encode(session.tokenizer, document.document + document.prompt)]
        start = len(ids)
        while len(ids) < start + 12 and ids[-1] != session.tokenizer.eos_token_id:
            with torch.no_grad():
                ids.append(int(session.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert answer == session.tokenizer.decode(ids[start:], skip_special_tokens=True)
    assert len(set(answers)) > 1, "a model that always answers the same would hide a mistake"


def test_a_memory_is_read_and_taken_away_again(byte_session, text):
    session = byte_session(initializer_range=0.2)
    options = {"text": text, "length": 900, "depths": 2, "trials": 1, "distractors": 1}
    reading = {"skip_rate": 64, "alpha": 8.0, "confidence": "model", "pooling": "last", "window": 100}
    evaluation = QuestionAnswering(**options, **reading, memory_size=300, top_k=20, sinks=4)
    before = session.model.config._attn_implementation
    scores = evaluate(evaluation, session).details["questions"]
    assert session.model.config._attn_implementation == before
    assert not session.model.model._forward_pre_hooks and not session.model.model._forward_hooks
    policy = SkipPolicy(rate=64, threshold=8.0, pooling="last")
    memory = MemoryConfig(size=300, top_k=20, sinks=4)
    documents = planted(session.tokenizer, text, length=900, depths=2, trials=1, distractors=1)
    for document, score in zip(documents, scores.values(), strict=True):
        with DocumentReader(
            session.model, session.tokenizer, policy=policy, window=100, memory=memory, confidence="model", bos=BOS
        ) as reader:
            windows = list(reader.read(document.document))
            assert reader.ask(document.prompt, 12) == score["generation"]
            assert (reader.tokens_read, len(windows)) == (score["tokens_read"], score["windows"])
    plain = evaluate(QuestionAnswering(**options, **reading), session).details["questions"]
    assert [q["generation"] for q in plain.values()] != [q["generation"] for q in scores.values()]
    assert evaluate(evaluation, session).details["questions"] == scores


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"reader": "skipp"},
            "--reader 'skipp' is not known .did you mean 'skip'..; allowed: skip, in-order, truncate",
        ),
        (
            {"reader": "in-order", "skip_rate": 9, "alpha": 1.0},
            "--skip-rate has no effect with --reader in-order: lea",
        ),
        ({"reader": "truncate", "window": 9, "memory_size": 9}, "--window has no .*--memory-size has no effect with"),
        ({"reader": "bm25", "keep": "end"}, "--keep has no effect with --reader bm25"),
        ({"top_k": 4, "sinks": 2}, "--top-k has no effect without --memory-size: .*--sinks has no effect without"),
        ({"memory_size": 9, "context": 99}, "--context has no effect with --memory-size"),
        ({"memory_size": 9, "sinks": 9}, "--sinks 9 must be fewer than --memory-size 9"),
        ({"pooling": "max"}, "--pooling 'max' is not known; allowed: mean"),
        ({"confidence": "modl"}, "--confidence 'modl' is not known .did you mean 'model'"),
        ({"reader": "truncate", "keep": "middle"}, "--keep 'middle' is not known"),
        ({"fact": "key"}, "--fact 'key' is not known .did you mean 'passkey'..; allowed: passkey, needle"),
        ({"fact": "needle", "distractors": 16}, "--distractors 16: this fact has at most 15"),
        ({"limit": 3}, "--limit has no effect with --data planted"),
        ({"data": "triviaqa", "length": 9, "seed": 0}, "--length has no effect with --data triviaqa: .*--seed has no"),
        ({"data": "q.jsonl", "split": "test"}, "--split has no effect with --data q.jsonl"),
        (
            {"repeats": 0, "skip_rate": -1, "alpha": float("nan"), "bos": "x", "max_new_tokens": 0},
            "--repeats 0 must be at least 1; --max-new-tokens 0 must be at least 1; "
            "--skip-rate -1 must be at least 0; --alpha nan must be at least 0; --bos 'x'",
        ),
        ({"alpha": float("inf")}, "--alpha inf must be a number of nats"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QuestionAnswering(**options)


def test_what_does_not_fit_is_refused_before_anything_is_read(text, monkeypatch):
    with pytest.raises(ValueError, match="window 129 is longer than the model's, 128 tokens"):
        ask(text, window=129)
    with pytest.raises(ValueError, match="a question of 38 tokens and an answer of 12 leave no room .* of 51 tokens"):
        ask(text, reader="truncate", context=51)
    with pytest.raises(
        ValueError, match="--window 100 is too large a chunk .* room for 49 beside .* smaller --window"
    ):
        ask(text, reader="bm25", context=100, window=100)
    with pytest.raises(ValueError, match="needs a fast tokenizer"):
        slow = SimpleNamespace(is_fast=False)
        QuestionAnswering(text=text).plan(Session(ReadingModel(), slow))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"bm25 needs bm25s, which is not installed: pip install 'ctxext\[eval\]'"):
        ask(text, reader="bm25")


def test_the_reader_is_what_is_compared_and_the_data_what_is_shared():
    one = QuestionAnswering()
    assert (
        one.protocol_id() == QuestionAnswering(reader="bm25", context=99, text="x", seed=0, length=8192).protocol_id()
    )
    assert one.protocol_id().startswith("question-answering-v1:data=planted,fact=passkey,repeats=1,length=8192,")
    changed = [
        {"repeats": 4},
        {"seed": 1},
        {"length": 99},
        {"max_new_tokens": 4},
        {"bos": "never"},
        {"fact": "needle"},
    ]
    assert len({QuestionAnswering(**change).protocol_id() for change in changed} | {one.protocol_id()}) == 7
    asked = QuestionAnswering(data="triviaqa", limit=3)
    assert asked.protocol_id() == QuestionAnswering(data="q.jsonl").protocol_id()
    assert asked.protocol_id() == "question-answering-v1:data=questions,max_new_tokens=auto,bos=auto"
    assert one.evaluated_length() is None and QuestionAnswering(window=9, context=12).evaluated_length() == 12
    assert CONFIDENCES == READER_CONFIDENCES


class Stopped(Exception):
    pass


def test_a_run_is_taken_up_and_compared(byte_checkpoint, text, tmp_path, monkeypatch):
    options = {"text": text, "length": 400, "depths": 2, "trials": 3, "distractors": 1, "max_new_tokens": 4}
    settings, evaluation = RunSettings(dtype="float32"), QuestionAnswering(**options, skip_rate=64, alpha=12.0)
    whole, _ = run_evaluation(evaluation, byte_checkpoint(), settings, tmp_path / "skip.json")
    score, calls = QuestionAnswering.score, []

    def counted(self, session, unit):
        if len(calls) == 4:
            raise Stopped
        calls.append(unit.id)
        return score(self, session, unit)

    monkeypatch.setattr(QuestionAnswering, "score", counted)
    with pytest.raises(Stopped):
        run_evaluation(evaluation, byte_checkpoint(), settings, tmp_path / "killed.json")
    first, calls = calls, []
    monkeypatch.setattr(QuestionAnswering, "score", lambda *args: (calls.append(args[2].id), score(*args))[1])
    resumed, _ = run_evaluation(evaluation, byte_checkpoint(), settings, tmp_path / "killed.json")
    assert len(calls) == 2 and not set(calls) & set(first)
    assert (resumed.metrics, resumed.details, resumed.plots) == (whole.metrics, whole.details, whole.plots)

    other = QuestionAnswering(**options, reader="truncate")
    run_evaluation(other, byte_checkpoint(), settings, tmp_path / "truncate.json")
    comparison = compare_results([tmp_path / "skip.json", tmp_path / "truncate.json"], tmp_path / "pictures")
    assert all(row["comparable"] for row in comparison["results"])
    assert [row["metric"] for row in comparison["results"][1]["paired"]] == ["exact_match", "f1", "contains"]
    said = " ".join(comparison["footnotes"])
    assert "reader skip: skip rate 64, alpha 12.0" in said and "reader truncate: keep start, context 128" in said
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"question-answering.png", "question-answering-by-depth.png"}


def test_importing_it_imports_no_model():
    heavy = "{'torch', 'transformers', 'datasets', 'bm25s'}"
    code = f"import sys, ctxext.evals.question_answering; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
