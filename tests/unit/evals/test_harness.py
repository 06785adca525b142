"""lm-eval on a tiny model: its scores against plain loops, and samples that are too long are never cut."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml

from ctxext.checkpoint.patch import patch_checkpoint
from ctxext.evals.harness import OWN_TASKS, PI_TASKS, Harness
from ctxext.evaluation.base import Plan, Session, Summary, build
from ctxext.evaluation.loading import RunSettings, load
from ctxext.evaluation.runner import run_evaluation

WINDOW = 128
QUESTIONS = [f"Say {'more ' * (i % 4)}number {i}:" for i in range(8)]
CHOICES = ["ab", "cde", "f"]
ANSWERS = [i % 3 for i in range(8)]
PEAKED = {"initializer_range": 0.3}


@pytest.fixture(autouse=True)
def own_tasks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep lm-eval from indexing its 14,000 tasks (20 seconds), and datasets from the user's cache."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager", lambda **given: TaskManager(**{**given, "include_defaults": False})
    )


@pytest.fixture
def write_task(tmp_path: Path) -> Callable[..., Harness]:
    """Return a function that writes task files over rows, and the evaluation that reads them."""
    folder = tmp_path / "tasks"
    folder.mkdir()

    def write(name: str, rows: list[dict[str, Any]], **config: Any) -> Path:
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {
            **{"task": name, "dataset_path": "json", "test_split": "test", "metadata": {"version": 1.5}},
            **{"dataset_kwargs": {"data_files": {"test": str(data), "train": str(data)}}},
            **config,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
        return folder

    return write


def choice_task(
    write: Callable[..., Path], questions: list[str] = QUESTIONS, name: str = "choice", **more: Any
) -> Path:
    rows = [
        {"question": question, "options": CHOICES, "answer": answer}
        for question, answer in zip(questions, ANSWERS, strict=False)
    ]
    return write(
        name,
        rows,
        output_type="multiple_choice",
        doc_to_choice="{{options}}",
        doc_to_target="{{answer}}",
        **{"doc_to_text": "{{question}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}], **more},
    )


def run(evaluation: Harness, session: Any) -> tuple[Plan, Summary]:
    plan = evaluation.plan(session)
    scored = [json.loads(json.dumps(evaluation.score(session, unit))) for unit in plan.units]
    return plan, evaluation.summarize(plan, scored)


def log_likelihood(session: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The probability of a continuation, one forward over the two, and whether every token is the likeliest."""
    ids = session.tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
    count = len(session.tokenizer(continuation, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logits = session.model(input_ids=torch.tensor([ids[:-1]])).logits[0, -count:].double().log_softmax(-1)
    targets = torch.tensor(ids[-count:])
    return float(logits.gather(-1, targets[:, None]).sum()), bool((logits.argmax(-1) == targets).all())


def accuracy(session: Any, questions: list[str]) -> tuple[float, float]:
    """The share of right answers by log-likelihood, and by log-likelihood for each letter."""
    right, right_by_letter = [], []
    for question, answer in zip(questions, ANSWERS, strict=False):
        found = [log_likelihood(session, question, f" {choice}")[0] for choice in CHOICES]
        by_letter = [value / len(choice) for value, choice in zip(found, CHOICES, strict=True)]
        right.append(found.index(max(found)) == answer)
        right_by_letter.append(by_letter.index(max(by_letter)) == answer)
    return sum(right) / len(right), sum(right_by_letter) / len(right)


def greedy(session: Any, prompt: str, count: int) -> str:
    ids = session.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    start = len(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(session.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == session.tokenizer.eos_token_id:
            break
    return str(session.tokenizer.decode(ids[start:], skip_special_tokens=True))


def test_multiple_choice(byte_session, write_task) -> None:
    session = byte_session(**PEAKED)
    folder = choice_task(write_task)
    plan, summary = run(Harness(tasks="choice", include_path=str(folder)), session)
    acc, acc_norm = accuracy(session, QUESTIONS)
    assert summary.metrics == {"choice/acc": acc, "choice/acc_norm": acc_norm} and acc != acc_norm
    task = summary.details["tasks"]["choice"]
    assert (task["version"], task["num_fewshot"], task["samples"]) == (1.5, 0, 8)
    assert task["stderr"]["acc_stderr,none"] == pytest.approx(math.sqrt(acc * (1 - acc) / 7))
    # The longest choice of each sample, without its last letter, which is predicted.
    assert summary.tokens_scored == plan.corpus["tokens"] == sum(len(question) + 3 for question in QUESTIONS)
    few = run(Harness(tasks="choice", include_path=str(folder), max_samples=3), session)[1]
    assert few.metrics["choice/acc"] == accuracy(session, QUESTIONS[:3])[0]
    assert few.details["tasks"]["choice"]["samples"] == 3


def test_log_likelihood_generation_and_their_group(byte_session, write_task) -> None:
    session = byte_session(**PEAKED)
    likely = [greedy(session, question, 3) for question in QUESTIONS]
    rows = [
        {"question": question, "target": text if number % 2 else "xyz"}
        for number, (question, text) in enumerate(zip(QUESTIONS, likely, strict=True))
    ]
    asked = {"doc_to_text": "{{question}}", "doc_to_target": "{{target}}", "target_delimiter": ""}
    metrics = [{"metric": "acc"}, {"metric": "perplexity"}]
    folder = write_task("likelihood", rows, output_type="loglikelihood", metric_list=metrics, **asked)
    stop = {"until": [likely[1][1]], "max_gen_toks": 3, "do_sample": False}
    exact = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    write_task("generation", rows, output_type="generate_until", generation_kwargs=stop, metric_list=exact, **asked)
    choice_task(write_task)
    group = {
        "group": "both",
        "task": ["choice", "likelihood"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}],
    }
    (folder / "both.yaml").write_text(yaml.safe_dump(group))
    summary = run(Harness(tasks="both,generation", include_path=str(folder)), session)[1]
    found = [log_likelihood(session, row["question"], row["target"]) for row in rows]
    acc = sum(hit for _, hit in found) / 8
    assert 0 < acc < 1 and summary.metrics["likelihood/acc"] == acc
    perplexity = math.exp(-sum(value for value, _ in found) / 8)
    assert summary.metrics["likelihood/perplexity"] == pytest.approx(perplexity, rel=1e-4)
    hits = [text.split(likely[1][1])[0] == row["target"] for text, row in zip(likely, rows, strict=True)]
    assert not hits[1] and summary.metrics["generation/exact_match"] == sum(hits) / 8
    assert summary.metrics["both/acc"] == pytest.approx((acc + accuracy(session, QUESTIONS)[0]) / 2)


def lengths_read(session: Any) -> list[int]:
    lengths: list[int] = []
    embeddings = session.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].shape[1]))
    return lengths


def test_samples_beyond_the_window_are_refused_or_skipped_but_never_cut(byte_session, write_task) -> None:
    session = byte_session(**PEAKED)
    # " cde" without its last letter is three tokens: 125 + 3 just fits, 126 + 3 does not.
    questions = [*QUESTIONS[:5], "x" * 125, "y" * 126, "z" * 300]
    folder = choice_task(write_task, questions)
    evaluation = Harness(tasks="choice", include_path=str(folder))
    with pytest.raises(ValueError, match=r"2 of 8 samples of choice exceed the window of 128 .*needs 303.*--overlong"):
        evaluation.plan(session)
    lengths = lengths_read(session)
    skipping = Harness(tasks="choice", include_path=str(folder), overlong="skip")
    plan, summary = run(skipping, session)
    assert plan.skipped == {"samples_longer_than_the_window": 2} and max(lengths) == WINDOW
    assert plan.notes[0] == "choice: 2 of 8 samples exceed 128 tokens and are not scored"
    assert summary.metrics["choice/acc"] == accuracy(session, questions[:6])[0]
    assert summary.details["tasks"]["choice"]["samples"] == plan.corpus["documents"] == 6
    assert skipping.protocol_id() != evaluation.protocol_id()
    longer = run(Harness(tasks="choice", include_path=str(folder), max_length=400), session)[0]
    assert not longer.skipped and longer.corpus["documents"] == 8
    with pytest.raises(ValueError, match="8 of 8 samples of choice exceed the window of 10 tokens"):
        Harness(tasks="choice", include_path=str(folder), max_length=10, overlong="skip").plan(session)


def test_a_generation_needs_room_for_its_answer(byte_session, write_task) -> None:
    rows = [{"question": "q" * size, "target": "t"} for size in (100, 118, 119)]
    options = {"until": ["\n"], "max_gen_toks": 10}
    asked = {"doc_to_text": "{{question}}", "doc_to_target": "{{target}}"}
    folder = write_task("generation", rows, output_type="generate_until", generation_kwargs=options, **asked)
    with pytest.raises(ValueError, match=r"1 of 3 samples .* \(the longest needs 129\)"):
        Harness(tasks="generation", include_path=str(folder)).plan(byte_session())


def test_leaving_samples_out_changes_the_examples_of_others_and_still_none_is_cut(byte_session, write_task) -> None:
    session = byte_session(**PEAKED)
    questions = [f"{letter}" * (10 + 13 * number) for number, letter in enumerate("abcdefgh")]
    folder = choice_task(write_task, questions, fewshot_split="train")
    lengths = lengths_read(session)
    evaluation = Harness(tasks="choice", include_path=str(folder), num_fewshot=1, overlong="skip")
    plan, summary = run(evaluation, session)
    kept = plan.units[0].work.kept
    assert 0 < len(kept) < 8 and plan.skipped["samples_longer_than_the_window"] == 8 - len(kept)
    assert max(lengths) <= WINDOW and summary.details["tasks"]["choice"]["num_fewshot"] == 1
    assert run(evaluation, byte_session(**PEAKED))[1].metrics == summary.metrics


def test_a_resumed_run_scores_only_the_tasks_that_are_left(byte_checkpoint, write_task, tmp_path, monkeypatch) -> None:
    choice_task(write_task, name="first")
    folder = choice_task(write_task, QUESTIONS[:4], name="second")
    evaluation = Harness(tasks="first,second", include_path=str(folder))
    scored: list[str] = []
    original = Harness.score

    def counted(self: Harness, session: Any, unit: Any) -> dict[str, Any]:
        if fails and unit.id == "second":
            raise KeyboardInterrupt
        scored.append(unit.id)
        return original(self, session, unit)

    monkeypatch.setattr(Harness, "score", counted)
    fails = True
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(evaluation, byte_checkpoint(), output=tmp_path / "r.json")
    fails = False
    resumed, _ = run_evaluation(evaluation, byte_checkpoint(), output=tmp_path / "r.json")
    assert scored == ["first", "second"]
    whole, _ = run_evaluation(evaluation, byte_checkpoint(), output=tmp_path / "w.json")
    assert resumed.metrics == whole.metrics and resumed.details == whole.details
    assert resumed.details["lm_eval"] in resumed.notes[0] and resumed.details["lm_eval"] in resumed.protocol_id


def test_race_is_asked_question_by_question(byte_session, monkeypatch) -> None:
    asked = []
    row = {"article": "It rains.", "question": "What?", "options": ["Sun", "Rain", "Fog", "Ice"], "answer": "B"}

    def load_dataset(path: str, name: str, **_: Any) -> Any:
        asked.append((path, name))
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), datasets.Dataset.from_list([row])))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    plan = Harness(tasks="race_middle,race_high").plan(byte_session())
    assert asked == [("ehovy/race", "middle"), ("ehovy/race", "high")]
    for unit in plan.units:
        task = unit.work.task
        context = "Article: It rains.\n\nQuestion: What?\nAnswer:"
        assert [instance.args for instance in task.instances] == [(context, f" {text}") for text in row["options"]]
        assert task.doc_to_target(row) == 1 and unit.id == task.config.task


def test_docstrings_are_chosen_offline(byte_session) -> None:
    """The pinned wheel's own text: sympy/assumptions/facts.py is the first held-out file with four docstrings."""
    session = byte_session(max_position_embeddings=2048)
    plan, summary = run(Harness(tasks="docstring_choice", max_samples=5), session)
    task = plan.units[0].work.task
    first, fifth = task.test_docs()[0], task.test_docs()[4]
    assert first["signature"] == "def get_known_facts(x=None):"
    assert first["choices"][first["answer"]] == "Facts between unary predicates."
    assert fifth["answer"] == 0 and all(len(set(row["choices"])) == 4 for row in task.test_docs())
    assert task.instances[1].args == ('def get_known_facts(x=None):\n    """', first["choices"][1])
    assert plan.corpus["documents"] == 5
    assert list(summary.metrics) == ["docstring_choice/acc", "docstring_choice/acc_norm"]


def test_a_model_whose_frequencies_depend_on_the_length_needs_one(byte_checkpoint, write_task, tmp_path) -> None:
    folder = choice_task(write_task)
    patched = patch_checkpoint(byte_checkpoint(), tmp_path / "dynamic", method="dynamic", length=256)["output"]
    loaded = load(Path(patched), RunSettings())
    session = Session(loaded.model, loaded.tokenizer, 2)
    with pytest.raises(ValueError, match=r"\(dynamic\) depend on the length: give --max-length"):
        Harness(tasks="choice", include_path=str(folder)).plan(session)
    given = Harness(tasks="choice", include_path=str(folder), max_length=200)
    assert given.evaluated_length() == 200 and given.plan(session).corpus["documents"] == 8
    assert Harness().evaluated_length() is None


@pytest.mark.parametrize("method", ["yarn", "alibi"])
def test_patched_models_are_read_as_they_are(byte_checkpoint, write_task, tmp_path, method) -> None:
    folder = choice_task(write_task, [*QUESTIONS[:7], "x" * 300])
    patched = patch_checkpoint(byte_checkpoint(**PEAKED), tmp_path / method, method=method, length=512)["output"]
    loaded = load(Path(patched), RunSettings())
    session = Session(loaded.model, loaded.tokenizer, 2)
    plan, summary = run(Harness(tasks="choice", include_path=str(folder)), session)
    acc, acc_norm = accuracy(session, [*QUESTIONS[:7], "x" * 300])
    assert summary.metrics == {"choice/acc": acc, "choice/acc_norm": acc_norm} and not plan.skipped
    assert (session.model.config.model_type == "ctxext_llama") == (method == "alibi")


def test_what_is_refused(byte_session, write_task, monkeypatch) -> None:
    with pytest.raises(ValueError, match="--tasks is empty.*--max-samples -1.*'cut' .*refuse, skip.*'4k' .*no folder"):
        Harness(tasks=" ,", max_samples=-1, overlong="cut", max_seq_lengths="4k", include_path="/nowhere")
    folder = choice_task(write_task, num_fewshot=0)
    with pytest.raises(ValueError, match=r"no task 'choise'; did you mean 'choice'\?; .* no task 'nothing'"):
        Harness(tasks="choise,nothing", include_path=str(folder)).plan(byte_session())
    with pytest.raises(ValueError, match="--num-fewshot 2 has no effect on choice, which fixes it at 0"):
        Harness(tasks="choice", include_path=str(folder), num_fewshot=2).plan(byte_session())
    with pytest.raises(ValueError, match="--protocol pi fixes --num-fewshot 0"):
        build(Harness, {"num_fewshot": 1}, "pi")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"harness needs lm-eval, .* `pip install 'ctxext\[eval\]'`"):
        Harness(tasks="choice", include_path=str(folder)).plan(byte_session())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"doc_to_text": "{{nothing}}"}, "--tasks choice cannot be loaded: UndefinedError: 'nothing' is undefined"),
        # lm-eval tries the first sample while it loads a task
        (
            {"doc_to_text": f"{{{{question if question == {QUESTIONS[0]!r} else nothing}}}}"},
            "no samples can be made of choice: UndefinedError: 'nothing' is undefined",
        ),
        ({"metric_list": [{"metric": "whatever"}]}, "--tasks choice cannot be loaded: "),
        ({"dataset_kwargs": {"data_files": {"test": "/nowhere.jsonl"}}}, "--tasks choice cannot be loaded: .*nowhere"),
    ],
)
def test_faults_of_a_users_task_are_named(byte_session, write_task, changes, message) -> None:
    folder = choice_task(write_task, **changes)
    with pytest.raises(ValueError, match=message):
        Harness(tasks="choice", include_path=str(folder)).plan(byte_session())


def test_lengths_for_tasks_that_make_no_samples_are_refused(byte_session, write_task) -> None:
    with pytest.raises(ValueError, match="--max-seq-lengths has no effect: no task of --tasks choice makes"):
        Harness(tasks="choice", include_path=str(choice_task(write_task)), max_seq_lengths="64").plan(byte_session())


@pytest.mark.slow
def test_the_papers_tasks_and_the_long_suites_are_there(monkeypatch) -> None:
    from lm_eval.tasks.manager import TaskManager

    known = set(TaskManager(include_path=OWN_TASKS).all_tasks)
    assert {*PI_TASKS.split(","), "race", "ruler", "longbench", "infinitebench"} <= known
