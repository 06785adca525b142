"""Files of a checkpoint folder: which belong to it, how they are placed, and folders that appear whole or not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINK_MODES = ("copy", "hard", "symlink")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FICLONE = 0x40049409  # Linux: share the blocks of another file until one of them is written to
_COPY_CHUNK = 64 * 2**20

# Beside the weights: what a tokenizer, a processor or a generation needs, and the licence. A README is left out, for
# what it says of lengths is no longer true; optimizer states, pickles and other frameworks' weights stay behind.
_CARRIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
_CARRIED_STEMS = ("LICENSE", "NOTICE", "USE_POLICY")
_CARRIED_FOLDERS = ("additional_chat_templates",)
_LEFT_BEHIND = ("trainer_state.json", "all_results.json", "train_results.json", "eval_results.json")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        ValueError: If the file is missing, is no JSON or holds no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}; a checkpoint folder needs one") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; it must hold an object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as JSON, beside its place first and then renamed onto it."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers would load from a folder, the index first where there is one.

    Raises:
        ValueError: If there are none, one of the index is missing, or there are only pickles; says what to do.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]  # transformers prefers it and never looks at an index beside it
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{index} has no weight_map from tensor to file; re-save the checkpoint")
        names = sorted(set(shards.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ValueError(f"{index} names {outside[0]!r}, which is no plain file name; re-save the checkpoint")
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ValueError(f"{index} names {', '.join(missing)}, not in the folder; download the checkpoint again")
        return [index, *(folder / name for name in names)]
    if any(path.suffix in PICKLED for path in folder.iterdir()):
        raise ValueError(
            f"{folder} has only pickled weights, which run code when read; convert them first: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder), then copy the tokenizer files"
        )
    raise ValueError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


def carried_files(folder: Path) -> list[Path]:
    """Return the files beside the weights and `config.json` that a patched checkpoint keeps, relative to `folder`."""
    kept = []
    for path in sorted(folder.iterdir()):
        name = path.name
        if path.is_dir():
            if name in _CARRIED_FOLDERS:
                kept += [p.relative_to(folder) for p in sorted(path.rglob("*")) if p.is_file()]
        elif name == "config.json" or name.startswith(".") or name in _LEFT_BEHIND or ".safetensors" in name:
            continue
        elif path.suffix in PICKLED or name.endswith(".index.json"):
            continue
        elif path.suffix in _CARRIED_SUFFIXES or name.startswith(_CARRIED_STEMS):
            kept.append(path.relative_to(folder))
    return kept


def place(source: Path, target: Path, link: str) -> None:
    """Put `source` at `target`: reflinked or else copied, hard-linked or symlinked.

    Symbolic links in SOURCE, as the Hub's cache has them, are followed first, so that a hard link is one to the file.

    Raises:
        ValueError: If the file system cannot hard-link from there to here.
    """
    source = source.resolve(strict=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if link == "symlink":
        target.symlink_to(source)
    elif link == "hard":
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
            raise ValueError(
                f"{source} cannot be hard-linked to {target} ({error.strerror}); use --link copy or symlink"
            ) from None
    else:
        _clone_or_copy(source, target)


def _clone_or_copy(source: Path, target: Path) -> None:
    """Share the blocks of `source` where the file system can, copy them where it cannot."""
    with source.open("rb") as reader, target.open("xb") as writer:
        with contextlib.suppress(OSError):
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            return
        shutil.copyfileobj(reader, writer, _COPY_CHUNK)
        writer.flush()
        os.fsync(writer.fileno())


@contextlib.contextmanager
def whole_folder(output: Path, force: bool) -> Iterator[Path]:
    """Yield a folder beside `output` that is renamed onto it when the block ends well, and removed when it does not.

    A process killed inside the block leaves `output` as it was; what it had built is removed by the next attempt.

    Args:
        output: The folder to make.
        force: Whether a folder that is there and not empty may be replaced.

    Raises:
        ValueError: If `output` is a file, is not empty without `force`, or another process is making it now.
        OSError: If the disk fills, or the folder may not be written to; nothing is left behind then.
    """
    _refuse_occupied(output, force)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial, previous = (output.with_name(f".{output.name}.ctxext-{kind}") for kind in ("partial", "previous"))
    partial.mkdir(exist_ok=True)
    with _locked(partial):
        _refuse_occupied(output, force)  # another process may have filled it since
        for entry in partial.iterdir():  # of an attempt that was killed
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        if previous.exists() and output.exists():
            shutil.rmtree(previous)
        try:
            yield partial
            _sync_folder(partial)
            if output.exists():
                output.rename(previous)
            partial.rename(output)
            _sync_folder(output.parent)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"the disk is full: OUTPUT {output} was not made and nothing is left behind; free space there, choose "
                "another place, or have the weights linked (--link hard or symlink)",
            ) from error
        finally:
            if partial.exists():
                shutil.rmtree(partial)
        if previous.exists():
            shutil.rmtree(previous)


def _refuse_occupied(output: Path, force: bool) -> None:
    if output.exists() and not output.is_dir():
        raise ValueError(f"OUTPUT {output} is a file; name a folder")
    if output.is_dir() and any(output.iterdir()) and not force:
        raise ValueError(f"OUTPUT {output} is not empty; choose another folder, or --force to replace it")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder being made; the kernel lets go of it when the process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"another process is filling {folder} now; wait for it or choose another OUTPUT") from None
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Have the entries of a folder on disk before its name says that they are."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
