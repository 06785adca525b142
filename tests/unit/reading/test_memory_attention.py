"""Attention to a window and a memory, against a loop over rows, heads, queries and keys in float64."""

from __future__ import annotations

import pytest
import torch
from memory_reference import DIM, attend_one
from torch._subclasses import FakeTensorMode

from ctxext.reading.memory import MemoryConfig
from ctxext.reading.memory_attention import memory_attention
from ctxext.reading.memory_pass import Reading, rotate, unrotate
from ctxext.reading.memory_state import Remembered, best


def first_layer() -> torch.nn.Module:
    module = torch.nn.Module()
    module.layer_idx = 0
    return module


def test_ties_go_to_the_most_recent_keys() -> None:
    scores = torch.tensor([[2.0, 5.0, 2.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 3.0, 3.0, 3.0, 2.0]])
    assert best(scores, 2).int().tolist() == [[0, 1, 0, 1, 0], [0, 0, 0, 1, 1], [0, 0, 1, 1, 0]]
    hidden = torch.tensor([[1.0, -torch.inf, 4.0, -torch.inf]])
    assert best(hidden, 3)[0, [0, 2]].all()


def test_attention_with_ties_is_exact_forward_and_backward() -> None:
    """Small whole numbers, so that scores are equal to the last bit and most queries meet a tie at the k-th place."""
    draw_whole = torch.Generator().manual_seed(3)
    batch, heads, shared, tokens, slots, width = 2, 4, 2, 6, 20, 4

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=draw_whole).double()

    query, key, value = (
        whole(batch, heads, tokens, width).requires_grad_(),
        whole(batch, shared, tokens, width).requires_grad_(),
        torch.randn(batch, shared, tokens, width, dtype=torch.float64, generator=draw_whole).requires_grad_(),
    )
    old_key, old_value = (
        whole(batch, shared, slots, width),
        torch.randn(batch, shared, slots, width, generator=draw_whole).double(),
    )
    valid = torch.rand(batch, slots, generator=draw_whole) < 0.7
    still = torch.ones(batch, 1, width), torch.zeros(batch, 1, width)
    remembered = Remembered([(old_key, old_value)], valid)
    reading = Reading(MemoryConfig(size=slots, top_k=4), remembered, False, before=still)
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    out, _ = memory_attention(first_layer(), query, key, value, seen, reading=reading)
    wanted, ties = torch.zeros_like(out), 0
    for row in range(batch):
        kept = [slot for slot in range(slots) if valid[row, slot]]
        for head in range(heads):
            mine = head // (heads // shared)
            for place in range(tokens):
                keys = [old_key[row, mine, slot] for slot in kept] + list(key[row, mine, : place + 1])
                values = [old_value[row, mine, slot] for slot in kept] + list(value[row, mine, : place + 1])
                wanted[row, place, head] = attend_one(query[row, head, place], keys, values, 4)
                scores = sorted(((query[row, head, place] @ one).item() for one in keys), reverse=True)
                ties += scores[3] == scores[4]
    assert ties > batch * heads * tokens // 2
    assert (out - wanted).abs().max() < 1e-12
    towards = torch.randn(out.shape, dtype=torch.float64, generator=draw_whole)
    grads = torch.autograd.grad((out * towards).sum(), (query, key, value))
    for grad, other in zip(grads, torch.autograd.grad((wanted * towards).sum(), (query, key, value)), strict=True):
        assert (grad - other).abs().max() < 1e-12


def test_unrotating_takes_the_attention_factor_out() -> None:
    angles, states = torch.rand(2, 5, 4).double() * 100, torch.randn(2, 3, 5, 8).double()
    cos, sin = (1.4 * torch.cat((part, part), dim=-1) for part in (angles.cos(), angles.sin()))
    assert (unrotate(rotate(states, cos, sin), cos, sin) - states).abs().max() < 1e-14


@torch.no_grad()
def test_bf16_retrieves_what_float64_does_from_the_same_numbers() -> None:
    generator, tokens, slots = torch.Generator().manual_seed(2), 16, 64

    def states(heads: int, count: int) -> torch.Tensor:
        return torch.randn(1, heads, count, 32, generator=generator).bfloat16()

    query, key, value, old = (
        states(4, tokens),
        states(2, tokens),
        states(2, tokens),
        (states(2, slots), states(2, slots)),
    )
    still = torch.ones(1, 1, 32), torch.zeros(1, 1, 32)
    remembered = Remembered([old], torch.ones(1, slots, dtype=torch.bool))
    reading = Reading(MemoryConfig(size=slots, top_k=5), remembered, False, before=still)
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    out, _ = memory_attention(first_layer(), query, key, value, seen, reading=reading)
    assert out.dtype == torch.bfloat16
    for head in range(4):
        keys, values = (torch.cat(pair, dim=2)[0, head // 2].double() for pair in ((old[0], key), (old[1], value)))
        for place in range(tokens):
            end = slots + place + 1
            wanted = attend_one(query[0, head, place].double(), list(keys[:end]), list(values[:end]), 5)
            assert (out[0, place, head].double() - wanted).abs().max() < 0.02  # bf16 keeps 2 to 3 digits


@pytest.mark.parametrize("offload", [False, True])
def test_where_the_memory_lies(offload: bool) -> None:
    """With tensors that only know their device: what mixes two devices fails, as it does on CUDA."""
    with FakeTensorMode(), torch.device("meta"):
        config = MemoryConfig(size=6, top_k=4, offload=offload)
        around, remembered = (torch.ones(2, 1, DIM), torch.zeros(2, 1, DIM)), None
        for _ in range(3):
            window = torch.ones(1, 4, DIM), torch.zeros(1, 4, DIM)
            real = torch.ones(2, 4, dtype=torch.bool)
            reading = Reading(config, remembered, True, None, window, around, real)
            key, seen = torch.randn(2, 2, 4, DIM), torch.ones(2, 1, 4, 4, dtype=torch.bool)
            out, _ = memory_attention(first_layer(), torch.randn(2, 4, 4, DIM), key, key, seen, reading=reading)
            remembered = reading.append()
        assert out.device.type == "meta"
        places = {states.device.type for states in remembered.layers[0]}
        assert places == {"cpu" if offload else "meta"}
        assert remembered.layers[0][0].shape == (2, 2, 6, DIM)
