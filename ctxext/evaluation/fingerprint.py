"""The hash of a checkpoint: full sha256 over its configuration and weights, and the adapter's if there is one."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PATTERNS = ("config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json")
BLOCK_BYTES = 1 << 22
THREADS = 4


def file_sha256(path: Path) -> str:
    """Return the sha256 of one file's content; hashing releases the interpreter lock, so threads run side by side."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def checkpoint_hash(*folders: Path) -> str:
    """Return one sha256 over the config and weight files of a checkpoint folder (and of an adapter's folder).

    It is the sha256 of the lines `<sha256>  <file name>`, files in name order, folders in the given order.

    Raises:
        ValueError: if a folder holds neither a config nor weights.
    """
    digest = hashlib.sha256()
    for folder in folders:
        files = sorted({path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()})
        if not files:
            raise ValueError(f"{folder} is not a checkpoint: it holds none of {', '.join(PATTERNS)}")
        with ThreadPoolExecutor(THREADS) as pool:
            for path, value in zip(files, pool.map(file_sha256, files), strict=True):
                digest.update(f"{value}  {path.name}\n".encode())
    return digest.hexdigest()
