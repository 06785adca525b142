"""Write the sha256 manifest of `sympy-source` anew from the installed wheel: `python -m ctxext.data.manifest`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ctxext.data.offline import MANIFEST_PATH, SYMPY_VERSION, python_files, sympy_root


def _corpus_hash(files: dict[str, str]) -> str:
    return hashlib.sha256("".join(f"{digest}  {path}\n" for path, digest in files.items()).encode()).hexdigest()


def build_manifest(root: Path) -> dict[str, object]:
    """Return the manifest of the sympy package under `root`: path to sha256, and one hash over all of them."""
    files = {f"sympy/{path}": "" for path in python_files(root / "sympy")}
    for path in files:
        files[path] = hashlib.sha256((root / path).read_bytes()).hexdigest()
    return {"package": "sympy", "version": SYMPY_VERSION, "corpus_hash": _corpus_hash(files), "files": files}


def main() -> None:
    """Write the manifest of the installed, pinned sympy into the package."""
    MANIFEST_PATH.write_text(json.dumps(build_manifest(sympy_root()), indent=1) + "\n")


if __name__ == "__main__":
    main()
