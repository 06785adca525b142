"""Headers of safetensors files, read without loading a library or a tensor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ctxext.positions.base import FloatArray

_HEADER_LIMIT = 100_000_000  # bytes; the limit of the format's own reader


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """Where one tensor of a safetensors file lies.

    Attributes:
        file: The file.
        dtype: As the format spells it, such as `BF16`.
        shape: Of the tensor.
        start: Its first byte, counted from the start of the file.
        size: Its length in bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Return what a safetensors file says of its tensors, by name.

    Raises:
        ValueError: If the file is no safetensors file or is cut short.
    """
    damaged = f"{path} is no whole safetensors file"
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _HEADER_LIMIT):
            raise ValueError(f"{damaged}: {size} bytes, and its header is said to have {length}")
        text = file.read(length)
    try:
        entries = json.loads(text)
        found = {
            name: TensorHeader(
                file=path,
                dtype=str(entry["dtype"]),
                shape=tuple(int(dim) for dim in entry["shape"]),
                start=8 + length + int(entry["data_offsets"][0]),
                size=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{damaged}: its header cannot be read ({error})") from None
    end = max((tensor.start + tensor.size for tensor in found.values()), default=8 + length)
    if size != end:
        raise ValueError(f"{damaged}: {size} bytes, where its header asks for {end}")
    return found


def read_floats(tensor: TensorHeader) -> FloatArray | None:
    """Return a (small) tensor's values as float64, flattened, or None for a dtype that holds no floats.

    Returns:
        `(size,)`.
    """
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        raw = file.read(tensor.size)
    if tensor.dtype == "BF16":  # the upper half of a float32
        halves = np.frombuffer(raw, dtype="<u2").astype(np.uint32)
        return (halves << np.uint32(16)).view(np.float32).astype(np.float64)
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
    if tensor.dtype not in kinds:
        return None
    return np.frombuffer(raw, dtype=kinds[tensor.dtype]).astype(np.float64)
