"""Read a recipe's config from YAML and the command line, and report everything that is wrong with it at once."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from ctxext.positions.base import nearest
from ctxext.training.arguments import DEFAULTS, FIXED, REFUSED, Recipe

OWN_KEYS = tuple(name for name in Recipe.model_fields if name != "training")


class ConfigError(ValueError):
    """A config that cannot be run, with every reason.

    Attributes:
        problems: One line for each.
    """

    def __init__(self, problems: Sequence[str], where: str = "the config") -> None:
        self.problems = list(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        super().__init__("\n".join([f"{where} has {count}:", *(f"  - {problem}" for problem in self.problems)]))


class _Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error, not a silent choice."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    twice = sorted({str(key) for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError([f"{', '.join(twice)} stands twice (line {node.start_mark.line + 1})"])
    return dict(loader.construct_mapping(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return what a YAML file says.

    Raises:
        ConfigError: If it is no YAML, holds no mapping, or says a key twice.
        OSError: If it cannot be read.
    """
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError([f"it is no YAML: {error}"], str(path)) from None
    if not isinstance(value, dict):
        raise ConfigError([f"it holds {type(value).__name__}; it must hold keys with values"], str(path))
    return value


def apply_overrides(config: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return a config with the values of a command line: `--key value`, `--key=value`, `--data.sources.0.data x`.

    Values are read as YAML. A key with nothing behind it is true.

    Raises:
        ConfigError: If a word is no key, or a path leads nowhere.
    """
    problems: list[str] = []
    result: dict[str, Any] = _copied(config)
    for key, text in _pairs(words, problems):
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        problem = _put(result, key.replace("-", "_").split("."), value)
        if problem:
            problems.append(f"--{key}: {problem}")
    if problems:
        raise ConfigError(problems, "the command line")
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _pairs(words: Sequence[str], problems: list[str]) -> Iterator[tuple[str, str]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            problems.append(f"{word!r} is no --key; write --key value")
            continue
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        yield key, value


def _put(place: Any, path: list[str], value: Any) -> str | None:
    """Set a value deep inside a config; return what is wrong, if anything."""
    for key, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(place, list):
            if not key.isdigit() or int(key) >= len(place):
                return f"{key!r} is no place in a list of {len(place)}"
            index: Any = int(key)
        elif isinstance(place, dict):
            index = key
        else:
            return f"{key!r} lies below a value that holds nothing"
        if following is None:
            place[index] = value
        else:
            if isinstance(place, dict) and place.get(index) is None:
                place[index] = {}
            place = place[index]
    return None


def parse_config(config: Mapping[str, Any], where: str = "the config") -> Recipe:
    """Return the recipe that a config describes.

    Args:
        config: Keys and values; those that are not the recipe's own are TrainingArguments.
        where: What to call the config in an error.

    Raises:
        ConfigError: With everything that can be seen to be wrong from the config alone.
    """
    own = {key: value for key, value in config.items() if key in OWN_KEYS}
    training = {key: value for key, value in config.items() if key not in OWN_KEYS}
    problems: list[str] = []
    converted = _convert_training(training, problems)
    recipe = None
    try:
        recipe = Recipe(**own, training={**DEFAULTS, **converted})
    except pydantic.ValidationError as error:
        problems += [_described(item, own) for item in error.errors()]
    problems += _contradictions({**DEFAULTS, **converted}, converted, config)
    if problems or recipe is None:
        raise ConfigError(problems, where)
    return recipe


def _described(item: Any, own: Mapping[str, Any]) -> str:
    """Return one error of pydantic in our words: key, value, what is allowed."""
    path = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "missing":
        return f"{path} is missing"
    if item["type"] == "extra_forbidden":
        allowed = _keys_beside(item["loc"])
        return f"{path} is no key{nearest(str(item['loc'][-1]), allowed)}; allowed: {', '.join(allowed)}"
    if item["type"] == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path} is {item['input']!r}: {message[0].lower()}{message[1:]}"


def _keys_beside(path: Sequence[Any]) -> list[str]:
    """Return the keys that are allowed where an unknown one stands."""
    from ctxext.data.sources import Source
    from ctxext.training.arguments import Data, Lora, Reading, ReadingMemory

    sections: dict[str, type[pydantic.BaseModel]] = {"lora": Lora, "reading": Reading}
    model = ReadingMemory if path[:2] == ("reading", "memory") else sections.get(path[0], Recipe)
    if path[0] == "data":
        model = Source if "sources" in path[:-1] else Data
    return list(model.model_fields)


def _convert_training(given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return TrainingArguments' values in their types; YAML reads `2e-5` as text."""
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    known = [field.name for field in dataclasses.fields(TrainingArguments)]
    allowed = [*OWN_KEYS, *known]
    converted: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            problems.append(
                f"{key} is no key of the recipe and no TrainingArgument of transformers{nearest(str(key), allowed)}"
            )
        elif key in REFUSED:
            problems.append(f"{key} cannot take effect: {REFUSED[key]}")
        else:
            try:
                converted[key] = pydantic.TypeAdapter(hints[key]).validate_python(value)
            except pydantic.ValidationError as error:
                wanted = getattr(hints[key], "__name__", str(hints[key]))
                problems.append(f"{key} is {value!r}; it must be {wanted} ({error.errors()[0]['msg'].lower()})")
    return converted


def _contradictions(training: Mapping[str, Any], given: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return what does not go together; `given` is what the config itself says of `training`."""
    problems = []
    if "output_dir" not in training:
        problems.append("output_dir is missing: the folder for checkpoints and the finished model")
    if config.get("epochs") is not None and "max_steps" in given:
        problems.append("epochs and max_steps exclude each other: leave one out")
    elif training["max_steps"] < 1:
        problems.append(f"max_steps is {training['max_steps']}; it must be at least 1")
    saves, logs = training["save_steps"], training["logging_steps"]
    if training["save_strategy"] not in ("steps", "no"):
        problems.append(f"save_strategy is {training['save_strategy']!r}; it must be steps or no")
    elif training["save_strategy"] == "steps" and (saves < 1 or logs < 1 or saves % logs):
        problems.append(
            f"save_steps is {saves} and logging_steps {logs}; both must be whole numbers and the first a multiple of "
            "the second, or the log of a resumed run would differ"
        )
    if training["warmup_steps"] == 0 and "warmup_start" in config:
        problems.append("warmup_start has no effect with warmup_steps 0")
    if not str(training["optim"]).startswith(("adam", "paged_adam")):
        useless = [key for key in ("adam_beta1", "adam_beta2", "adam_epsilon") if key in given]
        problems += [f"{key} has no effect with optim {training['optim']!r}" for key in useless]
    if training["save_strategy"] == "no":
        useless = [key for key in ("save_steps", "save_total_limit") if key in given]
        problems += [f"{key} has no effect with save_strategy 'no'" for key in useless]
    return problems


def training_arguments(recipe: Recipe, world_size: int) -> Any:
    """Return transformers' TrainingArguments of a recipe.

    Args:
        recipe: The recipe.
        world_size: Processes that share a step.

    Raises:
        ConfigError: If the batch cannot be shared evenly, or transformers refuses an argument.
    """
    from transformers import TrainingArguments

    at_once = recipe.training["per_device_train_batch_size"] * world_size
    if recipe.batch_size % at_once:
        raise ConfigError(
            [
                f"batch_size is {recipe.batch_size}; it must be a multiple of {at_once} "
                f"({world_size} processes x per_device_train_batch_size {at_once // world_size})"
            ]
        )
    values = {**recipe.training, **FIXED, "gradient_accumulation_steps": recipe.batch_size // at_once}
    try:
        return TrainingArguments(**values)
    except (ValueError, ImportError) as error:
        raise ConfigError([str(error)]) from error
