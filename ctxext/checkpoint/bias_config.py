"""Read and write how a config says that its model has an attention bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ctxext
from ctxext.checkpoint.families import BIAS_FAMILIES, BIAS_PREFIX, base_type
from ctxext.checkpoint.loaders import has_bias
from ctxext.positions import BIASES
from ctxext.positions.base import nearest
from ctxext.positions.bias import AttentionBias

# How the classes of `ctxext.modeling` spell each family.
_CLASS_NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def read_bias(config: dict[str, Any]) -> AttentionBias | None:
    """Return the bias of a config, or None for a model without one.

    Raises:
        ValueError: If its `bias_parameters` say no bias; names the key, its value and what is allowed.
    """
    if not has_bias(config):
        return None
    parameters = config.get("bias_parameters")
    if not isinstance(parameters, dict):
        raise ValueError(f"bias_parameters is {parameters!r}; a {config['model_type']} config keeps an object there")
    kind = parameters.get("bias_type")
    if kind not in BIASES:
        guess = nearest(str(kind), list(BIASES))
        raise ValueError(f"bias_parameters: bias_type is {kind!r}{guess}; it must be one of {', '.join(BIASES)}")
    options = {key: value for key, value in parameters.items() if key != "bias_type"}
    try:
        return BIASES[kind](**options)
    except TypeError as error:
        raise ValueError(f"bias_parameters of {kind} are {options!r}: {error}") from None


def write_bias(config: dict[str, Any], bias: AttentionBias) -> dict[str, Any]:
    """Return a copy of a config of a family with code for biases, as the config of a model with `bias`.

    Raises:
        ValueError: If there is no code for the family.
    """
    model_type = base_type(config["model_type"])
    if model_type not in BIAS_FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} has no code for attention biases; {', '.join(BIAS_FAMILIES)} have: use a "
            "method that changes the rotary embedding, such as yarn"
        )
    name = f"Ctxext{_CLASS_NAMES[model_type]}"
    return {
        **config,
        "architectures": [f"{name}ForCausalLM"],
        "model_type": f"{BIAS_PREFIX}{model_type}",
        "auto_map": {
            "AutoConfig": f"configuration_ctxext.{name}Config",
            "AutoModel": f"modeling_ctxext.{name}Model",
            "AutoModelForCausalLM": f"modeling_ctxext.{name}ForCausalLM",
        },
        "bias_parameters": bias.bias_parameters(),
    }


def remote_code_files() -> list[Path]:
    """Return the files that a bias checkpoint carries, so that it loads where ctxext is not installed."""
    folder = Path(ctxext.__file__).parent / "modeling"
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
