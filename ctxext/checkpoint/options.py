"""Method options as they come from a command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ctxext.positions.base import check_number


def parse_factors(name: str, given: str | None) -> tuple[float, ...] | None:
    """Return the numbers of a comma-separated list, or of a JSON file that holds a list.

    Args:
        name: The option, for the message; a JSON object is read at this key.
        given: As typed; None stays None.

    Raises:
        ValueError: If it is neither, or a number is not positive.
    """
    if given is None:
        return None
    path = Path(given).expanduser()
    try:
        text = path.read_text(encoding="utf-8") if path.suffix == ".json" else f"[{given}]"
        values = json.loads(text)
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{name} is {given!r}; it must be numbers separated by commas, or a .json file with a list ({error})"
        ) from None
    if isinstance(values, dict):
        values = values.get(name)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name}: {given} holds no list of numbers")
    return tuple(check_number(f"{name}[{i}]", value, above=0.0) for i, value in enumerate(values))


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Return `NAME=VALUE` pairs as keyword arguments, values read as JSON where they are JSON.

    Raises:
        ValueError: If a pair has no `=` or a name is not one.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise ValueError(f"--option {pair!r} is not NAME=VALUE")
        if name in options:
            raise ValueError(f"--option {name} is given twice")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options
