"""Summaries against a plain loop that samples token by token, ROUGE by hand, and what a prompt holds."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import BOS, EOS, byte_tokenizer

from ctxext.data.sources import Source
from ctxext.data.supervised import summary_prompt
from ctxext.data.tokens import TokenRules, open_store
from ctxext.evals.summarization import PROMPT_ROOM, Summarization
from ctxext.evaluation.base import Plan, build

# Peaked enough that a nucleus leaves most tokens out.
PEAKED = {"initializer_range": 0.3, "max_position_embeddings": 512}
ROWS = [("first é " * 20, "one two"), ("second " * 9, "three"), ("third", ""), ("fourth " * 30, "four five")]
KEPT = [0, 1, 3]


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"document": d, "summary": s}) + "\n" for d, s in ROWS))
    return str(path)


def run(evaluation: Summarization, session: Any) -> tuple[Plan, dict[str, Any]]:
    """Plan and score; return the documents in details by name."""
    plan = evaluation.plan(session)
    scored = [json.loads(json.dumps(evaluation.score(session, unit))) for unit in plan.units]
    return plan, evaluation.summarize(plan, scored).details["documents"]


def plain_summary(session: Any, evaluation: Summarization, name: str, document: str) -> list[int]:
    """Sample one document's summary with neither cache, batch nor padding, in float64."""
    text = document.encode()[: evaluation.truncate].decode()
    ids = [BOS, *session.tokenizer(summary_prompt(text), add_special_tokens=False)["input_ids"]]
    start, draw = len(ids), random.Random(f"{evaluation.seed}/{name}")
    while len(ids) - start < evaluation.max_new_tokens:
        with torch.no_grad():
            logits = session.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()
        if evaluation.temperature == 0:
            token = int(logits.argmax())
        else:
            weights = np.exp((logits - logits.max()) / evaluation.temperature)
            order = np.argsort(-weights, kind="stable")
            mass = np.cumsum(weights[order] / weights.sum())
            nucleus = order[: int(np.searchsorted(mass, evaluation.top_p)) + 1]
            inside = np.cumsum(weights[nucleus] / weights[nucleus].sum())
            token = int(nucleus[np.searchsorted(inside, draw.random(), side="right")])
        if token == EOS:
            break
        ids.append(token)
    return ids[start:]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.5, "top_p": 0.95}, {"temperature": 2.0, "top_p": 0.3}, {}])
def test_summaries_are_those_of_a_plain_loop(byte_session, data, family, batch_size, sampling) -> None:
    session = byte_session(family, batch_size=batch_size, **PEAKED)
    greedy = {"temperature": 0.0, "top_p": 1.0}
    evaluation = Summarization(data=data, truncate=100, max_new_tokens=12, seed=3, **(sampling or greedy))
    plan, documents = run(evaluation, session)
    assert len(plan.units) == -(-3 // batch_size)
    for index in KEPT:
        name = f"pairs.jsonl:{index + 1}"
        wanted = plain_summary(session, evaluation, name, ROWS[index][0])
        assert documents[name]["summary"] == session.tokenizer.decode(wanted, skip_special_tokens=True).strip()
        assert documents[name]["tokens"] == len(wanted)


def test_another_seed_or_document_draws_otherwise(byte_session, tmp_path) -> None:
    path = tmp_path / "same.jsonl"
    path.write_text(
        json.dumps({"document": "same", "summary": "s"}) + "\n" + json.dumps({"document": "same", "summary": "s"})
    )
    options = {"data": str(path), "max_new_tokens": 20, "temperature": 1.0}
    first, again, other = (run(Summarization(seed=seed, **options), byte_session())[1] for seed in (0, 0, 1))
    assert first == again
    assert len({value["summary"] for found in (first, other) for value in found.values()}) == 4


def test_the_prompt_is_that_of_training_and_its_cuts_are_counted(byte_session, data, tmp_path) -> None:
    evaluation = Summarization(data=data, truncate=100)
    plan = evaluation.plan(byte_session(batch_size=1))
    prompts = {unit.work[0].pair.id: unit.work[0].prompt for unit in plan.units}
    assert [unit.work[0].pair.id for unit in plan.units] == ["pairs.jsonl:1", "pairs.jsonl:4", "pairs.jsonl:2"]
    source = Source(data=data, kind="summary", document_tokens=100)
    store = open_store(source, byte_tokenizer(), TokenRules(), tmp_path / "cache")
    for number, index in enumerate(KEPT):
        tokens = store.tokens[store.offsets[number] : store.offsets[number + 1]].tolist()
        counted = store.counted[store.offsets[number] : store.offsets[number + 1]].tolist()
        assert tokens[: counted.index(1)] == prompts[f"pairs.jsonl:{index + 1}"]
    # 180 and 210 bytes are cut to 100; "é" has two, so that the cut falls between characters here.
    assert plan.skipped == {"documents_without_a_summary_of_1_words": 1, "tokens_cut_off_documents": 80 + 110}
    assert plan.notes[0] == "2 of 3 documents cut to their first 100 tokens, by the protocol"
    assert plan.corpus["documents"] == 3 and plan.corpus["tokens"] == 3 * (1 + 92) + 100 + 100 + 63
    assert (
        max(len(prompt) for prompt in prompts.values()) + 1000 <= evaluation.evaluated_length() == 1100 + PROMPT_ROOM
    )


def test_rouge_by_hand(byte_session, tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.jsonl"
    pairs = [("d", "the cats sat on the mat"), ("e", "a b\nc d")]
    path.write_text("".join(json.dumps({"document": d, "summary": s}) + "\n" for d, s in pairs))
    answers = {"a.jsonl:1": " the cat sat ", "a.jsonl:2": "c d\na b"}
    session = byte_session()
    encode = lambda text: session.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    monkeypatch.setattr(
        Summarization, "_generate", lambda self, _, jobs: [encode(answers[job.pair.id]) for job in jobs]
    )
    evaluation = Summarization(data=str(path))
    plan = evaluation.plan(session)
    summary = evaluation.summarize(plan, [evaluation.score(session, unit) for unit in plan.units])
    first, second = (summary.details["documents"][name] for name in answers)
    assert first["summary"] == "the cat sat"
    # Stemmed, all three words are among the six; of two bigrams both are among five; the sequence has three in order.
    assert first["rouge1"] == pytest.approx(100 * 2 * 1 * 0.5 / 1.5) == first["rougeL"]
    assert first["rouge2"] == pytest.approx(100 * 2 * 1 * 0.4 / 1.4)
    # Over the whole text only half the words are in order, though every line is found.
    assert (second["rouge1"], second["rougeL"]) == (100, 50) and second["rouge2"] == pytest.approx(200 / 3)
    means = [(first[key] + second[key]) / 2 for key in ("rouge1", "rouge2", "rougeL")]
    assert list(summary.metrics) == ["rouge_geometric_mean", "rouge1", "rouge2", "rougeL"]
    assert list(summary.metrics.values()) == pytest.approx([np.prod(means) ** (1 / 3), *means])
    assert summary.tokens_scored == 13 + 7


def test_the_models_own_generation_config_has_no_say_and_stays(byte_session, data) -> None:
    def summaries(**own: Any) -> dict[str, Any]:
        session = byte_session(**PEAKED)
        session.model.generation_config.update(**own)
        before = session.model.generation_config
        found = run(Summarization(data=data, truncate=50, max_new_tokens=10), session)[1]
        assert session.model.generation_config is before
        return found

    assert summaries() == summaries(repetition_penalty=5.0, min_new_tokens=10, do_sample=True, top_k=1)


def test_a_token_that_ends_a_summary_is_not_part_of_it(byte_session, data) -> None:
    session = byte_session(**PEAKED)
    evaluation = Summarization(data=data, truncate=50, max_new_tokens=10, temperature=0.0)
    name = "pairs.jsonl:2"
    whole = plain_summary(session, evaluation, name, ROWS[1][0])
    session.model.generation_config.eos_token_id = [EOS, whole[4]]
    assert run(evaluation, session)[1][name]["tokens"] == whole.index(whole[4])


def test_what_is_part_of_the_protocol() -> None:
    one = Summarization()
    assert one.protocol_id() == Summarization(data="docstrings", limit=3, split="train").protocol_id()
    assert one.protocol_id() == build(Summarization, {}, "pi").protocol_id()
    assert (
        len({Summarization(**{key: 1}).protocol_id() for key in ("truncate", "max_new_tokens", "seed", "top_p")}) == 4
    )
    greedy = Summarization(temperature=0.0)
    assert greedy.protocol_id() == Summarization(temperature=0.0, top_p=0.5, seed=9).protocol_id()
    with pytest.raises(ValueError, match="--protocol pi fixes --truncate 15000"):
        build(Summarization, {"truncate": 2048}, "pi")


def test_what_is_refused(byte_session, tmp_path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="--truncate 0 .*--limit -1 .*--temperature -1 .*--top-p 2 .*--bos 'x'"):
        Summarization(truncate=0, limit=-1, temperature=-1, top_p=2, bos="x")
    path = tmp_path / "empty.jsonl"
    path.write_text(json.dumps({"document": "", "summary": "s"}) + "\n")
    with pytest.raises(ValueError, match="no document of .*empty.jsonl has a summary of 1 words"):
        Summarization(data=str(path)).plan(byte_session())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs rouge-score, which is not installed: pip install 'ctxext\[eval\]'"):
        Summarization(data=str(path)).plan(byte_session())


def test_importing_it_imports_no_model() -> None:
    heavy = "{'torch', 'transformers', 'lm_eval', 'rouge_score', 'datasets'}"
    code = f"import sys, ctxext.evals.harness, ctxext.evals.summarization; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
