"""The recipes that are installed beside ctxext: files to read and to copy, which nobody imports."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from ctxext.positions.base import nearest


def recipe_root() -> Path:
    """Return the folder that holds `finetune.py`, `configs` and `accelerate`.

    Raises:
        ValueError: If they are not installed.
    """
    spec = importlib.util.find_spec("ctxext.recipes")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("ctxext was installed without its recipes; install it anew with pip")
    return Path(spec.submodule_search_locations[0])


def recipe_files() -> list[dict[str, str]]:
    """Return name, path and one line on each recipe, config and launcher's config."""
    root = recipe_root()
    paths = [path for path in sorted(root.glob("*.py")) if path.name != "__init__.py"]
    paths += [*sorted(root.glob("configs/*.yaml")), *sorted(root.glob("accelerate/*.yaml"))]
    return [{"name": path.relative_to(root).as_posix(), "path": str(path), "what": _what(path)} for path in paths]


def _what(path: Path) -> str:
    """Return a file's own description: a script's first line, a config's first comment after the launch command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".py":
        return lines[0].strip('" ')
    comments = [line.lstrip("# ") for line in lines if line.startswith("#")]
    named = [line.removeprefix("What: ") for line in comments if line.startswith("What: ")]
    return (named or comments[1:] or [""])[0]


def copy_file(name: str, output: Path, force: bool) -> Path:
    """Copy a recipe or config to a file or into a folder; return where it lies.

    Args:
        name: As `recipe_files` names it; the folder and `.yaml` may be left out.
        output: A file's path, or a folder that is there.
        force: Replace a file that is there.

    Raises:
        ValueError: If there is none of that name, or a file is in the way.
    """
    known = {row["name"]: Path(row["path"]) for row in recipe_files()}
    short = {path.stem: path for path in known.values()}
    found = known.get(name) or short.get(Path(name).stem)
    if found is None:
        raise ValueError(f"no recipe is called {name!r}{nearest(name, list(short))}; see `ctxext recipe list`")
    target = output / found.name if output.is_dir() else output
    if target.exists() and not force:
        raise ValueError(f"{target} is there already; choose another name, or --force to replace it")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(found, target)
    return target
