"""Which model families have rotary position embeddings that ctxext can patch, and how their configs spell them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ctxext.positions.base import nearest


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one `model_type` writes its rotary embedding in `config.json`.

    Attributes:
        default_theta: What stock transformers assumes where the config names no base.
        default_head_dim: Head dimension where the config names none and hidden_size / heads is not the rule.
        theta_key: Top-level key of the base in the dialect of transformers 4.
        partial_key: Top-level key of the rotated share of a head, or None where the whole head is rotated.
        default_partial: The rotated share where the config names none.
        per_layer_type: Whether `rope_parameters` holds one dict for each attention type.
        only_longrope: Whether the family reads no `rope_type` but default and longrope, and of that three keys.
        old_two_keys: Whether transformers 4 takes no `rope_scaling` but {type, factor} with type linear or dynamic.
        default_window: max_position_embeddings where the config names none, or None where it always does.
        default_original: original_max_position_embeddings at the top level where the config names none, or None.
        text_section: Key under which a multimodal config keeps the language model's config, or None.
        writes_head_dim: Whether head_dim must be spelt out for stock transformers to compute scaled frequencies.
        sliding: Which layers a `sliding_window` applies to: `all`; with `use_sliding_window` on, `all_if_used`, or
            `some_if_used`, those from max_window_layers on; those that `layer_types` names; or `none`.
    """

    default_theta: float = 10000.0
    default_head_dim: int | None = None
    theta_key: str = "rope_theta"
    partial_key: str | None = None
    default_partial: float = 1.0
    per_layer_type: bool = False
    only_longrope: bool = False
    old_two_keys: bool = False
    default_window: int | None = None
    default_original: int | None = None
    text_section: str | None = None
    writes_head_dim: bool = False
    sliding: str = "none"


_GEMMA3: dict[str, Any] = {
    "default_theta": 1_000_000.0,
    "default_head_dim": 256,
    "default_window": 131_072,
    "per_layer_type": True,
    "sliding": "layer_types",
}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(writes_head_dim=True, sliding="all"),
    "mixtral": Family(default_theta=1_000_000.0, writes_head_dim=True, sliding="all"),
    "qwen2": Family(sliding="some_if_used"),
    "qwen3": Family(default_head_dim=128, sliding="some_if_used"),
    "qwen3_moe": Family(sliding="all_if_used"),
    "smollm3": Family(default_theta=2_000_000.0, sliding="layer_types"),
    "phi3": Family(
        partial_key="partial_rotary_factor",
        only_longrope=True,
        default_original=4096,
        sliding="all",
    ),
    "gemma": Family(default_head_dim=256),
    "gemma3_text": Family(**_GEMMA3),
    "gemma3": Family(**_GEMMA3, text_section="text_config"),
    "olmo2": Family(old_two_keys=True),
    "gpt_neox": Family(theta_key="rotary_emb_base", partial_key="rotary_pct", default_partial=0.25),
}

# Families that `ctxext.modeling` has models with an attention bias for, and what their model types begin with.
BIAS_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BIAS_PREFIX = "ctxext_"

# What people most often try; the reason saves them a search.
WITHOUT_ROPE: dict[str, str] = {
    "gpt2": "learned absolute positions",
    "opt": "learned absolute positions",
    "gpt_neo": "learned absolute positions",
    "gpt_bigcode": "learned absolute positions",
    "bert": "learned absolute positions",
    "bloom": "an ALiBi bias",
    "mpt": "an ALiBi bias",
    "t5": "a learned relative bias",
    "mamba": "no attention",
}


def base_type(model_type: str) -> str:
    """Return the model type of the family, without what a bias checkpoint puts before it."""
    base = model_type.removeprefix(BIAS_PREFIX)
    return base if base in BIAS_FAMILIES else model_type


def find_family(config: dict[str, Any]) -> Family:
    """Return the family of a config.

    Raises:
        ValueError: If the model has no rotary embedding or its type is unknown; names what is supported.
    """
    supported = ", ".join(FAMILIES)
    if "model_type" not in config:
        raise ValueError(
            f"config.json has no model_type{nearest_key('model_type', config)}; supported are {supported}"
        )
    model_type = config["model_type"]
    if not isinstance(model_type, str):
        raise ValueError(f"model_type is {model_type!r}; it must be one of {supported}")
    if model_type in WITHOUT_ROPE:
        raise ValueError(
            f"model_type {model_type!r} has {WITHOUT_ROPE[model_type]} and no rotary embedding to rescale; "
            f"supported are {supported}"
        )
    model_type = base_type(model_type)
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported{nearest(model_type, list(FAMILIES))}: {supported}"
        )
    return FAMILIES[model_type]


def nearest_key(key: str, mapping: dict[str, Any]) -> str:
    """Return a did-you-mean for a missing `key` among the keys that `mapping` has."""
    return nearest(key, [name for name in mapping if isinstance(name, str)])
