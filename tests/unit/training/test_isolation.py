"""Packed documents do not read each other, whatever mask the model is called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import tiny_model

from ctxext.training.isolation import isolate_documents

SIZES = (9, 1, 14)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 90, (2, sum(SIZES)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(size) for size in SIZES]).expand(2, -1)
    return ids, positions


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_neox", "phi3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", ["none", "ones", "cache"])
def test_another_document_changes_nothing(family: str, attention: str, mask: str) -> None:
    model = tiny_model(family, attn_implementation=attention).train(mask == "ones")
    isolate_documents(model)
    ids, positions = batch()
    given: dict[str, Any] = {} if mask == "none" else {"attention_mask": torch.ones_like(ids)}
    if mask == "cache":
        given["use_cache"] = True
    changed = ids.clone()
    changed[:, : SIZES[0]] = (ids[:, : SIZES[0]] + 1) % 90
    with torch.no_grad():
        before = model(input_ids=ids, position_ids=positions, **given).logits[:, SIZES[0] :]
        after = model(input_ids=changed, position_ids=positions, **given).logits[:, SIZES[0] :]
        alone = model(input_ids=ids[:, 10:], position_ids=positions[:, 10:]).logits
    assert (before == after).all()
    torch.testing.assert_close(before[:, 1:], alone, rtol=1e-5, atol=1e-5)


def test_without_the_hook_an_all_ones_mask_joins_documents() -> None:
    """The fault that the hook is for; once transformers repairs it, the hook can go."""
    model = tiny_model("llama")
    ids, positions = batch()
    changed = ids.clone()
    changed[:, : SIZES[0]] = (ids[:, : SIZES[0]] + 1) % 90
    with torch.no_grad():
        logits = [
            model(input_ids=i, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
            for i in (ids, changed)
        ]
    assert not (logits[0][:, SIZES[0] :] == logits[1][:, SIZES[0] :]).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_by_a_mask_is_never_read(side: str) -> None:
    model = tiny_model("llama")
    isolate_documents(model)
    ids, _ = batch()
    mask = torch.ones_like(ids)
    padded = slice(0, 6) if side == "left" else slice(-6, None)
    mask[:, padded] = 0
    changed = torch.where(mask == 0, ids + 1, ids)
    positions = torch.arange(ids.shape[1]).expand(2, -1)
    with torch.no_grad():
        first, second = (
            model(input_ids=i, position_ids=positions, attention_mask=mask).logits for i in (ids, changed)
        )
    assert (first[mask == 1] == second[mask == 1]).all()


def test_generation_is_left_alone() -> None:
    model = tiny_model("llama")
    ids, _ = batch()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    isolate_documents(model)
    assert (model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False) == plain).all()
