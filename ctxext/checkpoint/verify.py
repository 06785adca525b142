"""Ask stock transformers what it makes of a checkpoint folder: without weights, so in constant memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.checkpoint.files import read_json, weight_files
from ctxext.checkpoint.plan import check_geometry
from ctxext.checkpoint.rope_config import read_rope, text_section

if TYPE_CHECKING:
    from torch import nn

# What transformers and torch raise for a config they cannot build a model from; a new kind is a bug to look at.
_REFUSALS = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    ZeroDivisionError,
    OverflowError,
    IndexError,
)


def verify_checkpoint(folder: Path) -> None:
    """Check that stock transformers loads a folder and turns with the frequencies that its config spells.

    The model is built on the meta device: no weight is read beyond the shapes in the safetensors headers. The rotary
    modules are built for real, and compared with ctxext's formulas.

    Args:
        folder: A checkpoint folder.

    Raises:
        ValueError: Names what does not agree.
    """
    raw = read_json(folder / "config.json")
    section = text_section(raw)
    check_geometry(section)
    rope = read_rope(raw)
    shapes = tensor_shapes(folder)
    _check_layers(section, shapes)
    model, config = _build(folder)
    _check_shapes(model, shapes, section)
    from ctxext.positions.live import check_frequencies, rotary_modules

    text_config = config.get_text_config()
    live = _modules([type(module)(config=text_config) for module in rotary_modules(model).values()])
    check_frequencies(live, rope.scaling, rope.rotary_dim, rope.window)


def _modules(modules: list[nn.Module]) -> nn.Module:
    from torch import nn

    return nn.ModuleList(modules)


def _build(folder: Path) -> tuple[nn.Module, Any]:
    """Return the model that stock transformers builds from a folder's config, on the meta device, and the config."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config), config
    except (*_REFUSALS, StrictDataclassError) as error:
        told = " ".join(str(error).split())
        raise ValueError(f"transformers cannot load this config.json: {type(error).__name__}: {told}") from error


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint, from the headers of its safetensors files alone.

    Raises:
        ValueError: If a file is damaged or cut short.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        if path.suffix != ".safetensors":
            continue
        try:
            with safe_open(path, framework="numpy") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole safetensors file ({error}); download or save it again") from None
    return shapes


def _check_layers(section: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a config that names more layers than the weights have: stock transformers would make the rest up."""
    names = [name for name in shapes if ".layers." in name and "vision" not in name]
    layers = {int(name.split(".layers.")[1].split(".")[0]) for name in names}
    wanted = section.get("num_hidden_layers")
    if layers and isinstance(wanted, int) and wanted != max(layers) + 1:
        raise ValueError(f"num_hidden_layers is {wanted}; the weights have {max(layers) + 1} layers")


def _check_shapes(model: nn.Module, shapes: dict[str, tuple[int, ...]], section: dict[str, Any]) -> None:
    """Refuse a config whose model has other shapes than the weights."""
    prefix = getattr(model, "base_model_prefix", "model")
    for name, tensor in model.state_dict().items():
        stored = shapes.get(name, shapes.get(name.removeprefix(f"{prefix}.")))
        if stored is not None and stored != tuple(tensor.shape):
            sizes = (
                "hidden_size",
                "intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "vocab_size",
            )
            told = ", ".join(f"{key} {section[key]}" for key in sizes if section.get(key) is not None)
            raise ValueError(f"config.json ({told}) makes {name} {tuple(tensor.shape)}; the weights have {stored}")
