"""ALiBi's promise of cost: a training step at L against one with sinusoids at 2 L, the same tokens in both.

`python -m ctxext.reproduce.scratch_cost OPTIONS-AS-JSON` is one side in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from ctxext.bench.measure import interleave, summarize
from ctxext.checkpoint.files import read_json, write_json

LENGTH, TOKENS, ROUNDS, STEPS = 1024, 8192, 3, 2  # the paper's 1024 against 2048
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}


def measure_cost(output: Path) -> dict[str, float]:
    """Return time and peak memory of a step with ALiBi at L over those with sinusoids at 2 L; kept in `output`."""
    path = output / "cost.json"
    if not path.exists():
        sides = {"alibi": _command("alibi", LENGTH), "sinusoidal": _command("sinusoidal", 2 * LENGTH)}
        made = {side: summarize(runs) for side, runs in interleave(sides, ROUNDS, "cost").items()}
        alibi, sinusoidal = made["alibi"], made["sinusoidal"]
        ratios = {
            "time": alibi["seconds"] / sinusoidal["seconds"],
            "memory": alibi["peak_mb"] / sinusoidal["peak_mb"],
        }
        write_json(path, {**ratios, "sides": made})
    found = read_json(path)
    return {"time": found["time"], "memory": found["memory"]}


def _command(positions: str, length: int) -> list[str]:
    job = json.dumps({"positions": positions, "length": length})
    return [sys.executable, "-m", "ctxext.reproduce.scratch_cost", job]


def main(job: dict[str, Any]) -> None:
    """Train for a few steps; print the seconds of one."""
    import torch
    from transformers import AutoModelForCausalLM

    from ctxext.modeling.configuration_ctxext import CtxextLlamaConfig
    from ctxext.reproduce.sinusoidal import SinusoidalLlamaConfig

    bias = {"bias_type": "alibi", "keep_rotary": False}
    config = (
        CtxextLlamaConfig(**SHAPE, bias_parameters=bias)
        if job["positions"] == "alibi"
        else SinusoidalLlamaConfig(**SHAPE)
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, SHAPE["vocab_size"], (TOKENS // job["length"], job["length"]))
    seconds = []
    for _ in range(1 + STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": statistics.median(seconds[1:]), "answer": {}}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
