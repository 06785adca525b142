"""Ask stock transformers what it makes of a checkpoint folder: without weights, so in constant memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.checkpoint.bias_config import read_bias
from ctxext.checkpoint.files import read_json, weight_files, write_json
from ctxext.checkpoint.loaders import has_bias
from ctxext.checkpoint.plan import COUNTS, check_geometry, check_padding
from ctxext.checkpoint.rope_config import read_rope, text_section

if TYPE_CHECKING:
    from torch import nn

# What transformers raises, beside its own validation errors, for a config that it cannot build a model from: an
# unknown hidden_act is a KeyError, a dtype that is no name an AttributeError, empty layer_types are an IndexError, a
# number where a list belongs is a TypeError. Sizes that torch would refuse are checked before.
_REFUSALS = (ValueError, TypeError, KeyError, AttributeError, IndexError)


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
    _check_layers(section.get("num_hidden_layers"), shapes)
    model, config = _build(folder, raw)
    text_config = config.get_text_config()
    _check_layers(text_config.num_hidden_layers, shapes)  # the default's, where the config names none
    if getattr(config, "quantization_config", None) is None:  # quantized weights are packed into other shapes
        _check_shapes(model, shapes, text_config)
    from ctxext.positions.live import check_frequencies, rotary_modules
    from ctxext.positions.live_bias import check_bias

    bias = read_bias(raw)
    if bias is not None:
        check_bias(model, bias)
        if not bias.keep_rotary:
            return
    live = _modules([type(module)(config=text_config) for module in rotary_modules(model).values()])
    check_frequencies(live, rope.scaling, rope.rotary_dim, rope.window)


def _modules(modules: list[nn.Module]) -> nn.Module:
    from torch import nn

    return nn.ModuleList(modules)


def _build(folder: Path, raw: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Return the model that stock transformers builds from a folder's config, on the meta device, and the config.

    Raises:
        ValueError: If it cannot; names the keys that it stumbles over.
    """
    if has_bias(raw):
        import ctxext.modeling  # noqa: F401  # so that no code of the folder is run
    built = _try_to_build(folder)
    if isinstance(built, Exception):
        culprits = _culprits(built, raw) or {key: raw[key] for key in COUNTS if key in raw}
        told = ", ".join(f"{key} {value!r}" for key, value in culprits.items())
        reason = " ".join(str(built).split())
        raise ValueError(
            f"transformers cannot load this config.json because of {told}: {type(built).__name__}: {reason}"
        ) from built
    return built


def _try_to_build(folder: Path) -> tuple[nn.Module, Any] | Exception:
    """Return the model and the config, or what stock transformers raises instead."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            from transformers.quantizers.auto import AutoHfQuantizer

            AutoHfQuantizer.supports_quant_method(config.quantization_config)  # raises as from_pretrained does
        text_config = config.get_text_config()
        check_padding(getattr(text_config, "pad_token_id", None), text_config.vocab_size)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config), config
    except (*_REFUSALS, StrictDataclassError) as error:
        return error


def _culprits(refusal: Exception, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a refused config that the refusal is about: without any of them it would be another."""
    least = dict(raw)
    # These were checked already, and without them a model may be too large, or refused for another reason.
    sized = {key for key in (*COUNTS, "pad_token_id") if raw.get(key) is not None}
    candidates = [key for key in raw if key != "model_type" and key not in sized]
    with tempfile.TemporaryDirectory() as scratch:
        for key in candidates:
            trial = {name: value for name, value in least.items() if name != key}
            write_json(Path(scratch) / "config.json", trial)
            again = _try_to_build(Path(scratch))
            if type(again) is type(refusal) and str(again) == str(refusal):
                least = trial
    return {key: least[key] for key in candidates if key in least}


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


def _check_layers(wanted: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse a config that names more layers than the weights have: stock transformers would make the rest up."""
    names = [name for name in shapes if ".layers." in name and "vision" not in name]
    layers = {int(name.split(".layers.")[1].split(".")[0]) for name in names}
    if layers and isinstance(wanted, int) and wanted != max(layers) + 1:
        raise ValueError(f"num_hidden_layers is {wanted}; the weights have {max(layers) + 1} layers")


def _check_shapes(model: nn.Module, shapes: dict[str, tuple[int, ...]], text_config: Any) -> None:
    """Refuse a config whose model has other shapes than the weights."""
    prefix = getattr(model, "base_model_prefix", "model")
    for name, tensor in model.state_dict().items():
        stored = shapes.get(name, shapes.get(name.removeprefix(f"{prefix}.")))
        if stored is not None and stored != tuple(tensor.shape):
            sizes = {key: getattr(text_config, key, None) for key in COUNTS if key != "num_labels"}
            told = ", ".join(f"{key} {value}" for key, value in sizes.items() if value is not None)
            raise ValueError(f"config.json ({told}) makes {name} {tuple(tensor.shape)}; the weights have {stored}")
