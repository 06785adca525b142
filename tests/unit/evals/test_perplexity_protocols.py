"""The named protocols: worked out by hand on a few tokens, and by slow loops written from where they come from."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from ctxext.evals.last_token import LastToken
from ctxext.evals.perplexity import Perplexity
from ctxext.evaluation.base import Session, build

VOCABULARY, BOS = 16, 15


class Counting(torch.nn.Module):
    """Knows that each token is one more than the last, and says so with probability 2^-n after reading n tokens."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.device, self.dtype, self.base_model = torch.device("cpu"), torch.float32, self

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, use_cache, logits_to_keep):
        batch, length = input_ids.shape
        right = 2.0 ** -torch.arange(1, length + 1)
        wrong = (1 - right) / (VOCABULARY - 1)
        probability = wrong[None, :, None].repeat(batch, 1, VOCABULARY)
        probability.scatter_(2, ((input_ids + 1) % VOCABULARY)[..., None], right[None, :, None].repeat(batch, 1, 1))
        return SimpleNamespace(logits=probability.log()[:, logits_to_keep])


class Digits:
    """Every word of a text is the token that it names."""

    bos_token_id = BOS

    def __call__(self, text, **options):
        return {"input_ids": [int(word) for word in text.split()]}


def score(evaluation, session):
    plan = evaluation.plan(session)
    scored = [json.loads(json.dumps(evaluation.score(session, unit))) for unit in plan.units]
    return evaluation.summarize(plan, scored)


@pytest.fixture
def counted(tmp_path):
    """Return a function: the log2 of the perplexity of texts by a protocol, the model being `Counting`."""

    def value(protocol, texts, *, batch=2, **changes):
        path = tmp_path / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        options = {**Perplexity.presets[protocol], "min_tokens": 1, "buckets": "1", **changes}
        summary = score(Perplexity(data=str(path), **options), Session(Counting(), Digits(), batch))
        return math.log2(summary.metrics["perplexity"]), summary

    return value


FIVE = ["0 1 2 3 4"]
TWO = ["0 1 2", "3 4"]


def test_pi_by_hand(counted):
    # windows that read [0 1], [1 2], [2 3]: 1 and 2 after one and two tokens, 3 and 4 after two
    found, summary = counted("pi", FIVE, length=2, stride=1, bos="never")
    assert found == pytest.approx((1 + 2 + 2 + 2) / 4) and summary.tokens_scored == 4
    # a document each: 1, 2 after one and two, and 4 after one; with the mark in front 0 and 3 are scored too
    assert counted("pi", TWO, length=2, stride=1, bos="never")[0] == pytest.approx((1 + 2 + 1) / 3)
    zeros = ["0 1 2", "0 1"]
    assert counted("pi", zeros, length=2, stride=1)[0] == pytest.approx((1 + 2 + 2 + 1 + 2) / 5)


def test_alibi_by_hand(counted):
    assert counted("alibi-nonoverlapping", FIVE, length=2)[0] == pytest.approx((1 + 2 + 1 + 2) / 4)
    assert counted("alibi-sliding", FIVE, length=2)[0] == pytest.approx((1 + 2 + 2 + 2) / 4)
    # one stream: 3 is read after 1 and 2
    assert counted("alibi-sliding", TWO, length=3)[0] == pytest.approx((1 + 2 + 3 + 3) / 4)
    assert counted("alibi-nonoverlapping", TWO, length=3)[0] == pytest.approx((1 + 2 + 3 + 1) / 4)


def test_yarn_truncate_by_hand(counted):
    # the mark and two tokens: 0 after one token, 1 after two; the rest is never read
    found, summary = counted("yarn-truncate", FIVE, length=3)
    assert found == pytest.approx((1 + 2) / 2) and summary.tokens_scored == 2
    # a mean of the documents' means: 1.5 and 1; by tokens it would be 4 / 3
    assert counted("yarn-truncate", ["0 1 2 3 4", "0"], length=3)[0] == pytest.approx((1.5 + 1) / 2)


def test_longlora_all_tokens_by_hand(counted):
    # starts 0, 1 and 2 leave room for three tokens and one after them; the last is left out. Each scores two tokens.
    found, summary = counted("longlora-all-tokens", ["0 1 2 3 4 5"], length=3, stride=1, bos="never")
    assert found == pytest.approx((1 + 2) / 2) and summary.tokens_scored == 4
    found, summary = counted("longlora-all-tokens", FIVE, length=3, stride=1, bos="never")
    assert found == pytest.approx((1 + 2) / 2) and summary.tokens_scored == 2
    # [M 0 1 2 M 0 1 2 3]: the second mark is read and not scored
    found, summary = counted("longlora-all-tokens", ["0 1 2", "0 1 2 3"], length=4, stride=1)
    windows = [(1 + 2 + 3) / 3, (1 + 2) / 2, (1 + 3) / 2, (2 + 3) / 2]
    assert found == pytest.approx(sum(windows) / 4) and summary.tokens_scored == 9


def test_the_rule_of_a_protocol_cannot_be_bent(tmp_path):
    with pytest.raises(ValueError, match="--protocol yarn-truncate fixes --mean windows"):
        build(Perplexity, {"mean": "tokens"}, "yarn-truncate")
    with pytest.raises(
        ValueError, match="--windows 'all' is not known; allowed: once, first, every-token; --mean 'sum'"
    ):
        Perplexity(windows="all", mean="sum")
    path = tmp_path / "short.txt"
    path.write_text("0 1 2")
    evaluation = Perplexity(data=str(path), windows="every-token", length=3, stride=1, bos="never", buckets="1")
    with pytest.raises(ValueError, match="leaves no window to score with --windows every-token: use more data"):
        evaluation.plan(Session(Counting(), Digits(), 1))


def losses(model, ids):
    """Return the loss of every token but the first of one window, read at once."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    return [-float(logits[at].log_softmax(-1)[token]) for at, token in enumerate(ids[1:])]


@pytest.fixture
def documents(texts):
    def encoded(session):
        rows = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
        return [session.tokenizer(row, add_special_tokens=False)["input_ids"] for row in rows]

    return encoded


@pytest.mark.parametrize("length", [24, 200])
def test_yarn_truncate_is_its_loop(byte_session, texts, documents, length):
    session = byte_session()
    means = []
    for ids in documents(session):
        window = [session.tokenizer.bos_token_id, *ids[: length - 1]]
        found = losses(session.model, window)
        means.append(sum(found) / len(found))
    given = {"data": str(texts), "length": length, "min_tokens": 1}
    if length == 200:  # no document fills it
        with pytest.raises(ValueError, match="longer than"):
            build(Perplexity, given, "yarn-truncate").plan(session)
        return
    summary = score(build(Perplexity, given, "yarn-truncate"), session)
    assert summary.metrics["loss"] == pytest.approx(sum(means) / len(means), rel=1e-5)


def test_longlora_all_tokens_is_its_loop(byte_session, texts, documents):
    session = byte_session(bos=False)
    stream = [token for ids in documents(session) for token in ids]
    starts = list(range(0, len(stream) - 40, 16))
    starts.pop()
    means = []
    for start in starts:
        found = losses(session.model, stream[start : start + 40])
        means.append(sum(found) / len(found))
    options = {**Perplexity.presets["longlora-all-tokens"], "stride": 16}
    summary = score(Perplexity(data=str(texts), length=40, **options), session)
    assert summary.metrics["loss"] == pytest.approx(sum(means) / len(means), rel=1e-5)


def test_alibi_sliding_is_one_forward_a_token(byte_session, texts, documents):
    session = byte_session()
    stream = [token for ids in documents(session) for token in ids]
    found = [losses(session.model, stream[max(0, at - 32) : at + 1])[-1] for at in range(1, len(stream))]
    summary = score(build(Perplexity, {"data": str(texts), "length": 32}, "alibi-sliding"), session)
    assert summary.tokens_scored == len(found) == 259
    assert summary.metrics["loss"] == pytest.approx(sum(found) / len(found), rel=1e-5)
    assert summary.notes == [f"{3 / 259:.1%} of the predictions had at most 3 tokens of context"]


def test_smaller_batches_than_planned_score_the_same(byte_session, texts):
    session = byte_session(batch_size=4)
    evaluation = Perplexity(data=str(texts), length=32, stride=8, windows="every-token", mean="windows")
    unit = evaluation.plan(session).units[0]
    whole = evaluation.score(session, unit)
    session.batch_size = 1
    again = evaluation.score(session, unit)
    assert len(unit.work) == 4 and again["bucket_tokens"] == whole["bucket_tokens"]
    assert [nll for nll, _ in again["windows"]] == pytest.approx([nll for nll, _ in whole["windows"]], rel=1e-5)


def test_last_token_by_hand(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "0 1 2 3 4"}\n{"text": "5 6"}\n')
    evaluation = LastToken(data=str(path), lengths="2,1,3", segments=2)
    plan = evaluation.plan(Session(Counting(), Digits(), 1))
    # 3 and 4 have three tokens before them; after n tokens the right one has probability 2^-n
    assert [unit.work for unit in plan.units] == [
        (1, [[2, 3], [3, 4]]),
        (2, [[1, 2, 3], [2, 3, 4]]),
        (3, [[0, 1, 2, 3], [1, 2, 3, 4]]),
    ]
    summary = score(evaluation, Session(Counting(), Digits(), 1))
    assert summary.details["perplexity"] == pytest.approx({"1": 2, "2": 4, "3": 8})
    assert summary.metrics == pytest.approx({"perplexity": 8, "best_length": 1, "best": 2})
    assert plan.skipped == {"documents_too_short": 1} and plan.corpus["documents"] == 1


def test_last_token_is_one_forward_a_history(byte_session, texts, documents):
    session = byte_session()
    evaluation = LastToken(data=str(texts), lengths="5,60", segments=7)
    summary = score(evaluation, session)
    places = [(ids, end) for ids in documents(session)[:2] for end in range(60, len(ids))]
    chosen = [places[round(index * (len(places) - 1) / 6)] for index in range(7)]
    for length in (5, 60):
        found = [losses(session.model, ids[end - length : end + 1])[-1] for ids, end in chosen]
        assert summary.details["perplexity"][str(length)] == pytest.approx(math.exp(sum(found) / 7), rel=1e-5)
    with pytest.raises(ValueError, match="has 120 tokens with 60 before them; 1000 segments are wanted"):
        LastToken(data=str(texts), lengths="60").plan(session)
    with pytest.raises(ValueError, match="--lengths '64,zero' must be whole numbers"):
        LastToken(lengths="64,zero")
