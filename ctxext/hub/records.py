"""What is known of where a checkpoint comes from: its base, the base's licence, and the training behind it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.files import read_json
from ctxext.hub.files import ADAPTER_FILES, README, is_adapter
from ctxext.training.checkpoints import STATE_FILE, newest_checkpoint

HUB_ID = re.compile(r"(?!\.)[\w.-]+/[\w.-]+", re.ASCII)
_LICENCE_KEYS = ("license", "license_name", "license_link")
_RECIPE_FILE, _LOG_FILE = "recipe.yaml", "log.jsonl"  # beside a run's final folder
_DEPTH = 8  # bases of bases, in case two name each other
# Of a recipe: what the card calls it. What is off or empty is left out.
_SHOWN = {
    "tuning": "tuning",
    "length": "sequence length (tokens)",
    "batch_size": "sequences per step",
    "epochs": "epochs",
    "dtype": "dtype of the weights",
    "attention": "attention",
}
_SHOWN_TRAINING = {
    "learning_rate": "learning rate",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "warm-up steps",
    "optim": "optimizer",
    "adam_beta1": "beta 1",
    "adam_beta2": "beta 2",
    "weight_decay": "weight decay",
    "seed": "seed",
}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a checkpoint comes from.

    Attributes:
        base: The Hub id of the model that was patched or adapted, or None where it has none on record.
        licence: The base's `license`, `license_name` and `license_link`, as far as known.
    """

    base: str | None
    licence: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training on record.

    Attributes:
        settings: Names and values.
        data: What it read, a line for each source; empty where that is not on record.
    """

    settings: dict[str, str]
    data: list[str]


def find_origin(folder: Path, ask_hub: bool) -> Origin:
    """Return the base of a checkpoint and its licence, followed through local folders to a repository of the Hub.

    Args:
        folder: The checkpoint.
        ask_hub: Whether the base's card may be fetched for the licence.
    """
    licence = _licence_of(folder)
    place, base = folder, None
    for _ in range(_DEPTH):
        named = _named_base(place)
        if named is None:
            break
        local = Path(named).expanduser()
        if local.is_dir():
            place = local
            licence = licence or _licence_of(local)
            continue
        base = named.partition("@")[0] if HUB_ID.fullmatch(named.partition("@")[0]) else None
        break
    if base is not None and not licence:
        licence = _licence_on_hub(base, ask_hub)
    return Origin(base=base, licence=licence)


def _named_base(folder: Path) -> str | None:
    """Return what a checkpoint's own files call the model that it was made from."""
    named: Any = None
    if is_adapter(folder):
        named = read_json(folder / ADAPTER_FILES[0]).get("base_model_name_or_path")
    elif (folder / "config.json").exists():
        record = read_json(folder / "config.json").get("ctxext")
        named = record.get("source") if isinstance(record, dict) else None
    if not named and (run := _state(folder)) is not None:
        named = run.get("model")
    return named if isinstance(named, str) and named else None


def _licence_of(folder: Path) -> dict[str, str]:
    """Return the licence that a folder's card or config states."""
    if (folder / README).exists():
        found = _licence_of_card((folder / README).read_text(encoding="utf-8", errors="replace"))
        if found:
            return found
    if (folder / "config.json").exists():
        stated = read_json(folder / "config.json").get("license")
        return {"license": stated} if isinstance(stated, str) and stated else {}
    return {}


def _licence_of_card(text: str) -> dict[str, str]:
    from huggingface_hub import ModelCard

    try:
        data = ModelCard(text, ignore_metadata_errors=True).data
    except Exception:  # somebody else's card may be broken in any way; then it states nothing
        return {}
    return {key: data[key] for key in _LICENCE_KEYS if isinstance(data.get(key), str) and data.get(key)}


def _licence_on_hub(base: str, ask_hub: bool) -> dict[str, str]:
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(base, README, local_files_only=not ask_hub)
        return _licence_of_card(Path(path).read_text(encoding="utf-8", errors="replace"))
    except Exception:  # no card, no network, no access: the licence is not known, and the card leaves it out
        return {}


def _run_folder(folder: Path) -> Path | None:
    """Return the folder of the run that a checkpoint is of, or None; a recipe saves its last model as `final`."""
    name = folder.resolve().name
    return folder.resolve().parent if name == "final" or re.fullmatch(r"checkpoint-\d+", name) else None


def _state(folder: Path) -> dict[str, Any] | None:
    """Return the identity of the run that a checkpoint is of, as its checkpoints have it, or None."""
    run = _run_folder(folder)
    places = [folder, *([newest] if run is not None and (newest := newest_checkpoint(run)) else [])]
    for place in places:
        if (place / STATE_FILE).exists():
            found = read_json(place / STATE_FILE).get("run")
            return found if isinstance(found, dict) and found else None
    return None


def find_training(folder: Path, recipe: Path | None, length: int | None) -> Training | None:
    """Return the training on record, or None where there is none.

    Args:
        folder: The checkpoint, best where the recipe saved it.
        recipe: The config that it was trained with, where the run's folder has none.
        length: Tokens that the checkpoint reads.

    Raises:
        ValueError: If the recipe given is no config, or of another length.
    """
    run, given = _run_folder(folder), recipe
    if recipe is None:
        places = [folder, *([run] if run is not None else [])]
        recipe = next((place / _RECIPE_FILE for place in places if (place / _RECIPE_FILE).exists()), None)
    config = _read_recipe(recipe, required=given is not None) if recipe is not None else None
    if given is not None and config is not None and length is not None and config["length"] != length:
        raise ValueError(
            f"--recipe {given} is of length {config['length']}, and {folder} reads {length} tokens: give the config "
            "that it was trained with"
        )
    state = _state(folder) or config
    if state is None or (length is not None and state.get("length") != length):
        return None
    settings = {**_settings(state), **_progress(folder, run)}
    return Training(settings=settings, data=_sources(config) if config is not None else [])


def _read_recipe(path: Path, required: bool) -> dict[str, Any] | None:
    from ctxext.training.config_file import parse_config, read_yaml

    try:
        config: dict[str, Any] = parse_config(read_yaml(path), str(path)).model_dump(mode="json")
    except (ValueError, OSError):
        if required:
            raise
        return None
    return config


def _settings(run: dict[str, Any]) -> dict[str, str]:
    training = run.get("training")
    rows: list[tuple[str, Any]] = [(label, run.get(key)) for key, label in _SHOWN.items()]
    if isinstance(training, dict):
        rows += [(label, training.get(key)) for key, label in _SHOWN_TRAINING.items()]
    if isinstance(run.get("lora"), dict):
        rows += [(f"LoRA {key}", value) for key, value in run["lora"].items()]
    if isinstance(run.get("reading"), dict):
        rows.append(("read in windows, skipping at rate", run["reading"].get("rate")))
    return {label: _text(value) for label, value in rows if value not in (None, "", [], {})}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _progress(folder: Path, run: Path | None) -> dict[str, str]:
    """Return the steps of a run and its last loss, as its log has them, up to the checkpoint's own step."""
    if run is None or not (run / _LOG_FILE).exists():
        return {}
    rows = []
    for line in (run / _LOG_FILE).read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    own = re.fullmatch(r"checkpoint-(\d+)", folder.resolve().name)
    rows = [row for row in rows if own is None or row["step"] <= int(own[1])]
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), float)]
    if not rows:
        return {}
    last = {"loss of the last step": f"{losses[-1]:.4f}"} if losses else {}
    return {"steps": str(rows[-1]["step"]), **last}


def _sources(config: dict[str, Any]) -> list[str]:
    """Return the sources of a recipe; of a local file only its name, for its folder is nobody's matter."""
    lines = []
    for source in config["data"]["sources"]:
        name = str(source["data"])
        local = "/" in name and not HUB_ID.fullmatch(name)
        said = [f"`{Path(name).name if local or Path(name).exists() else name}`"]
        keys = ("data_id", "data_config", "data_revision", "split", "min_tokens", "max_tokens")
        said += [f"{key.replace('_', ' ')} {source[key]}" for key in keys if source.get(key)]
        if len(config["data"]["sources"]) > 1:
            said.append(f"weight {source['weight']:g}")
        lines.append(", ".join(said))
    return [*lines, f"documents {config['data']['boundaries']} within a sequence"]
