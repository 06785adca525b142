"""Find what is wrong with a checkpoint, and repair what has one right answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctxext.checkpoint.case import ERROR, Case, Fault, examine
from ctxext.checkpoint.faults_bias import bias_faults
from ctxext.checkpoint.faults_config import config_faults
from ctxext.checkpoint.faults_files import adapter_faults, limit_faults, weight_faults
from ctxext.checkpoint.faults_use import record_faults, use_faults
from ctxext.checkpoint.files import read_json
from ctxext.checkpoint.repair import repair_config, repair_limits
from ctxext.checkpoint.source import resolve_checkpoint

__all__ = ["Fault", "diagnose", "doctor"]


def diagnose(source: str | Path, *, verify: bool = True) -> list[Fault]:
    """Return what is wrong with a checkpoint, ctxext's own or not, and what to know before using it.

    Args:
        source: A folder, a `.gguf` file or a Hub id; the folder of a peft adapter too.
        verify: Also build the model in stock transformers, without weights, and compare its live frequencies with the
            formula; the only part that needs torch, but for a learned bias. Left out where an error was found already.

    Returns:
        Errors and warnings, which make a checkpoint faulty, and notices, which do not.

    Raises:
        ValueError: If there is no such checkpoint, its `config.json` is no JSON, or its model type is unknown.
    """
    folder = resolve_checkpoint(source)
    if (folder / "adapter_config.json").exists() and not (folder / "model.safetensors").exists():
        return adapter_faults(folder)
    return _diagnose_folder(examine(folder, read_json(folder / "config.json")), verify)


def _diagnose_folder(case: Case, verify: bool) -> list[Fault]:
    found = config_faults(case)
    if not any(fault.code in ("dynamic-enlarged", "float-length") for fault in found):
        found += record_faults(case)
    found += bias_faults(case)
    found += weight_faults(case)
    found += limit_faults(case)
    found += use_faults(case)
    if verify and not any(fault.level == ERROR for fault in found):
        from ctxext.checkpoint.verify import verify_checkpoint

        try:
            verify_checkpoint(case.folder)
        except ValueError as error:
            told = "load it with the transformers that it was saved with, and save or patch it again"
            found.append(Fault(code="stock-model", level=ERROR, message=str(error), remedy=told))
    return found


def doctor(source: str | Path, *, fix: bool = False, verify: bool = True) -> dict[str, Any]:
    """Diagnose a checkpoint and, if asked, repair the faults that have one right answer; then diagnose it again.

    Every file that is changed is kept beside it as `NAME.before-doctor` (`.before-doctor.1` and so on where there is
    one) and replaced as a whole. A file that is a link, as in the Hub's cache, is replaced by a file; what it links to
    stays as it is.

    Args:
        source: As `diagnose` takes it; a local folder with `fix`.
        fix: Whether to repair.
        verify: As `diagnose` takes it.

    Returns:
        `checkpoint`, `healthy` (no errors and no warnings), `faults` as they are now, `fixed`, the faults that were
        repaired, and `backups`, the files that were kept.

    Raises:
        ValueError: As `diagnose` does, and if `fix` is asked of something that is no local folder.
    """
    if fix and not Path(source).expanduser().is_dir():
        raise ValueError(f"--fix changes files, so it needs a local folder; {str(source)!r} is none")
    before = diagnose(source, verify=False) if fix else []
    folder = resolve_checkpoint(source)
    backups: list[Path] = []
    if any(fault.fixable for fault in before):
        backups += repair_config(examine(folder, read_json(folder / "config.json")), before)
        case = examine(folder, read_json(folder / "config.json"))
        backups += repair_limits(case, limit_faults(case))
    faults = diagnose(source, verify=verify)
    left = {fault.code for fault in faults}
    return {
        "checkpoint": str(folder),
        "healthy": not any(fault.counts for fault in faults),
        "faults": [fault.to_dict() for fault in faults],
        "fixed": [fault.to_dict() for fault in before if fault.fixable and fault.code not in left],
        "backups": [path.name for path in backups],
    }
