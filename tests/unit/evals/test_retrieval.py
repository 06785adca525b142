"""Retrieval prompts to the token, answers found by an independent reader, and success worked out by hand."""

import json
import re

import pytest
import torch
from answering_model import answering_session
from helpers import byte_tokenizer

from ctxext.evals.retrieval import Retrieval
from ctxext.evals.retrieval_variants import VARIANTS
from ctxext.evaluation.base import Session
from ctxext.evaluation.prompts import Haystack, TooLongError, answer, corpus_tokens, encode, noise_tokens
from ctxext.evaluation.runner import run_evaluation

CASES = [
    {"variant": "digits", "digits": 12},
    {"variant": "several", "keys": 3},
    {"variant": "several", "ask": "all"},
    {"variant": "distractors", "distractors": 3},
    {"variant": "key_value"},
    {"variant": "needle", "data": "python-docs"},
]
NAMES = [" ".join(map(str, case.values())) for case in CASES]


def solve(prompt):
    """Find the answer in a decoded prompt."""
    if "JSON data:" in prompt:
        data, question = prompt.split("JSON data:\n")[1].split("\n\nKey: ")
        return f' "{json.loads(data)[question.split(chr(34))[1]]}"'
    if city := re.search(r"Which animal is on the flag of (\w+)\?", prompt):
        return " " + re.search(rf"The animal on the flag of {city.group(1)} is a ([\w ]+)\.", prompt).group(1)
    if "What are all the pass keys?" in prompt:
        return " " + " and ".join(re.findall(r"\nThe pass key of \S+ is (\d+)\.", prompt))
    owner = re.search(r"\nWhat is the pass key( of [\w-]+)?\?", prompt).group(1) or ""
    return " " + re.search(rf"\nThe pass key{owner} is (\d+)\. Remember it\. \1 is the pass key", prompt).group(1)


def run(session, **options):
    """Score every unit as a resumed run would see it; return the summary and the scores."""
    evaluation = Retrieval(**options)
    plan = evaluation.plan(session)
    scored = [json.loads(json.dumps(evaluation.score(session, unit))) for unit in plan.units]
    return evaluation.summarize(plan, scored), scored


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize("length", [1200, 1501])
def test_every_prompt_is_exact_and_answerable(case, length):
    session = Session(answering_session(solve).model, byte_tokenizer())
    evaluation = Retrieval(length=length, depths=3, trials=2, **case)
    evaluation.plan(session)
    positions = []
    for depth in (0.0, 0.5, 1.0):
        trial = session.memo["variant"].trial(depth, evaluation._draw(depth, 0))
        assert len(trial.ids) == length and trial.ids[0] == 256
        text = session.tokenizer.decode(trial.ids[1:])
        found = re.findall(r"[\w-]+", solve(text).replace(" and ", " "))
        assert (
            found == list(trial.expected) or " ".join(found) == trial.expected[0] or set(found) == set(trial.expected)
        )
        stated = session.tokenizer.decode(trial.ids[trial.position :])
        assert trial.expected[0] in stated[:120], "the position is where the answer is stated"
        positions.append(trial.position)
    room = length - len(session.memo["variant"].start)
    assert positions[0] < 0.2 * length and positions[2] > 0.55 * length
    assert positions == sorted(positions) and positions[1] < room


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_perfect_model_scores_one_and_a_wrong_one_nothing(case):
    options = {"length": 1200, "depths": 3, "trials": 4, **case}
    summary, scored = run(answering_session(solve), **options)
    assert summary.metrics["success"] == summary.metrics["worst_depth"] == 1.0
    assert summary.plots[0].x == [0.0, 50.0, 100.0] and summary.plots[0].y == [1.0, 1.0, 1.0]
    assert len(summary.details["items"]) == 12 and set(summary.details["items"].values()) == {1.0}
    assert all(len(set(map(str, unit["expected"]))) > 1 for unit in scored), "the keys must differ between trials"
    # another number, uuid or animal first, then the right one: the first counts
    wrong = {"key_value": " 00000000-0000-0000-0000-000000000000 ", "needle": " red wolf "}
    first = wrong.get(case["variant"], " 7 ")
    late, _ = run(answering_session(lambda prompt: first + solve(prompt)), **options)
    assert late.metrics["success"] == (1.0 if case.get("ask") == "all" else 0.0)
    nothing, _ = run(answering_session(lambda prompt: " I do not know."), **options)
    assert nothing.metrics["success"] == 0.0


def test_all_keys_or_a_share_of_them():
    def half(prompt):
        return " and ".join(solve(prompt).split(" and ")[:2])

    summary, _ = run(answering_session(half), length=1200, depths=2, trials=3, variant="several", ask="all")
    assert summary.metrics == {"success": 0.0, "worst_depth": 0.0, "found": 0.5}


def test_success_by_depth_by_hand():
    # Right only where the key is stated in the first half of the prompt.
    def early(prompt):
        return solve(prompt) if prompt.index("\nThe pass key is") < 600 else " 7"

    summary, scored = run(answering_session(early), length=1200, depths=4, trials=2, variant="digits")
    assert summary.plots[0].y == [1.0, 1.0, 0.0, 0.0]
    assert summary.metrics == {"success": 0.5, "worst_depth": 0.0}
    assert summary.tokens_scored == 8 * 1200
    assert [unit["hits"] for unit in scored] == [2, 2, 0, 0]


def plain(session, prompt, count):
    """Greedy decoding with neither cache nor batch, up to the end-of-sequence token."""
    ids, ends = list(prompt), {session.tokenizer.eos_token_id, session.model.generation_config.eos_token_id}
    for _ in range(count):
        with torch.no_grad():
            token = int(session.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token in ends:
            break
        ids.append(token)
    return session.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)


@pytest.mark.parametrize(("family", "case"), [("mistral", CASES[0]), ("llama", CASES[4])], ids=["digits", "key_value"])
def test_the_answers_are_those_of_a_plain_loop(byte_session, family, case):
    changes = {"sliding_window": 64} if family == "mistral" else {}
    session = byte_session(family, initializer_range=0.2, **changes)
    options = {"length": 550, "depths": 2, "trials": 2, **case}
    _, scored = run(session, **options)
    evaluation, answers = Retrieval(**options), set()
    for unit, depth in zip(scored, (0.0, 1.0), strict=True):
        for number, got in enumerate(unit["answers"]):
            trial = session.memo["variant"].trial(depth, evaluation._draw(depth, number))
            count = 2 * len(encode(session.tokenizer, " " + trial.expected[0]))
            assert got == plain(session, trial.ids, count)
            answers.add(got)
    assert len(answers) > 1, "a model that always answers the same would hide a mistake"


def test_an_answer_ends_at_the_end_of_sequence_token():
    session = answering_session(lambda prompt: " 12</s>99" if "first" in prompt else " 345678")
    prompts = [encode(session.tokenizer, f"{word} question? Answer:") for word in ("first", "other")]
    assert answer(session, prompts, 5) == [" 12", " 3456"]


def test_statements_are_put_between_lines_and_keep_their_order():
    tokenizer = byte_tokenizer()
    haystack = Haystack(tokenizer, encode(tokenizer, "one\ntwo\nthree\nfour\n"))
    a, b = encode(tokenizer, "A"), encode(tokenizer, "BB")
    ids, starts = haystack.hide([(0.5, a), (0.4, b)], 19 + 3)
    # half of 19 tokens is 9, 40% is 7; the line breaks before are at 8 and 4
    assert tokenizer.decode(ids) == "one\nBBtwo\nAthree\nfour\n" and starts == [10, 4]
    ids, starts = haystack.hide([(1.0, a), (0.0, b)], 8)
    assert tokenizer.decode(ids) == "BBone\ntA" and starts == [7, 0]
    with pytest.raises(TooLongError, match="statements of 3 tokens do not fit into 2"):
        haystack.hide([(0.1, a), (0.2, b)], 2)


def test_texts_to_hide_in(tmp_path):
    from ctxext.data.corpora import open_corpus

    tokenizer = byte_tokenizer()
    assert tokenizer.decode(noise_tokens(tokenizer, 200)).startswith("The grass is green. The sky is blue.")
    assert [len(noise_tokens(tokenizer, count)) for count in (1, 90, 1000)] == [1, 90, 1000]
    (tmp_path / "a.txt").write_text("first\n\n")
    (tmp_path / "b.txt").write_text("second")
    ids, used = corpus_tokens(tokenizer, open_corpus(str(tmp_path)), 9)
    assert tokenizer.decode(ids) == "first\nsec" and [document.id for document in used] == ["a.txt", "b.txt"]
    with pytest.raises(ValueError, match="holds 13 tokens, fewer than the 14"):
        corpus_tokens(tokenizer, open_corpus(str(tmp_path)), 14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "digit"}, "--variant 'digit' is not known; did you mean 'digits'"),
        ({"variant": "needle", "digits": 3}, "--digits has no effect with --variant needle"),
        ({"variant": "digits", "data": "x", "keys": 2}, "--keys has no effect .*; --data has no effect"),
        ({"variant": "several", "ask": "most"}, "--ask 'most' is not known; allowed: one, all"),
        ({"variant": "several", "keys": 1}, "--keys 1 must be at least 2"),
        ({"variant": "distractors", "digits": 1, "distractors": 9}, "gives only 9 different keys"),
        ({"length": 0, "trials": 0}, "--length 0 must be at least 1; --trials 0 must be at least 1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        Retrieval(**options)


def test_lengths_that_are_too_short():
    with pytest.raises(ValueError, match="--length 400 is too short .* take 7.. tokens; use a longer --length"):
        Retrieval(variant="distractors", length=400, depths=1, trials=1).plan(answering_session(solve))


def test_the_protocol_has_the_options_of_the_variant_only():
    id_of = lambda **options: Retrieval(**options).protocol_id().split(",bos=auto")[1]  # noqa: E731
    assert id_of(variant="digits") == id_of(variant="digits", digits=20) == ",digits=20"
    assert id_of(variant="several", ask="all") == ",digits=5,keys=4,ask=all"
    assert id_of(variant="needle") == id_of(variant="needle", data="python-docs") == id_of(variant="key_value") == ""
    assert set(VARIANTS) == {case["variant"] for case in CASES}


def test_the_result_states_the_corpus(byte_checkpoint, tmp_path):
    evaluation = Retrieval(variant="needle", length=400, depths=2, trials=1, data="python-docs")
    result, _ = run_evaluation(evaluation, byte_checkpoint(), output=tmp_path / "r.json")
    assert result.corpus["name"] == "python-docs" and result.corpus["tokens"] == 400
    assert result.metrics["success"] == 0.0 and result.plots[0]["kind"] == "heat"
