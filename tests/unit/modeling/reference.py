"""The biases and attention written a second time, in plain Python and float64: what the tests compare with.

Nothing here calls a formula of ctxext. Fixed biases are functions of one head and one distance; learned ones are
float64 torch, so that autograd gives their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ctxext.modeling.bias import ScoreBias

# Every bias, with an edge (window, last T5 bucket) in the middle of the few hundred tokens that the tests read.
CASES: dict[str, dict[str, Any]] = {
    "alibi": {"bias_type": "alibi"},
    "sandwich": {"bias_type": "sandwich"},
    "smoothed_sandwich": {"bias_type": "smoothed_sandwich"},
    "windowed": {"bias_type": "windowed", "window": 200},
    "windowed_alibi": {"bias_type": "windowed", "window": 200, "with_alibi": True},
    "kerple_log": {"bias_type": "kerple_log"},
    "kerple_power": {"bias_type": "kerple_power"},
    "t5": {"bias_type": "t5"},
}
LEARNED_CASES = ("kerple_log", "kerple_power", "t5")

Values = dict[str, torch.Tensor]


def alibi_slopes(heads: int) -> list[float]:
    """The recursion of ALiBi's reference code (fairseq fork, models/transformer.py)."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    slopes = [2.0 ** (-8.0 * n / power) for n in range(1, power + 1)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[0::2][: heads - power]


def alibi(
    head: int, heads: int, distance: int, slope_shift: float = 0.0, shared_exponent: float | None = None
) -> float:
    slope = alibi_slopes(heads)[head] if shared_exponent is None else 0.5**shared_exponent
    return -slope * 0.5**slope_shift * distance


def sandwich(head: int, heads: int, distance: int, dimension: int = 128, base: float = 10000.0) -> float:
    """From the embeddings themselves, p_m . p_n at m = distance and n = 0, and not from the sum of cosines."""
    product = 0.0
    for i in range(dimension // 2):
        angle = distance / base ** (2 * i / dimension)
        product += math.sin(angle) * math.sin(0.0) + math.cos(angle) * math.cos(0.0)
    return (product - dimension / 2) / (8 * (head + 1) / heads)


def smoothed_sandwich(head: int, heads: int, distance: int, log_slope: float = 0.825, offset: float = 0.8) -> float:
    return (-log_slope * math.log(1 + distance) - offset) * heads / (head + 1)  # 8 / h_n = H / n


def windowed(head: int, heads: int, distance: int, window: int, with_alibi: bool = False) -> float:
    if distance > window - 1:
        return -math.inf
    return alibi(head, heads, distance) if with_alibi else 0.0


def t5_bucket(distance: int, buckets: int, furthest: int) -> int:
    """The bucket in whole numbers, so that no rounding decides at an edge.

    Bucket exact + j starts where (distance / exact)^steps >= (furthest / exact)^j.
    """
    exact = buckets // 2
    steps = buckets - exact
    if distance < exact:
        return distance
    passed = [distance**steps * exact**j >= furthest**j * exact**steps for j in range(1, steps)]
    return exact + sum(passed)


FIXED: dict[str, Callable[..., float]] = {
    "alibi": alibi,
    "sandwich": sandwich,
    "smoothed_sandwich": smoothed_sandwich,
    "windowed": windowed,
}


def options(parameters: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parameters.items() if key not in ("bias_type", "keep_rotary")}


def learned_bias(bias_type: str, values: Values, distances: torch.Tensor, **extra: int) -> torch.Tensor:
    """`(heads, n)` float64 from the raw parameters."""
    if bias_type == "t5":
        buckets, furthest = extra.get("num_buckets", 32), extra.get("max_distance", 128)
        return values["weight"][:, [t5_bucket(int(d), buckets, furthest) for d in distances]]
    rows = []
    for head in range(len(values["log_r1"])):
        r1 = torch.exp(values["log_r1"][head])
        if bias_type == "kerple_log":
            rows.append(-r1 * torch.log(1 + torch.exp(values["log_r2"][head]) * distances.double()))
            continue
        r2 = 2 / (1 + torch.exp(-values["logit_r2"][head]))
        logarithms = torch.tensor([math.log(d) if d else 0.0 for d in distances.tolist()], dtype=torch.float64)
        rows.append(-r1 * torch.exp(r2 * logarithms).where(distances > 0, 0.0))
    return torch.stack(rows)


def bias_table(
    parameters: dict[str, Any], heads: int, distances: torch.Tensor, values: Values | None = None
) -> torch.Tensor:
    """`(heads, n)` float64 of any bias; `values` are the raw parameters of a learned one."""
    kind, extra = parameters["bias_type"], options(parameters)
    if kind in FIXED:
        rows = [[FIXED[kind](head, heads, d, **extra) for d in distances.tolist()] for head in range(heads)]
        return torch.tensor(rows, dtype=torch.float64)
    assert values is not None
    return learned_bias(kind, values, distances, **extra)


def make_bias(parameters: dict[str, Any], heads: int, seed: int = 0) -> ScoreBias:
    """A `ScoreBias` whose learned parameters are moved off their start, each head elsewhere."""
    bias = ScoreBias(parameters, heads)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in bias.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return bias


def raw_values(bias: ScoreBias) -> Values:
    """The learned parameters as float64 leaves of their own."""
    found = bias.kernel.named_parameters() if bias.kernel is not None else ()
    return {name: parameter.detach().double().requires_grad_() for name, parameter in found}


def seen_by(documents: torch.Tensor) -> torch.Tensor:
    """`(batch, queries, keys)` bool of documents `(batch, length)`, -1 for padding.

    Padding sees itself alone, so that the reference stays finite there; no test compares those rows.
    """
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, None, :] & causal
    return same | torch.eye(length, dtype=torch.bool)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    seen: torch.Tensor,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """`(batch, queries, heads, head_dim)` float64, one head at a time, of as many queries as keys.

    Query head h reads key head h // (heads / key heads), as in grouped-query attention. `keep` multiplies the
    weights: what dropout does, `(batch, heads, queries, keys)`.
    """
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    out = []
    for row in range(batch):
        for head in range(heads):
            scores = query[row, head].double() @ key[row, head // groups].double().T / math.sqrt(width)
            scores = scores + table[head][distance.clamp(min=0)]
            weights = torch.softmax(scores.masked_fill(~seen[row], -math.inf), dim=-1)
            weights = weights if keep is None else weights * keep[row, head]
            out.append(weights @ value[row, head // groups].double())
    return torch.stack(out).reshape(batch, heads, length, -1).transpose(1, 2)
