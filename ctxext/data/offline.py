"""Corpora that are on every machine: the sources of the pinned sympy wheel, and Python's own sources and docs.

The sha256 manifest of `sympy-source` is written by `python -m ctxext.data.manifest`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ctxext.data.documents import Document

SYMPY_VERSION = "1.14.0"
SYMPY_REMEDY = f"run `pip install sympy=={SYMPY_VERSION}`"
MANIFEST_PATH = Path(__file__).with_name("sympy_source.json")
HELD_OUT_ONE_IN = 10
SPLITS = ("held-out", "train", "all")


def in_split(document_id: str, split: str) -> bool:
    """Say whether a document belongs to `split`: one in ten, by the sha256 of its id, is held out.

    Args:
        document_id: the document's path, with forward slashes.
        split: `held-out`, `train` or `all`.
    """
    held_out = int(hashlib.sha256(document_id.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0
    return split == "all" or held_out == (split == "held-out")


def python_files(root: Path) -> list[str]:
    """Return the `*.py` files below `root` as sorted relative paths with forward slashes."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))


def sympy_root() -> Path:
    """Return the folder that holds the installed `sympy` package, which is found but not imported.

    Raises:
        ValueError: if sympy is missing or another version than the pinned one.
    """
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the corpus sympy-source needs sympy, which is not installed: {SYMPY_REMEDY}")
    version = importlib.metadata.version("sympy")
    if version != SYMPY_VERSION:
        raise ValueError(
            f"the corpus sympy-source is sympy {SYMPY_VERSION}, but {version} is installed: {SYMPY_REMEDY}"
        )
    return Path(spec.submodule_search_locations[0]).parent


def sympy_source(split: str, root: Path | None = None, manifest_path: Path = MANIFEST_PATH) -> Iterator[Document]:
    """Yield the `*.py` files of the pinned sympy wheel in path order, each checked against the shipped manifest.

    Args:
        split: `held-out` (one in ten, for evaluation), `train` or `all`.
        root: the folder that holds `sympy/`; the installed one by default.
        manifest_path: the sha256 manifest.

    Raises:
        ValueError: if the version differs, or a file is missing, added or altered.
    """
    root = root or sympy_root()
    wanted: dict[str, str] = json.loads(manifest_path.read_text())["files"]
    found = [f"sympy/{path}" for path in python_files(root / "sympy")]
    differing = sorted(set(found) ^ set(wanted))
    if differing:
        raise ValueError(
            f"sympy under {root} is not the {SYMPY_VERSION} wheel: {len(differing)} files are missing or added, "
            f"the first is {differing[0]}: {SYMPY_REMEDY} (with --force-reinstall if it is altered)"
        )
    for path in found:
        if not in_split(path, split):
            continue
        content = (root / path).read_bytes()
        if hashlib.sha256(content).hexdigest() != wanted[path]:
            raise ValueError(f"{root / path} was altered: {SYMPY_REMEDY} --force-reinstall --no-deps")
        yield Document(path, content.decode("utf-8"))


def python_stdlib(split: str) -> Iterator[Document]:
    """Yield the running interpreter's own `*.py` sources in path order; files that are not UTF-8 are left out.

    They differ between builds of Python, so numbers on them are not comparable across machines.
    """
    root = Path(sysconfig.get_path("stdlib"))
    for path in python_files(root):
        if path.startswith(("site-packages/", "dist-packages/")) or not in_split(path, split):
            continue
        try:
            text = (root / path).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        yield Document(path, text)


def python_docs(split: str) -> Iterator[Document]:
    """Yield the language reference's topics (`pydoc_data.topics`), by name: about half a megabyte of prose."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        if in_split(name, split):
            yield Document(name, topics[name])


READERS = {"sympy-source": sympy_source, "python-stdlib": python_stdlib, "python-docs": python_docs}


def reader(name: str, split: str) -> partial[Iterator[Document]]:
    """Return a callable that starts reading the offline corpus `name` from its beginning."""
    return partial(READERS[name], split)
