"""Repairs that have one right answer; every file is kept before it is replaced."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ctxext.checkpoint.case import Case, Fault
from ctxext.checkpoint.faults_config import unread_keys
from ctxext.checkpoint.faults_files import LIMITS
from ctxext.checkpoint.files import read_json, write_json
from ctxext.checkpoint.loaders import ORIGINAL
from ctxext.checkpoint.normalize import normalized, same_json
from ctxext.checkpoint.rope_config import text_section
from ctxext.positions.rope_by_parts import Yarn


def repair_config(case: Case, faults: Iterable[Fault]) -> list[Path]:
    """Write the config without its fixable faults, in both dialects; return what was kept.

    What other faults leave unsettled is left as it is: then nothing is written.

    Args:
        case: The checkpoint.
        faults: What `diagnose` found.
    """
    codes = {fault.code for fault in faults if fault.fixable} - {code for _, _, code, _ in LIMITS}
    if not codes:
        return []
    config = _repaired(case, codes)
    try:
        config = normalized(config)
    except (ValueError, OverflowError):
        return []  # a fault without one right answer is in the way; it is reported as such
    return _replace(case.folder / "config.json", config)


def _repaired(case: Case, codes: set[str]) -> dict[str, Any]:
    """Return the config with every fixable fault but missing dialects undone; those the writer undoes."""
    config = copy.deepcopy(case.config)
    section = text_section(config)
    if "float-length" in codes:
        _make_whole(section)
    if "unknown-rope-key" in codes:
        for parameters in _rope_dicts(section, case):
            for key in unread_keys(parameters, case.new.rope_type):
                del parameters[key]
    if codes & {"theta-missing", "theta-lost"}:
        _spread_theta(section, case)
    if "original-length-missing" in codes:
        for parameters in _rope_dicts(section, case):
            parameters[ORIGINAL] = case.provenance["original_length"]
    if "dynamic-enlarged" in codes:
        places = [case.provenance, section, *_rope_dicts(section, case)]
        recorded = case.provenance.get("original_length")
        known = [place[ORIGINAL] for place in places if isinstance(place.get(ORIGINAL), int)]
        section["max_position_embeddings"] = recorded if isinstance(recorded, int) else known[0]
    if "length-not-multiplied" in codes and case.rope is not None and isinstance(case.rope.scaling, Yarn):
        scaling = case.rope.scaling
        section["max_position_embeddings"] = round(scaling.original_max_position_embeddings * scaling.factor)
    if "sliding-rope" in codes:
        sliding = section["rope_parameters"]["sliding_attention"]
        theta = sliding.get("rope_theta") or section.get("rope_local_base_freq") or 10000.0
        section["rope_parameters"]["sliding_attention"] = {"rope_type": "default", "rope_theta": theta}
    return config


def _rope_dicts(section: dict[str, Any], case: Case) -> list[dict[str, Any]]:
    """Return the rope dicts of a section, to be changed in place."""
    found = []
    for key in case.spelt:
        value = section[key]
        nested = key == "rope_parameters" and case.family.per_layer_type
        found.append(value["full_attention"] if nested else value)
    return found


def _make_whole(values: dict[str, Any]) -> None:
    """Write every length in a config that is a float as the integer that it is."""
    for key, value in values.items():
        if isinstance(value, dict):
            _make_whole(value)
        elif key in ("max_position_embeddings", ORIGINAL, "sliding_window"):
            if isinstance(value, float) and value.is_integer():
                values[key] = int(value)


def _spread_theta(section: dict[str, Any], case: Case) -> None:
    """Write the one base that a config spells to every place that loaders look at."""
    theta = next(v for v in case.stated_thetas().values() if isinstance(v, (int, float)))
    section[case.family.theta_key] = theta
    for parameters in _rope_dicts(section, case):
        if "rope_theta" in parameters:
            parameters["rope_theta"] = theta


def repair_limits(case: Case, faults: Iterable[Fault]) -> list[Path]:
    """Write the model's length wherever a limit beside the config is another one; return what was kept.

    Args:
        case: The checkpoint, its config repaired.
        faults: Those of `limit_faults`.
    """
    codes = {fault.code for fault in faults if fault.fixable}
    kept: list[Path] = []
    for name, keys, code, _ in LIMITS:
        if code in codes:
            values = read_json(case.folder / name)
            place: Any = values
            for key in keys[:-1]:
                place = place[key]
            place[keys[-1]] = case.length
            kept += _replace(case.folder / name, values)
    return kept


def _replace(path: Path, values: dict[str, Any]) -> list[Path]:
    """Keep a file as `NAME.before-doctor` and put another in its place; a link is replaced, not followed."""
    if same_json(read_json(path), values):
        return []
    number = 0
    while True:
        kept = path.with_name(f"{path.name}.before-doctor" + (f".{number}" if number else ""))
        try:
            with kept.open("xb") as file:
                file.write(path.read_bytes())
            break
        except FileExistsError:
            number += 1
    write_json(path, values)
    return [kept]
