"""Passkey prompts to the token, answers against a plain loop, and k_max worked out by hand."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from ctxext.evals.passkey import PasskeyRetrieval, PromptMaker, hits_needed, is_hit, spread
from ctxext.evaluation.base import Session
from ctxext.evaluation.prefix import Prefix, Reader

SENTENCE = r"\nThe pass key is (\d{5})\. Remember it\. \1 is the pass key\.\n"


def text_of(tokenizer, ids):
    return tokenizer.decode(ids)


@pytest.mark.parametrize("length", [400, 511])
@pytest.mark.parametrize("bos", [True, False])
def test_prompts_have_the_exact_length_and_the_key_at_k(byte_session, length, bos):
    tokenizer = byte_session(bos=bos).tokenizer
    maker = PromptMaker(tokenizer, length, tokenizer.bos_token_id)
    low, high = maker.range_of_k()
    for k in (low, (low + high) // 2, high):
        ids = maker.prefix()[: length - k] + maker.suffix(k, 31415)
        assert len(ids) == length
        assert (ids[0] == 256) == bos
        before, after = (text_of(tokenizer, part) for part in (ids[: length - k], ids[length - k :]))
        assert before.removeprefix("<s>").startswith("There is an important info")
        assert re.match(SENTENCE, after).group(1) == "31415"
        assert after.endswith("\nWhat is the pass key? The pass key is")
    assert ids[: length - k] == maker.header, "the largest k leaves the header only"


def test_distances_by_hand():
    assert spread(10, 20, 3) == [10, 15, 20]
    assert spread(10, 13, 3) == [10, 12, 13]
    assert spread(10, 20, 1) == [20]
    assert [hits_needed(trials) for trials in (1, 2, 5, 6, 10, 11)] == [1, 1, 1, 2, 2, 3]
    assert is_hit(" 12345.\n6", 12345) and is_hit("is 12345", 12345)
    assert not is_hit(" 123456", 12345) and not is_hit(" 1 12345", 12345) and not is_hit("none", 12345)


def plain_answers(session, evaluation, k, keys):
    """Every prompt written out and decoded token by token, with neither cache nor batch."""
    maker = PromptMaker(session.tokenizer, evaluation.length, session.tokenizer.bos_token_id)
    answers = []
    for key in keys:
        filler = maker.filler[: evaluation.length - k - len(maker.header)]
        ids = maker.header + filler + maker.suffix(k, key)
        for _ in range(7):  # " 12345" is six bytes, and one more
            with torch.no_grad():
                ids.append(int(session.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(session.tokenizer.decode(ids[evaluation.length :], skip_special_tokens=True))
    return answers


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mistral", "gemma3_text"])
@pytest.mark.parametrize("kmax_only", [False, True])
def test_the_answers_are_those_of_a_plain_loop(byte_session, family, kmax_only, monkeypatch):
    monkeypatch.setattr("ctxext.evaluation.prefix.TOKENS_AT_ONCE", 50)
    # with the usual small weights a random gpt_neox answers every prompt alike
    changes = {"mistral": {"sliding_window": 64}, "gpt_neox": {"initializer_range": 0.2}}
    session = byte_session(family, **changes.get(family, {}))
    evaluation = PasskeyRetrieval(length=420, depths=3, trials=4, kmax_only=kmax_only)
    seen = set()
    for unit in evaluation.plan(session).units:
        score = json.loads(json.dumps(evaluation.score(session, unit)))
        assert score["answers"] == plain_answers(session, evaluation, unit.work, score["keys"])
        seen |= set(score["answers"])
    assert len(seen) > 1, "a model that always answers the same would hide a mistake"


def test_a_branch_leaves_the_prefix_as_it_was(byte_session):
    model = byte_session().model
    ids = list(range(40))
    reader = Reader(model)
    prefix = Prefix(reader, ids)
    for length, more in ((30, [[5, 6], [7, 8]]), (10, [[9, 9]]), (40, [[1, 2]]), (30, [[5, 6], [7, 8]])):
        got = reader.read(torch.tensor(more), prefix.branch(length, len(more)))
        with torch.no_grad():
            wanted = torch.stack([model(input_ids=torch.tensor([ids[:length] + row])).logits[0, -1] for row in more])
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_models_without_keys_to_crop_are_refused(byte_session):
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "mamba", vocab_size=300, hidden_size=16, num_hidden_layers=1, state_size=4, intermediate_size=32
    )
    session = Session(AutoModelForCausalLM.from_config(config), byte_session().tokenizer)
    with pytest.raises(ValueError, match="mamba keeps .* states, which cannot be cut back to a prefix"):
        PasskeyRetrieval(length=420, depths=3, trials=2).plan(session)


class Scripted(PasskeyRetrieval):
    """Answers by a script: at distance number i, trial t is a hit where `script[i][t]` is 1."""

    def _generate(self, session, k, keys):
        depth = self.distances.index(k)
        every = self.keys(session.memo["maker"], k)
        session.memo.setdefault("asked", {}).setdefault(depth, []).append(len(keys))
        return [f" {key}." if self.script[depth][every.index(key)] == "1" else " 7" for key in keys]


def scripted(session, script, **options):
    """Run passkey with scripted answers; return its summary, distances, and how many trials each batch asked for."""
    evaluation = Scripted(length=420, depths=len(script), trials=len(script[0]), **options)
    plan = evaluation.plan(session)
    object.__setattr__(evaluation, "script", script)
    object.__setattr__(evaluation, "distances", sorted(unit.work for unit in plan.units))
    scored = []
    for unit in plan.units:
        scored.append(evaluation.score(session, unit))
        if evaluation.finished(scored):
            break
    return evaluation.summarize(plan, scored), evaluation.distances, session.memo.get("asked")


def test_k_max_by_hand(byte_session):
    summary, k, _ = scripted(byte_session(), ["1111100000", "0011000000", "0000000001", "1111111111"])
    assert summary.metrics == {"k_max": k[1], "all_feasible": False, "success": 18 / 40}
    assert summary.plots[0].x == k and summary.plots[0].y == [0.5, 0.2, 0.1, 1.0]
    summary, k, _ = scripted(byte_session(), ["1100000000"] * 3)
    assert summary.metrics == {"k_max": 420, "all_feasible": True, "success": 0.2}
    summary, k, _ = scripted(byte_session(), ["0000000000", "1111111111"])
    assert summary.metrics["k_max"] == 0


def test_kmax_only_ends_a_distance_once_it_is_settled(byte_session):
    # Hits come third and sixth: settled after six. Then nine misses in a row: failed, and the last is never tried.
    script = ["0010011111", "0000000001", "1111111111"]
    summary, k, asked = scripted(byte_session(batch_size=4), script, kmax_only=True)
    assert [(unit["hits"], unit["tried"]) for unit in summary.details["distances"]] == [(2, 6), (0, 9)]
    assert asked == {0: [2, 4], 1: [2, 4, 4]}
    assert summary.metrics == {"k_max": k[0], "all_feasible": False}


def test_keys_depend_on_seed_distance_and_trial_only(byte_session):
    maker = PromptMaker(byte_session().tokenizer, 420, None)
    k = sum(maker.range_of_k()) // 2
    ten = PasskeyRetrieval(length=420, trials=10).keys(maker, k)
    assert PasskeyRetrieval(length=420, depths=3, trials=4).keys(maker, k) == ten[:4]
    assert (
        PasskeyRetrieval(length=420, seed=1).keys(maker, k) != ten != PasskeyRetrieval(length=420).keys(maker, k + 1)
    )
    assert all(10000 <= key <= 99999 for key in ten)


def test_reduced_grids_are_labelled(byte_session):
    summary, _, _ = scripted(byte_session(), ["11"])
    assert summary.details["reduced"] is True
    full = PasskeyRetrieval(length=500)
    assert not any("reduced" in note for note in full.plan(byte_session()).notes)
    reduced = PasskeyRetrieval(length=500, depths=8, trials=2).plan(byte_session())
    assert "reduced grid: 8 depths x 2 trials (32 x 10)" in reduced.notes


def test_lengths_that_leave_too_few_distances(byte_session):
    with pytest.raises(ValueError, match=r"--length 100 leaves 0 distances .* use a longer --length"):
        PasskeyRetrieval(length=100).plan(byte_session())
    with pytest.raises(ValueError, match="--length 0 must be at least 1; --trials -1 must be at least 1"):
        PasskeyRetrieval(length=0, trials=-1)


def test_the_begin_of_sequence_token_follows_the_rule_and_is_part_of_the_protocol(byte_session):
    def first_token(bos, rule):
        session = byte_session(bos=bos)
        PasskeyRetrieval(length=420, depths=2, trials=1, bos=rule).plan(session)
        return session.memo["maker"].header[0]

    there = byte_session().tokenizer("There", add_special_tokens=False)["input_ids"][0]
    assert [first_token(True, rule) for rule in ("auto", "always", "never")] == [256, 256, there]
    assert first_token(False, "auto") == there != 256
    with pytest.raises(ValueError, match="this tokenizer has no begin-of-sequence token; use --bos auto or never"):
        first_token(False, "always")
    with pytest.raises(ValueError, match="--bos 'sometimes' is not known; allowed: auto, always, never"):
        PasskeyRetrieval(bos="sometimes")
    assert PasskeyRetrieval(bos="never").protocol_id() != PasskeyRetrieval().protocol_id()
