"""Whole tiny models: read in pieces, padded or packed they say what they say of each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import CASES, make_bias
from tiny_bias import BACKENDS, FAMILIES, alone, bias_config, bias_model, in_pieces, tokens
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, StaticCache

from ctxext.modeling.attention import FUNCTIONS, BiasRows
from ctxext.modeling.bias import TAIL

# Largest error of a float32 logit; logits have a standard deviation of 1.7, and another window or slope moves
# them by more than 0.1 (test_the_bias_matters).
SAME = 2e-4
LENGTH, SHORTER = 300, 170
WINDOW = {"window": 70}  # its edge within a block, and within what a cache holds


def model_for(case: str, family: str = "llama", backend: str = "sdpa", **more: Any) -> Any:
    return bias_model(case, family, backend, bias=WINDOW if "window" in CASES[case] else None, **more)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _slow_but(wanted: set[tuple[str, str, str]]) -> list[Any]:
    every = [(case, family, backend) for case in CASES for family in FAMILIES for backend in BACKENDS]
    return [pytest.param(*row, marks=() if row in wanted else pytest.mark.slow) for row in every]


COMMON = {(case, "llama", "sdpa") for case in CASES} | {("kerple_power", family, "sdpa") for family in FAMILIES}
COMMON |= {("windowed", "llama", "eager"), ("t5", "qwen3", "eager"), ("alibi", "llama", "flex_attention")}
ENDS = [SHORTER - 50, SHORTER - 12, SHORTER - 8, SHORTER - 1, SHORTER]


@pytest.mark.parametrize(("case", "family", "backend"), _slow_but(COMMON))
@torch.no_grad()
def test_any_reading_equals_alone(case: str, family: str, backend: str) -> None:
    model, row, neighbour = model_for(case, family, backend), tokens(SHORTER), tokens(LENGTH, seed=2)
    wanted, space = alone(model, row), LENGTH - SHORTER
    static = StaticCache(model.config, max_cache_len=LENGTH)
    assert difference(in_pieces(model, row, ENDS, DynamicCache(config=model.config)), wanted) < SAME
    assert difference(in_pieces(model, row, ENDS, static), wanted) < SAME
    padding, ends = torch.zeros(1, space, dtype=torch.long), [end + space for end in ENDS]
    for side in ("left", "right"):
        order = [padding, row] if side == "left" else [row, padding]
        ids = torch.cat([torch.cat(order, dim=1), neighbour])
        mask = torch.ones_like(ids).masked_fill(ids == 0, 0)
        real = mask[0].bool()
        live = model(ids, attention_mask=mask, use_cache=False).logits
        assert difference(live[:1, real], wanted) < SAME, side
        assert difference(live[1:], alone(model, neighbour)) < SAME, side
        if side == "left":  # how a batch of prompts is generated from
            static = StaticCache(model.config, max_cache_len=LENGTH + 20)
            for cache in (DynamicCache(config=model.config), static):
                assert difference(in_pieces(model, ids, ends, cache, mask)[:1, real], wanted) < SAME, type(cache)


@pytest.mark.parametrize(("case", "family", "backend"), _slow_but(COMMON))
@torch.no_grad()
def test_packed_documents_equal_each_alone(case: str, family: str, backend: str) -> None:
    model = model_for(case, family, backend)
    parts = [tokens(length, seed=length) for length in (5, SHORTER, 1, 140)]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    packed = model(torch.cat(parts, dim=1), position_ids=positions, use_cache=False).logits
    start = 0
    for part in parts:
        stop = start + part.shape[1]
        assert difference(packed[:, start:stop], alone(model, part)) < SAME
        start = stop


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_bias_matters(case: str) -> None:
    """What the tests of this file would miss if attention were too flat: a bias of another kind is no other."""
    row = tokens(LENGTH)
    others = [model_for(other) for other in CASES if other != case]
    logits = alone(model_for(case), row)
    assert min(difference(alone(other, row), logits) for other in others) > 0.1


@torch.no_grad()
def test_flex_attention_as_users_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False, False)
    row = tokens(140)
    model = model_for("t5", backend="flex_attention")
    flex = alone(model, row)
    model.set_attn_implementation("sdpa")
    assert difference(flex, alone(model, row)) < SAME


# --- sliding windows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [50, 128])
@torch.no_grad()
def test_a_sliding_window_is_a_windowed_bias(window: int, backend: str) -> None:
    """Mistral's own window by the mask, and the bias that is minus infinity from there: two ways to one model."""
    row = tokens(LENGTH)
    sliding = bias_model("alibi", "mistral", backend, sliding_window=window)
    biased = bias_model("windowed_alibi", "mistral", backend, bias={"window": window})
    wanted = alone(biased, row)
    assert difference(alone(sliding, row), wanted) < SAME
    assert difference(alone(bias_model("alibi", "mistral", backend), row), wanted) > 0.1
    if backend != "flex_attention":
        ends = [window + 30, LENGTH - 20, LENGTH - 5, LENGTH - 1, LENGTH]
        for cache in (DynamicCache(config=sliding.config), StaticCache(sliding.config, max_cache_len=LENGTH)):
            assert difference(in_pieces(sliding, row, ends, cache), wanted) < SAME


MIXED = {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}  # the first layer sees everything
KINDS = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1]], ids=lambda kinds: kinds[0])
@torch.no_grad()
def test_layers_with_and_without_a_sliding_window(kinds: list[str]) -> None:
    """On a cache they read different numbers of keys, the fewer first or the more."""
    row = tokens(LENGTH)
    model = bias_model("kerple_log", "qwen2", **MIXED, layer_types=kinds)
    wanted = alone(model, row)
    assert difference(alone(bias_model("kerple_log", "qwen2"), row), wanted) > 0.1
    model.set_attn_implementation("eager")
    assert difference(alone(model, row), wanted) < SAME
    ends = [100, LENGTH - 1, LENGTH]
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=LENGTH)):
        assert difference(in_pieces(model, row, ends, cache), wanted) < SAME


def test_one_row_serves_the_layers_of_a_pass() -> None:
    """Without gradients it is computed once, and again where a layer reads more keys; with them for each layer."""
    rows, device = BiasRows(make_bias(CASES["kerple_log"], 2)), torch.device("cpu")
    with torch.no_grad():
        short = rows.row(10, device)
        assert rows.row(10, device) is short and rows.row(8, device) is short
        assert rows.row(50, device).shape[1] == 50 + TAIL
    assert rows.row(10, device).requires_grad


@torch.no_grad()
def test_layers_with_and_without_a_sliding_window_in_flex_attention() -> None:
    row = tokens(LENGTH)
    model = bias_model("kerple_log", "qwen2", **MIXED)
    wanted = alone(model, row)
    model.set_attn_implementation("flex_attention")
    assert difference(alone(model, row), wanted) < SAME


# --- which attention runs ------------------------------------------------------------------------------------------


@torch.no_grad()
def test_set_attn_implementation_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def recorded(name: str) -> Any:
        def attend(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return FUNCTIONS[name](*args, **kwargs)

        return attend

    for name in FUNCTIONS:
        monkeypatch.setitem(AttentionInterface._global_mapping, name, recorded(name))
    model, row = bias_model(), tokens(20)
    expected = {"sdpa": "ctxext_sdpa", "eager": "ctxext_eager", "flex_attention": "ctxext_flex", "ctxext": "ctxext"}
    logits = []
    for asked, name in expected.items():
        model.set_attn_implementation(asked)
        logits.append(alone(model, row))
        assert ran == [name] * 2 and model.config._attn_implementation == name  # once a layer
        ran.clear()
    assert max(difference(one, logits[0]) for one in logits) < SAME


def test_eager_alone_returns_weights() -> None:
    model, row = bias_model(backend="eager", case="windowed", bias=WINDOW), tokens(100)
    weights = model(row, output_attentions=True).attentions
    assert len(weights) == 2 and weights[0].shape == (1, 4, 100, 100)
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(1, 4, 100))
    distance = torch.arange(100)[:, None] - torch.arange(100)
    assert not weights[0][..., (distance < 0) | (distance >= 70)].any()


REFUSED = ("vllm", "flash_attention_3", "paged|sdpa", "sdpaa")
MESSAGE = "would leave the attention bias out; use sdpa, eager, flex_attention"


@pytest.mark.parametrize("name", REFUSED)
def test_an_attention_without_the_bias_is_refused(name: str, tmp_path: Any) -> None:
    model = bias_model()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=MESSAGE) as raised:
        model.set_attn_implementation(name)
    assert repr(name) in str(raised.value) and model.config._attn_implementation == before
    with pytest.raises(ValueError, match=MESSAGE):
        AutoModelForCausalLM.from_config(bias_config("llama", CASES["alibi"]), attn_implementation=name)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=MESSAGE):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_stock_model_cannot_take_our_attention(name: str) -> None:
    stock = LlamaForCausalLM(bias_config("llama", CASES["alibi"])).eval()
    stock.set_attn_implementation(name)
    with pytest.raises(ValueError, match="needs the bias of a ctxext checkpoint; use 'sdpa'"):
        alone(stock, tokens(20))
