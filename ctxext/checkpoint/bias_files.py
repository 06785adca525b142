"""What a bias checkpoint has beside the weights of its source: remote code, and a weight file of a learned bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxext.checkpoint.bias_config import remote_code_files
from ctxext.checkpoint.files import place, read_json, write_json
from ctxext.checkpoint.headers import read_headers
from ctxext.positions.bias import AttentionBias

BIAS_SHARD = "model-score-bias.safetensors"
PREFIX = "model.score_bias."  # of a learned bias's tensors
INDEX = "model.safetensors.index.json"


def place_code(folder: Path) -> None:
    """Copy the remote code into a checkpoint folder, in place of files of the same name."""
    for path in remote_code_files():
        (folder / path.name).unlink(missing_ok=True)
        place(path, folder / path.name, "copy")


def place_weights(weights: list[Path], folder: Path, link: str, bias: AttentionBias | None, num_heads: int) -> None:
    """Put the weight files of a source into a folder, unread, and those of a learned bias beside them.

    A single `model.safetensors` becomes the first file of an index then: an index beside that name is ignored.

    Args:
        weights: The source's files, its index first where it has one.
        folder: Where they go.
        link: As `place` takes it.
        bias: The bias to be, or None.
        num_heads: Query heads.
    """
    if bias is None or not bias.learned:
        for path in weights:
            place(path, folder / path.name, link)
        return
    tensors = initial_values(bias, num_heads)
    if weights[0].name == INDEX:
        index = read_json(weights[0])
        names = {path: path.name for path in weights[1:]}
    else:
        names = {weights[0]: "model-00001-of-00001.safetensors"}
        index = {"metadata": {}, "weight_map": dict.fromkeys(read_headers(weights[0]), names[weights[0]])}
    for path, name in names.items():
        place(path, folder / name, link)
    _save(tensors, folder / BIAS_SHARD)
    write_json(folder / INDEX, _indexed(index, tensors, [*(folder / name for name in names.values())]))


def initial_values(bias: AttentionBias, num_heads: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return the tensors that a learned bias starts from, by their names in the model; none for a fixed one."""
    from ctxext.modeling.bias import ScoreBias

    state = ScoreBias(bias.bias_parameters(), num_heads).state_dict()
    return {f"{PREFIX}{name}": value.numpy() for name, value in state.items()}


def _save(tensors: dict[str, npt.NDArray[np.float32]], path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _indexed(index: dict[str, Any], tensors: dict[str, npt.NDArray[np.float32]], placed: list[Path]) -> dict[str, Any]:
    """Return an index with the tensors of the bias in it, and the size of all."""
    headers = [header for path in placed for header in read_headers(path).values()]
    size = sum(header.size for header in headers) + sum(tensor.nbytes for tensor in tensors.values())
    return {
        **index,
        "metadata": {**(index.get("metadata") or {}), "total_size": size},
        "weight_map": {**index["weight_map"], **dict.fromkeys(tensors, BIAS_SHARD)},
    }
