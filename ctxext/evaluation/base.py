"""What an evaluation is. A plugin needs this module only, and importing it imports no torch.

An evaluation is a frozen, keyword-only dataclass of its options that subclasses `Evaluation`:

    @dataclass(frozen=True, kw_only=True)
    class Copy(Evaluation):
        name: ClassVar[str] = "copy"
        description: ClassVar[str] = "can the model repeat a sequence it has read?"

        length: int = option(1024, "tokens in the sequence")

        def plan(self, session): ...        # the units of work, and what was skipped
        def score(self, session, unit): ... # one unit -> a dict that JSON can hold
        def summarize(self, plan, scored): ...

and is registered by an entry point in its package's `pyproject.toml`:

    [project.entry-points."ctxext.evals"]
    copy = "my_package:Copy"

The command line (`ctxext eval copy --help`), resuming, the result file and `ctxext compare` follow from that.
"""

from __future__ import annotations

import dataclasses
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


def option(default: Any, help: str, *, scored: bool = True) -> Any:
    """Declare one option of an evaluation.

    Args:
        default: its default value.
        help: what the command line says about it.
        scored: whether it changes the score, and so is part of the protocol id. Options that choose the data are not
            part of it: the result's corpus hash says what was read.
    """
    return field(default=default, metadata={"help": help, "scored": scored})


@dataclass(frozen=True)
class Unit:
    """A piece of work that is scored at once and never split, so that a resumed run equals an unbroken one.

    Attributes:
        id: stable over runs with the same options, checkpoint and corpus.
        cost: how long it takes, relative to the other units (for instance tokens read): for the progress bar.
        work: whatever `score` needs; never written to disk.
    """

    id: str
    cost: float = 1.0
    work: Any = None


@dataclass
class Plan:
    """All the units of a run, in the order in which they are scored.

    Attributes:
        units: the work.
        corpus: what was read (`name`, `hash`, ...), or None for an evaluation without a corpus.
        skipped: how many documents or tokens are not scored, by reason.
        notes: anything a reader of the score must know.
    """

    units: list[Unit]
    corpus: dict[str, Any] | None = None
    skipped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One curve of a result; `ctxext compare` draws the curves with equal `id` of several results together.

    Attributes:
        id: the same for curves that belong in one picture.
        title: what the picture shows.
        x_label: quantity and unit of `x`.
        y_label: quantity and unit of `y`.
        x: positions, ascending.
        y: one value for each `x`; None where there is nothing to show.
        kind: `line`, `log-line` (its y axis logarithmic), or `heat` for one coloured row per result (`y` between 0
            and 1).
        mark_window: whether `x` are token positions, where the model's original window can be marked.
    """

    id: str
    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    y: Sequence[float | None]
    kind: str = "line"
    mark_window: bool = False


@dataclass
class Summary:
    """What an evaluation makes of its scored units.

    Attributes:
        metrics: the numbers, by name; the first is the headline.
        tokens_scored: how many tokens the numbers rest on.
        details: anything else worth keeping in the result file, as JSON.
        plots: the curves of the result.
        notes: what a reader must know, added to the plan's notes.
    """

    metrics: dict[str, Any]
    tokens_scored: int
    details: dict[str, Any] = field(default_factory=dict)
    plots: list[Plot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Session:
    """What an evaluation works with.

    Attributes:
        model: a causal language model of transformers, in eval mode.
        tokenizer: its tokenizer.
        batch_size: sequences to read at once.
        memo: for what an evaluation prepares once and uses for many units.
    """

    model: Any
    tokenizer: Any
    batch_size: int = 1
    memo: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluation(ABC):
    """The base of every evaluation: see the module's docstring for how to write one.

    Class attributes:
        name: what users type; equal to the entry point's name.
        description: one line for `ctxext eval list`.
        version: raise it whenever the same options give another score.
        presets: named protocols, each the options that it fixes, for `--protocol`.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    version: ClassVar[int] = 1
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def protocol(self) -> dict[str, Any]:
        """Return the values of the options that change the score; override where two values mean the same."""
        return {item.name: getattr(self, item.name) for item in scored_fields(type(self))}

    def protocol_id(self) -> str:
        """Return the string that two results must share to be comparable."""
        words = ",".join(f"{name}={_plain(value)}" for name, value in self.protocol().items())
        return f"{self.name}-v{self.version}:{words}"

    def evaluated_length(self) -> int | None:
        """Return the longest sequence the model will read, in tokens; None if it is not known beforehand."""
        length = getattr(self, "length", None)
        return length if isinstance(length, int) else None

    def check(self) -> None:  # noqa: B027  # most evaluations have nothing to check
        """Refuse what must fail whatever the checkpoint is, such as data that is not there, before one is loaded.

        Raises:
            ValueError: if data, a package or another thing that the options name cannot be used.
            OSError: if it cannot be read.
        """

    @abstractmethod
    def plan(self, session: Session) -> Plan:
        """Return the units of work.

        Raises:
            ValueError: if the options, the data and the tokenizer leave nothing to score.
        """

    @abstractmethod
    def score(self, session: Session, unit: Unit) -> dict[str, Any]:
        """Score one unit; the returned dict must survive JSON, because resumed runs read it from disk."""

    def finished(self, scored: Sequence[Mapping[str, Any]]) -> bool:
        """Say whether the units scored so far (in the plan's order) settle the answer; by default all are needed."""
        return False

    @abstractmethod
    def summarize(self, plan: Plan, scored: Sequence[Mapping[str, Any]]) -> Summary:
        """Turn the scored units, in the plan's order, into the result's numbers, details and plots."""


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def scored_fields(kind: type[Evaluation]) -> list[dataclasses.Field[Any]]:
    """Return the options of an evaluation that are part of its protocol id."""
    return [item for item in dataclasses.fields(kind) if item.metadata.get("scored", True)]


def option_types(kind: type[Evaluation]) -> dict[str, Any]:
    """Return the type of every option, by name, with the annotations of the class resolved."""
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


def build(kind: type[Evaluation], given: Mapping[str, Any], protocol: str | None = None) -> Evaluation:
    """Make an evaluation from the options that a user gave and a preset.

    Args:
        kind: the evaluation's class.
        given: option values by name, only those given explicitly.
        protocol: the name of one of the class' presets.

    Raises:
        ValueError: if the preset is unknown, or an option contradicts it.
    """
    if protocol is None:
        return kind(**given)
    if protocol not in kind.presets:
        allowed = ", ".join(kind.presets) or "none"
        raise ValueError(f"{kind.name} has no protocol {protocol!r}; allowed: {allowed}")
    preset = kind.presets[protocol]
    broken = [
        f"--{name.replace('_', '-')} {value}" for name, value in preset.items() if given.get(name, value) != value
    ]
    if broken:
        raise ValueError(f"--protocol {protocol} fixes {' and '.join(broken)}: leave out your value, or the protocol")
    return kind(**{**preset, **given})
