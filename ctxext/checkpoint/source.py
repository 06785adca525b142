"""From what a user names to a checkpoint folder: folder, GGUF file, Hub id, or the tiny model of this package."""

from __future__ import annotations

import hashlib
import os
import re
from importlib.resources import files
from pathlib import Path

from ctxext.checkpoint.files import whole_folder, write_json
from ctxext.checkpoint.normalize import normalize_config

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
# What a checkpoint needs and no more: no pickles, no other frameworks' weights, no original/ folder.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*"]


TINY = "tiny"


def resolve_checkpoint(source: str | Path) -> Path:
    """Return the folder of a checkpoint, fetched or converted where it must be.

    Args:
        source: A folder, a `.gguf` file (dequantized once to bfloat16 safetensors under `~/.cache/ctxext`), a Hub id
            such as `org/name` or `org/name@revision`, or `tiny`, the model that comes with ctxext.

    Raises:
        ValueError: If it is none of these, or the Hub does not have it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        return _dequantized(path)
    if path.exists():
        raise ValueError(f"{path} is a file; a checkpoint is a folder with config.json, a .gguf file or a Hub id")
    if str(source) == TINY:
        return Path(str(files("ctxext.reproduce") / "tiny"))
    if _HUB_ID.fullmatch(str(source)):
        return _snapshot(str(source))
    raise ValueError(f"there is no folder {path}, and {str(source)!r} is no Hub id such as org/name (nor 'tiny')")


def _snapshot(source: str) -> Path:
    """Fetch a model repository from the Hub, or take it from the local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, _, revision = source.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"there is no folder {source!r}, and the Hub does not give {name!r}: {reason}; check the id and your "
            "network, and for a gated model log in with `hf auth login`"
        ) from None


def cache_folder() -> Path:
    """Return where ctxext keeps what it can make again: `CTXEXT_CACHE`, else `~/.cache/ctxext`."""
    return Path(os.environ.get("CTXEXT_CACHE") or Path("~/.cache/ctxext")).expanduser()


def _dequantized(path: Path) -> Path:
    """Return the folder with the dequantized weights and the tokenizer of a GGUF file, made on first use."""
    digest = file_sha256(path)
    folder = cache_folder() / "gguf" / f"{path.stem}-{digest[:16]}"
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(**where)
    with whole_folder(folder, force=False) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        normalize_config(partial)
        write_json(partial / "gguf_source.json", {"file": path.name, "sha256": digest, "dtype": "bfloat16"})
    return folder


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
