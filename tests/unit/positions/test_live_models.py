"""Models in memory: patched as checkpoints are, in float32 phases, and consistent with a key-value cache."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    LENGTH,
    METHODS,
    WINDOW,
    expected,
    frequencies_at,
    options_for,
    read_config,
    rotary,
    save_tiny,
    tiny_model,
)
from transformers import AutoModelForCausalLM

import ctxext
from ctxext.positions.base import unscaled_inv_freq
from ctxext.positions.live import check_frequencies, rotary_modules
from ctxext.positions.rope import Linear, Theta

CHANGING = ("dynamic", "longrope")
STEPS, BEFORE = 64, 32  # 64 steps that start 32 tokens before the original window ends
LOUD = {"initializer_range": 0.25}  # attention far from uniform, so that positions matter to the logits


def patched(method: str, model: Any | None = None) -> Any:
    model = tiny_model("llama", **LOUD) if model is None else model
    return ctxext.patch(model, method=method, length=LENGTH, **options_for(method, 10000.0, 16))


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def uncached_steps(model: Any, row: torch.Tensor) -> torch.Tensor:
    """Logits `(steps, vocabulary)` of the last token of every prefix, each read afresh."""
    first = WINDOW - BEFORE
    return torch.cat([model(row[:, : first + i + 1], use_cache=False).logits[:, -1] for i in range(STEPS)])


@torch.inference_mode()
def cached_steps(model: Any, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits `(steps, batch, vocabulary)` of the last STEPS tokens, one at a time, on a cache of all before them."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    start = rows.shape[1] - STEPS
    cache = model(
        rows[:, :start], attention_mask=mask[:, :start], position_ids=positions[:, :start], use_cache=True
    ).past_key_values
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # from 5.24
    logits = []
    for i in range(start, rows.shape[1]):
        answer = model(
            rows[:, i : i + 1],
            attention_mask=mask[:, : i + 1],
            position_ids=positions[:, i : i + 1],
            use_cache=True,
            **{cache_name: cache},
        )
        logits.append(answer.logits[:, -1])
    return torch.stack(logits)


def difference_alone(model: Any) -> float:
    row = tokens(WINDOW - BEFORE + STEPS)
    wanted = uncached_steps(model, row)
    return float((cached_steps(model, row, torch.ones_like(row))[:, 0] - wanted).abs().max())


def difference_in_batch(model: Any) -> float:
    """A row left-padded beside one of 400 tokens, against the same row alone and uncached."""
    row, long_row = tokens(WINDOW - BEFORE + STEPS), tokens(400, seed=2)
    wanted = uncached_steps(model, row)
    padding = torch.zeros(1, 400 - row.shape[1], dtype=torch.long)
    mask = torch.cat([torch.cat([padding, torch.ones_like(row)], 1), torch.ones_like(long_row)])
    rows = torch.cat([torch.cat([padding, row], 1), long_row])
    return float((cached_steps(model, rows, mask)[:, 0] - wanted).abs().max())


@pytest.mark.parametrize("method", METHODS)
def test_cached_equals_uncached(method: str) -> None:
    model = ctxext.fit_length(patched(method), LENGTH)
    assert difference_alone(model) < 1e-4
    assert difference_in_batch(model) < 1e-4


@pytest.mark.parametrize("method", CHANGING)
def test_without_fit_length_the_cache_goes_stale(method: str) -> None:
    assert difference_alone(patched(method)) > 1e-2
    assert difference_in_batch(patched(method)) > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_live_patch_equals_checkpoint_patch(method: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", **LOUD)
    options = options_for(method, 10000.0, 16)
    ctxext.patch_checkpoint(source, tmp_path / "out", method=method, length=LENGTH, **options)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    live = AutoModelForCausalLM.from_pretrained(source).eval()
    row = tokens(300)
    with torch.inference_mode():
        before = live(row).logits
        live = patched(method, live)
        after = live(row).logits
        assert torch.equal(after, stored(row).logits)
    assert (after - before).abs().max() > 1e-2
    live.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.inference_mode():
        assert torch.equal(again(row).logits, after)
    written, kept = read_config(tmp_path / "out"), live.config.to_dict()
    for key in ("rope_parameters", "max_position_embeddings"):
        assert kept[key] == written[key]
    assert kept["ctxext"]["length"] == LENGTH and written["ctxext"]["history"] == []


@pytest.mark.parametrize("method", METHODS)
def test_phases_are_float32_in_a_bf16_model(method: str) -> None:
    cast = tiny_model().bfloat16()
    assert rotary(cast).inv_freq.dtype == torch.bfloat16  # what a plain cast does
    model = patched(method, cast)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert rotary(model).inv_freq.dtype == rotary(model).original_inv_freq.dtype == torch.float32
    for seq_len in (1, LENGTH):
        wanted, _ = expected(method, 10000.0, 16, WINDOW, LENGTH, seq_len)
        np.testing.assert_allclose(frequencies_at(model, seq_len)[0], wanted, rtol=1e-5)
    module = ctxext.fit_length(model, LENGTH).model.rotary_emb
    assert module.inv_freq.dtype == module.original_inv_freq.dtype == torch.float32
    cos, _ = module(torch.zeros(1, dtype=torch.float32), torch.tensor([[LENGTH - 1]]))
    wanted, factor = expected(method, 10000.0, 16, WINDOW, LENGTH, LENGTH)
    np.testing.assert_allclose(cos[0, 0, :8].numpy(), factor * np.cos((LENGTH - 1) * wanted), atol=2e-4)


def test_from_pretrained_in_bf16_keeps_float32_phases(llama: Path, tmp_path: Path) -> None:
    ctxext.patch_checkpoint(llama, tmp_path / "out", method="yarn", length=LENGTH)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert rotary(model).inv_freq.dtype == torch.float32
    assert next(model.parameters()).dtype == torch.bfloat16


def test_check_frequencies_finds_a_cast_model_and_wrong_ones() -> None:
    model = tiny_model()
    plain = Theta(rope_theta=10000.0)
    check_frequencies(model, plain, 16, WINDOW)
    with pytest.raises(ValueError, match="frequencies of model.rotary_emb differ .*'linear' by 1 "):
        check_frequencies(model, Linear(rope_theta=10000.0, factor=2.0), 16, WINDOW)
    with pytest.raises(ValueError, match="has 8 frequencies; method 'theta' gives 4"):
        check_frequencies(model, plain, 8, WINDOW)
    with pytest.raises(ValueError, match="differ from those of method 'theta' by 0.00"):
        check_frequencies(copy.deepcopy(model).bfloat16(), plain, 16, WINDOW)
    rotary(model).attention_scaling = 1.1
    with pytest.raises(ValueError, match="multiplies cos and sin by 1.1; method 'theta' gives 1"):
        check_frequencies(model, plain, 16, WINDOW)
    with pytest.raises(ValueError, match="Linear has no rotary embedding module"):
        rotary_modules(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("method", CHANGING)
def test_fit_length_stays_whatever_the_model_reads(method: str) -> None:
    model = patched(method)
    frequencies_at(model, 1)  # a stock update before the call must not matter
    ctxext.fit_length(model, 300)
    options = options_for(method, 10000.0, 16)
    if method == "longrope":
        wanted = unscaled_inv_freq(10000.0, 16) / np.array(options["long_factor"])
    else:
        wanted = expected(method, 10000.0, 16, WINDOW, LENGTH, 300)[0]
    for seq_len in (1, WINDOW, 300, LENGTH, 10):
        np.testing.assert_allclose(frequencies_at(model, seq_len)[0], wanted, rtol=1e-5)
    np.testing.assert_allclose(frequencies_at(copy.deepcopy(model), 1)[0], wanted, rtol=1e-5)
    ctxext.fit_length(model, WINDOW)  # and can be moved again, also back
    np.testing.assert_allclose(frequencies_at(model, 300)[0], unscaled_inv_freq(10000.0, 16), rtol=1e-5)


def test_fit_length_keeps_the_config_and_the_attention_factor(tmp_path: Path) -> None:
    model = patched("longrope")
    before = model.config.to_dict()
    ctxext.fit_length(model, LENGTH)
    assert model.config.to_dict() == before
    assert rotary(model).attention_scaling == pytest.approx(expected("longrope", 1e4, 16, WINDOW, LENGTH)[1])
    model.save_pretrained(tmp_path / "saved")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for seq_len in (1, LENGTH):
        wanted = expected("longrope", 1e4, 16, WINDOW, LENGTH, seq_len)[0]
        np.testing.assert_allclose(frequencies_at(stock, seq_len)[0], wanted, rtol=1e-5)


def test_fit_length_of_gemma3_fixes_the_full_attention_layers_only() -> None:
    model = tiny_model("gemma3_text")
    ctxext.patch(model, method="dynamic", length=LENGTH)
    module = rotary(ctxext.fit_length(model, LENGTH))
    wanted = expected("dynamic", 1e6, 16, WINDOW, LENGTH, LENGTH)[0]
    for seq_len in (1, LENGTH, 7):
        np.testing.assert_allclose(frequencies_at(model, seq_len)[0], wanted, rtol=1e-5)
    np.testing.assert_allclose(module.sliding_attention_inv_freq, unscaled_inv_freq(10000.0, 16), rtol=1e-5)


def test_fit_length_refuses_what_is_no_length() -> None:
    with pytest.raises(ValueError, match="length is 0; it must be a whole number"):
        ctxext.fit_length(patched("dynamic"), 0)


def test_a_stale_original_length_does_not_override_the_new_one() -> None:
    model = ctxext.patch(tiny_model(original_max_position_embeddings=64), method="yarn", length=LENGTH)
    assert model.config.rope_parameters["original_max_position_embeddings"] == WINDOW
    wanted, _ = expected("yarn", 10000.0, 16, WINDOW, LENGTH)
    np.testing.assert_allclose(frequencies_at(model, 1)[0], wanted, rtol=1e-5)


def test_a_refused_patch_changes_nothing() -> None:
    model = tiny_model()
    config, module = model.config.to_dict(), rotary(model)
    for bad in ({"method": "yran"}, {"method": "yarn", "beta_fst": 1}, {"method": "linear", "original_length": 64}):
        with pytest.raises(ValueError):
            ctxext.patch(model, length=WINDOW, **bad)
    assert model.config.to_dict() == config and rotary(model) is module


def test_generation_limit_follows() -> None:
    model = tiny_model()
    model.generation_config.max_length = WINDOW
    patched("linear", model)
    assert model.generation_config.max_length == LENGTH
