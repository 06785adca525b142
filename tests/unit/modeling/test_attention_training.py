"""Training with a bias: dropout, gradients in float64, activation checkpointing, memory, torch.compile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import CASES, LEARNED_CASES, bias_table, dense_attention, make_bias, raw_values, seen_by
from tiny_bias import FAMILIES, Largest, alone, bias_model, tokens
from torch.autograd.graph import saved_tensors_hooks

from ctxext.modeling.attention import FUNCTIONS, BiasRows
from ctxext.modeling.bias import TAIL
from ctxext.modeling.blocked import Block, Layout, block_bias, block_rows, blocked_attention, blocks

HEADS = 2


def states(length: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """Query, key and value of one row, that ask for gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, HEADS, length, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(3)
    ]


# --- dropout -------------------------------------------------------------------------------------------------------

DROPPED = 0.3


def weights_of(backend: str, query: torch.Tensor, key: torch.Tensor, bias: Any, dropout: float) -> torch.Tensor:
    """`(heads, queries, keys)`: with the identity for values, what attention returns is its weights."""
    length = query.shape[2]
    value = torch.eye(length).expand(1, HEADS, length, length)
    out = FUNCTIONS[backend](None, query, key, value, None, dropout=dropout, score_bias=BiasRows(bias))[0]
    return out[0].transpose(0, 1)


LENGTHS = [6, 300]  # read at once, and in three blocks


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", ["alibi", "windowed", "kerple_log"])
@pytest.mark.parametrize("backend", ["ctxext_sdpa", "ctxext_eager"])
def test_dropout_drops_weights_and_scales_the_rest(backend: str, case: str, length: int) -> None:
    bias, (query, key, _) = make_bias(CASES[case], HEADS), states(length, length)
    plain = weights_of(backend, query, key, bias, 0.0).detach()
    torch.manual_seed(0)
    dropped = weights_of(backend, query, key, bias, DROPPED).detach()
    kept, there = dropped != 0, plain > 1e-30
    torch.testing.assert_close(dropped[kept], plain[kept] / (1 - DROPPED))
    if length == LENGTHS[1]:
        count = int(there.sum())
        assert abs(float(kept[there].float().mean()) - 0.7) < 5 * math.sqrt(0.3 * 0.7 / count)
        first, second = kept[:, :128, :128][:, -1], kept[:, 128:256, :128][:, -1]  # the last rows of two blocks
        assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(weights_of(backend, query, key, bias, DROPPED).detach(), dropped)  # reproducible
    assert not torch.equal(weights_of(backend, query, key, bias, DROPPED).detach(), dropped)


@pytest.mark.parametrize("backend", ["ctxext_sdpa", "ctxext_eager"])
@torch.no_grad()
def test_the_mean_of_many_draws_is_the_undropped_output(backend: str) -> None:
    bias, draws = make_bias(CASES["kerple_power"], HEADS), 2000
    query, key, value = (state.expand(draws, -1, -1, -1) for state in states(12, 4))
    torch.manual_seed(0)
    out = FUNCTIONS[backend](None, query, key, value, None, dropout=DROPPED, score_bias=BiasRows(bias))[0]
    plain = FUNCTIONS[backend](None, query[:1], key[:1], value[:1], None, score_bias=BiasRows(bias))[0]
    error = out.std(dim=0) / math.sqrt(draws)
    assert bool(((out.mean(dim=0) - plain[0]).abs() < 5 * error + 1e-6).all())
    assert float(out.std(dim=0).max()) > 0.1


@pytest.mark.parametrize("case", ["sandwich", "windowed_alibi", *LEARNED_CASES])
@pytest.mark.parametrize("backend", ["ctxext_sdpa", "ctxext_eager"])
def test_gradients_under_dropout_are_those_of_the_same_draw(backend: str, case: str) -> None:
    length = 300
    bias, (query, key, _) = make_bias(CASES[case], HEADS), states(length, length)
    torch.manual_seed(3)
    keep = weights_of(backend, query, key, bias, DROPPED).detach() != 0
    value = torch.randn(1, HEADS, length, length, requires_grad=True)
    pull = torch.randn(length, HEADS, length)
    torch.manual_seed(3)  # the draw does not depend on the values
    out = FUNCTIONS[backend](None, query, key, value, None, dropout=DROPPED, score_bias=BiasRows(bias))[0]
    (out[0] * pull).sum().backward()
    leaves = [state.detach().double().requires_grad_() for state in (query, key, value)]
    raw = raw_values(bias)
    table = bias_table(CASES[case], HEADS, torch.arange(length), raw)
    seen = seen_by(torch.zeros(1, length, dtype=torch.long))
    wanted = dense_attention(*leaves, table, seen, keep=keep[None] / (1 - DROPPED))
    (wanted[0] * pull).sum().backward()
    pairs = [*zip((query, key, value), leaves, strict=True)]
    pairs += [(parameter, raw[name.removeprefix("kernel.")]) for name, parameter in bias.named_parameters()]
    for live, exact in pairs:
        assert float((live.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()) < 3e-5


def test_dropout_in_models() -> None:
    """`attention_dropout` acts in training alone; flex attention, which has none, says so."""
    model, row = bias_model("alibi", attention_dropout=0.5), tokens(50)
    assert torch.equal(alone(model, row), alone(bias_model("alibi"), row))
    model.train()
    assert not torch.equal(alone(model, row), alone(model, row))
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="flex_attention has no dropout: set attention_dropout to 0"):
        alone(model, row)


# --- blocks --------------------------------------------------------------------------------------------------------


def test_rows_of_a_block() -> None:
    # an eighth of the queries within 128 .. 512; a window's own number within 64 .. 512
    assert [block_rows(queries, None) for queries in (10, 2048, 10**5)] == [128, 256, 512]
    assert [block_rows(10**5, window) for window in (5, 200, 4096)] == [64, 200, 512]


def test_blocks_read_what_their_queries_see() -> None:
    """Each query once, and keys from the first that any of them sees to the last one's own."""
    assert [*blocks(300, Layout(40), 128)] == [Block(0, 128, 0, 168), Block(128, 256, 0, 296), Block(256, 300, 0, 340)]
    # window 100: query 100 has its own key 140 and sees from 41 on
    assert [*blocks(300, Layout(40, window=100), 100)][1] == Block(100, 200, 41, 240)
    first = torch.tensor([[90] * 300, [200] * 300])
    assert [block.low for block in blocks(300, Layout(40, first, 100), 100)] == [90, 90, 141]


def test_a_block_of_bias_is_a_view() -> None:
    row = make_bias(CASES["alibi"], 3)(600, torch.device("cpu"))
    block = block_bias(row, Block(100, 300, 7, 340), Layout(40))
    assert block.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
    wanted = [[40 + query - key for key in range(7, 340)] for query in range(299, 99, -1)]
    distance = torch.tensor(wanted)
    slope = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2])  # two heads' slopes, then every other of four heads'
    bias = -slope[:, None, None] * distance
    torch.testing.assert_close(block[0], bias.masked_fill(distance < 0, -math.inf))


WINDOWS = {"all": None, "narrow": 90, "wide": 600}  # blocks of 128, 90 and 512 rows


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("starts", ["together", "apart"])
def test_float64_gradients_of_the_row(window: str, starts: str) -> None:
    """Queries that continue 40 keys, in float64 throughout: the blocks add nothing but rounding."""
    past, queries = 40, 700
    length = past + queries
    query, key, value = states(length, 4, torch.float64)
    row = torch.randn(HEADS, length + TAIL, dtype=torch.float64)
    row[:, length:] = -math.inf
    if WINDOWS[window]:
        row[:, : length - WINDOWS[window]] = -math.inf
    row.requires_grad_()
    documents = torch.zeros(1, length, dtype=torch.long)
    first = None
    if starts == "apart":
        documents = (torch.arange(length)[None] >= 333).long()
        first = 333 * documents[:, past:]
    layout = Layout(past, first, WINDOWS[window])
    live = blocked_attention(query[:, :, past:], key, value, row, layout, 0.5)  # 4^-1/2
    table = row.detach()[:, :length].flip(1).requires_grad_()
    leaves = [state.detach().clone().requires_grad_() for state in (query, key, value)]
    wanted = dense_attention(*leaves, table, seen_by(documents))[:, past:].transpose(1, 2)
    torch.testing.assert_close(live, wanted, rtol=1e-10, atol=1e-12)
    pull = torch.randn_like(live)
    (live * pull).sum().backward()
    (wanted * pull).sum().backward()
    for state, leaf in zip((query, key, value), leaves, strict=True):
        torch.testing.assert_close(state.grad, leaf.grad, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(row.grad[:, :length].flip(1), table.grad, rtol=1e-9, atol=1e-11)
    assert not row.grad[:, length:].any()


# --- memory --------------------------------------------------------------------------------------------------------


def peak(case: str, length: int, packed: bool, dropout: float = 0.0) -> tuple[int, int]:
    """Bytes of the largest tensor of a forward and backward pass, and of all that the forward pass saves."""
    bias = make_bias(CASES[case], 1)
    query, key, value = (state[:, :1] for state in states(length, 4))
    ranges = None
    if packed:
        place = torch.arange(length)
        first = torch.where(place > length // 2, length // 2 + 1, 0)
        ranges = torch.stack([first, place], dim=-1).int()[None, None]
    saved: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Largest() as largest:
        with saved_tensors_hooks(count, lambda tensor: tensor):
            rows = BiasRows(bias)
            out = FUNCTIONS["ctxext_sdpa"](None, query, key, value, ranges, dropout=dropout, score_bias=rows)[0]
        out.sum().backward()
    return largest.size, sum(saved.values())


def _memory() -> list[Any]:
    rows = []
    for case in ("alibi", "windowed", "kerple_log"):
        for packed in (False, True):
            marks = [pytest.mark.slow] if (case, packed) == ("kerple_log", True) else []
            rows.append(pytest.param(case, packed, 0.0, marks=marks, id=f"{case}-{'packed' if packed else 'plain'}"))
    for case in ("alibi", "kerple_log"):
        rows.append(pytest.param(case, True, 0.1, marks=pytest.mark.slow, id=f"{case}-packed-dropout"))
    return rows


@pytest.mark.parametrize(("case", "packed", "dropout"), _memory())
def test_memory_is_linear_in_the_length(case: str, packed: bool, dropout: float) -> None:
    short, long = peak(case, 4096, packed, dropout), peak(case, 8192, packed, dropout)
    assert long[0] < 2.2 * short[0] and long[1] < 2.2 * short[1]
    assert long[0] < 8192 * 8192 * 4 / 8  # nothing of queries by keys: 512 rows at most, twice over


# --- models --------------------------------------------------------------------------------------------------------


def model_gradients(model: Any, row: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(row, labels=row, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def gradients_agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """But for rounding, in which the gradient of a key's constant, zero by the softmax, is all there is."""
    return float((one - other).abs().max()) < 1e-4 * float(other.abs().max()) + 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("case", "family"), [*[(case, "llama") for case in (*LEARNED_CASES, "alibi")], ("t5", "qwen3")]
)
def test_activation_checkpointing_gives_the_same_gradients(case: str, family: str, reentrant: bool) -> None:
    model, row = bias_model(case, family).train(), tokens(200)
    wanted = model_gradients(model, row)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    live = model_gradients(model, row)
    learned = [gradient for name, gradient in live.items() if "score_bias" in name]
    assert len(learned) == {"t5": 1, "alibi": 0}.get(case, 2) and all(bool(gradient.any()) for gradient in learned)
    for name, gradient in wanted.items():
        assert gradients_agree(live[name], gradient), name


@pytest.mark.parametrize("length", [5, 200])  # read at once, and in blocks
@pytest.mark.parametrize("family", FAMILIES)
def test_backends_agree_on_every_gradient_of_a_model(family: str, length: int) -> None:
    model, row = bias_model("kerple_log", family), tokens(length)
    wanted = model_gradients(model, row)
    model.set_attn_implementation("eager")
    for name, gradient in model_gradients(model, row).items():
        assert gradients_agree(gradient, wanted[name]), name


def compiled_equals_eager(model: Any, length: int, **options: Any) -> None:
    """Left-padded; a hole, which no compiled model can look for, is an error and no silent answer."""
    torch.compiler.reset()
    compiled, row = torch.compile(model, **options), tokens(length, rows=2)
    mask = torch.ones_like(row)
    mask[0, :2] = 0
    with torch.no_grad():
        live = compiled(row, attention_mask=mask, use_cache=False).logits
        wanted = model(row, attention_mask=mask, use_cache=False).logits
        assert float((live - wanted)[mask.bool()].abs().max()) < 2e-4
        mask[0, 5] = 0
        with pytest.raises(RuntimeError, match="cannot read an attention mask with holes: pad at one side"):
            compiled(row, attention_mask=mask, use_cache=False)
    torch.compiler.reset()


def test_a_short_piece_is_traced_as_one_graph() -> None:
    model = bias_model("windowed", bias={"window": 5}, num_hidden_layers=1)
    compiled_equals_eager(model, 8, backend="eager", fullgraph=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["alibi", "kerple_log"])
def test_a_compiled_model_equals_eager(case: str) -> None:
    """With C++ code made for it: minutes, and needs g++."""
    compiled_equals_eager(bias_model(case), 140)
    model, row = bias_model(case), tokens(140)
    wanted = model_gradients(model, row)
    for name, gradient in model_gradients(torch.compile(model), row).items():
        assert gradients_agree(gradient, wanted[name.removeprefix("_orig_mod.")]), name
