"""Checks of the files beside a config: weights, tokenizer, generation, adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ctxext.checkpoint.case import ERROR, NOTICE, WARNING, Case, Fault
from ctxext.checkpoint.files import PICKLED, read_json, weight_files
from ctxext.checkpoint.headers import TensorHeader, read_floats, read_headers
from ctxext.positions.base import FloatArray

# Tokenizers without a limit say 1e30; anything this large is no limit.
_NO_LIMIT = 10**9


def limit_of(folder: Path, name: str, *keys: str) -> int | None:
    """Return a limit in tokens from a JSON file beside the config, or None where it has none.

    Args:
        folder: The checkpoint.
        name: The file.
        *keys: Where in it the limit is.

    Raises:
        ValueError: If the file is no JSON object.
    """
    if not (folder / name).exists():
        return None
    value: Any = read_json(folder / name)
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _NO_LIMIT:
        return None
    return int(value)


# File, keys, the code of its fault, and what it is called.
LIMITS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("tokenizer_config.json", ("model_max_length",), "tokenizer-limit", "the tokenizer's model_max_length"),
    ("generation_config.json", ("max_length",), "generation-limit", "the generation config's max_length"),
    ("tokenizer.json", ("truncation", "max_length"), "tokenizer-truncation", "the truncation of tokenizer.json"),
)


def limit_faults(case: Case) -> Iterator[Fault]:
    """Yield the limits beside the config that are not the model's length; too large a one is a notice."""
    length = case.length
    if length is None:
        return
    for name, keys, code, called in LIMITS:
        limit = limit_of(case.folder, name, *keys)
        if limit is None or limit == length or (limit > length and code == "tokenizer-truncation"):
            continue
        yield Fault(
            code=code,
            level=WARNING if limit < length else NOTICE,
            message=f"{called} is {limit}; the model reads {length}",
            remedy=f"write {length}",
            fixable=limit < length,
        )


def weight_faults(case: Case) -> Iterator[Fault]:
    """Yield what is wrong with the weights, from the names and headers of their files alone."""
    folder = case.folder
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not single.exists() and not index.exists():
        yield _no_weights(folder)
        return
    if single.exists() and index.exists():
        yield Fault(
            code="index-ignored",
            level=WARNING,
            message=f"{index.name} lies beside {single.name}; loaders take the latter and never look at the index",
            remedy="delete the one that is not meant",
        )
    try:
        files = weight_files(folder)
    except ValueError as error:
        yield Fault(code="shard-missing", level=ERROR, message=str(error), remedy="download or save it again")
        return
    tensors: dict[str, TensorHeader] = {}
    for path in files:
        if path.suffix == ".safetensors":
            try:
                tensors |= read_headers(path)
            except ValueError as error:
                yield Fault(
                    code="weights-truncated", level=ERROR, message=str(error), remedy="download or save it again"
                )
                return
    yield from _layer_faults(case, tensors)
    yield from _stored_frequencies(case, tensors)


def _no_weights(folder: Path) -> Fault:
    if any(path.suffix in PICKLED for path in folder.iterdir()):
        return Fault(
            code="pickles-only",
            level=ERROR,
            message="the weights are pickles only, which run code when read",
            remedy="AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
        )
    return Fault(
        code="weights-missing",
        level=ERROR,
        message="there is neither model.safetensors nor model.safetensors.index.json",
        remedy="download or save it again",
    )


def _layer_faults(case: Case, tensors: dict[str, TensorHeader]) -> Iterator[Fault]:
    """Layers that the config has and the weights have not, or the other way round."""
    names = [
        name.split(".layers.")[1].split(".")[0] for name in tensors if ".layers." in name and "vision" not in name
    ]
    numbers = {int(name) for name in names if name.isdecimal()}
    wanted = case.section.get("num_hidden_layers")
    if numbers and isinstance(wanted, int) and wanted != max(numbers) + 1:
        yield Fault(
            code="layer-count",
            level=ERROR,
            message=f"num_hidden_layers is {wanted}; the weights have {max(numbers) + 1} layers",
            remedy="correct num_hidden_layers; loaders make up what is missing",
        )


def _stored_frequencies(case: Case, tensors: dict[str, TensorHeader]) -> Iterator[Fault]:
    """Frequencies in the weights, as checkpoints of 2023 have them: loaders compute their own and ignore these."""
    stored = {name: tensor for name, tensor in tensors.items() if name.endswith("rotary_emb.inv_freq")}
    if not stored or case.rope is None:
        return
    expected = case.rope.scaling.inv_freq(case.rope.rotary_dim)
    unequal = [name for name, tensor in stored.items() if not _agrees(tensor, expected)]
    told = f"the weights hold {len(stored)} inv_freq tensors, which loaders ignore"
    if unequal:
        told += f"; {unequal[0]} has other values than the config gives"
    remedy = "check with which frequencies it was trained" if unequal else "nothing, or save the model again"
    yield Fault(code="stored-inv-freq", level=NOTICE, message=told, remedy=remedy)


def _agrees(tensor: TensorHeader, expected: FloatArray) -> bool:
    values = read_floats(tensor)
    tolerance = 1e-4 if tensor.dtype in ("F32", "F64") else 1e-2  # bfloat16 keeps 8 bits
    return (
        values is not None and values.shape == expected.shape and bool(np.allclose(values, expected, rtol=tolerance))
    )


def adapter_faults(folder: Path) -> list[Fault]:
    """Return what is wrong with the position method of a peft adapter's base.

    The adapter records nothing of it: peft loads whatever `base_model_name_or_path` has.

    Args:
        folder: A folder with `adapter_config.json`.

    Raises:
        ValueError: If a JSON file is none.
    """
    named = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    own = read_json(folder / "config.json") if (folder / "config.json").exists() else None
    base = _local_base(folder, named)
    if base is not None:
        return _compare_with_base(own, read_json(base / "config.json"), base)
    if own is None:
        told = f"the adapter records no position method, and its base {named!r} is not here to look at"
        remedy = "if that is not the extended model, put the patched config.json beside the adapter"
        return [Fault(code="adapter-base", level=WARNING, message=told, remedy=remedy)]
    told = f"peft loads the base {named!r} with its own config, not with the config.json beside the adapter"
    remedy = "load the base with this config, then PeftModel.from_pretrained(base, adapter)"
    return [Fault(code="adapter-base", level=NOTICE, message=told, remedy=remedy)]


def _local_base(folder: Path, named: object) -> Path | None:
    """Return the folder of an adapter's base where it is a local one."""
    if not isinstance(named, str) or not named:
        return None
    places = [Path(named).expanduser(), folder / named, folder.parent / named]
    return next((place for place in places if (place / "config.json").is_file()), None)


def _compare_with_base(own: dict[str, Any] | None, base: dict[str, Any], where: Path) -> list[Fault]:
    from ctxext.checkpoint.rope_config import read_rope

    theirs = read_rope(base)
    if own is not None:
        mine = read_rope(own)
        if (mine.scaling, mine.window) != (theirs.scaling, theirs.window):
            told = (
                f"the config beside the adapter reads {mine.window} tokens with {mine.scaling.name}, but its base "
                f"{where} reads {theirs.window} with {theirs.scaling.name}, which is what peft loads"
            )
            remedy = "name the patched checkpoint in base_model_name_or_path"
            return [Fault(code="adapter-base", level=ERROR, message=told, remedy=remedy)]
    elif theirs.provenance is None and theirs.window == theirs.original_length:
        told = f"the adapter records no position method, and its base {where} is not extended"
        remedy = "name the patched checkpoint in base_model_name_or_path, if it was trained on that"
        return [Fault(code="adapter-base", level=WARNING, message=told, remedy=remedy)]
    return []
