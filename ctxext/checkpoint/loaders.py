"""What other programs read from a config: transformers 5 and 4.

Every function here repeats, key by key, what one loader does with a `config.json`, defaults and silences included; it
does not say what the config means, which is `rope_config`'s matter. The servers are in `servers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ctxext.checkpoint.families import BIAS_PREFIX, Family, find_family
from ctxext.checkpoint.rope_config import text_section
from ctxext.positions.base import RopeScaling, check_length, check_number, nearest
from ctxext.positions.rope import Dynamic, Linear, LongRoPE, Theta, longrope_attention_factor
from ctxext.positions.rope_by_parts import Llama3, Yarn, yarn_attention_factor

TRANSFORMERS_5 = "transformers 5.24"
TRANSFORMERS_4 = "transformers 4.57.6"
NO_BIAS = "it has no attention biases and refuses this model type"
ORIGINAL = "original_max_position_embeddings"
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True, kw_only=True)
class LoaderReading:
    """What one loader makes of a config.

    Attributes:
        loader: Its name and the version that this was read from.
        supported: Whether it loads the config and then reads positions as it was told.
        scaling: What it turns with, or None where it does not load the config.
        rotary_dim: Rotated dimensions of a head.
        length: Tokens that it reads without being told a length.
        flags: What to give on its command line.
        problems: What it refuses, drops or reads otherwise, a sentence each.
    """

    loader: str
    supported: bool
    scaling: RopeScaling | None = None
    rotary_dim: int = 0
    length: int = 0
    flags: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def rope_type(self) -> str | None:
        """The `rope_type` that the loader sees; `yarn` also for NTK-by-parts."""
        return None if self.scaling is None else self.scaling.rope_type

    @property
    def theta(self) -> float | None:
        """The base."""
        return None if self.scaling is None else self.scaling.rope_theta

    @property
    def factor(self) -> float | None:
        """The scaling factor, or None where the type has none."""
        return getattr(self.scaling, "factor", None)

    @property
    def attention_factor(self) -> float | None:
        """What cos and sin are multiplied by."""
        return None if self.scaling is None else self.scaling.cos_sin_factor

    def to_dict(self) -> dict[str, Any]:
        """Return the reading as JSON has it."""
        return {
            "loader": self.loader,
            "supported": self.supported,
            "rope_type": self.rope_type,
            "rope_theta": self.theta,
            "factor": self.factor,
            "attention_factor": self.attention_factor,
            "length": self.length or None,
            "flags": list(self.flags),
            "problems": list(self.problems),
        }

    def turns_as(self, other: LoaderReading, length: int) -> bool:
        """Return whether two loaders that load the config also turn by the same frequencies, up to `length` tokens."""
        mine, theirs = self.scaling, other.scaling
        if mine is None or theirs is None or self.rotary_dim != other.rotary_dim:
            return False
        if not math.isclose(mine.cos_sin_factor, theirs.cos_sin_factor, rel_tol=1e-6):
            return False
        try:
            pairs = [(mine.inv_freq(self.rotary_dim, n), theirs.inv_freq(self.rotary_dim, n)) for n in (1, length)]
        except OverflowError:
            return False
        return all(bool(np.allclose(ours, others, rtol=1e-6, atol=0.0)) for ours, others in pairs)


def read_as_transformers5(config: dict[str, Any]) -> LoaderReading:
    """Return what transformers 5.24 makes of a config.

    `rope_scaling` wins over `rope_parameters`; a base inside the dict over the top level, that over the family's
    default; `original_max_position_embeddings` at the top level over the one in the dict.

    Args:
        config: The parsed `config.json` of a supported family.
    """
    return _or_refused(TRANSFORMERS_5, _transformers5, config)


def read_as_transformers4(config: dict[str, Any]) -> LoaderReading:
    """Return what transformers 4.57.6 makes of a config.

    Only `rope_theta` (gpt_neox: `rotary_emb_base`) and `rope_scaling` are read; without them it takes the family's
    default base and no scaling, and says nothing. `longrope` takes its original length from the top level only.

    Args:
        config: The parsed `config.json` of a supported family.
    """
    return _or_refused(TRANSFORMERS_4, _transformers4, config)


def _or_refused(loader: str, read: Callable[[dict[str, Any]], LoaderReading], config: dict[str, Any]) -> LoaderReading:
    if has_bias(config) and loader != TRANSFORMERS_5:
        return LoaderReading(loader=loader, supported=False, problems=(NO_BIAS,))
    try:
        reading = read(config)
        if reading.scaling is not None:
            for length in (1, reading.length):  # refuses lists of the wrong length
                reading.scaling.inv_freq(reading.rotary_dim, length)
    except (ValueError, OverflowError) as error:
        return LoaderReading(loader=loader, supported=False, problems=(str(error),))
    return replace(reading, loader=loader)


def _transformers5(config: dict[str, Any]) -> LoaderReading:
    section, family = text_section(config), find_family(config)
    max_length = section.get("max_position_embeddings", family.default_window)
    if isinstance(max_length, bool) or not isinstance(max_length, int):
        raise ValueError(f"max_position_embeddings is {max_length!r}; transformers 5 takes a whole number only")
    parameters = _merged5(section, family)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if family.only_longrope and rope_type in ("su", "yarn"):
        if ORIGINAL not in parameters:
            raise ValueError(f"rope_scaling has type {rope_type!r}; transformers 5 takes longrope for it in phi3")
        rope_type = "longrope"
    original = parameters.get(ORIGINAL, max_length)
    if family.only_longrope:
        original = section.get(ORIGINAL, family.default_original)
    elif ORIGINAL in section and not family.per_layer_type:
        original = section[ORIGINAL]
    factor = parameters.get("factor")
    if rope_type in ("yarn", "longrope") and factor is None and _is_number(original):
        factor = max_length / original
    share = parameters.get("partial_rotary_factor", family.default_partial)
    return LoaderReading(
        loader=TRANSFORMERS_5,
        supported=True,
        scaling=_scaling(rope_type, {**parameters, "factor": factor, ORIGINAL: original}, max_length),
        rotary_dim=_rotary_dim(section, family, share, rope_type),
        length=max_length,
    )


def _merged5(section: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the dict that transformers 5 ends up with for full-attention layers."""
    old, new = section.get("rope_scaling"), section.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{key} is {value!r}; it must be a dict or null")
    if family.per_layer_type:
        full = (new or {}).get("full_attention")
        if full is not None and not isinstance(full, dict):
            raise ValueError(f"rope_parameters.full_attention is {full!r}; it must be a dict or null")
        parameters = {**(full or {}), **(old or {})}
        parameters["truncate"] = (new or {}).get("truncate", True)  # 5.24 reads it here, not in full_attention
    else:
        parameters = dict(old or new or {})
    parameters.setdefault("rope_theta", section.get(family.theta_key, family.default_theta))
    if family.partial_key:
        parameters.setdefault("partial_rotary_factor", section.get(family.partial_key, family.default_partial))
    return parameters


def _transformers4(config: dict[str, Any]) -> LoaderReading:
    section, family = text_section(config), find_family(config)
    max_length: Any = section.get("max_position_embeddings", family.default_window)
    if not _is_number(max_length):
        raise ValueError(f"max_position_embeddings is {max_length!r}; it must be a whole number of tokens")
    given = section.get("rope_scaling")
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"rope_scaling is {given!r}; it must be a dict or null")
    parameters = {**(given or {}), "rope_theta": section.get(family.theta_key, family.default_theta)}
    rope_type = "default" if given is None else given.get("rope_type", given.get("type"))
    if given is not None and family.only_longrope:
        rope_type = _phi3_type4(given)
    if given is not None and model_type_of(config) == "olmo2":
        _check_olmo2_4(given)
    original = parameters.get(ORIGINAL) or (None if rope_type == "llama3" else max_length)
    if rope_type == "longrope":
        top = section.get(ORIGINAL, family.default_original)
        if top is not None and not _is_number(top):
            raise ValueError(f"{ORIGINAL} is {top!r}; it must be a whole number of tokens")
        original = top or max_length
        parameters["factor"] = max_length / top if top else parameters.get("factor")
    share = section.get(family.partial_key, family.default_partial) if family.partial_key else 1.0
    return LoaderReading(
        loader=TRANSFORMERS_4,
        supported=True,
        scaling=_scaling(rope_type, {**parameters, ORIGINAL: original}, max_length),
        rotary_dim=_rotary_dim(section, family, share, rope_type),
        length=int(max_length),
    )


def _phi3_type4(given: dict[str, Any]) -> str:
    """Return the type of a phi3 scaling, which 4.57 reads from `type`, in a dict of exactly three keys."""
    if len(given) != 3 or given.get("type") not in ("su", "yarn", "longrope"):
        raise ValueError(
            f"rope_scaling has the keys {', '.join(map(str, given))}; phi3 in transformers 4 takes type (longrope), "
            "short_factor and long_factor, and nothing else"
        )
    return "longrope"


def _check_olmo2_4(given: dict[str, Any]) -> None:
    """Refuse what olmo2 refuses in 4.57: all but `type` linear or dynamic with a `factor` that is a float."""
    factor = given.get("factor")
    if len(given) != 2 or given.get("type") not in ("linear", "dynamic") or not isinstance(factor, float):
        raise ValueError(
            f"rope_scaling is {given!r}; olmo2 in transformers 4 takes type (linear or dynamic) and a factor written "
            "as a float, and nothing else"
        )


def has_bias(config: dict[str, Any]) -> bool:
    """Return whether a config is that of a model with an attention bias."""
    return str(config.get("model_type")).startswith(BIAS_PREFIX)


def model_type_of(config: dict[str, Any]) -> str:
    """Return the model type of the language model in a config."""
    return str(text_section(config).get("model_type") or config["model_type"])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**40


def _rotary_dim(section: dict[str, Any], family: Family, share: object, rope_type: object) -> int:
    """Return the rotated dimensions of a head, as both versions count them."""
    head_dim = section.get("head_dim")
    if head_dim is None and family.writes_head_dim and rope_type in ("dynamic", "yarn", "longrope"):
        raise ValueError(f"head_dim is missing; this model type with {rope_type} does not work it out itself")
    head_dim = family.default_head_dim if head_dim is None else head_dim
    if head_dim is None:
        hidden, heads = section.get("hidden_size"), section.get("num_attention_heads")
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
            raise ValueError(
                f"hidden_size is {hidden!r} and num_attention_heads {heads!r}; both must be whole numbers"
            )
        head_dim = hidden // heads
    if not _is_number(head_dim) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"head_dim is {head_dim!r} and partial_rotary_factor {share!r}; they must be numbers above 0")
    return int(head_dim * share)


def _scaling(rope_type: object, parameters: dict[str, Any], max_length: int) -> RopeScaling:
    """Return the frequencies that a rope dict means once a loader has put its defaults in.

    Raises:
        ValueError: Names a type that no loader has, a key that is missing or a value that it cannot work with.
    """
    theta = parameters["rope_theta"]
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type is {rope_type!r}{nearest(str(rope_type), ROPE_TYPES)}; it must be {', '.join(ROPE_TYPES)}"
        )

    def need(key: str) -> Any:
        if parameters.get(key) is None:
            raise ValueError(f"the {rope_type} scaling has no {key}, which it needs")
        return parameters[key]

    if rope_type == "default":
        return Theta(rope_theta=theta)
    if rope_type == "linear":
        return Linear(rope_theta=theta, factor=need("factor"))
    if rope_type == "dynamic":
        return Dynamic(rope_theta=theta, factor=need("factor"), original_max_position_embeddings=int(max_length))
    if rope_type == "llama3":
        keys = ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor")
        return Llama3(rope_theta=theta, **{key: need(key) for key in keys})
    if rope_type == "yarn":
        return _yarn(parameters, theta, need("factor"), need(ORIGINAL))
    return _longrope(parameters, theta, need("short_factor"), need("long_factor"))


def _longrope(parameters: dict[str, Any], theta: float, short: Any, long: Any) -> LongRoPE:
    """Return LongRoPE with the attention factor that follows from the factor where none is given."""
    factor, original, attention = (parameters.get(key) for key in ("factor", ORIGINAL, "attention_factor"))
    factor = max(check_number("factor", 1.0 if factor is None else factor, above=0.0), 1.0)
    original = check_length(ORIGINAL, original)
    if attention is None:
        if factor > 1 and original == 1:
            raise ValueError(f"{ORIGINAL} is 1; longrope divides by its logarithm")
        attention = longrope_attention_factor(factor, original)
    return LongRoPE(
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        short_factor=short,
        long_factor=long,
    )


def _yarn(parameters: dict[str, Any], theta: float, factor: Any, original: int) -> Yarn:
    """Return YaRN with the defaults that transformers has: mscale over mscale_all_dim, else 0.1 ln(s) + 1."""
    if not _is_number(factor):
        raise ValueError(f"factor is {factor!r}; it must be a number of at least 1")
    attention = parameters.get("attention_factor")
    if attention is None:
        scales = [parameters.get(key) for key in ("mscale", "mscale_all_dim")]
        if all(_is_number(scale) for scale in scales):
            over, under = (0.1 * float(scale or 0.0) * math.log(factor) + 1 for scale in scales)
            attention = over / under
        else:
            attention = yarn_attention_factor(factor)
    return Yarn(
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        truncate=parameters.get("truncate", True),
    )
