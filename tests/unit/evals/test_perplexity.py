"""Perplexity against a loop that reads every token's context anew, and the rules of what is scored."""

import json
import math

import pytest
import torch

from ctxext.evals.perplexity import Perplexity
from ctxext.evaluation.base import build

BOS = 256


def run(evaluation, session):
    plan = evaluation.plan(session)
    scored = [json.loads(json.dumps(evaluation.score(session, unit))) for unit in plan.units]
    return plan, evaluation.summarize(plan, scored)


def naive(model, sequences, length, stride, inserted=()):
    """Every token's loss by a forward of its own, over exactly the context of the window that has the most of it."""
    losses = []
    for ids in sequences:
        for target in range(1, len(ids)):
            if target in inserted:
                continue
            start = min(s for s in range(0, len(ids), stride) if 1 <= target - s <= length)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids[start:target]])).logits[0, -1].double()
            losses.append(-float(logits.log_softmax(-1)[ids[target]]))
    return losses


def encoded(session, texts, bos):
    rows = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    return [([BOS] if bos else []) + session.tokenizer(row, add_special_tokens=False)["input_ids"] for row in rows]


@pytest.mark.parametrize(("length", "stride"), [(32, 8), (32, 32), (40, 7)])
@pytest.mark.parametrize("bos", [True, False])
def test_documents(byte_session, texts, length, stride, bos):
    session = byte_session(bos=bos)
    plan, summary = run(Perplexity(data=str(texts), length=length, stride=stride), session)
    losses = naive(session.model, encoded(session, texts, bos)[:2], length, stride)
    assert summary.tokens_scored == len(losses) == 240 - (0 if bos else 2)
    assert summary.metrics["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    wanted = {"documents_too_short": 1, "tokens_in_short_documents": 20}
    assert plan.skipped == (wanted if bos else {**wanted, "first_tokens_without_context": 2})
    assert plan.corpus["documents"] == 2 and plan.corpus["tokens"] == 240


def test_stream_reads_inserted_tokens_but_does_not_score_them(byte_session, texts):
    session = byte_session()
    _, summary = run(Perplexity(data=str(texts), length=32, stride=8, stream=True), session)
    documents = encoded(session, texts, True)
    losses = naive(session.model, [sum(documents, [])], 32, 8, inserted=(151, 242))
    assert summary.tokens_scored == len(losses) == 260
    assert summary.metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_loss_by_position(byte_session, texts):
    session = byte_session()
    _, summary = run(Perplexity(data=str(texts), length=32, stride=32, buckets="4,16", limit=1), session)
    losses = naive(session.model, encoded(session, texts, True)[:1], 32, 32)
    buckets = [[], [], []]
    for target, loss in enumerate(losses, 1):
        context = (target - 1) % 32  # position of the last token read
        buckets[0 if context < 4 else 1 if context < 16 else 2].append(loss)
    assert summary.details["bucket_tokens"] == [len(bucket) for bucket in buckets]
    assert summary.details["bucket_loss"] == pytest.approx([sum(b) / len(b) for b in buckets], rel=1e-5)


def test_bos_rules(byte_session, texts):
    with pytest.raises(ValueError, match="--bos always: this tokenizer has no begin-of-sequence token"):
        Perplexity(data=str(texts), length=32, stride=8, bos="always").plan(byte_session(bos=False))
    never = Perplexity(data=str(texts), length=32, stride=8, bos="never").plan(byte_session())
    assert never.notes[0].startswith("begin-of-sequence token none")
    assert never.units[0].work[0].sequence.ids[0] != BOS
    auto = Perplexity(data=str(texts), length=32, stride=8).plan(byte_session())
    assert auto.units[0].work[0].sequence.ids[0] == BOS
    assert BOS not in auto.units[0].work[0].sequence.ids[1:]


def test_max_windows_are_evenly_spaced_and_part_of_the_protocol(byte_session, texts):
    session = byte_session()
    every = Perplexity(data=str(texts), length=32, stride=8)
    few = Perplexity(data=str(texts), length=32, stride=8, max_windows=5)
    jobs = [job for unit in every.plan(session).units for job in unit.work]
    for _ in range(2):
        plan = few.plan(session)
        chosen = [job for unit in plan.units for job in unit.work]
        assert [job.window for job in chosen] == [jobs[round(i * (len(jobs) - 1) / 4)].window for i in range(5)]
    left_out = sum(job.window.scored for job in jobs) - sum(job.window.scored for job in chosen)
    assert plan.skipped["tokens_in_windows_left_out"] == left_out
    assert every.protocol_id() != few.protocol_id()


def test_protocol_id_holds_what_changes_the_score_and_nothing_else():
    one = Perplexity(length=64, stride=0)
    assert one.protocol_id() == Perplexity(length=64, stride=64, data="pg19", buckets="4", limit=3).protocol_id()
    assert one.protocol_id() == build(Perplexity, {"length": 64}, "non-overlapping").protocol_id()
    assert one.protocol_id() != Perplexity(length=64, stride=32).protocol_id()


def test_presets():
    pile = build(Perplexity, {"length": 8192}, "pi-proof-pile")
    assert (pile.data, pile.truncate, pile.min_tokens, pile.limit, pile.stride) == (
        "proof-pile",
        32768,
        32768,
        128,
        256,
    )
    with pytest.raises(ValueError, match="--protocol pi fixes --stride 256"):
        build(Perplexity, {"stride": 128}, "pi")
    with pytest.raises(ValueError, match="no protocol 'p1'; allowed: pi, pi-proof-pile, alibi-nonoverlapping"):
        build(Perplexity, {}, "p1")


def test_lengths_that_do_not_fit(byte_session, texts):
    session = byte_session()
    with pytest.raises(ValueError, match="no document .* has 500 tokens, the longest has 150"):
        Perplexity(data=str(texts), length=500, stride=8).plan(session)
    with pytest.raises(ValueError, match="--length 500 is longer than"):
        Perplexity(data=str(texts), length=500, stride=8, stream=True).plan(session)
    with pytest.raises(ValueError, match="--length 500 is longer than"):
        Perplexity(data=str(texts), length=500, stride=8, min_tokens=10).plan(session)


def test_all_wrong_options_are_named_at_once():
    with pytest.raises(ValueError, match="--length 0 .*--limit -1 .*--bos 'x'"):
        Perplexity(length=0, stride=0, limit=-1, bos="x")
    with pytest.raises(ValueError, match="--stride 65 must lie between 1 and --length 64"):
        Perplexity(length=64, stride=65)
    with pytest.raises(ValueError, match="--truncate 10 leaves less than the 64"):
        Perplexity(length=64, stride=8, truncate=10)
