"""Checks of a `config.json`: each yields the faults of one kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from ctxext.checkpoint.case import ERROR, NOTICE, WARNING, Case, Fault
from ctxext.checkpoint.loaders import ORIGINAL, ROPE_TYPES, has_bias, read_as_transformers4, read_as_transformers5
from ctxext.checkpoint.normalize import normalized
from ctxext.checkpoint.plan import every_layer_slides
from ctxext.checkpoint.rope_parameters import allowed_keys
from ctxext.positions.base import nearest
from ctxext.positions.rope import Dynamic
from ctxext.positions.rope_by_parts import Yarn

_LENGTHS = ("max_position_embeddings", ORIGINAL, "sliding_window")


def config_faults(case: Case) -> list[Fault]:
    """Return the faults of a config, in the order in which they are best repaired."""
    found: list[Fault] = []
    for check in _CHECKS:
        found += check(case)
    if case.rope_error is not None and not any(fault.level == ERROR for fault in found):
        found.append(Fault(code="config", level=ERROR, message=case.rope_error, remedy="correct config.json"))
    if not case.new.supported and not any(fault.level == ERROR for fault in found):
        settles = _settles(case)
        found.append(
            Fault(
                code="transformers-5",
                level=ERROR,
                message=f"{case.new.loader} refuses it: {case.new.problems[0]}",
                remedy="write it as transformers 5 does" if settles else "correct config.json",
                fixable=settles,
            )
        )
    return found


def _check_numbers(case: Case) -> Iterator[Fault]:
    """Lengths written as floats, which transformers 5 refuses."""
    places: list[tuple[str, Any]] = [(key, case.section.get(key)) for key in _LENGTHS]
    places += [(f"{name}.{ORIGINAL}", parameters.get(ORIGINAL)) for name, parameters in case.spelt.items()]
    for name, value in places:
        if isinstance(value, float):
            yield Fault(
                code="float-length",
                level=ERROR,
                message=f"{name} is {value!r}; transformers 5 takes a whole number only",
                remedy=f"write {int(value)}" if value.is_integer() else "write a whole number of tokens",
                fixable=value.is_integer(),
            )


def _check_keys(case: Case) -> Iterator[Fault]:
    """Rope types and keys that no loader knows: typing mistakes."""
    for name, parameters in case.spelt.items():
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        kind = "longrope" if kind == "su" or (case.family.only_longrope and kind == "yarn") else kind
        if kind not in ROPE_TYPES:
            yield Fault(
                code="unknown-rope-type",
                level=ERROR,
                message=f"{name} has rope_type {kind!r}{nearest(str(kind), ROPE_TYPES)}",
                remedy=f"write one of {', '.join(ROPE_TYPES)}",
            )
            continue
        for key in sorted(parameters.keys() - allowed_keys(kind)):
            meant = nearest(key, sorted(allowed_keys(kind)))
            yield Fault(
                code="unknown-rope-key",
                level=ERROR,
                message=f"{name} has a key {key!r}{meant} that no loader reads for {kind}",
                remedy="rename or delete it" if meant else "delete it",
                fixable=not meant,
            )


def unread_keys(parameters: dict[str, Any], rope_type: str | None) -> list[str]:
    """Return the keys of a rope dict that no loader reads and that look like none that one does."""
    allowed = allowed_keys(rope_type) if rope_type else set(parameters)
    return [key for key in parameters if key not in allowed and not nearest(key, sorted(allowed))]


def _check_theta(case: Case) -> Iterator[Fault]:
    """A base that is missing, null, or spelt where a loader does not look."""
    stated = case.stated_thetas()
    known = {value for value in stated.values() if isinstance(value, (int, float))}
    empty = [place for place, value in stated.items() if value is None]
    key = case.family.theta_key
    if empty:
        told = f"{' and '.join(empty)} is null, which no loader computes with"
        remedy = f"write {_short(next(iter(known)))}, as elsewhere in the file" if len(known) == 1 else f"write {key}"
        yield Fault(code="theta-missing", level=ERROR, message=told, remedy=remedy, fixable=len(known) == 1)
    elif not stated:
        default = f"{case.family.default_theta:g}"
        told = f"no {key} anywhere; every loader takes {default}, the default of this model type"
        yield Fault(code="theta-implied", level=NOTICE, message=told, remedy=f"write {key} {default} to be sure")
    elif len(known) == 1 and not _has_only_new(case):
        theta = next(iter(known))
        for reading in (case.new, case.old):
            if reading.theta is not None and reading.theta != theta:
                yield Fault(
                    code="theta-lost",
                    level=ERROR,
                    message=f"{next(iter(stated))} is {_short(theta)}, but {reading.loader} reads {reading.theta:g}",
                    remedy=f"write {key} at the top level too",
                    fixable=True,
                )
                return


def _has_only_new(case: Case) -> bool:
    return bool(case.section.get("rope_parameters")) and not (
        case.section.get("rope_scaling") or case.section.get(case.family.theta_key)
    )


def _contradictions(case: Case) -> list[str]:
    """Return the keys of which the two dialects say different things."""
    if len(case.spelt) == 2:
        old, new = (
            {("rope_type" if key == "type" else key): value for key, value in parameters.items() if value is not None}
            for parameters in case.spelt.values()
        )
        differing = sorted(key for key in old.keys() & new.keys() if old[key] != new[key])
        if differing:
            return differing
    known = [value for value in case.stated_thetas().values() if value is not None]
    return ["rope_theta"] if any(value != known[0] for value in known) else []


def _check_dialects(case: Case) -> Iterator[Fault]:
    """Dialects that are missing or contradict each other, so that two versions of transformers read two models."""
    differing = _contradictions(case)
    if differing:
        yield Fault(
            code="dialects-contradict",
            level=ERROR,
            message=f"rope_scaling with {case.family.theta_key} and rope_parameters differ in {', '.join(differing)}",
            remedy="delete the wrong one, then ctxext doctor --fix",
        )
        return
    if not case.new.supported:
        return
    length = case.length or case.new.length
    if case.old.supported and not case.new.turns_as(case.old, length):
        told = f"{case.old.loader}, and servers on it, {_told(case)}"
        code = "only-new-dialect" if _has_only_new(case) else "loaders-disagree"
        yield Fault(
            code=code,
            level=ERROR,
            message=f"only rope_parameters is there: {told}" if code == "only-new-dialect" else told,
            remedy="write both dialects",
            fixable=_settles(case),
        )
    elif not case.old.supported and not has_bias(case.config):
        yield Fault(
            code="transformers-4",
            level=NOTICE,
            message=f"{case.old.loader} does not load it: {case.old.problems[0]}",
            remedy="load it with transformers 5",
        )


def _told(case: Case) -> str:
    """Say what transformers 4 reads otherwise."""
    new, old = case.new, case.old
    pairs = [
        ("rope_type", new.rope_type, old.rope_type),
        ("rope_theta", new.theta, old.theta),
        ("factor", new.factor, old.factor),
        ("attention factor", new.attention_factor, old.attention_factor),
        ("rotated dimensions", new.rotary_dim, old.rotary_dim),
    ]
    told = [f"{name} {_short(theirs)}, not {_short(ours)}" for name, ours, theirs in pairs if ours != theirs]
    return f"silently read {', '.join(told)}" if told else "silently read another original length"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63) else repr(value)


def _settles(case: Case) -> bool:
    """Return whether writing both dialects makes both versions read the same."""
    try:
        written = normalized(case.config)
    except (ValueError, OverflowError):
        return False
    new, old = read_as_transformers5(written), read_as_transformers4(written)
    length = case.length or new.length
    return new.turns_as(old, length) and (not case.new.supported or new.turns_as(case.new, length))


def _check_original(case: Case) -> Iterator[Fault]:
    """Scalings that need the original length and do not have it, so that loaders take the extended one."""
    kind = case.new.rope_type
    top = case.section.get(ORIGINAL, case.family.default_original)
    if kind not in ("yarn", "longrope", "llama3") or top is not None:
        return
    if any(parameters.get(ORIGINAL) is not None for parameters in case.spelt.values()):
        return
    recorded = case.provenance.get("original_length")
    known = isinstance(recorded, int) and not isinstance(recorded, bool)
    yield Fault(
        code="original-length-missing",
        level=ERROR,
        message=f"{kind} has no {ORIGINAL}; loaders take max_position_embeddings {case.new.length} for it",
        remedy=f"write {recorded}, which ctxext recorded" if known else "write the pretrained window there",
        fixable=known,
    )


def _check_lengths(case: Case) -> Iterator[Fault]:
    """Lengths that do not fit the factor, or that make the method do nothing."""
    if case.rope is None:
        return
    scaling, max_length = case.rope.scaling, case.rope.max_position_embeddings
    if isinstance(scaling, Dynamic):
        yield from _check_dynamic(case, max_length)
    if not isinstance(scaling, Yarn) or scaling.factor == 1:
        return
    original = scaling.original_max_position_embeddings
    wanted = round(min(original * scaling.factor, 2.0**40))
    stated = case.section.get(ORIGINAL) or any(parameters.get(ORIGINAL) for parameters in case.spelt.values())
    if max_length == original and stated:
        yield Fault(
            code="length-not-multiplied",
            level=WARNING,
            message=f"yarn has factor {scaling.factor:g}, but max_position_embeddings is still {original}",
            remedy=f"write {wanted}",
            fixable=case.provenance.get("length", wanted) == wanted,
        )
    elif max_length != original and not math.isclose(scaling.factor, max_length / original, rel_tol=1e-3):
        yield Fault(
            code="yarn-factor",
            level=ERROR,
            message=f"yarn has factor {scaling.factor:g}, but max_position_embeddings {max_length} is "
            f"{max_length / original:g} times the original {original}; loaders take the factor",
            remedy="make them agree",
        )


def _check_dynamic(case: Case, max_length: int) -> Iterator[Fault]:
    """A dynamic scaling with an enlarged length: it begins to work where the extended window ends."""
    places = [case.provenance.get("original_length"), case.section.get(ORIGINAL)]
    places += [parameters.get(ORIGINAL) for parameters in case.spelt.values()]
    known = [value for value in places if isinstance(value, int) and not isinstance(value, bool)]
    if known and known[0] < max_length:
        yield Fault(
            code="dynamic-enlarged",
            level=ERROR,
            message=f"dynamic grows from max_position_embeddings, which is {max_length}: up to there it does nothing",
            remedy=f"write {known[0]}, the original length",
            fixable=True,
        )
    elif not known:
        yield Fault(
            code="dynamic-window",
            level=NOTICE,
            message=f"dynamic does nothing up to max_position_embeddings, {max_length}",
            remedy="if that is not the pretrained window, write that",
        )


def _check_factors(case: Case) -> Iterator[Fault]:
    """Lists of longrope factors that do not have one number for each frequency."""
    wanted = case.new.rotary_dim // 2 or (case.rope.rotary_dim // 2 if case.rope else 0)
    wanted = wanted or _count_from_sizes(case)
    for name, parameters in case.spelt.items():
        for key in ("short_factor", "long_factor"):
            factors = parameters.get(key)
            if wanted and isinstance(factors, list) and len(factors) != wanted:
                yield Fault(
                    code="longrope-factors",
                    level=ERROR,
                    message=f"{name}.{key} has {len(factors)} numbers; the model has {wanted} frequencies",
                    remedy="give one number for each",
                )


def _count_from_sizes(case: Case) -> int:
    """Return the number of frequencies where the config is otherwise unreadable, or 0."""
    from ctxext.checkpoint.rope_config import merged_parameters, read_rotary_dim

    try:
        return read_rotary_dim(case.section, case.family, merged_parameters(case.section, case.family)) // 2
    except ValueError:
        return 0


def _check_sliding(case: Case) -> Iterator[Fault]:
    """Layers that slide: over less than the length everywhere, or with a scaling that is not meant for them."""
    window, length = case.section.get("sliding_window"), case.length
    if isinstance(window, int) and length and 0 < window < length and every_layer_slides(case.section, case.family):
        yield Fault(
            code="sliding-window",
            level=WARNING,
            message=f"every layer attends over the last {window} tokens only, of {length}",
            remedy="set sliding_window to null if the weights can do without",
        )
    parameters = case.section.get("rope_parameters")
    sliding = (
        parameters.get("sliding_attention") if case.family.per_layer_type and isinstance(parameters, dict) else None
    )
    if isinstance(sliding, dict) and sliding.get("rope_type", "default") != "default":
        yield Fault(
            code="sliding-rope",
            level=ERROR,
            message=f"the sliding layers are scaled too ({sliding.get('rope_type')}), though they see no further",
            remedy="leave them at rope_type default",
            fixable=True,
        )


_CHECKS: tuple[Callable[[Case], Iterator[Fault]], ...] = (
    _check_numbers,
    _check_keys,
    _check_theta,
    _check_dialects,
    _check_original,
    _check_factors,
    _check_lengths,
    _check_sliding,
)
