"""Attention functions against one dense float64 reference: bias x backend x dtype x heads x cache x padding.

Masks are those that transformers makes for a model's forward pass, caches are transformers' own. Lengths cross
several blocks (queries / 8, at least 128 rows; a window's rows; 128 in flex attention), and window, documents and
padding begin in the middle of them.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from reference import CASES, bias_table, dense_attention, make_bias, raw_values, seen_by
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask

from ctxext.modeling import CtxextLlamaConfig
from ctxext.modeling.attention import FUNCTIONS, BiasRows
from ctxext.modeling.bias import ScoreBias

# Largest error of an output; values are standard normal, and an output is a mean of them.
# bfloat16 has 8 bits: eager rounds scores up to 8 to 0.03, sdpa only what it returns.
FORWARD = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
# Largest error of a gradient, as a share of the largest entry that the reference has.
# A learned bias sums what nearly cancels over all queries, from bfloat16 gradients of the outputs.
BACKWARD = {torch.float32: 3e-5, torch.bfloat16: 1e-1}

HEADS, WIDTH = 4, 8
LENGTHS = {"ctxext_sdpa": 380, "ctxext_eager": 230, "ctxext_flex": 230}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KEY_HEADS = {"mha": 4, "gqa": 2}


@dataclass
class Inputs:
    """Two rows of queries, keys and values, and which document each token belongs to (-1: padding)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    documents: torch.Tensor

    @property
    def real(self) -> torch.Tensor:
        return self.documents >= 0

    def mask(self) -> torch.Tensor | None:
        """What a user hands to the model for padding."""
        return None if bool(self.real.all()) else self.real.long()

    def positions(self) -> torch.Tensor:
        """`position_ids` that restart at each document."""
        place = torch.arange(self.documents.shape[1]).expand(2, -1)
        starts = torch.diff(self.documents, dim=1, prepend=self.documents[:, :1]) != 0
        return place - torch.where(starts, place, 0).cummax(dim=1).values


def documents(layout: str, length: int) -> torch.Tensor:
    """`(2, length)` document numbers; the two rows are unlike."""
    place, found = torch.arange(length), torch.zeros(2, length, dtype=torch.long)
    if layout == "left":
        found[0, : length // 3] = -1
        found[1, :3] = -1
    elif layout == "right":
        found[0, -(length // 3) :] = -1
    elif layout == "hole":  # padding within a row
        found[0, length // 3 : length // 2] = -1
        found[1, 50] = -1
    elif layout == "packed":  # one document longer than a block, one of a single token
        found[0] = (place >= 11) + (place >= length // 2).long() + (place >= length // 2 + 1)
        found[1] = place // (length // 3 + 5)
    return found


def inputs(length: int, layout: str, dtype: torch.dtype, key_heads: int) -> Inputs:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, HEADS, length, WIDTH), *[(2, key_heads, length, WIDTH)] * 2]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[0] *= 2.0  # weights far from uniform
    return Inputs(*[tensor.to(dtype) for tensor in tensors], documents(layout, length))


def config_for(backend: str) -> CtxextLlamaConfig:
    config = CtxextLlamaConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, bias_parameters=CASES["alibi"]
    )
    config._attn_implementation = backend
    return config


def attend(backend: str, bias: ScoreBias, given: Inputs, cache: str = "none") -> torch.Tensor:
    """`(batch, length, heads, head_dim)`, read at once, or piece by piece on a cache as a model would."""
    config, length = config_for(backend), given.query.shape[2]
    mask, positions, store = given.mask(), None, None
    ends = [length]
    if cache == "none":
        positions = given.positions()
    else:  # a prefill, several blocks more, a short piece, a few tokens at once, single ones
        ends = [length // 3, length - 40, length - 15, length - 8, *range(length - 4, length + 1)]
        store = DynamicCache() if cache == "dynamic" else StaticCache(config, max_cache_len=length + 25)
    outs, start = [], 0
    for end in ends:
        key, value = given.key[:, :, start:end], given.value[:, :, start:end]
        seen = mask if mask is None else mask[:, :end]
        made = create_causal_mask(config, torch.zeros(2, end - start, 1), seen, store, positions)
        if store is not None:
            key, value = store.update(key, value, 0)
        query = given.query[:, :, start:end]
        outs.append(FUNCTIONS[backend](None, query, key, value, made, score_bias=BiasRows(bias))[0])
        start = end
    return torch.cat(outs, dim=1)


@functools.cache
def expected(case: str, length: int, layout: str, dtype: torch.dtype, key_heads: int) -> torch.Tensor:
    """The reference's output; the same for every backend and cache."""
    return expect(case, make_bias(CASES[case], HEADS), inputs(length, layout, dtype, key_heads))


def expect(case: str, bias: ScoreBias, given: Inputs, values: Any = None) -> torch.Tensor:
    length = given.query.shape[2]
    table = bias_table(CASES[case], HEADS, torch.arange(length), values or raw_values(bias))
    return dense_attention(given.query, given.key, given.value, table, seen_by(given.documents))


def _matrix(backends: tuple[str, ...], layouts: dict[str, tuple[str, ...]]) -> list[Any]:
    """All combinations; by default those of sdpa in float32 with grouped heads, and every eleventh of the others.

    Eleven shares no factor with the lengths of the lists, so that each value of each is there by default.
    """
    rows = []
    spread = itertools.count()
    for backend, cache in itertools.product(backends, layouts):
        for layout, case, dtype, heads in itertools.product(layouts[cache], CASES, DTYPES, KEY_HEADS):
            if backend == "ctxext_flex" and dtype == "bfloat16":
                continue  # uncompiled on a CPU: float32 alone
            common = (backend, dtype, heads) == ("ctxext_sdpa", "float32", "gqa")
            marks = () if common or next(spread) % 11 == 0 else pytest.mark.slow
            names = (case, backend.removeprefix("ctxext_"), dtype, heads, cache, layout)
            values = (case, backend, DTYPES[dtype], KEY_HEADS[heads], cache, layout)
            rows.append(pytest.param(*values, marks=marks, id="-".join(names)))
    return rows


PADDED = {
    "none": ("plain", "left", "right", "packed", "hole"),
    "dynamic": ("plain", "left"),
    "static": ("plain", "left"),
}
RANGES = {"none": ("plain", "left", "right", "packed"), "dynamic": ("plain", "left"), "static": ("plain", "left")}
ARGUMENTS = "case, backend, dtype, key_heads, cache, layout"


@pytest.mark.parametrize(
    ARGUMENTS, _matrix(("ctxext_sdpa", "ctxext_eager"), PADDED) + _matrix(("ctxext_flex",), RANGES)
)
@torch.no_grad()
def test_forward(case: str, backend: str, dtype: torch.dtype, key_heads: int, cache: str, layout: str) -> None:
    bias, given = make_bias(CASES[case], HEADS), inputs(LENGTHS[backend], layout, dtype, key_heads)
    live = attend(backend, bias, given, cache)
    wanted = expected(case, LENGTHS[backend], layout, dtype, key_heads)
    assert live.dtype == dtype and live.shape == wanted.shape
    error = (live.double() - wanted)[given.real].abs().max()
    assert float(error) < FORWARD[dtype]


def gradients(out: torch.Tensor, given: Inputs, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a random sum of the outputs that are no padding."""
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    (out.double() * pull * given.real[..., None, None]).sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def leaves(given: Inputs, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Queries, keys and values of their own, put in place of those of `given`."""
    found = {name: getattr(given, name).detach().to(dtype).requires_grad_() for name in ("query", "key", "value")}
    given.query, given.key, given.value = found.values()
    return found


@pytest.mark.parametrize(ARGUMENTS, _matrix(("ctxext_sdpa", "ctxext_eager"), {"none": PADDED["none"]}))
def test_backward(case: str, backend: str, dtype: torch.dtype, key_heads: int, cache: str, layout: str) -> None:
    bias, given = make_bias(CASES[case], HEADS), inputs(LENGTHS[backend], layout, dtype, key_heads)
    live_leaves = leaves(given, dtype)
    live = gradients(attend(backend, bias, given), given, {**live_leaves, **dict(bias.named_parameters())})
    values = raw_values(bias)
    named = {f"kernel.{name}": value for name, value in values.items()}
    wanted_leaves = {**leaves(given, torch.float64), **named}
    wanted = gradients(expect(case, bias, given, values), given, wanted_leaves)
    assert live.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (live[name].double() - gradient).abs().max() / gradient.abs().max()
        assert float(error) < BACKWARD[dtype], name
