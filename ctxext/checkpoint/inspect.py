"""Say what a checkpoint is: positions, lengths, wavelengths, weights, provenance, and what every loader reads."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from ctxext.checkpoint.bias_config import read_bias
from ctxext.checkpoint.faults_files import limit_of
from ctxext.checkpoint.files import read_json, weight_files
from ctxext.checkpoint.headers import read_headers
from ctxext.checkpoint.loaders import model_type_of, read_as_transformers4, read_as_transformers5
from ctxext.checkpoint.rope_config import RopeConfig, read_head_dim, read_rope, text_section
from ctxext.checkpoint.servers import read_as_llama_cpp, read_as_vllm
from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.positions.base import FloatArray, unscaled_inv_freq


def inspect_checkpoint(source: str | Path) -> dict[str, Any]:
    """Return what a checkpoint is, from its JSON files and the headers of its weights.

    Args:
        source: A folder, a `.gguf` file or a Hub id.

    Returns:
        A dict of plain values; `rope_type`, `rope_theta` and `wavelengths` are None where a bias replaces the rotary
        embedding. Lengths and wavelengths are in tokens; `wavelengths.beyond_window` holds the pairs j
        that turn less than once within the original window, of `count` in all.

    Raises:
        ValueError: If there is no such checkpoint or its config does not say one thing; `ctxext doctor` tells more.
    """
    folder = resolve_checkpoint(source)
    config = read_json(folder / "config.json")
    rope, section = read_rope(config), text_section(config)
    bias = read_bias(config)
    replaced = bias is not None and not bias.keep_rotary
    scaling, method = rope.scaling, rope.scaling.name if bias is None else bias.name
    length = rope.window if rope.ambiguity is None else rope.max_position_embeddings
    if rope.provenance is not None:
        method = str(rope.provenance.get("method", method))
    readings = [
        read_as_transformers5(config),
        read_as_transformers4(config),
        read_as_vllm(config, length),
        read_as_llama_cpp(config),
    ]
    return {
        "checkpoint": str(folder),
        "model_type": model_type_of(config),
        "method": method,
        "bias": None if bias is None else bias.bias_parameters(),
        "rope_type": None if replaced else scaling.rope_type,
        "factor": getattr(scaling, "factor", None),
        "total_factor": length / rope.original_length,
        "length": length,
        "original_length": rope.original_length,
        "max_position_embeddings": rope.max_position_embeddings,
        "ambiguity": rope.ambiguity,
        "rope_theta": None if replaced else scaling.rope_theta,
        "attention_factor": scaling.cos_sin_factor,
        "head_dim": read_head_dim(section, rope.family),
        "rotary_dim": 0 if replaced else rope.rotary_dim,
        "wavelengths": None if replaced else _wavelengths(rope, length),
        "sliding_window": section.get("sliding_window"),
        "tokenizer_limit": limit_of(folder, "tokenizer_config.json", "model_max_length"),
        "generation_limit": limit_of(folder, "generation_config.json", "max_length"),
        "weights": _weights(folder),
        "provenance": rope.provenance,
        "loaders": [reading.to_dict() for reading in readings],
    }


def _wavelengths(rope: RopeConfig, length: int) -> dict[str, Any]:
    """Return the wavelengths 2 pi / theta_j before any scaling and as they are for a sequence of `length` tokens."""
    theta = _base_before(rope)
    after = rope.scaling.inv_freq(rope.rotary_dim, length)
    before = None if theta is None else unscaled_inv_freq(theta, rope.rotary_dim)
    return {
        "count": len(after),
        "before": None if before is None else _spread(before, rope.original_length),
        "after": _spread(after, rope.original_length),
    }


def _base_before(rope: RopeConfig) -> float | None:
    """Return the base that the model was pretrained with, or None where a patch replaced it without a trace."""
    record = rope.provenance or {}
    steps = [*record.get("history", []), record]
    changes = [step for step in steps if isinstance(step, dict) and step.get("method") in ("theta", "ntk")]
    if not changes:
        return rope.scaling.rope_theta
    if any(step.get("method") == "theta" for step in changes) or rope.rotary_dim <= 2:
        return None
    stretch = math.prod(float(step["factor"]) for step in changes)
    return rope.scaling.rope_theta / stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))


def _spread(frequencies: FloatArray, window: int) -> dict[str, Any]:
    lengths = 2 * math.pi / frequencies
    return {
        "shortest": float(lengths.min()),
        "longest": float(lengths.max()),
        "beyond_window": [j for j, wavelength in enumerate(lengths) if wavelength > window],
    }


def _weights(folder: Path) -> dict[str, Any]:
    """Return the weight files of a folder, their size, and the dtypes that their headers name, commonest first."""
    try:
        files = weight_files(folder)
        tensors = [t for path in files if path.suffix == ".safetensors" for t in read_headers(path).values()]
    except ValueError as error:
        return {"files": [], "bytes": 0, "dtypes": [], "tensors": 0, "problem": str(error)}
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.size
    return {
        "files": [path.name for path in files],
        "bytes": sum(path.stat().st_size for path in files),
        "dtypes": [dtype for dtype, _ in sizes.most_common()],
        "tensors": len(tensors),
        "problem": None,
    }
