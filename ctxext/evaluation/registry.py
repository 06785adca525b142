"""Find evaluations through the entry-point group `ctxext.evals`: ctxext's own in the same way as anybody else's."""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points

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
    """Import the evaluation `name`.

    Raises:
        ValueError: if none is called that, or the entry point does not lead to an evaluation of that name.
    """
    points = available()
    if name not in points:
        close = difflib.get_close_matches(name, points, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
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
