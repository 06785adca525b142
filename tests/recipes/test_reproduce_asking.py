"""`reproduce question-answering`: planted documents, its claims on made-up grids, and the whole chain (slow)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.data.sources import Source
from ctxext.data.tokens import TokenRules, open_store
from ctxext.recipes.plant_questions import Planting, write
from ctxext.reproduce import asking
from ctxext.reproduce.asking import Settings, check, run_grid, write_report

KEY = "The pass key is {key}. Remember it. {key} is the pass key."


def test_planted_documents_are_a_source_of_questions(tmp_path: Path) -> None:
    path = write(Planting(output=str(tmp_path / "asked.jsonl"), documents=6, length=400, repeats=3, distractors=1))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 6 and len({row["asked"] for row in rows}) == 6
    for row in rows:
        question, key = row["asked"].rsplit(" ", 1)
        assert question == "\nWhat is the pass key? The pass key is" and len(key) == 5
        assert row["document"].count(KEY.format(key=key)) == 3 and row["document"].count("key is") == 4
    again = write(Planting(output=str(tmp_path / "again.jsonl"), documents=6, length=400, repeats=3, distractors=1))
    assert again.read_bytes() == path.read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(resolve_checkpoint("tiny"))
    source = Source(data=str(path), kind="completion", prompt_column="document", completion_column="asked")
    store = open_store(source, tokenizer, TokenRules(), tmp_path / "cache")
    assert store.counted is not None
    lengths = [int(length) for length in store.lengths]
    assert all(200 - 2 * 4 <= length - 20 <= 400 + 2 * 4 for length in lengths) and len(set(lengths)) > 3
    first = store.tokens[: store.offsets[1]][store.counted[: store.offsets[1]] == 1]
    assert tokenizer.decode(first) == rows[0]["asked"] + tokenizer.eos_token


def test_what_cannot_be_planted() -> None:
    with pytest.raises(ValueError, match="documents 0 must be at least 1; repeats 0 .*; fact 'needles' is none of"):
        Planting(output="x", documents=0, repeats=0, fact="needles")


def grid(*rows: list[float]) -> dict[int, list[dict[str, Any]]]:
    """Return a grid of exact matches: a row for each K_train, a column for each K_infer."""
    rates = Settings().rates
    cells = [
        {str(rate): {"exact_match": v, "share_read": 0.5} for rate, v in zip(rates, row, strict=True)} for row in rows
    ]
    return {rate: [{"rate": rate, "seed": 0, "cells": cell}] for rate, cell in zip(rates, cells, strict=True)}


def test_claims_by_hand(tmp_path: Path) -> None:
    def verdicts(*rows: list[float]) -> list[bool | None]:
        return [claim.holds for claim in check(grid(*rows), Settings())]

    assert verdicts([0.1, 0.2, 0.3], [0.2, 0.3, 0.4], [0.3, 0.4, 0.5]) == [True, True, True]
    assert verdicts([0.1, 0.2, 0.3], [0.35, 0.3, 0.4], [0.36, 0.4, 0.5]) == [False, True, True]
    assert verdicts([0.1, 0.2, 0.3], [0.2, 0.3, 0.4], [0.3, 0.51, 0.5]) == [False, True, False]
    assert verdicts([0.1, 0.2, 0.3], [0.2, 0.3, 0.6], [0.3, 0.4, 0.5]) == [True, False, False]
    # Of a rate in between, the claim is about the smaller ones alone: 0.9 in the last column is no fault.
    assert verdicts([0.0, 0.0, 0.9], [0.1, 0.2, 0.9], [0.2, 0.3, 0.9]) == [True, True, True]
    made = grid([0.1, 0.2, 0.3], [0.2, 0.3, 0.4], [0.3, 0.4, 0.5])
    answer = write_report(made, check(made, Settings()), Settings(), tmp_path)
    assert "| K_train = 256 | 0.200 (0.50) | 0.300 (0.50) | 0.400 (0.50) |" in Path(answer["report"]).read_text()


@pytest.mark.slow
def test_a_model_is_tuned_asked_and_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Settings(rates=(0, 128), memory=128, length=512, documents=8, steps=3, rows=2, depths=2, trials=1)
    found = run_grid(small, (0,), tmp_path / "out", jobs=1)
    assert set(found) == {0, 128} and set(found[0][0]["cells"]) == {"0", "128"}
    assert found[0][0]["cells"]["0"]["share_read"] == 1.0 > found[0][0]["cells"]["128"]["share_read"]
    assert (tmp_path / "out" / "models" / "K-128-seed-0" / "final" / "config.json").exists()
    monkeypatch.setattr(asking, "run_apart", lambda module, jobs, *rest: jobs and pytest.fail("tuned again"))
    assert run_grid(small, (0,), tmp_path / "out", jobs=1) == found
