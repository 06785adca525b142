"""What a checkpoint's faults are found in, and what a fault is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import Family, find_family
from ctxext.checkpoint.loaders import LoaderReading, read_as_transformers4, read_as_transformers5
from ctxext.checkpoint.rope_config import RopeConfig, read_rope, text_section

ERROR, WARNING, NOTICE = "error", "warning", "notice"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is wrong with a checkpoint.

    Attributes:
        code: Its name, stable between versions.
        level: `error`: some loader fails or silently reads another model. `warning`: files disagree, and some use
            goes wrong. `notice`: nothing to repair, but something to know; it does not make a checkpoint faulty.
        message: What is wrong.
        remedy: What to do.
        fixable: Whether there is one right answer, which `ctxext doctor --fix` writes.
    """

    code: str
    level: str
    message: str
    remedy: str
    fixable: bool = False

    @property
    def counts(self) -> bool:
        """Whether it makes the checkpoint faulty: an error or a warning."""
        return self.level != NOTICE

    def to_dict(self) -> dict[str, Any]:
        """Return the fault as JSON has it."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint folder with its config, read in every way that a check needs.

    Attributes:
        folder: The checkpoint.
        config: The parsed `config.json`.
        section: Its part on the language model.
        family: How it spells positions.
        spelt: The rope dict of each dialect, as far as it is one.
        rope: What the config says about positions, or None where it cannot be resolved.
        rope_error: Why it cannot.
        new: What transformers 5 reads.
        old: What transformers 4 reads.
    """

    folder: Path
    config: dict[str, Any]
    section: dict[str, Any]
    family: Family
    spelt: dict[str, dict[str, Any]]
    rope: RopeConfig | None
    rope_error: str | None
    new: LoaderReading
    old: LoaderReading

    @property
    def provenance(self) -> dict[str, Any]:
        """What an earlier ctxext patch recorded, or nothing."""
        recorded = self.config.get("ctxext")
        return recorded if isinstance(recorded, dict) else {}

    @property
    def length(self) -> int | None:
        """Tokens that the model is meant to read, or None where the config does not say."""
        recorded = self.provenance.get("length")
        if isinstance(recorded, int) and not isinstance(recorded, bool) and 0 < recorded <= 2**40:
            return recorded
        if self.rope is not None and self.rope.ambiguity is not None:
            return self.rope.max_position_embeddings
        return None if self.rope is None else self.rope.window

    def stated_thetas(self) -> dict[str, Any]:
        """Return every base that the config spells, by the place that spells it; None where it says null."""
        places = {self.family.theta_key: self.section} if self.family.theta_key in self.section else {}
        stated: dict[str, Any] = {key: section[key] for key, section in places.items()}
        for name, parameters in self.spelt.items():
            if "rope_theta" in parameters:
                stated[f"{name}.rope_theta"] = parameters["rope_theta"]
        return stated


def examine(folder: Path, config: dict[str, Any]) -> Case:
    """Read a config in every way that the checks need.

    Raises:
        ValueError: If the model is of no family that ctxext knows.
    """
    family, section = find_family(config), text_section(config)
    rope, rope_error = None, None
    try:
        rope = read_rope(config)
    except (ValueError, OverflowError) as error:
        rope_error = str(error)
    return Case(
        folder=folder,
        config=config,
        section=section,
        family=family,
        spelt=_spelt(section, family),
        rope=rope,
        rope_error=rope_error,
        new=read_as_transformers5(config),
        old=read_as_transformers4(config),
    )


def _spelt(section: dict[str, Any], family: Family) -> dict[str, dict[str, Any]]:
    """Return the rope dict of each dialect, null values kept, leaving out what is no dict."""
    found = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = section.get(key)
        if key == "rope_parameters" and family.per_layer_type and isinstance(value, dict):
            value = value.get("full_attention")
        if isinstance(value, dict) and value:
            found[key] = value
    return found
