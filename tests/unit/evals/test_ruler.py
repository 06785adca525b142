"""RULER's tasks: every prompt within its length and answerable by an independent reader, and scores by hand."""

import json
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
from answering_model import answering_session
from helpers import byte_tokenizer

from ctxext.evals.ruler import TASKS, Ruler
from ctxext.evals.ruler_lists import zeta_counts
from ctxext.evals.ruler_qa import read_questions
from ctxext.evals.ruler_words import ADJECTIVES, NOUNS, compound_words, made_up_words
from ctxext.evaluation.base import Session
from ctxext.evaluation.runner import run_evaluation

# How many tokens (bytes) a task made of lines, words or documents may leave unused: less than one of them.
PIECE = {"niah_multikey_2": 90, "niah_multikey_3": 140, "cwe": 40, "fwe": 60, "qa_1": 130}
NEEDLES = [name for name in TASKS if name.startswith("niah")]
SMALL = ",".join([*NEEDLES, "vt", "fwe"])


def needle_answers(prompt):
    keys = re.search(r"\nWhat (?:is|are all) the special magic \w+ for (.+) mentioned in the provided text\?", prompt)
    found = []
    for key in re.split(r", and |, ", keys.group(1)):
        found += re.findall(rf"\nOne of the special magic \w+ for {key} is: (\S+)\.\n", prompt)
    return found


def variables(prompt):
    task = prompt.split("Memorize and track")[-1]
    value = re.search(r"assigned the value (\d+) in the text above", task).group(1)
    said = dict(re.findall(r"\nVAR ([A-Z]+) = (?:VAR )?(\w+)\n", task))
    assert list(said.values())[1:] == list(said)[:-1], "each variable is stated before it is used"

    def follow(name):
        return follow(said[name]) if name in said else name

    return [name for name in said if follow(name) == value]


def frequent(prompt):
    text = prompt.split("frequently appeared coded words.\n")[1].split("\nQuestion:")[0]
    counts = Counter(text.split())
    (dots, _), *ranked = counts.most_common(5)
    assert dots == "...." and ranked[2][1] > ranked[3][1], "the third word must be told from the fourth"
    return [word for word, _ in ranked[:3]]


def common(prompt):
    text = prompt.split("Memorize the ones that appear most often.\n")[-1].split("\nQuestion:")[0]
    entries = re.findall(r"(\d+)\. (\S+)", text)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    words = [word for _, word in entries]
    assert sum(one == other for one, other in zip(words, words[1:], strict=False)) < len(words) / 4, "not shuffled"
    ranked = Counter(words).most_common(11)
    assert ranked[9][1] == 6 * ranked[10][1] or ranked[9][1] == 10 * ranked[10][1]
    return [word for word, _ in ranked[:10]]


def told(prompt):
    town = re.search(r"\nQuestion: Who lives in (\w+)\? Answer:", prompt).group(1)
    return [re.search(rf"Document \d+:\nIn {town} there lives a person called (\w+)\.", prompt).group(1)]


def read(prompt):
    """Return what a decoded prompt asks for."""
    readers = {
        "special magic": needle_answers,
        "chain(s)": variables,
        "coded text": frequent,
        "numbered list": common,
        "given documents": told,
    }
    return next(reader for words, reader in readers.items() if words in prompt[:150])(prompt)


@pytest.fixture
def questions(tmp_path):
    """A jsonl file of forty questions, each answered by one paragraph."""
    words = random.Random(1).sample([word.capitalize() for word in NOUNS], 80)
    rows = [
        {
            "question": f"Who lives in {town}?",
            "context": f"In {town} there lives a person called {person}. " + "Nothing else is known. " * 2,
            "answers": [person],
        }
        for town, person in zip(words[:40], words[40:], strict=True)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made(**options):
    """Return an evaluation that hides in prose, if any of its tasks needs text: the prose is refused else."""
    needs_text = any(TASKS[name.strip()].needs_text for name in options.get("tasks", "niah_single_2").split(","))
    return Ruler(**{**({"data": "python-docs"} if needs_text else {}), **options})


def planned(session, **options):
    """Return an evaluation that has planned, and its materials."""
    evaluation = made(**options)
    evaluation.plan(session)
    return evaluation, session.memo["materials"]


def run(session, **options):
    """Score every unit as a resumed run would see it; return the summary and the plan."""
    evaluation = made(**options)
    plan = evaluation.plan(session)
    scored = [json.loads(json.dumps(evaluation.score(session, unit))) for unit in plan.units]
    return evaluation.summarize(plan, scored), plan


@pytest.mark.parametrize("lengths", ["2500,3333", "9001"])
def test_every_prompt_fills_its_length_and_is_answerable(questions, lengths):
    qa = {} if lengths == "9001" else {"qa_1": str(questions)}
    evaluation, materials = planned(Session(None, byte_tokenizer()), lengths=lengths, samples=3, **qa)
    for length in evaluation.tested_lengths():
        for name in evaluation.tested_tasks():
            for index in range(3):
                sample = evaluation._sample(materials, name, length, index)
                left = length - len(sample.ids) - sample.room
                assert 0 <= left <= PIECE.get(name, 0), (name, length, left)
                assert sample.ids[0] == 256
                found = read(materials.tokenizer.decode(sample.ids[1:]))
                assert sorted(found) == sorted(sample.expected), (name, length)
    assert len(evaluation.tested_tasks()) == (12 if qa else 11)


def test_prompts_of_a_subword_tokenizer():
    from transformers import AutoTokenizer

    from ctxext.checkpoint.source import resolve_checkpoint

    tokenizer = AutoTokenizer.from_pretrained(resolve_checkpoint("tiny"))
    evaluation, materials = planned(Session(None, tokenizer), lengths="1500,5000", samples=2)
    for length in (1500, 5000):
        for name in evaluation.tested_tasks():
            sample = evaluation._sample(materials, name, length, 1)
            left = length - len(sample.ids) - sample.room
            assert 0 <= left <= PIECE.get(name, 0)
            text = tokenizer.decode(sample.ids, skip_special_tokens=True)
            assert sorted(read(text)) == sorted(sample.expected), (name, length)


def test_a_perfect_model_scores_100_and_a_wrong_one_nothing(questions):
    options = {"length": 2500, "samples": 2, "qa_1": str(questions)}
    perfect, plan = run(answering_session(lambda prompt: " " + ", ".join(read(prompt)), 2), **options)
    names = [name for name in TASKS if name != "qa_2"]
    assert perfect.metrics == {"score": 100.0, "effective_length": 2500, **dict.fromkeys(names, 100.0)}
    assert perfect.details["score_by_length"] == {"2500": 100.0} and not plan.skipped
    assert "left out for want of questions (--qa-1, --qa-2): qa_2" in plan.notes
    wrong, _ = run(answering_session(lambda prompt: " I do not know", 2), **options)
    assert set(wrong.metrics.values()) == {0.0}


def test_scores_tasks_and_lengths_by_hand():
    # Half of what several needles say, the first needle otherwise, and nothing in prompts longer than 1000 bytes.
    def answer(prompt):
        found = read(prompt)
        return "" if len(prompt) > 1000 else " " + ", ".join(found[: max(1, len(found) // 2)])

    summary, plan = run(
        answering_session(answer), lengths="1400,900,1000", samples=4, tasks="niah_single_1,niah_multivalue"
    )
    assert summary.metrics == {
        "score": 50.0,  # 75 at 900 and 1000 tokens, 0 at 1400
        "effective_length": 0,
        "weighted_inc": pytest.approx((75 + 2 * 75 + 3 * 0) / 6),
        "weighted_dec": pytest.approx((3 * 75 + 2 * 75 + 0) / 6),
        "niah_single_1": pytest.approx(200 / 3),
        "niah_multivalue": pytest.approx(100 / 3),
    }
    assert summary.plots[0].x == [900, 1000, 1400] and summary.plots[0].y == [75.0, 75.0, 0.0]
    assert summary.notes == ["score by length: 900: 75.0, 1000: 75.0, 1400: 0.0"]
    assert len(summary.details["items"]) == 24 and summary.details["items"]["900/niah_multivalue/3"] == 50
    easier = Ruler(lengths="1400,900,1000", tasks="vt", threshold=70)
    by_length = {900: 75.0, 1000: 75.0, 1400: 0.0}
    assert easier._metrics({900: {"vt": 75.0}}, by_length)["effective_length"] == 1000
    assert [unit.id for unit in plan.units[:3]] == [
        "900/niah_single_1/0-2",
        "900/niah_single_1/3-3",
        "900/niah_multivalue/0-2",
    ]


def test_string_match_by_hand():
    assert TASKS["niah_multivalue"].score("It is 12, ABC.", ["12", "abc", "34", "56"]) == 0.5
    assert TASKS["vt"].score("nothing", ["A"]) == 0.0
    assert TASKS["qa_1"].score("in PARIS", ["Paris, France", "Paris"]) == 1.0
    assert TASKS["qa_1"].score("in London", ["Paris, France", "Paris"]) == 0.0


def test_the_answers_do_not_depend_on_the_batch(byte_session):
    options = {"length": 1500, "samples": 3, "tasks": "vt,fwe"}
    one, _ = run(byte_session(batch_size=1, initializer_range=0.2), **options)
    three, _ = run(byte_session(batch_size=3, initializer_range=0.2), **options)

    def answers(summary):
        return [row["answer"] for unit in summary.details["answers"] for row in unit["samples"]]

    assert answers(one) == answers(three) and len(set(answers(one))) > 1


def test_a_batch_that_is_halved_after_the_plan_is_honoured():
    session = answering_session(lambda prompt: " " + " ".join(read(prompt)), batch_size=4)
    evaluation = Ruler(length=1500, samples=4, tasks="niah_single_1")
    (unit,) = evaluation.plan(session).units
    session.batch_size = 2
    seen = []
    session.model.register_forward_pre_hook(lambda model, given, named: seen.append(named), with_kwargs=True)
    assert [row["score"] for row in evaluation.score(session, unit)["samples"]] == [1.0] * 4
    assert {len(named["input_ids"]) for named in seen} == {2}


def test_samples_that_do_not_fit_are_counted_and_never_cut(tmp_path, questions):
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    rows[0]["context"] = rows[0]["context"] + "Much more is known. " * 100
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    session = answering_session(lambda prompt: " " + read(prompt)[0])
    summary, plan = run(session, length=1500, samples=50, tasks="qa_1", qa_1=str(questions))
    assert plan.skipped == {"samples_too_long": 1} and summary.metrics["qa_1"] == 100.0
    assert len(summary.details["items"]) == 39
    assert "qa_1: all 40 questions of the file, one sample each" in plan.notes
    with pytest.raises(
        ValueError, match=r"take \d+ tokens, fewer than the \d+ to fill: use a smaller length or a file"
    ):
        planned(session, length=20000, samples=1, tasks="qa_1", qa_1=str(questions))


def test_lengths_that_no_sample_fits_are_refused_together():
    with pytest.raises(
        ValueError, match=r"niah_multikey_3 at 400 tokens: .*; cwe at 400 tokens.*; cwe at 1400 tokens"
    ):
        planned(Session(None, byte_tokenizer()), lengths="400,1400", samples=2)


def test_frequent_words_need_room_to_differ():
    with pytest.raises(ValueError, match="fwe at 530 tokens: .* tokens are too few for three words"):
        planned(Session(None, byte_tokenizer()), length=530, samples=1, tasks="fwe")


def test_no_other_needle_has_the_key_that_is_asked_for(monkeypatch):
    monkeypatch.setattr("ctxext.evals.ruler_tasks.compound_words", lambda draw, count: [draw.choice(["one", "two"])])
    evaluation, materials = planned(Session(None, byte_tokenizer()), length=2000, samples=1, tasks="niah_multikey_2")
    sample = evaluation._sample(materials, "niah_multikey_2", 2000, 0)
    assert needle_answers(materials.tokenizer.decode(sample.ids)) == list(sample.expected)


def test_questions_are_read_in_each_form(tmp_path):
    squad = {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": "A.",
                        "qas": [
                            {"question": "q1", "answers": [{"text": "x"}, {"text": "x"}, {"text": "y"}]},
                            {"question": "q2", "answers": [], "is_impossible": True},
                        ],
                    },
                    {"context": "B.", "qas": [{"question": "q3", "answers": [{"text": "z"}]}]},
                ]
            }
        ]
    }
    (tmp_path / "s.json").write_text(json.dumps(squad))
    read_squad = read_questions(tmp_path / "s.json")
    assert read_squad.paragraphs == ["A.", "B."]
    assert [(item.text, item.answers, item.paragraphs) for item in read_squad.questions] == [
        ("q1", ("x", "y"), (0,)),
        ("q3", ("z",), (1,)),
    ]
    rows = [
        {"question": "several hops", "context": ["B.", "A."], "answers": {"text": ["w"]}},
        {"question": "one", "context": "A.", "answers": "v"},
    ]
    (tmp_path / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
    hops = read_questions(tmp_path / "l.jsonl")
    assert [(item.answers, item.paragraphs) for item in hops.questions] == [(("w",), (0, 1)), (("v",), (1,))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "q", "context": "c", "answers": ["a"]}\n{"question": "q"', "line 2, is not SQuAD-style"),
        ('{"question": "q", "answers": ["a"]}', r"line 1, is not SQuAD-style \(no 'context'\)"),
        ('{"question": "q", "context": "c", "answers": []}', "has no question with an answer"),
    ],
)
def test_files_that_hold_no_questions(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_questions(path)
    with pytest.raises(ValueError, match="there is no file .*gone.json: give a SQuAD-style"):
        read_questions(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 5, "lengths": "5,6"}, "--length and --lengths exclude each other"),
        ({"lengths": "4k"}, "--lengths '4k' must be numbers such as 4096,8192"),
        ({"lengths": "8,8"}, "the lengths 8, 8 must be different"),
        ({"tasks": "vt,niah_singel_1"}, "has no 'niah_singel_1'; did you mean 'niah_single_1'"),
        ({"tasks": "qa_1,vt"}, "--tasks qa_1 needs questions: give --qa-1 FILE"),
        ({"tasks": "vt", "qa_2": "x"}, "--qa-2 has no effect: --tasks leaves qa_2 out"),
        (
            {"tasks": "vt", "data": "x", "column": "y"},
            "--data has no effect: no .* reads text; --column",
        ),
        ({"samples": 0, "threshold": 101.0}, "--samples 0 must be at least 1; --threshold 101.0 is a percentage"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        Ruler(**options)


def test_the_protocol_spells_out_lengths_and_tasks(questions):
    assert Ruler(length=4096, tasks="vt").protocol_id() == Ruler(tasks="vt").protocol_id()
    assert (
        Ruler(lengths="8192,4096", tasks="vt, cwe")
        .protocol_id()
        .startswith("ruler-v1:lengths=4096+8192,tasks=vt+cwe,samples=20,")
    )
    assert Ruler(qa_1=str(questions)).protocol_id() != Ruler().protocol_id()
    assert Ruler(lengths="8192,4096").evaluated_length() == 8192


def test_words_cannot_be_taken_for_one_another():
    assert not [(a, b) for a in ADJECTIVES for b in ADJECTIVES if a != b and a.endswith(b)]
    assert not [(a, b) for a in NOUNS for b in NOUNS if a != b and a.startswith(b)]
    assert len(set(compound_words(random.Random(0), 500))) == 500
    words = made_up_words(random.Random(0))
    five = [next(words) for _ in range(12 * 5 * 12 * 5 * 12)]
    assert len(set(five)) == len(five) and {len(word) for word in five} == {5} and len(next(words)) == 7


def test_zeta_frequencies_by_hand():
    # 1000 / (pi^2 / 6) = 607.9, of which 1, 1/4, 1/9, 1/16
    assert zeta_counts(1000, 4) == [607, 151, 67, 37]


def test_the_result_file(byte_checkpoint, tmp_path):
    evaluation = Ruler(lengths="1400,1500", samples=1, tasks="vt")
    result, _ = run_evaluation(evaluation, byte_checkpoint(), output=tmp_path / "r.json")
    assert result.metrics["score"] == 0.0 and result.metrics["effective_length"] == 0 and result.corpus is None
    text = run_evaluation(
        Ruler(length=500, samples=1, tasks="niah_single_2", data="python-docs"),
        byte_checkpoint(),
        output=tmp_path / "t.json",
    )[0]
    assert text.corpus["name"] == "python-docs" and text.corpus["source"]["kind"] == "offline"


def test_importing_them_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'datasets', 'matplotlib', 'numpy'}"
    modules = "ctxext.evals.ruler, ctxext.evals.retrieval, ctxext.evaluation.effective, ctxext.evaluation.heatmap"
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
