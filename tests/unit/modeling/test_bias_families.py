"""Checkpoints of the four families: saved and loaded, begun from stock ones, generated from; rotary kept or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import CASES, LEARNED_CASES
from tiny_bias import FAMILIES, alone, bias_class, bias_config, bias_model, stock_class, tokens
from transformers import AutoModel, AutoModelForCausalLM, StaticCache

SAME = 2e-4  # largest error of a float32 logit, whose standard deviation is 1.7
family_and_case = pytest.mark.parametrize(
    ("family", "case"),
    [*[(family, case) for family in FAMILIES for case in ("alibi", "kerple_power")], ("llama", "windowed_alibi")],
)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def learned(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "score_bias" in name}


@family_and_case
@torch.no_grad()
def test_saved_and_loaded_it_is_the_same_model(family: str, case: str, tmp_path: Path) -> None:
    model, row = bias_model(case, family), tokens(60)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == f"ctxext_{family}" and config["bias_parameters"] == CASES[case]
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert type(again) is bias_class(family, "ForCausalLM")
    assert torch.equal(alone(again, row), alone(model, row))
    decoder = AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert type(decoder) is bias_class(family, "Model")
    assert torch.equal(again.lm_head(decoder(row, use_cache=False).last_hidden_state), alone(model, row))


@pytest.mark.parametrize("case", LEARNED_CASES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_learned_values_are_what_the_live_model_adds(family: str, case: str, tmp_path: Path) -> None:
    model, row = bias_model(case, family), tokens(60)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    values = learned(model)
    assert values and values.keys() == learned(again).keys()
    assert all(torch.equal(value, learned(again)[name]) for name, value in values.items())
    before = alone(again, row)
    for parameter in again.model.score_bias.parameters():
        parameter.copy_(parameter.flip(0))  # each head the values of another
    assert difference(alone(again, row), before) > 0.1


@pytest.mark.parametrize(("kind", "case"), [("ForCausalLM", "t5"), ("ForCausalLM", "kerple_log"), ("Model", "t5")])
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_in_bfloat16_the_bias_stays_float32(family: str, kind: str, case: str, tmp_path: Path) -> None:
    model = bias_model(case, family)
    model.save_pretrained(tmp_path)
    again = bias_class(family, kind).from_pretrained(tmp_path, dtype=torch.bfloat16)
    values = learned(again)
    assert len(values) == len(learned(model)) > 0
    for name, value in learned(model).items():
        assert torch.equal(values[name if name in values else name.removeprefix("model.")], value)  # no bit is lost
    others = [value.dtype for name, value in again.state_dict().items() if "score_bias" not in name]
    assert set(others) == {torch.bfloat16}
    out = again(tokens(60), use_cache=False)
    assert out[0].dtype == torch.bfloat16 and bool(out[0].isfinite().all())


# Not t5, whose start is what uninitialized memory often holds: zeros.
@pytest.mark.parametrize("case", ["alibi", "kerple_log", "kerple_power"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_stock_checkpoint_gets_the_bias_at_its_start(family: str, case: str, tmp_path: Path) -> None:
    """Stock weights, no bias among them, under a config that asks for one: learning begins where the paper begins."""
    torch.manual_seed(0)
    stock = stock_class(family, "ForCausalLM")(bias_config(family, {})).eval()
    stock.save_pretrained(tmp_path)
    model = bias_class(family, "ForCausalLM").from_pretrained(tmp_path, config=bias_config(family, CASES[case]))
    kernel = model.model.score_bias.kernel
    starts = {} if kernel is None else kernel.initial_values(4)
    assert len(starts) == len(learned(model))
    for name, value in starts.items():
        assert torch.equal(getattr(kernel, name), value) and bool(value.isfinite().all())
    state = stock.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items() if name in state)
    assert state.keys() == model.state_dict().keys() - learned(model).keys()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_tied_embeddings_stay_tied(family: str, tmp_path: Path) -> None:
    model, row = bias_model("t5", family, tie_word_embeddings=True), tokens(40)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(alone(again, row), alone(model, row))


# --- generation ----------------------------------------------------------------------------------------------------


def greedy(model: Any, row: torch.Tensor, steps: int) -> torch.Tensor:
    """`(1, steps)`, each token from a forward pass without a cache over all before it."""
    for _ in range(steps):
        row = torch.cat([row, alone(model, row)[:, -1:].argmax(-1)], dim=1)
    return row[:, -steps:]


GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


@family_and_case
@torch.no_grad()
def test_greedy_generation_is_the_argmax_without_a_cache(family: str, case: str) -> None:
    model, row, neighbour = bias_model(case, family), tokens(40), tokens(57, seed=2)
    model.generation_config.eos_token_id = None  # every token counts
    wanted = greedy(model, row, 8)
    assert torch.equal(model.generate(row, **GREEDY)[:, 40:], wanted)
    cache = StaticCache(model.config, max_cache_len=60)
    name = (
        "cache" if hasattr(model.generate(row, return_dict_in_generate=True, **GREEDY), "cache") else "past_key_values"
    )
    assert torch.equal(model.generate(row, **{name: cache}, **GREEDY)[:, 40:], wanted)
    padding = torch.zeros(1, 17, dtype=torch.long)
    batch = torch.cat([torch.cat([padding, row], dim=1), neighbour])
    made = model.generate(batch, attention_mask=(batch != 0).long(), **GREEDY)[:, 57:]
    assert torch.equal(made, torch.cat([wanted, greedy(model, neighbour, 8)]))


# --- with and without the rotary embedding -------------------------------------------------------------------------


class Identity(torch.nn.Module):
    """A rotary embedding that turns by no angle: cos 1, sin 0 at every position."""

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosine = torch.ones(*position_ids.shape, 8, dtype=hidden.dtype)
        return cosine, torch.zeros_like(cosine)


def stock_with_weights_of(model: Any, family: str) -> Any:
    config = bias_config(family, {})
    stock = stock_class(family, "ForCausalLM")(config).eval()
    missing, unexpected = stock.load_state_dict(model.state_dict(), strict=False)
    assert not missing and all("score_bias" in name for name in unexpected)
    return stock


def zero_t5(family: str, **parameters: Any) -> Any:
    model = bias_model("t5", family, bias=parameters)
    with torch.no_grad():
        for parameter in model.model.score_bias.parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_zero_bias_beside_the_rotary_embedding_is_the_stock_model(family: str) -> None:
    model, row = zero_t5(family, keep_rotary=True), tokens(150)
    wanted = alone(stock_with_weights_of(model, family), row)
    assert difference(alone(model, row), wanted) < SAME
    assert difference(alone(zero_t5(family), row), wanted) > 0.1  # by default the bias takes its place
    assert difference(alone(zero_t5(family, keep_rotary=False), row), wanted) > 0.1
    assert difference(alone(bias_model("t5", family, bias={"keep_rotary": True}), row), wanted) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_without_rotary_a_zero_bias_knows_no_positions(family: str) -> None:
    model, row = zero_t5(family, keep_rotary=False), tokens(150)
    stock = stock_with_weights_of(model, family)
    stock.model.rotary_emb = Identity()
    assert difference(alone(model, row), alone(stock, row)) < SAME


@torch.no_grad()
def test_one_layer_without_positions_reads_a_bag_of_tokens() -> None:
    """What comes before the last token may stand in any order, unless a bias tells."""
    row = tokens(50)
    shuffled = torch.cat([row[:, :-1].flip(1), row[:, -1:]], dim=1)
    for case, same in (("t5", True), ("alibi", False), ("sandwich", False)):
        model = bias_model(case, num_hidden_layers=1)
        if same:
            model.model.score_bias.kernel.weight.zero_()
        moved = difference(alone(model, row)[:, -1], alone(model, shuffled)[:, -1])
        assert (moved < SAME) == same and (same or moved > 0.1)
