"""What of a checkpoint folder is published, and what is left out and why.

Only what a checkpoint is made of is taken: an unknown file may be anything. On top of that comes a list of what must
never leave the machine, which holds for links too, by the name of what they lead to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ctxext.checkpoint.files import PICKLED, carried_files, weight_files
from ctxext.training.checkpoints import STATE_FILE

README = "README.md"
FIGURES = "figures"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

# Names with `token` in them that are a tokenizer's.
_OF_TOKENIZERS = re.compile(r"tokenizer.*|tokenization_\w+\.py|special_tokens_map\.json|added_tokens\.json")
_SECRET = re.compile(
    r"\.env.*|.*\.env|[._]netrc|\.git-credentials|\.pypirc|\.npmrc|\.ssh|\.aws|\.gnupg|\.kube|id_(rsa|dsa|ecdsa|ed25519).*"
    r"|.*\.(pem|key|p12|pfx|ppk|kdbx)|.*(token|secret|credential|password|api[_-]?key).*",
    re.IGNORECASE,
)
_OF_TRAINING = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|training_args|trainer_state)\b.*|rng_state_.*|checkpoint-\d+|global_step\d+"
    rf"|(all|train|eval)_results\.json|{re.escape(STATE_FILE)}|zero_pp_rank.*|.*_optim_states.*|log\.jsonl"
)
_PARTIAL = re.compile(r".*\.(partial|incomplete|part|tmp|temp|lock|old)|.*\.before-doctor.*|\..*\.ctxext-\w+")
_CACHES = ("__pycache__", ".cache", ".git", "wandb", "runs", "node_modules", ".ipynb_checkpoints")
# Of a token of the Hub, and of a private key, as they stand in a file.
_SECRET_TEXT = re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b|-----BEGIN [A-Z ]*PRIVATE KEY-----")
_CHUNK = 2**20


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file to publish.

    Attributes:
        path: Its name in the repository.
        source: Where it lies, or what it holds where it is made for the push.
        size: Bytes.
    """

    path: str
    source: Path | bytes
    size: int


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A file that stays, or a folder with all that is in it.

    Attributes:
        path: Relative to the checkpoint; a folder ends with a slash.
        reason: Why.
        size: Bytes.
    """

    path: str
    reason: str
    size: int


def plan_files(folder: Path) -> tuple[list[Upload], list[LeftOut]]:
    """Return what of a checkpoint folder is published, and what is left out.

    Args:
        folder: A checkpoint, or an adapter with the config that it was trained with.

    Raises:
        ValueError: If there are no safetensors weights, or a file that would be published holds a token or a key.
    """
    wanted = _wanted(folder)
    uploads: list[Upload] = []
    left: list[LeftOut] = []
    for path in _walk(folder):
        relative = path.relative_to(folder)
        name = relative.as_posix()
        reason = _reason(relative, path) or (None if name in wanted else "it is no part of the checkpoint")
        if path.is_dir() and not path.is_symlink():
            left.append(LeftOut(path=f"{name}/", reason=str(reason), size=_size_below(path)))
        elif reason is not None:
            left.append(LeftOut(path=name, reason=reason, size=_size(path)))
        else:
            uploads.append(Upload(path=name, source=path, size=path.stat().st_size))
    lost = sorted(required_files(folder) - {upload.path for upload in uploads})
    if lost:
        raise ValueError(f"{folder} cannot be published without {', '.join(lost)}, which is missing or left out")
    refuse_secrets(uploads)
    return uploads, left


def required_files(folder: Path) -> set[str]:
    """Return the names of the files without which a folder is no checkpoint: config and weights, or an adapter's."""
    if is_adapter(folder):
        return set(ADAPTER_FILES)
    return {"config.json", *(path.name for path in weight_files(folder))}


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a peft adapter rather than a model."""
    return (folder / ADAPTER_FILES[0]).exists() and not (folder / "model.safetensors").exists()


def _wanted(folder: Path) -> set[str]:
    figures = (path for path in (folder / FIGURES).glob("*.png")) if (folder / FIGURES).is_dir() else ()
    names = {path.as_posix() for path in carried_files(folder)}
    names |= {"config.json", README, *(path.relative_to(folder).as_posix() for path in figures)}
    return names | required_files(folder)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield every file, and every folder that is left out as a whole."""
    for path in sorted(folder.iterdir()):
        relative = path.relative_to(folder)
        if not path.is_dir():
            yield path
        elif path.is_symlink() or _reason(relative, path) is not None:
            yield path
        else:
            inside = [below for below in sorted(path.rglob("*")) if below.is_file() or below.is_symlink()]
            yield from inside


def _reason(relative: Path, path: Path) -> str | None:
    """Return why a file or folder must not be published, or None."""
    target = path.resolve() if path.is_symlink() else path
    if path.is_symlink() and (target.is_dir() or not target.exists()):
        return "a link to a folder" if target.is_dir() else "a link that leads nowhere"
    for part in {*relative.parts, target.name}:
        if _SECRET.fullmatch(part) and not _OF_TOKENIZERS.fullmatch(part):
            return "it may hold a secret"
        if part in _CACHES:
            return "a cache, or the history of a repository"
        if _PARTIAL.fullmatch(part):
            return "half-written, or kept from before a repair"
        if _OF_TRAINING.fullmatch(part):
            return "the state of a training run (optimizer, scheduler, random numbers, log)"
    if relative.suffix in PICKLED:
        return "a pickle, which runs code when it is read"
    if any(part.startswith(".") for part in relative.parts):
        return "hidden"
    return "weights that no index names" if path.suffix == ".safetensors" and _unnamed(path, relative) else None


def _unnamed(path: Path, relative: Path) -> bool:
    folder = path.parent
    return len(relative.parts) > 1 or relative.name not in required_files(folder)


def refuse_secrets(uploads: list[Upload]) -> None:
    """Refuse to publish a token of the Hub or a private key in a text file.

    Raises:
        ValueError: Names every such file, never what is in it.
    """
    found = [upload.path for upload in uploads if not upload.path.endswith(".safetensors") and _has_secret(upload)]
    if found:
        raise ValueError(
            f"{', '.join(found)} holds what looks like a token of the Hub or a private key; take it out (and revoke "
            "it, if it was ever shared), then push again"
        )


def _has_secret(upload: Upload) -> bool:
    if isinstance(upload.source, bytes):
        return _SECRET_TEXT.search(upload.source) is not None
    with upload.source.open("rb") as file:
        tail = b""
        while block := file.read(_CHUNK):
            if _SECRET_TEXT.search(tail + block):
                return True
            tail = block[-256:]
    return False


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _size_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
