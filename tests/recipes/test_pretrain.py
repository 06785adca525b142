"""The recipe of the tiny model: its diet leaves out what the model is tested with, and it runs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from ctxext.data.offline import sympy_source
from ctxext.evals.passkey import FILLER, HEADER, QUESTION
from ctxext.recipes import pretrain

SMALL = pretrain.Organism(vocabulary=600, layers=1, width=32, heads=2, kv_heads=1, mlp_width=32)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [document.text for document in itertools.islice(sympy_source("train"), 40)]


@pytest.fixture(scope="module")
def prompts(texts: list[str]) -> pretrain.PasskeyPrompts:
    tokenizer = pretrain.train_tokenizer([*texts, *pretrain.PROSE], SMALL)
    return pretrain.PasskeyPrompts(tokenizer, SMALL.window, seed=3)


def test_prompts_fit_the_window_and_leave_out_keys_and_offsets_of_the_test(prompts: pretrain.PasskeyPrompts) -> None:
    tokenizer = prompts.maker.tokenizer
    lengths, distances = set(), set()
    for index in range(400):
        ids = prompts.row(index)
        text = tokenizer.decode(ids)
        key = int(re.findall(r"The pass key is (\d{5})\.", text)[0])
        assert not pretrain.is_held_out(key)
        assert text.startswith(pretrain.END + HEADER) and text.endswith(f"{QUESTION} {key}{pretrain.END}")
        assert len(ids) <= SMALL.window
        before, after = re.split(r"\nThe pass key is \d{5}\. Remember it\. \d{5} is the pass key\.\n", text)
        for filler in (before.removeprefix(pretrain.END + HEADER), after.split(QUESTION)[0]):
            assert filler in FILLER * 9 and not filler.startswith(FILLER[:12])
        lengths.add(len(ids))
        distances.add(len(ids) - len(tokenizer(before, add_special_tokens=False)["input_ids"]))
    assert max(lengths) > 0.95 * SMALL.window and len(distances) > 50
    assert prompts.row(7) == prompts.row(7) != prompts.row(8)


def test_one_key_in_ten_is_held_out() -> None:
    share = sum(map(pretrain.is_held_out, range(10000, 20000))) / 10000
    assert 0.09 < share < 0.11


def test_it_runs_and_saves_a_model_in_both_dialects(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain, "sympy_source", lambda split: (Text(text) for text in texts))
    changes = {"max_steps": 3, "torch_compile": False, "per_device_train_batch_size": 2, "bf16": False}
    args = TrainingArguments(str(tmp_path / "run"), **{**pretrain.DEFAULTS, **changes, "disable_tqdm": True})
    final = pretrain.pretrain(SMALL, args)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    assert str(model.dtype) == "torch.bfloat16" and model.config.max_position_embeddings == SMALL.window
    assert len(tokenizer) == SMALL.vocabulary == model.config.vocab_size
    assert tokenizer("x = 12345", add_special_tokens=False).tokens()[-5:] == list("12345")
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id == 0
    assert '"rope_theta": 10000.0' in (final / "config.json").read_text()


@dataclasses.dataclass
class Text:
    text: str


def test_a_shape_that_cannot_be_is_refused_with_every_reason() -> None:
    with pytest.raises(ValueError, match=r"width 250 must be a multiple of heads 4; passkeys 2 is a share: 0 to 1"):
        pretrain.Organism(width=250, passkeys=2)
