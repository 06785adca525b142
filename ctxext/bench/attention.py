"""`ctxext bench attention`: attention with a bias against plain causal scaled_dot_product_attention.

`python -m ctxext.bench.attention OPTIONS-AS-JSON` is one setting in a process of its own. For times, all sides run in
turn in one process, so that the machine's mood is the same for all; for memory each side has a process.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from ctxext.bench.measure import machine, run_once
from ctxext.evaluation.progress import progress_bar

HEADS, KEY_HEADS = 4, 4
BIASES: dict[str, dict[str, Any]] = {
    "alibi": {"bias_type": "alibi"},
    "sandwich": {"bias_type": "sandwich"},
    "smoothed_sandwich": {"bias_type": "smoothed_sandwich"},
    "windowed": {"bias_type": "windowed", "window": 512},
    "kerple_log": {"bias_type": "kerple_log"},
    "kerple_power": {"bias_type": "kerple_power"},
    "t5": {"bias_type": "t5"},
}
FIXED, LEARNED = ("alibi", "sandwich", "smoothed_sandwich"), ("kerple_log", "kerple_power", "t5")
# Dtype, head dimension and length; whole matrices beside it up to MATRICES.
SETTINGS = [("float32", width, length) for width in (64, 128) for length in (1024, 4096, 8192, 16384)]
SETTINGS += [("bfloat16", width, length) for width in (64, 128) for length in (1024, 4096)]
MATRICES = 4096
MEMORY_LENGTHS = (4096, 8192, 16384, 32768)
DECODE_KEYS = 8192
DECODE_STEPS = 50


def bench_attention(
    rounds: int, settings: list[tuple[str, int, int]] = SETTINGS, memory_lengths: tuple[int, ...] = MEMORY_LENGTHS
) -> dict[str, Any]:
    """Compare times, forward and backward, and memory over plain attention.

    Args:
        rounds: Runs of each side in a setting, in turn, after one that warms up.
        settings: Dtype, head dimension and length of each.
        memory_lengths: Lengths of the memory curve.
    """
    ratios: dict[str, dict[str, float]] = {}
    memory: dict[str, dict[str, float]] = {}
    with progress_bar("bench attention", len(settings) + 3 * len(memory_lengths) + 1) as advance:
        for dtype, width, length in settings:
            options = {"job": "time", "dtype": dtype, "width": width, "length": length, "rounds": rounds}
            ratios[f"{dtype}, head {width}, {length}"] = run_once(side_command(options)).answer
            advance(1)
        for length in memory_lengths:
            peaks = {}
            for side in ("plain", "alibi", "kerple_log"):
                options = {"job": "memory", "dtype": "float32", "width": 64, "length": length, "side": side}
                peaks[side] = run_once(side_command(options)).peak_mb
                advance(1)
            memory[str(length)] = {side: round(peak - peaks["plain"], 1) for side, peak in peaks.items()}
        decode = run_once(side_command({"job": "decode", "dtype": "float32", "width": 64, "length": DECODE_KEYS}))
        advance(1)
    return {
        "bench": "attention",
        "what": f"{HEADS} heads, forward and backward, time over plain causal SDPA",
        "machine": machine(),
        "sides": {},
        "time_ratios": ratios,
        "mb_above_plain": memory,
        "decode_ratios": decode.answer,
        "worst_fixed_ratio_from_4096": _worst(ratios, FIXED),
        "worst_learned_ratio_from_4096": _worst(ratios, LEARNED),
        "worst_windowed_ratio_from_8_windows": _worst(ratios, ("windowed",)),
        "worst_decode_ratio": max(decode.answer.values()),
        "targets": {
            "worst_fixed_ratio_from_4096": 1.25,
            "worst_learned_ratio_from_4096": 2.0,
            "worst_windowed_ratio_from_8_windows": 1.0,
            "worst_decode_ratio": 1.1,
        },
    }


def _worst(ratios: dict[str, dict[str, float]], sides: tuple[str, ...]) -> float | None:
    """Return the largest ratio of `sides` at 4096 tokens (eight windows) and beyond, or None where there is none."""
    found = [row[side] for name, row in ratios.items() if int(name.split()[-1]) >= 4096 for side in sides]
    return max(found, default=None)


def side_command(options: dict[str, Any]) -> list[str]:
    """Return the command of one setting."""
    return [sys.executable, "-m", "ctxext.bench.attention", json.dumps(options)]


def _tensors(options: dict[str, Any], queries: int) -> tuple[Any, Any, Any, Any]:
    """Return q, k, v that ask for gradients, and a gradient of the output."""
    import torch

    torch.manual_seed(0)
    dtype, width = getattr(torch, options["dtype"]), options["width"]
    sizes = ((HEADS, queries), (KEY_HEADS, options["length"]), (KEY_HEADS, options["length"]))
    made = [torch.randn(1, heads, length, width, dtype=dtype).requires_grad_() for heads, length in sizes]
    return made[0], made[1], made[2], torch.randn(1, queries, HEADS, width, dtype=dtype)


def _attend(function: str, parameters: dict[str, Any]) -> Callable[..., Any]:
    """Return attention by one of ctxext's functions with a bias."""
    from torch import nn

    from ctxext.modeling.attention import FUNCTIONS, BiasRows
    from ctxext.modeling.bias import ScoreBias

    bias, layer = ScoreBias(parameters, HEADS), nn.Module()
    run: Any = FUNCTIONS[function]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return run(layer, q, k, v, None, score_bias=BiasRows(bias))[0]

    return attend


def _plain(q: Any, k: Any, v: Any) -> Any:
    """Attend as transformers does without a bias."""
    from torch import nn
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(nn.Module(), q, k, v, None)[0]


def _dense_mask(q: Any, k: Any, v: Any) -> Any:
    """Attend with ALiBi written out as a mask of queries by keys, as others do it."""
    import torch

    from ctxext.modeling.attention import gathered_bias
    from ctxext.modeling.bias import ScoreBias

    length = q.shape[2]
    row = ScoreBias(BIASES["alibi"], HEADS)(length, q.device)
    mask = gathered_bias(row, torch.arange(length), length).to(q.dtype)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def time_sides(options: dict[str, Any]) -> dict[str, float]:
    """Return the median time of every side over that of plain attention."""
    sides: dict[str, Callable[..., Any]] = {"plain": _plain}
    sides |= {name: _attend("ctxext_sdpa", parameters) for name, parameters in BIASES.items()}
    if options["length"] <= MATRICES:
        sides |= {"alibi, dense mask": _dense_mask, "alibi, eager": _attend("ctxext_eager", BIASES["alibi"])}
    q, k, v, grad = _tensors(options, options["length"])
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options["rounds"] + 1):
        for name, attend in sides.items():
            start = time.perf_counter()
            attend(q, k, v).backward(grad)
            if number:
                seconds[name].append(time.perf_counter() - start)
            q.grad = k.grad = v.grad = None
    plain = statistics.median(seconds["plain"])
    return {name: round(statistics.median(taken) / plain, 3) for name, taken in seconds.items()}


def time_decoding(options: dict[str, Any]) -> dict[str, float]:
    """Return the median time of one query over a full cache, over that of plain attention."""
    import torch

    from ctxext.modeling.attention import BiasRows, sdpa_bias_attention
    from ctxext.modeling.bias import ScoreBias

    q, k, v, _ = _tensors(options, 1)
    layer = torch.nn.Module()
    rows = {name: BiasRows(ScoreBias(parameters, HEADS)) for name, parameters in BIASES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", *rows)}
    with torch.no_grad():
        for _ in range(DECODE_STEPS):
            for name in seconds:
                start = time.perf_counter()
                if name == "plain":
                    _plain(q, k, v)
                else:
                    sdpa_bias_attention(layer, q, k, v, None, score_bias=rows[name])
                seconds[name].append(time.perf_counter() - start)
    plain = statistics.median(seconds["plain"])
    return {name: round(statistics.median(taken) / plain, 3) for name, taken in seconds.items()}


def main(options: dict[str, Any]) -> None:
    """Run one setting and print its answer."""
    start, answer = time.perf_counter(), {}
    if options["job"] == "memory":
        attend = _plain if options["side"] == "plain" else _attend("ctxext_sdpa", BIASES[options["side"]])
        q, k, v, grad = _tensors(options, options["length"])
        attend(q, k, v).backward(grad)
    else:
        answer = time_sides(options) if options["job"] == "time" else time_decoding(options)
    print(json.dumps({"seconds": time.perf_counter() - start, "answer": answer}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
