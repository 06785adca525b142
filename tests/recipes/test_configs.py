"""Every config by name: what Trainer and the model really see, and two steps of it, shrunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctxext.checkpoint.patch import patch_checkpoint
from ctxext.checkpoint.rope_config import read_rope
from ctxext.data.tokens import check_source
from ctxext.recipes import finetune
from ctxext.training.arguments import Reading
from ctxext.training.config_file import parse_config, read_yaml, training_arguments
from ctxext.training.preflight import evaluations_of
from ctxext.training.recipe_files import recipe_root

# peft 0.21 asks for an attribute that transformers 5.24 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ROOT = recipe_root()
WINDOW = 128
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
CONSTANT = "constant_with_warmup"
SUMMARIZE = "summarize-llama2-7b-16k"  # its model has the method already
SKIP = "skip-smollm2"  # no method: its windows are within the model's own

# model, method, length, factor in the shrunk run, batch, rate, decay, warm-up, schedule, steps, tuning, boundaries
EXPECTED: dict[str, tuple[Any, ...]] = {
    "pi-llama2-7b-8k": ("Llama-2-7b-hf", "linear", 8192, 2, 64, 2e-5, 0, 20, CONSTANT, 1000, "full", "joined"),
    "pi-llama2-7b-16k": ("Llama-2-7b-hf", "linear", 16384, 4, 128, 2e-5, 0, 20, CONSTANT, 1000, "full", "joined"),
    "pi-llama2-7b-32k": ("Llama-2-7b-hf", "linear", 32768, 8, 128, 2e-5, 0, 20, CONSTANT, 1000, "full", "joined"),
    "yarn-llama2-7b-64k": ("Llama-2-7b-hf", "yarn", 65536, 16, 64, 2e-5, 0, 20, CONSTANT, 400, "full", "joined"),
    "yarn-llama2-7b-128k": ("final", "yarn", 131072, 32, 64, 2e-5, 0, 20, CONSTANT, 200, "full", "joined"),
    "longlora-llama2-7b-32k": ("Llama-2-7b-hf", "linear", 32768, 8, 64, 2e-5, 0, 20, CONSTANT, 1000, "lora", "joined"),
    **{
        f"easycontext-llama2-7b{stage}": (model, "theta", length, small, batch, rate, 0.1, 0, "constant", steps)
        + ("full", "joined")
        for stage, model, length, small, batch, rate, steps in (
            ("", "Llama-2-7b-hf", 32768, 8, 32, 2e-5, 1000),
            ("-stage2", "easycontext-llama2-7b/final", 65536, 16, 16, 2e-5, 1000),
            ("-stage3", "stage2/final", 256000, 24, 4, 2e-5, 500),
            ("-stage4", "stage3/final", 256000, 24, 4, 2e-5, 500),
            ("-stage5", "stage4/final", 256000, 24, 4, 2e-5, 150),
            ("-stage6", "stage5/final", 512000, 32, 2, 2e-5, 300),
            ("-stage7", "stage6/final", 512000, 32, 2, 1e-5, 90),
        )
    },
    "prolong-llama3-8b-64k": (
        *("Meta-Llama-3-8B-Instruct", "theta", 65536, 8, 64, 1e-5, 0.1, 500, "cosine_with_min_lr", 5000, "full"),
        "isolated",
    ),
    "qlora-llama3-8b-32k": (
        *("Meta-Llama-3-8B-Instruct", "yarn", 32768, 4, 16, 1e-4, 0, 20, CONSTANT, 1000, "qlora", "isolated"),
    ),
    "yarn-smollm2-16k": (
        *("SmolLM2-135M-Instruct", "yarn", 16384, 2, 8, 2e-5, 0, 20, CONSTANT, 1000, "full", "isolated"),
    ),
    "yarn-smollm2-32k": (
        *("SmolLM2-135M-Instruct", "yarn", 32768, 4, 8, 2e-5, 0, 20, CONSTANT, 1000, "full", "isolated"),
    ),
    "pi-smollm2-32k": (
        *("SmolLM2-135M-Instruct", "linear", 32768, 4, 8, 2e-5, 0, 20, CONSTANT, 1000, "full", "isolated"),
    ),
    "sandwich-smollm2-16k": (
        *("SmolLM2-135M-Instruct", "sandwich", 16384, 2, 8, 1e-4, 0, 20, CONSTANT, 1000, "full", "isolated"),
    ),
    "skip-smollm2": (*("SmolLM2-135M-Instruct", None, 512, 1, 128, 2e-5, 0, 20, CONSTANT, 1000, "full", "isolated"),),
    "longalpaca-llama2-7b-16k": (
        *("Llama-2-7b-chat-hf", "linear", 16384, 4, 64, 2e-5, 0, 20, CONSTANT, 1000, "lora", "isolated"),
    ),
    SUMMARIZE: ("pi-llama2-7b-16k/final", "linear", 16384, 4, 128, 2e-5, 0, 20, CONSTANT, 1000, "full", "isolated"),
}
LORA = {
    "longlora-llama2-7b-32k": (8, 16, True),
    "longalpaca-llama2-7b-16k": (8, 16, True),
    "qlora-llama3-8b-32k": (16, 32, False),
}
THETA = {
    **{"easycontext-llama2-7b": 1e6, "easycontext-llama2-7b-stage2": 5e6, "easycontext-llama2-7b-stage3": 1e7},
    **{"easycontext-llama2-7b-stage4": 2.5e7, "easycontext-llama2-7b-stage5": 5e7},
    **{"easycontext-llama2-7b-stage6": 1e8, "easycontext-llama2-7b-stage7": 2.5e8, "prolong-llama3-8b-64k": 8e6},
}


def test_every_config_is_in_the_table() -> None:
    assert sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")) == sorted(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_a_config_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "configs" / f"{name}.yaml"
    lines = path.read_text().splitlines()
    launch = " ".join(line.lstrip("# ").rstrip(" \\") for line in lines[:2])
    assert launch.startswith("Launch: accelerate launch --config_file recipes/accelerate/")
    assert f"recipes/finetune.py --config recipes/configs/{name}.yaml" in launch
    assert (ROOT / "accelerate" / launch.split("recipes/accelerate/")[1].split()[0]).exists()
    assert any(line.startswith("# Source: ") for line in lines) and any(
        line.startswith("# Target: ") for line in lines
    )
    recipe = parse_config({**read_yaml(path), "use_cpu": True})
    world = min(8, recipe.batch_size)
    args = training_arguments(recipe, world_size=world)
    model, method, length, _, batch, rate, decay, warm_up, schedule, steps, tuning, boundaries = EXPECTED[name]
    assert recipe.model.endswith(model) and recipe.length == length
    assert recipe.method == (None if name == SUMMARIZE else method)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * world == recipe.batch_size == batch
    assert (args.learning_rate, args.weight_decay, args.warmup_steps) == (rate, decay, warm_up)
    assert (args.lr_scheduler_type, args.max_steps, recipe.tuning) == (schedule, steps, tuning)
    assert (args.adam_beta1, args.adam_beta2, recipe.warmup_start) == (0.9, 0.95, 0.1)
    assert recipe.data.boundaries == boundaries and args.bf16
    assert recipe.memory == ("plain" if name == SKIP else "lean")
    assert recipe.reading == (Reading(rate=256, threshold=6.0) if name == SKIP else None)
    assert recipe.method_options == ({"rope_theta": THETA[name]} if name in THETA else {})
    evaluations_of(recipe)
    if name != "longalpaca-llama2-7b-16k":  # whose file the user brings
        for source in recipe.data.sources:
            check_source(source)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_trainer_and_model_see_in_two_steps(
    name: str, byte_models: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    _, method, _, factor, _, rate, decay, warm_up, schedule, _, tuning, boundaries = EXPECTED[name]
    if tuning == "qlora":
        pytest.importorskip("bitsandbytes")
    model = byte_models()
    if name == "yarn-llama2-7b-128k":
        model = Path(patch_checkpoint(model, tmp_path / "64k", method="yarn", length=16 * WINDOW)["output"])
    if "stage" in name:
        before = name[:-1] + str(int(name[-1]) - 1) if name[-1] != "2" else name.removesuffix("-stage2")
        given = {"rope_theta": THETA[before], "length": EXPECTED[before][3] * WINDOW}
        model = Path(patch_checkpoint(model, tmp_path / "before", method="theta", **given)["output"])
    if name == SUMMARIZE:
        model = Path(patch_checkpoint(model, tmp_path / "16k", method="linear", length=4 * WINDOW)["output"])
    source: dict[str, Any] = {"data": str(corpus)}
    if name == "longalpaca-llama2-7b-16k":
        source = chat_source(tmp_path)
    if name == SUMMARIZE:
        source = summary_source(tmp_path)
    shrunk = {
        **{"model": str(model), "length": factor * WINDOW, "batch_size": 2, "max_steps": 2, "save_steps": 2},
        **{"data.sources": [source], "data.cache": str(tmp_path / "cache"), "output_dir": str(tmp_path / "run")},
        **{
            "use_cpu": True,
            "offload": False,
            "evaluations": {},
            "evaluate_every": None,
            "epochs": None,
            "disable_tqdm": True,
        },
        **({"optim": "adamw_torch"} if tuning == "qlora" else {}),  # the paged one needs a GPU
    }
    words = [f"--{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in shrunk.items()]
    trainer, _ = finetune.prepare(["--config", str(ROOT / "configs" / f"{name}.yaml"), *words])
    check_model(trainer, name, method, factor)
    if name == SKIP:
        assert (trainer.server.window, trainer.server.rows, trainer.server.policy.rate) == (WINDOW, 2, 256)
    else:
        assert trainer.packs.boundaries == boundaries
    trainer.train()
    group = trainer.optimizer.param_groups[0]
    assert group["betas"] == (0.9, 0.95) and group["initial_lr"] == rate
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} <= {decay, 0.0}
    first, second = (entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry)
    if warm_up:
        assert first == pytest.approx(0.1 * rate) and second == pytest.approx((0.1 + 0.9 / warm_up) * rate)
    else:
        assert first == second == rate
    assert (trainer.save_final() / "config.json").exists()


def chat_source(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "LongAlpaca-12k.json"
    rows = [{"instruction": f"say {i} " * 8, "output": f"{i}"} for i in range(60)]
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data": str(path), "kind": "chat", "prompt_column": "instruction", "completion_column": "output"}


def summary_source(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "govreport.jsonl"
    rows = [{"report": f"long {i} " * 20, "summary": f"short {i}"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data": str(path), "kind": "summary", "document_column": "report", "document_tokens": 100}


def check_model(trainer: Any, name: str, method: str, factor: int) -> None:
    model = trainer.model
    config = (model.get_base_model() if name in LORA else model).config
    rope = read_rope(config.to_dict())
    if method == "sandwich":
        assert config.model_type == "ctxext_llama" and config.bias_parameters["bias_type"] == "sandwich"
        assert not hasattr(model.model.rotary_emb, "inv_freq") and rope.window == factor * WINDOW
        return
    if name == SKIP:
        assert rope.window == rope.original_length == WINDOW and "ctxext" not in config.to_dict()
        return
    assert rope.scaling.name == method and rope.window == factor * WINDOW and rope.original_length == WINDOW
    if method in ("linear", "yarn"):
        assert rope.scaling.factor == factor  # type: ignore[attr-defined]
    else:
        assert rope.scaling.rope_theta == THETA[name]
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    if name not in LORA:
        assert trained == {key for key, _ in model.named_parameters()}
        return
    rank, alpha, whole = LORA[name]
    peft = model.peft_config["default"]
    assert (peft.r, peft.lora_alpha, set(peft.target_modules)) == (rank, alpha, ATTENTION)
    adapters = {key.split(".")[-4] for key in trained if "lora_" in key}
    others = {key.split(".modules_to_save")[0].split(".")[-1] for key in trained if "lora_" not in key}
    norms = {"embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"}
    assert adapters == ATTENTION and others == (norms if whole else set())


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configs(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert path.read_text().startswith(f"# Launch: accelerate launch --config_file recipes/accelerate/{path.name}")
    assert config.mixed_precision == "no"  # the recipe says it
    kind = {"zero": "DEEPSPEED", "fsdp": "FSDP"}.get(path.stem.removeprefix("cpu-")[:4], "NO")
    assert str(config.distributed_type).endswith(kind)
