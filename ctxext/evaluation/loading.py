"""Load a checkpoint for evaluation: a local folder or Hub id, any dtype, device, attention backend or adapter."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.files import read_json
from ctxext.checkpoint.loaders import has_bias
from ctxext.evaluation.processes import Processes

logger = logging.getLogger(__name__)
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Stock transformers recomputes the frequencies of these with the length of each call, so that the same token gets
# different keys within one run.
LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How the checkpoint is loaded; everything here goes into the result.

    Attributes:
        dtype: of the weights; `auto` is the checkpoint's own.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`, ...
        device_map: accelerate's placement over several devices, in place of `device`.
        attn: transformers' attention backend.
        load_in_4bit: quantize the weights to NF4 with bitsandbytes while loading.
        adapter: a peft adapter's folder or Hub id, applied on top.
        trust_remote_code: allow the checkpoint to bring its own Python code.
        batch_size: sequences read at once.
    """

    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    attn: str = "sdpa"
    load_in_4bit: bool = False
    adapter: str | None = None
    trust_remote_code: bool = False
    batch_size: int = 4

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype!r} is not known; allowed: {', '.join(DTYPES)}")
        if self.batch_size < 1:
            raise ValueError(f"--batch-size {self.batch_size} must be at least 1")
        if self.device_map is not None and self.device != "auto":
            raise ValueError("--device and --device-map exclude each other: leave one out")


@dataclass
class Loaded:
    """A model ready to be evaluated.

    Attributes:
        model: in eval mode, in its place.
        tokenizer: the checkpoint's.
        folders: the local folders that its hash is taken over: the checkpoint's, then the adapter's.
        rope: the rope parameters that the checkpoint declares.
        fitted_length: the length in tokens for which length-dependent frequencies were fixed, or None.
    """

    model: Any
    tokenizer: Any
    folders: tuple[Path, ...]
    rope: dict[str, Any]
    fitted_length: int | None = None


def choose_device(name: str) -> str:
    """Return the torch device for `name`, where `auto` is the first accelerator or else the CPU.

    Raises:
        ValueError: if torch does not know the device, or this machine does not have it.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator.type if accelerator is not None else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name!r} is not a torch device: try cpu, cuda, cuda:0 or mps") from error
    if device.type == "cpu":
        return name
    if accelerator is None or accelerator.type != device.type:
        has = "cpu" if accelerator is None else f"cpu and {accelerator.type}"
        raise ValueError(f"--device {name!r}: this machine (or this build of torch) has {has} only")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise ValueError(
            f"--device {name!r}: this machine has {torch.accelerator.device_count()} {device.type} devices"
        )
    return name


def fast_bfloat16() -> bool:
    """Return whether this machine multiplies bfloat16 matrices faster than float32 ones.

    A CPU without instructions for it emulates them, tens of times slower.
    """
    import torch

    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _placement(settings: RunSettings, processes: Processes) -> dict[str, Any]:
    if settings.device_map is not None:
        if processes.count > 1:
            raise ValueError(
                f"--device-map spreads one model over all devices, and {processes.count} processes each load one: "
                "start one process, or leave out --device-map"
            )
        return {"device_map": settings.device_map}
    device = choose_device(settings.device)
    if processes.count > 1 and device not in ("cpu", "mps") and ":" not in device:
        device = choose_device(f"{device}:{processes.local_rank}")
    return {} if device == "cpu" else {"device_map": {"": device}}


def _quantization(settings: RunSettings) -> dict[str, Any]:
    if not settings.load_in_4bit:
        return {}
    import importlib.util

    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("--load-in-4bit needs bitsandbytes: run `pip install 'ctxext[quantization]'`")
    import torch
    from transformers import BitsAndBytesConfig

    compute = torch.bfloat16 if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        )
    }


def _apply_adapter(model: Any, folder: Path) -> Any:
    """Return the transformers model with the adapter's layers in it.

    Raises:
        ValueError: If it learns a prompt, or was trained on a model that reads positions otherwise.
    """
    from peft import PeftConfig, PeftModel

    from ctxext.training.adapters import check_adapter

    if PeftConfig.from_pretrained(folder).is_prompt_learning:
        raise ValueError(
            f"--adapter {folder} learns a prompt, which would shift every position: it cannot be evaluated"
        )
    check_adapter(model.config.to_dict(), folder)
    return PeftModel.from_pretrained(model, folder).get_base_model()


def rope_parameters(config: Any) -> dict[str, Any]:
    """Return what a config declares about its rotary embedding, possibly nested by layer type; {} without one."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    parameters = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None)
    return dict(parameters) if parameters else {}


def rope_types(parameters: dict[str, Any]) -> set[str]:
    """Return the rope types in `parameters`, which may be nested by layer type."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(item.get("rope_type", "default")) for item in (nested or [parameters])}


def _resolve(source: str) -> Path:
    from ctxext.checkpoint.source import resolve_checkpoint

    return Path(resolve_checkpoint(source))


def _load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, ImportError) as error:
        if any(folder.glob("token*")):
            raise ValueError(f"the tokenizer of {folder} cannot be loaded: {error}") from error
        raise ValueError(
            f"{folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json of the model it was made from"
        ) from error


def load(
    source: str | Path, settings: RunSettings, length: int | None = None, processes: Processes | None = None
) -> Loaded:
    """Load a checkpoint and, where its frequencies depend on the length, fix them for `length` tokens.

    Args:
        source: a local folder (`Path`), or what a user typed: a folder, a GGUF file or a Hub id (`str`).
        settings: see `RunSettings`.
        length: the longest sequence that will be read, in tokens.
        processes: those that each load the model, onto a device of its own; by default this one alone.

    Raises:
        ValueError: if the device, dtype, attention backend, adapter or checkpoint cannot be used, with the remedy.
        OSError: if a file of the checkpoint cannot be read.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    folder = source if isinstance(source, Path) else _resolve(source)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a checkpoint: it has no config.json")
    if has_bias(read_json(folder / "config.json")):
        import ctxext.modeling  # noqa: F401  # so that it loads without running its own code
    adapter = _resolve(settings.adapter) if settings.adapter else None
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"--adapter {settings.adapter} is no peft adapter: it has no adapter_config.json")
    trust = {"trust_remote_code": settings.trust_remote_code}
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    placement = {**_placement(settings, processes or Processes()), **_quantization(settings)}
    tokenizer = _load_tokenizer(folder, settings.trust_remote_code)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=settings.attn, **placement, **trust
        )
    except ImportError as error:
        raise ValueError(f"cannot load {folder} with --attn {settings.attn}: {error}") from error
    except SafetensorError as error:
        raise ValueError(f"the weights of {folder} are damaged ({error}): run `ctxext doctor {folder}`") from error
    rope = rope_parameters(model.config)
    if adapter is not None:
        model = _apply_adapter(model, adapter)
    model.eval()
    if model.device.type == "cpu" and model.dtype == torch.bfloat16 and not fast_bfloat16():
        logger.warning("this CPU only emulates bfloat16: --dtype float32 is many times as fast")
    fitted = None
    if length is not None and rope_types(rope) & set(LENGTH_DEPENDENT):
        from ctxext.positions.live import fit_length

        fit_length(model, length)
        fitted = length
    folders = (folder,) if adapter is None else (folder, adapter)
    return Loaded(model, tokenizer, folders, rope, fitted)


def original_window(config: Any, rope: dict[str, Any]) -> int | None:
    """Return the window in tokens that the model was trained with, as far as its config says."""
    provenance = getattr(config, "ctxext", None)
    nested = [value for value in rope.values() if isinstance(value, dict)]
    candidates = [item.get("original_max_position_embeddings") for item in (nested or [rope])]
    if isinstance(provenance, dict):
        candidates.insert(0, provenance.get("original_length"))
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    candidates.append(getattr(text_config, "max_position_embeddings", None))
    return next((int(value) for value in candidates if isinstance(value, int | float) and value), None)
