"""`ctxext bench train`: a training step with the memory presets against Trainer as it comes.

`python -m ctxext.bench.train OPTIONS-AS-JSON` is one side in a process of its own: transformers' Trainer, its default
AdamW, weights in bfloat16, random tokens. The first step warms up and makes the optimizer's states; the rest is timed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

from ctxext.bench.measure import Sample, interleave, machine, summarize

TRAIN = {"length": 8192, "batch": 1, "steps": 1, "dtype": "bfloat16"}
SIDES = ("plain", "fast", "lean")
LOSS_TOLERANCE = 1e-3  # relative, of the first step: bfloat16 logits summed in another order


def bench_train(rounds: int, length: int = TRAIN["length"]) -> dict[str, Any]:  # type: ignore[assignment]
    """Compare peak memory and time of a step: Trainer's defaults, `fast` and `lean`.

    Args:
        rounds: Runs of each side, in turn.
        length: Tokens of the one sequence of a step.
    """
    from ctxext.checkpoint.source import resolve_checkpoint
    from ctxext.reproduce.smollm2 import find_smollm2

    options = {**TRAIN, "length": length, "checkpoint": str(resolve_checkpoint(find_smollm2()))}
    samples = interleave({side: side_command({**options, "preset": side}) for side in SIDES}, rounds, "train")
    return {
        "bench": "train",
        "what": f"SmolLM2-135M-Instruct, a Trainer step on {TRAIN['batch']} x {length} tokens, bfloat16, AdamW, sdpa",
        "machine": machine(),
        "sides": {side: summarize(samples[side]) for side in SIDES},
        **_ratios(samples),
        "targets": {
            "fast_peak_memory_ratio": 0.5,
            "fast_time_ratio": 1.05,
            "lean_peak_memory_ratio": 0.25,
            "lean_time_ratio": 1.4,
            "largest_relative_loss_difference": LOSS_TOLERANCE,
        },
    }


def side_command(options: dict[str, Any]) -> list[str]:
    """Return the command of one side."""
    return [sys.executable, "-m", "ctxext.bench.train", json.dumps(options)]


def _ratios(samples: dict[str, list[Sample]]) -> dict[str, float]:
    made = {side: summarize(samples[side]) for side in SIDES}
    plain, ratios = made["plain"], {}
    for side in SIDES[1:]:
        ratios[f"{side}_peak_memory_ratio"] = round(made[side]["peak_mb"] / plain["peak_mb"], 3)
        ratios[f"{side}_time_ratio"] = round(made[side]["seconds"] / plain["seconds"], 3)
    losses = [made[side]["answer"]["losses"][0] for side in SIDES]
    ratios["largest_relative_loss_difference"] = max(abs(loss / losses[0] - 1) for loss in losses)
    return ratios


def main(options: dict[str, Any]) -> None:
    """Run one side: train `steps` steps after one that warms up; print the seconds of a step and the losses."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from ctxext.training.lean_presets import MemoryPreset, apply_preset

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options["checkpoint"], dtype=torch.bfloat16)
    if options.get("method") == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    preset = options["preset"]
    apply_preset(model, preset if isinstance(preset, str) else MemoryPreset(**preset))
    rows = (1 + options["steps"]) * options["batch"]
    ids = torch.randint(0, model.config.vocab_size, (rows, options["length"])).tolist()
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=1 + options["steps"],
            per_device_train_batch_size=options["batch"],
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        data: Any = [{"input_ids": row, "labels": row} for row in ids]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Clock])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"seconds": (ends[-1] - ends[0]) / options["steps"], "answer": {"losses": losses}}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
