"""Everything that can be found wrong with a run before its model is loaded."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxext.checkpoint.files import read_json
from ctxext.checkpoint.plan import plan_patch
from ctxext.checkpoint.rope_config import read_rope
from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.data.tokens import check_source
from ctxext.evaluation import registry
from ctxext.evaluation.base import Evaluation, build
from ctxext.training.arguments import Recipe
from ctxext.training.config_file import ConfigError


def preflight(recipe: Recipe, where: str = "the config") -> Path:
    """Return the folder of the recipe's model, once everything else is found to be in order.

    Args:
        recipe: The recipe.
        where: What to call its config in an error.

    Raises:
        ConfigError: With everything that is wrong.
    """
    problems = [*environment_problems(recipe, os.environ), *source_problems(recipe), *_evaluation_problems(recipe)]
    folder = None
    # A model on the Hub may take long to come: it is asked for once the rest is in order.
    if not problems or Path(recipe.model).expanduser().exists():
        try:
            folder = resolve_checkpoint(recipe.model)
            problems += checkpoint_problems(recipe, folder)
        except ValueError as error:
            problems.append(f"model: {error}")
    if problems or folder is None:
        raise ConfigError(problems, where)
    return folder


def environment_problems(recipe: Recipe, environment: Mapping[str, str]) -> list[str]:
    """Return why this machine, as the launcher set it up, cannot run a recipe."""
    import torch

    cuda = torch.cuda.is_available()
    problems = []
    if _is_set(environment, "ACCELERATE_USE_FSDP") and not cuda:
        problems.append(
            "FSDP needs a GPU: on a CPU accelerate silently runs plain data parallelism; use cpu-zero.yaml there"
        )
    deepspeed = _is_set(environment, "ACCELERATE_USE_DEEPSPEED") or recipe.training.get("deepspeed") is not None
    if deepspeed:
        problems += _deepspeed_problems(recipe, environment, cuda)
    if recipe.tuning == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        problems.append("tuning 'qlora' needs bitsandbytes: run `pip install 'ctxext[quantization]'`")
    asked, own = environment.get("ACCELERATE_MIXED_PRECISION", "no"), _precision(recipe)
    if asked not in ("no", own):
        problems.append(
            f"mixed_precision {asked} of the accelerate config cannot take effect: Trainer follows the recipe, which "
            f"says {own}; set {asked}: true in the recipe, or mixed_precision: no in the accelerate config"
        )
    if cuda and torch.cuda.device_count() > 1 and "WORLD_SIZE" not in environment:
        problems.append(
            f"{torch.cuda.device_count()} GPUs are visible to one process; start it with `accelerate launch "
            "--config_file recipes/accelerate/zero2.yaml`, or set CUDA_VISIBLE_DEVICES to one of them"
        )
    if recipe.offload and not torch.accelerator.is_available():
        problems.append("offload moves activations from a GPU to the host's memory, and there is no GPU: leave it out")
    if not cuda and not recipe.training.get("use_cpu") and not torch.backends.mps.is_available():
        problems.append("there is no GPU; set use_cpu: true to train on the CPU")
    return problems


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("1", "true", "yes", "on", "y", "t")


def _precision(recipe: Recipe) -> str:
    return next((name for name in ("bf16", "fp16") if recipe.training.get(name)), "no")


def _deepspeed_problems(recipe: Recipe, environment: Mapping[str, str], cuda: bool) -> list[str]:
    problems = []
    if importlib.util.find_spec("deepspeed") is None:
        problems.append("DeepSpeed is not installed: run `pip install 'ctxext[train]'`")
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if missing and not cuda:
        problems.append(
            f"DeepSpeed on a CPU compiles its communication and needs {' and '.join(missing)}, not found on the PATH: "
            "install your system's C++ compiler, and ninja with `pip install ninja`"
        )
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if stage == "3":
        if environment.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false") != "true":
            problems.append(
                "ZeRO-3 without zero3_save_16bit_model: true in the accelerate config saves no model for transformers "
                "to load; set it"
            )
        if recipe.tuning == "qlora":
            problems.append("tuning 'qlora' cannot be sharded by ZeRO-3; use ZeRO-2, or tuning 'lora'")
    clipping = environment.get("ACCELERATE_GRADIENT_CLIPPING")
    own = float(recipe.training.get("max_grad_norm", 1.0))
    if clipping not in (None, "auto", "none") and float(clipping) != own:
        problems.append(
            f"gradient_clipping {clipping} of the accelerate config contradicts max_grad_norm {own:g}; leave it out"
        )
    return problems


def source_problems(recipe: Recipe) -> list[str]:
    """Return what is wrong with a recipe's sources; none is read."""
    problems = []
    streaming = recipe.reading is not None and recipe.reading.streaming
    for number, source in enumerate(recipe.data.sources):
        try:
            check_source(source, streaming=streaming)
        except ValueError as error:
            problems.append(f"data.sources.{number}: {error}")
    return problems


def evaluations_of(recipe: Recipe) -> dict[str, Evaluation]:
    """Return the evaluations to run while training, by name.

    Raises:
        ValueError: If one is not installed, or an option is not its own.
    """
    return {name: _evaluation(name, options) for name, options in recipe.evaluations.items()}


def _evaluation(name: str, options: Mapping[str, Any]) -> Evaluation:
    kind = registry.load(name)
    given = {key: value for key, value in options.items() if key != "protocol"}
    unknown = [key for key in given if key not in kind.__dataclass_fields__]
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(unknown)}; it has {', '.join(kind.__dataclass_fields__)}")
    return build(kind, given, options.get("protocol"))


def _evaluation_problems(recipe: Recipe) -> list[str]:
    problems = []
    for name, options in recipe.evaluations.items():
        try:
            _evaluation(name, options)
        except (ValueError, TypeError) as error:
            problems.append(f"evaluations.{name}: {error}")
    return problems


def checkpoint_problems(recipe: Recipe, folder: Path) -> list[str]:
    """Return why the checkpoint in `folder` cannot be trained as a recipe says; its weights are not read."""
    config = read_json(folder / "config.json")
    problems = []
    try:
        if recipe.method is not None:
            plan_patch(config, **patch_options(recipe))
        elif (window := read_rope(config).window) < recipe.length:
            problems.append(
                f"length is {recipe.length}, but model {recipe.model} reads {window} tokens; give a method, such as "
                "yarn, or a model that `ctxext patch` has extended"
            )
    except (ValueError, TypeError) as error:
        problems.append(str(error))
    if not problems and recipe.tuning != "full":
        problems += _target_problems(recipe, folder)
    return problems


def patch_options(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe says of the position method, as `plan_patch` and `patch` take it."""
    return {
        "method": recipe.method,
        "length": recipe.length,
        "original_length": recipe.original_length,
        **recipe.method_options,
    }


def _target_problems(recipe: Recipe, folder: Path) -> list[str]:
    """Return which of the adapters' targets the model does not have; peft ignores those if another one fits."""
    from accelerate import init_empty_weights
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    import ctxext.modeling  # noqa: F401  # registers the models with an attention bias

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    linear = sorted({name.split(".")[-1] for name, part in model.named_modules() if isinstance(part, nn.Linear)})
    missing = [name for name in recipe.adapters.targets if name.split(".")[-1] not in linear]
    if missing:
        return [f"lora.targets names {', '.join(missing)}, which the model does not have; it has {', '.join(linear)}"]
    return []
