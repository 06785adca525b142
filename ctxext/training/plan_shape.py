"""The shape of a checkpoint, from its config and the headers of its safetensors files: no weight is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.headers import TensorHeader, read_headers

_MIXTURES = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What memory depends on, of one model.

    Attributes:
        width: Hidden size.
        inner: Width inside the MLP.
        layers: Decoder layers.
        query_width: Query heads x head dimension.
        key_width: Key heads x head dimension, the same for values.
        query_heads: Query heads.
        vocabulary: Rows of the output head.
        parameters: Numbers in all tensors.
        head_parameters: Numbers of the output head, which is the embedding where they are tied.
        linear_parameters: Numbers in the layers' matrices, those that QLoRA quantizes.
        largest_matrix: Numbers of the largest of these matrices.
        attention_matrices: `(outputs, inputs)` of the attention projections of all layers, those that LoRA adapts.
    """

    width: int
    inner: int
    layers: int
    query_width: int
    key_width: int
    query_heads: int
    vocabulary: int
    parameters: int
    head_parameters: int
    linear_parameters: int
    largest_matrix: int
    attention_matrices: tuple[tuple[int, int], ...]


def read_shape(folder: Path) -> ModelShape:
    """Read a local checkpoint's shape.

    Raises:
        ValueError: If it has no config or safetensors files, mixes experts, or its config lacks a size.
    """
    tensors: dict[str, TensorHeader] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= read_headers(path)
    path = folder / "config.json"
    if not path.exists() or not tensors:
        raise ValueError(f"{folder} lacks config.json or *.safetensors; plan reads a checkpoint folder of both")
    config: dict[str, Any] = json.loads(path.read_text())
    config = config.get("text_config", config)
    if any(config.get(key) for key in _MIXTURES):
        raise ValueError(f"{folder} mixes experts, which plan's formula does not cover; it covers dense decoders")
    missing = [
        key
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        if not config.get(key)
    ]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; plan needs these sizes of a decoder-only model")
    return _shape(config, tensors)


def _shape(config: dict[str, Any], tensors: dict[str, TensorHeader]) -> ModelShape:
    sizes = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    matrices = {name: t.shape for name, t in tensors.items() if len(t.shape) == 2 and ".layers." in name}
    tables = [t.shape for name, t in tensors.items() if len(t.shape) == 2 and ".layers." not in name]
    table = max(tables, key=math.prod)
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    key_heads = int(config.get("num_key_value_heads") or heads)
    linear = [math.prod(shape) for shape in matrices.values()]
    return ModelShape(
        width=int(config["hidden_size"]),
        inner=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        query_width=heads * head_dim,
        key_width=key_heads * head_dim,
        query_heads=heads,
        vocabulary=table[0],
        parameters=sum(sizes.values()),
        head_parameters=math.prod(table),
        linear_parameters=sum(linear),
        largest_matrix=max(linear, default=0),
        attention_matrices=tuple(
            (shape[0], shape[1]) for name, shape in matrices.items() if "attn" in name or "attention" in name
        ),
    )
