"""Every setting of a checkpoint with its predicted peak, and the cheapest that fits: `ctxext plan`."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from ctxext.checkpoint.source import TINY, resolve_checkpoint
from ctxext.positions.base import nearest
from ctxext.training.plan import METHODS, Load, Method, Prediction, Recompute, Setting, predict
from ctxext.training.plan_shape import ModelShape, read_shape

_UNITS = {"": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30}
# Estimates of a step's time against Trainer's own; they order settings and are no measurements.
_RECOMPUTE_COST = {"nothing": 1.0, "cheap": 1.05, "layers": 1.33}
_STAGE_COST = (1.0, 1.01, 1.02, 1.15)
_OFFLOAD_COST = {"none": 1.0, "activations": 1.1, "optimizer": 1.5, "all": 2.5}
COST_ORDER = (
    "full before lora before qlora; within a method by the time of a step, estimated as the product of "
    "recompute (nothing 1, cheap 1.05, layers 1.33), ZeRO stage (0 1, 1 1.01, 2 1.02, 3 1.15) and "
    "offload (none 1, activations 1.1, optimizer 1.5, all 2.5)"
)
CHUNK_TOKENS = 512


def parse_memory(text: str) -> float:
    """Return bytes: `80GB` is 80e9, `80GiB` 80 x 2^30, a bare number bytes.

    Raises:
        ValueError: If it is no positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"--memory is {text!r}; give a positive number and GB, GiB, MB, MiB or TB, such as 80GB")
    return float(match[1]) * _UNITS[match[2].upper()]


def plan_checkpoint(
    checkpoint: str,
    *,
    length: int,
    gpus: int = 1,
    memory: str = "80GB",
    method: str | None = None,
    batch: int = 1,
    device: str = "cuda",
) -> dict[str, Any]:
    """Predict every setting of a checkpoint and name the cheapest that fits.

    Args:
        checkpoint: A local folder with config and safetensors, or `tiny`; only headers are read.
        length: Tokens of a sequence.
        gpus: Devices, each reading `batch` sequences.
        memory: Of one device, such as `80GB`.
        method: `full`, `lora` or `qlora`; None for all three.
        batch: Sequences a device reads at once.
        device: `cuda` or `cpu`: what a process costs before it holds anything.

    Returns:
        `cheapest` (None if nothing fits), `settings` by cost with their terms in bytes, `cost_order`.

    Raises:
        ValueError: If a number is not positive, or a name unknown.
    """
    for name, value in (("length", length), ("gpus", gpus), ("batch", batch)):
        if value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")
    if method is not None and method not in METHODS:
        raise ValueError(f"--method is {method!r}{nearest(method, METHODS)}; there are {', '.join(METHODS)}")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"--device is {device!r}; there are cuda, cpu")
    folder = resolve_checkpoint(checkpoint) if checkpoint == TINY else Path(checkpoint)
    limit, shape = parse_memory(memory), read_shape(folder)
    load = Load(length=length, batch=batch, gpus=gpus, device="cpu" if device == "cpu" else "cuda")
    chosen: tuple[Method, ...] = tuple(known for known in METHODS if method in (None, known))
    rows = [_row(shape, setting, load, limit) for setting in sorted(settings(chosen, device), key=_cost)]
    return {
        "checkpoint": checkpoint,
        "parameters": shape.parameters,
        "length": length,
        "batch": batch,
        "gpus": gpus,
        "memory": limit,
        "device": device,
        "cost_order": COST_ORDER,
        "cheapest": next((row for row in rows if row["fits"]), None),
        "settings": rows,
    }


def settings(methods: tuple[Method, ...], device: str = "cuda") -> list[Setting]:
    """Return every setting that can be: of each method, ZeRO stage, way of recomputing, and offload.

    Nothing recomputed comes with and without the logits of the whole batch; offload only with layers recomputed, where
    memory is short, and not on a CPU, where everything lies in the host's memory.
    """
    made: list[Setting] = []
    ways: tuple[Recompute, ...] = ("nothing", "cheap", "layers")
    for method, stage in product(methods, range(4)):
        if method == "qlora" and stage == 3:
            continue
        made.append(Setting(method=method, stage=stage, recompute="nothing", chunk_tokens=None))
        for recompute in ways:
            made.append(Setting(method=method, stage=stage, recompute=recompute, chunk_tokens=CHUNK_TOKENS))
        if device == "cpu":
            continue
        lean = made[-1]
        made.append(replace(lean, offload="activations"))
        if stage >= 2:
            made.append(replace(lean, offload="optimizer"))
        if stage == 3:
            made.append(replace(lean, offload="all"))
    return made


def _cost(setting: Setting) -> tuple[int, float, int]:
    time = _RECOMPUTE_COST[setting.recompute] * _STAGE_COST[setting.stage] * _OFFLOAD_COST[setting.offload]
    return METHODS.index(setting.method), round(time, 4), setting.chunk_tokens or 0


def _row(shape: ModelShape, setting: Setting, load: Load, limit: float) -> dict[str, Any]:
    made: Prediction = predict(shape, setting, load)
    return {
        **asdict(setting),
        "relative_time": _cost(setting)[1],
        "fits": made.peak <= limit,
        "bytes": {term: round(value) for term, value in asdict(made).items() if term != "moment"},
        "moment": made.moment,
    }


def render_plan(answer: dict[str, Any]) -> str:
    """Return the answer as text: the cheapest that fits with its terms, then the table."""
    lines = [
        f"{answer['checkpoint']}: {answer['parameters'] / 1e6:.0f}M parameters, "
        f"{answer['batch']} x {answer['length']} tokens on each of {answer['gpus']} {answer['device']} device(s) of "
        f"{answer['memory'] / 1e9:.1f} GB"
    ]
    best = answer["cheapest"]
    if best is None:
        smallest = min(answer["settings"], key=lambda row: row["bytes"]["peak"])
        lines.append(f"Nothing fits. The least is {_words(smallest)}: {smallest['bytes']['peak'] / 1e9:.1f} GB.")
    else:
        lines.append(
            f"The cheapest that fits: {_words(best)}, peak {best['bytes']['peak'] / 1e9:.2f} GB ({best['moment']})"
        )
        terms = [f"{term} {size / 1e9:.2f}" for term, size in best["bytes"].items() if size and term != "peak"]
        lines.append(f"  GB: {', '.join(terms)}")
    lines.append(f"Order of cost: {answer['cost_order']}")
    lines.append(
        f"{'method':7}{'ZeRO':>5}  {'recompute':10}{'logits of':>10}  {'offload':12}{'peak GB':>9}{'host GB':>9}"
    )
    for row in answer["settings"]:
        logits = row["chunk_tokens"] or "all"
        lines.append(
            f"{row['method']:7}{row['stage']:>5}  {row['recompute']:10}{logits:>10}  {row['offload']:12}"
            f"{row['bytes']['peak'] / 1e9:9.2f}{row['bytes']['host'] / 1e9:9.2f}{'' if row['fits'] else '  too much'}"
        )
    return "\n".join(lines)


def _words(row: dict[str, Any]) -> str:
    loss = (
        "the logits of the whole batch" if row["chunk_tokens"] is None else f"logits of {row['chunk_tokens']} tokens"
    )
    return f"{row['method']}, ZeRO-{row['stage']}, recompute {row['recompute']}, {loss}, offload {row['offload']}"
