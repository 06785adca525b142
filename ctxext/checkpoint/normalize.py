"""Rewrite what something else saved: a config in both dialects, integer lengths, a tokenizer class that both know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ctxext.checkpoint.files import read_json, write_json
from ctxext.checkpoint.rope_config import read_rope
from ctxext.checkpoint.rope_write import write_rope


def normalized(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that says the same to every loader, in both dialects; its length stays as it is.

    Args:
        config: The parsed `config.json`; not changed.

    Raises:
        ValueError: If it does not say one thing; names the key at fault.
    """
    rope = read_rope(config)
    return write_rope(config, rope, rope.scaling, rope.max_position_embeddings)


def same_json(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether two objects are the same as JSON, where 512.0 is not 512."""
    return json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True)


def normalize_config(folder: Path) -> bool:
    """Rewrite the `config.json` of a folder in both dialects, after any save that was not ctxext's own.

    `save_pretrained` of transformers 5 writes `rope_parameters` alone, which transformers 4 does not read, and may
    call the tokenizer's class by a name that transformers 4 does not know. A linked file is replaced; what it links to
    stays as it is.

    Args:
        folder: A checkpoint folder, or an adapter's with the config it was trained with.

    Returns:
        Whether anything had to be changed.

    Raises:
        ValueError: If the config does not say one thing; names the key at fault.
    """
    path = folder / "config.json"
    config = read_json(path)
    written = normalized(config)
    changed = not same_json(written, config)
    if changed:
        write_json(path, written)
    return _normalize_tokenizer(folder / "tokenizer_config.json") or changed


def _normalize_tokenizer(path: Path) -> bool:
    """Call transformers 5's `TokenizersBackend` by the name that both generations know; say whether it was there."""
    if not path.exists():
        return False
    config = read_json(path)
    if config.get("tokenizer_class") != "TokenizersBackend":
        return False
    write_json(path, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    return True
