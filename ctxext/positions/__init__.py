"""Position methods: one registry, open to plugins through the entry-point group `ctxext.positions`."""

from __future__ import annotations

from importlib.metadata import entry_points

from ctxext.positions.base import PositionMethod, RopeScaling, nearest
from ctxext.positions.bias import BIASES, AttentionBias
from ctxext.positions.rope import ALIASES, BUILT_IN

__all__ = [
    "ALIASES",
    "BIASES",
    "METHODS",
    "AttentionBias",
    "PositionMethod",
    "RopeScaling",
    "get_method",
    "get_rope_method",
]


def _with_plugins() -> dict[str, type[RopeScaling]]:
    """Return the built-in methods and those of installed packages, by name.

    Raises:
        ValueError: If a plugin takes a name that is taken, or is no `RopeScaling`.
    """
    methods = dict(BUILT_IN)
    for entry in entry_points(group="ctxext.positions"):
        method = entry.load()
        if not (isinstance(method, type) and issubclass(method, RopeScaling)):
            raise ValueError(f"the plugin {entry.value!r} is no RopeScaling; see CONTRIBUTING.md")
        if entry.name in methods or entry.name in ALIASES or entry.name in BIASES:
            raise ValueError(f"the plugin {entry.value!r} registers {entry.name!r}, which is taken; rename it")
        methods[entry.name] = method
    return methods


METHODS: dict[str, type[RopeScaling]] = _with_plugins()  # those that rescale the rotary embedding


def get_method(name: str) -> type[RopeScaling] | type[AttentionBias]:
    """Return the method that users call `name`, aliases included.

    Raises:
        ValueError: Names the unknown method, the nearest one and all that there are.
    """
    resolved = ALIASES.get(name, name)
    if resolved in BIASES:
        return BIASES[resolved]
    if resolved not in METHODS:
        known = [*METHODS, *ALIASES, *BIASES]
        raise ValueError(f"unknown method {name!r}{nearest(name, known)}; methods are {', '.join(known)}")
    return METHODS[resolved]


def get_rope_method(name: str) -> type[RopeScaling]:
    """Return the method that users call `name`, which must be one that rescales the rotary embedding.

    Raises:
        ValueError: If it is unknown or an attention bias.
    """
    method = get_method(name)
    if not issubclass(method, RopeScaling):
        raise ValueError(
            f"method {name!r} is an attention bias, which a model must be fine-tuned with; use one of "
            f"{', '.join(METHODS)}"
        )
    return method
