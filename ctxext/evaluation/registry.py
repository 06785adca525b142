"""Find evaluations through the entry-point group `ctxext.evals`: ctxext's own in the same way as anybody else's."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from ctxext.evaluation.base import Evaluation

GROUP = "ctxext.evals"


def available() -> dict[str, EntryPoint]:
    """Return the installed evaluations by name, none of them loaded.

    Raises:
        ValueError: if two packages register the same name.
    """
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        if point.name in found and found[point.name].value != point.value:
            raise ValueError(
                f"two evaluations are called {point.name!r}: {found[point.name].value} and {point.value}; "
                "uninstall one of their packages"
            )
        found[point.name] = point
    return found


def load(name: str) -> type[Evaluation]:
    """Import the evaluation `name`: an installed one, or a class in a file as `path/to/file.py:Name`.

    Raises:
        ValueError: if none is called that, or what the name leads to is no evaluation.
    """
    if ".py:" in name or name.endswith(".py"):
        return _load_file(name)
    points = available()
    if name not in points:
        close = difflib.get_close_matches(name, points, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"no evaluation is called {name!r}{hint} Installed: {', '.join(points) or 'none'}")
    try:
        kind = points[name].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the evaluation {name!r} ({points[name].value}) cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Evaluation)) or kind.name != name:
        raise ValueError(
            f"the entry point {name} = {points[name].value!r} must lead to a subclass of "
            f"ctxext.evaluation.base.Evaluation with name = {name!r}"
        )
    return kind


def _load_file(name: str) -> type[Evaluation]:
    """Run a user's own file and return the evaluation that it defines."""
    path, _, wanted = name.rpartition(":")
    file = Path(path if path.endswith(".py") else name)
    if not file.is_file():
        raise ValueError(f"there is no file {file}; give an evaluation of your own as path/to/file.py:ClassName")
    title = f"ctxext_evaluation_{file.stem}"
    spec = importlib.util.spec_from_file_location(title, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module  # where dataclasses look up the annotations
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{file} cannot be run: {type(error).__name__}: {error}") from error
    kinds = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Evaluation) and value.__module__ == title
    }
    if wanted not in kinds:
        found = ", ".join(kinds) or "none"
        raise ValueError(f"{name!r} names no evaluation of {file}; it defines: {found}; give {file}:ClassName")
    return kinds[wanted]
