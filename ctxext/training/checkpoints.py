"""Folders that a training run saves: whole or not there, in both config dialects, with tokenizer and no pickles."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from ctxext.checkpoint.files import read_json, write_json
from ctxext.checkpoint.normalize import normalize_config
from ctxext.training.arguments import Recipe
from ctxext.training.config_file import ConfigError

PARTIAL = ".partial"
STATE_FILE = "ctxext_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# Keys that do not change what a run computes.
_FREE_KEYS = {
    "output_dir",
    "logging_dir",
    "report_to",
    "run_name",
    "project",
    "save_total_limit",
    "save_steps",
    "max_steps",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "dataloader_persistent_workers",
    "disable_tqdm",
    "log_level",
    "ddp_backend",
    "ddp_timeout",
    "per_device_train_batch_size",
}
_FREE_OWN_KEYS = {"training", "resume", "evaluations", "evaluate_every", "save_at", "data"}


def finish_folder(folder: Path, length: int, config: Any | None = None) -> None:
    """Make a folder that transformers saved one that every loader reads alike: the one config writer of all saves.

    Args:
        folder: A model's folder, or an adapter's.
        length: Tokens that the model reads.
        config: For an adapter, the config of the patched base: it is saved beside it, as the record of what the
            adapter was trained on.
    """
    if config is not None:
        config.save_pretrained(folder)
        base = read_json(folder / "config.json")
        if base.pop("quantization_config", None) is not None:  # of this run's memory, not of the base
            write_json(folder / "config.json", base)
    normalize_config(folder)
    path = folder / "tokenizer_config.json"
    if path.exists():
        values = read_json(path)
        if values.get("model_max_length") != length:
            write_json(path, {**values, "model_max_length": length})
    (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle, and the recipe's config says it all


def identity(recipe: Recipe, packs_digest: str) -> dict[str, Any]:
    """Return what a resumed run must share with the run that it goes on from."""
    training = {key: value for key, value in recipe.training.items() if key not in _FREE_KEYS}
    own = recipe.model_dump(mode="json", exclude=_FREE_OWN_KEYS)
    return {**own, "training": {key: str(value) for key, value in sorted(training.items())}, "packs": packs_digest}


def write_state(folder: Path, packs_read: int, run: dict[str, Any]) -> None:
    """Write the data stream's state, the packs read so far, and the identity of the run."""
    write_json(folder / STATE_FILE, {"packs_read": packs_read, "run": run})


def newest_checkpoint(output: Path) -> Path | None:
    """Return the newest whole checkpoint of a run, or None; what a killed save left behind is not one."""
    found = [
        (int(match[1]), path) for path in output.glob("checkpoint-*") if (match := _CHECKPOINT.fullmatch(path.name))
    ]
    return max(found)[1] if found else None


def resume_from(output: Path, resume: str, run: dict[str, Any]) -> Path | None:
    """Return the checkpoint that a run goes on from, or None for a run from the start.

    Args:
        output: The run's folder.
        resume: `auto` or `never`.
        run: `identity` of this run.

    Raises:
        ConfigError: If there is one of another run, naming what differs, or there is one and it shall not be used.
    """
    newest = newest_checkpoint(output)
    if newest is None:
        return None
    if resume == "never":
        raise ConfigError([f"output_dir {output} has {newest.name}; choose another folder, or resume: auto"])
    before = read_json(newest / STATE_FILE).get("run", {})
    differing = sorted(key for key in {*before, *run} if before.get(key) != run.get(key))
    if differing:
        inner = [
            f"training.{key}"
            for key in sorted({*before.get("training", {}), *run["training"]})
            if before.get("training", {}).get(key) != run["training"].get(key)
        ]
        named = [key for key in differing if key != "training"] + inner
        raise ConfigError(
            [
                f"output_dir {output} holds another run: {', '.join(named)} differ; choose another folder, or run it "
                "with the config that it began with"
            ]
        )
    return newest


def publish(partial: Path, final: Path) -> None:
    """Move a finished folder to its place, in one step and with its content on the disk before its name says so."""
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    old = partial.with_name(f"{partial.name}.old")
    if final.exists():
        final.rename(old)
    partial.rename(final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if old.exists():
        shutil.rmtree(old)


def drop_old(output: Path, keep: int | None) -> None:
    """Remove the oldest whole checkpoints until `keep` are left; None keeps all.

    A checkpoint is renamed first, so that a half-removed one never passes for a whole one.
    """
    if keep is None or keep < 1:
        return
    found = sorted(
        (int(match[1]), path) for path in output.glob("checkpoint-*") if (match := _CHECKPOINT.fullmatch(path.name))
    )
    for _, path in found[:-keep]:
        doomed = output / PARTIAL / f"{path.name}.old"
        doomed.parent.mkdir(exist_ok=True)
        path.rename(doomed)
        shutil.rmtree(doomed.parent)
