"""The shipped tiny model: small, whole, and able to retrieve a passkey wherever it stands in the window."""

from __future__ import annotations

import json
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.checkpoint.doctor import doctor
from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.evals.passkey import LARGEST_KEY, SMALLEST_KEY, PromptMaker, is_hit, spread
from ctxext.recipes.pretrain import is_held_out

DEPTHS, TRIALS = 30, 10


def test_it_is_small_and_whole() -> None:
    folder = resolve_checkpoint("tiny")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10_000_000
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 10000.0
    assert doctor("tiny")["healthy"]
    assert "recipes/pretrain.py" in (folder / "README.md").read_text()


def test_it_retrieves_a_passkey_at_every_depth_of_its_window() -> None:
    """Held-out keys, and filler that starts where no training prompt's does; prompts fill the window."""
    folder = resolve_checkpoint("tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    window = model.config.max_position_embeddings
    maker = PromptMaker(tokenizer, window - 7, tokenizer.bos_token_id)  # the answer lies within the window too
    low, high = maker.range_of_k()
    draw = random.Random(0)
    found = {}
    for k in spread(low, high, DEPTHS):
        keys: list[int] = []
        while len(keys) < TRIALS:
            key = draw.randint(SMALLEST_KEY, LARGEST_KEY)
            if is_held_out(key):
                keys.append(key)
        rows = [(maker.header + maker.filler)[: maker.length - k] + maker.suffix(k, key) for key in keys]
        made = model.generate(torch.tensor(rows), max_new_tokens=6, do_sample=False, pad_token_id=0)
        answers = tokenizer.batch_decode(made[:, maker.length :], skip_special_tokens=True)
        found[k] = sum(is_hit(answer, key) for answer, key in zip(answers, keys, strict=True))
    assert sum(found.values()) >= 0.95 * DEPTHS * TRIALS, found
    assert min(found.values()) >= 0.8 * TRIALS, found
