"""Decide what a patch writes, from a config alone: nothing here touches a file or a model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import ctxext
from ctxext.checkpoint.bias_config import read_bias
from ctxext.checkpoint.families import Family
from ctxext.checkpoint.plan_bias import bias_notes, biased_config, check_start, choose_bias
from ctxext.checkpoint.rope_config import RopeConfig, read_rope, text_section
from ctxext.checkpoint.rope_write import OLD_TWO_KEY_TYPES, write_rope
from ctxext.positions import METHODS, get_method
from ctxext.positions.base import Extension, RopeScaling, check_length, nearest
from ctxext.positions.bias import AttentionBias


@dataclass(frozen=True, kw_only=True)
class PatchPlan:
    """What a patch writes.

    Attributes:
        rope: What the config says now.
        scaling: The method and numbers to be, of the rotary embedding.
        bias: The attention bias to be, or None.
        config: The new config, both dialects and the provenance included.
        length: Tokens that the model shall read.
        notes: What the user should know, a sentence each.
    """

    rope: RopeConfig
    scaling: RopeScaling
    config: dict[str, Any]
    length: int
    notes: list[str]
    bias: AttentionBias | None = None

    @property
    def total_factor(self) -> float:
        """Return the length over the window before any scaling."""
        return self.length / self.rope.original_length


def plan_patch(
    config: dict[str, Any],
    *,
    method: str,
    length: int,
    original_length: int | None = None,
    allow_sliding_window: bool = False,
    source: str | None = None,
    **options: Any,
) -> PatchPlan:
    """Return what extending a model of `config` to `length` tokens writes.

    Args:
        config: The parsed `config.json`.
        method: As after `--method`.
        length: Tokens that the model shall read; more than it reads now (`theta` and the biases may keep it).
        original_length: The pretrained window, in tokens, where the config is ambiguous.
        allow_sliding_window: Extend a model although none of its layers sees further than its window.
        source: What the checkpoint is called in the provenance.
        **options: The method's own options; None counts as not given.

    Raises:
        ValueError: Names the input at fault, what is allowed and what to do.
    """
    chosen = get_method(method)
    given = {name: value for name, value in options.items() if value is not None}
    check_options(chosen, given)
    length = check_length("length", length)
    if original_length is not None:
        check_length("original_length", original_length)
    check_geometry(text_section(config))
    _refuse_biased(config)
    rope = read_rope(config, original_length)
    bias: AttentionBias | None = None
    if issubclass(chosen, AttentionBias):
        bias = choose_bias(chosen, given)
        check_start(rope, bias, length)
    else:
        _check_composition(rope, chosen, length)
    notes = _sliding_notes(text_section(config), rope.family, length, allow_sliding_window)
    if bias is not None:
        written, scaling = biased_config(config, rope, bias, length)
        notes += bias_notes(bias, rope, length)
    elif issubclass(chosen, RopeScaling):
        extension = Extension(window=rope.window, length=length, rotary_dim=rope.rotary_dim)
        scaling = chosen.extend(rope.scaling, extension, **given)
        written = write_rope(config, rope, scaling, length)
        notes += _scaling_notes(config["model_type"], rope, scaling, length)
    written["ctxext"] = _provenance(config, rope, chosen.name, length, given, source)
    return PatchPlan(rope=rope, scaling=scaling, config=written, length=length, notes=notes, bias=bias)


def _refuse_biased(config: dict[str, Any]) -> None:
    """Refuse a model that has an attention bias: it was trained with that one."""
    bias = read_bias(config)
    if bias is not None:
        raise ValueError(f"the model has an attention bias already ({bias.name}); start from the one without")


def _check_composition(rope: RopeConfig, chosen: type[RopeScaling], length: int) -> None:
    """Refuse a window that cannot be known, a length that is not longer, and a method undefined on what is there."""
    if rope.ambiguity is not None:
        raise ValueError(rope.ambiguity)
    if length < rope.window or (length == rope.window and not chosen.may_keep_length):
        raise ValueError(f"length is {length}; the model reads {rope.window} tokens already, so ask for more")
    if rope.scaling.name not in chosen.composes_with:
        allowed = [name for name, known in METHODS.items() if rope.scaling.name in known.composes_with]
        raise ValueError(
            f"the model is scaled by {rope.scaling.name!r} already ({rope.original_length} -> {rope.window}), and "
            f"{chosen.name!r} on top of it is not defined; use {' or '.join(allowed)}, or start from the unscaled base"
        )


def _scaling_notes(model_type: str, rope: RopeConfig, scaling: RopeScaling, length: int) -> list[str]:
    """Return what the user should know of the new scaling."""
    notes = []
    if rope.window != rope.original_length:
        notes.append(
            f"composes with the {rope.scaling.name} scaling that is there: {length / rope.window:g} times more, "
            f"{length / rope.original_length:g} times the pretrained {rope.original_length} in all"
        )
    rope_type = scaling.rope_parameters(rope.rotary_dim, rope.original_length)["rope_type"]
    if rope.family.old_two_keys and rope_type not in ("default", *OLD_TWO_KEY_TYPES):
        notes.append(
            f"transformers 4 refuses to load this: its {model_type} knows only linear and dynamic scaling; "
            "transformers 5 loads it"
        )
    if not scaling.is_static:
        notes.append(
            f"stock {scaling.name} changes its frequencies with the sequence length, so a key-value cache goes stale: "
            "call ctxext.fit_length(model, n) after loading"
        )
    return notes


def check_options(method: type[RopeScaling] | type[AttentionBias], given: dict[str, Any]) -> None:
    """Refuse options that the method does not have: they would have no effect.

    Raises:
        ValueError: Names the option, the nearest one and all that there are.
    """
    known = [name.replace("_", "-") for name in method.options()]
    for name in (name.replace("_", "-") for name in given):
        if name not in known:
            has = "its options are --" + ", --".join(known) if known else "it has none"
            guess = nearest(name, known)
            raise ValueError(f"--{name} has no effect with method {method.name!r}{guess}; {has}")


# The largest that a config may say; transformers spells out a name for each label, so a wild number eats the memory.
COUNTS = {
    "hidden_size": 2**31 - 1,
    "intermediate_size": 2**31 - 1,
    "num_hidden_layers": 2**16,
    "num_attention_heads": 2**31 - 1,
    "num_key_value_heads": 2**31 - 1,
    "head_dim": 2**31 - 1,
    "vocab_size": 2**31 - 1,
    "num_labels": 2**20,
}


def check_geometry(section: dict[str, Any]) -> None:
    """Refuse sizes that no model can have.

    Raises:
        ValueError: Names the key, its value and what is allowed.
    """
    for key, largest in COUNTS.items():
        value = section.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest):
            raise ValueError(f"{key} is {value!r}; it must be a whole number from 1 to {largest}")
    check_padding(section.get("pad_token_id"), section.get("vocab_size"))
    heads, groups = section.get("num_attention_heads"), section.get("num_key_value_heads")
    if heads and groups and heads % groups:
        raise ValueError(f"num_key_value_heads is {groups}; it must divide num_attention_heads, {heads}")


def check_padding(padding: Any, vocabulary: int | None) -> None:
    """Refuse a padding token that the embedding has no row for.

    Raises:
        ValueError: Names the key, its value and what is allowed.
    """
    if isinstance(padding, int) and vocabulary and not -vocabulary <= padding < vocabulary:
        raise ValueError(f"pad_token_id is {padding}; it must be below vocab_size, {vocabulary}")


def _sliding_notes(section: dict[str, Any], family: Family, length: int, allowed: bool) -> list[str]:
    """Refuse a model whose every layer slides over less than `length`, unless allowed; return what to say of it.

    Raises:
        ValueError: Names the window and the way to go on.
    """
    window = section.get("sliding_window")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window is {window!r}; it must be a positive whole number of tokens or null")
    if window is None or window >= length or not every_layer_slides(section, family):
        if allowed:
            raise ValueError("--allow-sliding-window has no effect: this model has layers that see all; leave it out")
        return []
    told = f"every layer attends over the last {window} tokens only (sliding_window), whatever the positions say"
    if not allowed:
        raise ValueError(
            f"{told}; set sliding_window to null in SOURCE's config.json if the weights can do without, or go on with "
            "--allow-sliding-window"
        )
    return [told]


def every_layer_slides(section: dict[str, Any], family: Family) -> bool:
    """Return whether no layer of a model with a `sliding_window` attends over the whole sequence."""
    if family.sliding in ("none", "all"):
        return family.sliding == "all"
    used = family.sliding == "layer_types" or bool(section.get("use_sliding_window"))
    layer_types = section.get("layer_types")
    if family.sliding != "all_if_used" and isinstance(layer_types, list) and layer_types:
        return used and all(kind == "sliding_attention" for kind in layer_types)
    if family.sliding == "some_if_used":
        return used and section.get("max_window_layers") == 0
    return used and family.sliding == "all_if_used"


def _provenance(
    config: dict[str, Any], rope: RopeConfig, method: str, length: int, options: dict[str, Any], source: str | None
) -> dict[str, Any]:
    """Return what config.json keeps under `ctxext`: how this checkpoint came to be."""
    earlier = rope.provenance or {}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return {
        "version": ctxext.__version__,
        "method": method,
        "options": {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()},
        "length": length,
        "original_length": rope.original_length,
        "factor": length / rope.window,
        "total_factor": length / rope.original_length,
        "source": source,
        "source_config_sha256": digest,
        "history": [*earlier.get("history", []), *([_without_history(earlier)] if earlier else [])],
    }


def _without_history(provenance: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in provenance.items() if key != "history"}
