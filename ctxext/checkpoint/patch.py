"""Patch a checkpoint folder: a new config beside the same weights, and for a bias the code that reads it."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from ctxext.checkpoint.bias_files import place_code, place_weights
from ctxext.checkpoint.files import LINK_MODES, carried_files, place, read_json, weight_files, whole_folder, write_json
from ctxext.checkpoint.plan import PatchPlan, plan_patch
from ctxext.checkpoint.rope_config import text_section
from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.checkpoint.verify import verify_checkpoint
from ctxext.positions.base import nearest


def patch_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    method: str,
    length: int,
    original_length: int | None = None,
    link: str = "copy",
    force: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    allow_sliding_window: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Write a checkpoint folder that reads `length` tokens.

    Only configs are written, and for a bias its code and learned values; weights are reflinked or copied, hard-linked
    or symlinked, and never read. SOURCE is not changed. OUTPUT appears whole or not at all.

    Args:
        source: A folder, a `.gguf` file or a Hub id.
        output: The folder to make.
        method: A position method, such as `yarn`.
        length: Tokens that the model shall read.
        original_length: The pretrained window, in tokens, where the config is ambiguous.
        link: `copy` (shares blocks where the file system can), `hard` or `symlink`. A later write in place through a
            link would change SOURCE too.
        force: Replace an OUTPUT that is not empty.
        verify: Build the model of OUTPUT with stock transformers, without weights, and compare its frequencies.
        dry_run: Decide and report, but write nothing.
        allow_sliding_window: Extend a model although none of its layers sees further than its window.
        **options: The method's own options.

    Returns:
        What was done: method, lengths, factors, notes, the config diff, and the command's inputs.

    Raises:
        ValueError: Names the input at fault, what is allowed and what to do; nothing is written then.
    """
    if link not in LINK_MODES:
        raise ValueError(f"link is {link!r}{nearest(link, LINK_MODES)}; it must be one of {', '.join(LINK_MODES)}")
    folder, target = resolve_checkpoint(source), Path(output).expanduser()
    _check_places(folder, target)
    before = read_json(folder / "config.json")
    plan = plan_patch(
        before,
        method=method,
        length=length,
        original_length=original_length,
        allow_sliding_window=allow_sliding_window,
        source=str(source),
        **options,
    )
    weights = weight_files(folder)
    report = _report(plan, folder, target, before)
    if dry_run:
        return {**report, "written": False}
    with whole_folder(target, force) as partial:
        place_weights(weights, partial, link, plan.bias, text_section(before).get("num_attention_heads", 0))
        _write_small_files(plan, folder, partial)
        if verify:
            verify_checkpoint(partial)
    return {**report, "written": True, "verified": verify}


def _check_places(folder: Path, target: Path) -> None:
    """Refuse an OUTPUT that is SOURCE or lies inside it, or holds it."""
    inside, outside = target.resolve(), folder.resolve()
    if inside == outside or outside in inside.parents or inside in outside.parents:
        raise ValueError(
            f"OUTPUT {target} and SOURCE {folder} overlap; SOURCE is never changed, so choose another OUTPUT"
        )


def _write_small_files(plan: PatchPlan, folder: Path, partial: Path) -> None:
    """Copy what lies beside the weights, with every length in it set from the same number."""
    for relative in carried_files(folder):
        place(folder / relative, partial / relative, "copy")
    write_json(partial / "config.json", plan.config)
    if plan.bias is not None:
        place_code(partial)
    for name, key in (("tokenizer_config.json", "model_max_length"), ("generation_config.json", "max_length")):
        path = partial / name
        if not path.exists():
            continue
        values = read_json(path)
        if key in values or name == "tokenizer_config.json":
            write_json(path, {**values, key: plan.length})


def _report(plan: PatchPlan, folder: Path, target: Path, before: dict[str, Any]) -> dict[str, Any]:
    return {
        "source": str(folder),
        "output": str(target),
        "method": plan.config["ctxext"]["method"],
        "window": plan.rope.window,
        "original_length": plan.rope.original_length,
        "length": plan.length,
        "factor": plan.config["ctxext"]["factor"],
        "total_factor": plan.total_factor,
        "rope_theta": plan.scaling.rope_theta,
        "attention_factor": plan.scaling.cos_sin_factor,
        "bias": None if plan.bias is None else plan.bias.bias_parameters(),
        "notes": plan.notes,
        "config_diff": config_diff(before, plan.config),
    }


def config_diff(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a unified diff of two configs, as they stand in `config.json`."""
    old, new = (json.dumps(value, indent=2, ensure_ascii=False).splitlines() for value in (before, after))
    return list(difflib.unified_diff(old, new, "SOURCE/config.json", "OUTPUT/config.json", lineterm="", n=1))
