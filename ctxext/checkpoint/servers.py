"""What vLLM and llama.cpp's converter make of a config, and what to tell them.

vLLM was read in the source of its releases 0.33.0, 0.20.0 and 0.11.0 (`config/model.py`,
`transformers_utils/config.py`, `model_executor/layers/rotary_embedding/`); llama.cpp in `conversion/base.py` at commit
00bd27a6, the files of single models beside it, and `src/llama-context.cpp`. Neither is run here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ctxext.checkpoint.families import find_family
from ctxext.checkpoint.loaders import (
    NO_BIAS,
    ORIGINAL,
    LoaderReading,
    has_bias,
    model_type_of,
    read_as_transformers5,
)
from ctxext.checkpoint.rope_config import text_section
from ctxext.positions.base import RopeScaling
from ctxext.positions.rope import Dynamic, Linear, LongRoPE, Theta, longrope_attention_factor, ntk_theta
from ctxext.positions.rope_by_parts import Llama3, Yarn, yarn_attention_factor

VLLM = "vLLM 0.33.0"
LLAMA_CPP = "llama.cpp conversion (00bd27a6)"
# vLLM has no rotary code of its own for these and runs transformers' model.
_THROUGH_TRANSFORMERS = ("gpt_neox", "olmo2", "smollm3")
# Converters that build on LlamaModel write llama3's factors as a tensor; gemma and gpt_neox write no rope at all.
_WITH_ROPE_FREQS = ("llama", "mistral", "mixtral", "smollm3")
_WITHOUT_ROPE = ("gemma", "gpt_neox")
_LLAMA3_ORIGINAL = 8192  # what the converter takes where the config's top level names no original length


def read_as_vllm(config: dict[str, Any], length: int) -> LoaderReading:
    """Return what vLLM 0.33.0 makes of a config; it reads it through transformers 5.

    It multiplies `max_position_embeddings` by the factor of linear and dynamic scalings (but not for gemma3), starts
    longrope at its original length unless told a longer one, and computes every frequency once.

    Args:
        config: The parsed `config.json` of a supported family.
        length: Tokens that the model is meant to read.
    """
    reading = read_as_transformers5(config)
    if has_bias(config):
        return LoaderReading(loader=VLLM, supported=False, problems=(NO_BIAS,))
    if not reading.supported or reading.scaling is None:
        return replace(reading, loader=VLLM)
    scaling, model_type = reading.scaling, model_type_of(config)
    multiplied = isinstance(scaling, (Linear, Dynamic)) and "gemma3" not in model_type
    derived = int(min(reading.length * getattr(scaling, "factor", 1.0), 2.0**40)) if multiplied else reading.length
    default = derived
    flags: tuple[str, ...] = ("--max-model-len", str(length))
    problems: list[str] = []
    supported = True
    if isinstance(scaling, Dynamic):
        supported = False
        problems.append("dynamic scaling is static there, fixed at the unscaled base, and ends at the old window")
        flags = _fixed_dynamic(scaling, reading, config, length)
    elif isinstance(scaling, LongRoPE):
        original = text_section(config).get(ORIGINAL)
        default = original if isinstance(original, int) else derived
        flags, told = _longrope(scaling, reading, config, length)
        problems += told
    elif isinstance(scaling, Yarn) and not scaling.has_default_attention_factor:
        problems.append(
            f"attention_factor {scaling.attention_factor:g} is read by 0.33.0; 0.20.0 and earlier ignore it and "
            "multiply cos and sin by YaRN's own"
        )
    if derived < length and supported:
        supported = False
        problems.append(f"it allows {derived} tokens: max_position_embeddings is not the extended length")
    if model_type in _THROUGH_TRANSFORMERS and not isinstance(scaling, Theta):
        problems.append(f"{model_type} runs there through transformers' own model")
    return replace(reading, loader=VLLM, supported=supported, length=default, flags=flags, problems=tuple(problems))


def _overrides(config: dict[str, Any], length: int, parameters: dict[str, Any]) -> tuple[str, ...]:
    """Return the flags that replace the rope parameters; empty for a model whose parameters are nested."""
    section, family = text_section(config), find_family(config)
    if family.per_layer_type:
        return ()
    if family.partial_key:
        parameters["partial_rotary_factor"] = section.get(family.partial_key, family.default_partial)
    told = json.dumps({"max_position_embeddings": length, "rope_parameters": parameters})
    return ("--max-model-len", str(length), "--hf-overrides", told)


def _fixed_dynamic(scaling: Dynamic, reading: LoaderReading, config: dict[str, Any], length: int) -> tuple[str, ...]:
    """Return the flags for the base that dynamic scaling has at `length` tokens, as a plain base."""
    original = scaling.original_max_position_embeddings
    stretch = scaling.factor * max(length, original) / original - (scaling.factor - 1)
    try:
        theta = ntk_theta(scaling.rope_theta, stretch, reading.rotary_dim)
    except OverflowError:
        return ()
    return _overrides(config, length, {"rope_type": "default", "rope_theta": theta})


def _longrope(
    scaling: LongRoPE, reading: LoaderReading, config: dict[str, Any], length: int
) -> tuple[tuple[str, ...], list[str]]:
    """Return the flags for longrope, and what to know: its attention factor comes from the two lengths there."""
    original = scaling.original_max_position_embeddings
    flags: tuple[str, ...] = ("--max-model-len", str(length))
    own = longrope_attention_factor(max(reading.length / original, 1.0), max(original, 2))
    if abs(own - scaling.attention_factor) < 1e-6:
        return flags, []
    told = f"it takes attention factor {own:g} from the two lengths, not attention_factor {scaling.attention_factor:g}"
    parameters = scaling.rope_parameters(reading.rotary_dim, original)
    parameters |= {"short_mscale": scaling.attention_factor, "long_mscale": scaling.attention_factor}
    return _overrides(config, length, parameters), [f"{told}, unless --hf-overrides gives the mscale keys"]


def read_as_llama_cpp(config: dict[str, Any]) -> LoaderReading:
    """Return what survives llama.cpp's `convert_hf_to_gguf.py`, and so what its server turns with.

    Linear scalings and plain bases survive everywhere but in gemma and gpt_neox; yarn without its attention factor
    and ramp options; llama3 as a tensor of factors, in the LLaMA family only; longrope in phi3 only.

    Args:
        config: The parsed `config.json` of a supported family.
    """
    reading = read_as_transformers5(config)
    if has_bias(config):
        return LoaderReading(loader=LLAMA_CPP, supported=False, problems=(NO_BIAS,))
    if not reading.supported or reading.scaling is None:
        return replace(reading, loader=LLAMA_CPP)
    scaling, problems = _converted(reading.scaling, config)
    if find_family(config).per_layer_type and not isinstance(reading.scaling, Theta):
        problems.append(
            "releases of llama.cpp differ in whether they scale gemma3's sliding layers: compare the output"
        )
    supported = not problems or scaling == reading.scaling
    return replace(reading, loader=LLAMA_CPP, supported=supported, scaling=scaling, problems=tuple(problems))


def _converted(scaling: RopeScaling, config: dict[str, Any]) -> tuple[RopeScaling, list[str]]:
    """Return what is left of a scaling after the conversion, and what is not."""
    model_type, plain = model_type_of(config), Theta(rope_theta=scaling.rope_theta)
    if model_type in _WITHOUT_ROPE:
        lost = Theta(rope_theta=10000.0)
        dropped = f"{model_type} is converted without base and scaling: it reads base 10000, unscaled"
        return lost, [] if scaling == lost else [dropped]
    if isinstance(scaling, Dynamic):
        return plain, ["dynamic scaling is dropped: it reads the unscaled model"]
    if isinstance(scaling, LongRoPE):
        if find_family(config).only_longrope:
            return scaling, []
        return plain, [f"longrope factors are dropped for {model_type}: it reads the unscaled model"]
    if isinstance(scaling, Llama3):
        if model_type not in _WITH_ROPE_FREQS:
            return plain, [f"llama3 scaling is dropped for {model_type}: it reads the unscaled model"]
        original = text_section(config).get(ORIGINAL) or _LLAMA3_ORIGINAL
        if original == scaling.original_max_position_embeddings:
            return scaling, []
        told = (
            f"llama3's factors are computed for an original length of {original}, not "
            f"{scaling.original_max_position_embeddings}, which it reads only at the top level of config.json"
        )
        return replace(scaling, original_max_position_embeddings=original), [told]
    if isinstance(scaling, Yarn):
        return _converted_yarn(scaling)
    return scaling, []


def _converted_yarn(scaling: Yarn) -> tuple[RopeScaling, list[str]]:
    """Return what is left of yarn: the factor and the original length."""
    own = yarn_attention_factor(scaling.factor)
    left = Yarn(
        rope_theta=scaling.rope_theta,
        factor=scaling.factor,
        original_max_position_embeddings=scaling.original_max_position_embeddings,
        attention_factor=own,
    )
    told = []
    if not scaling.has_default_attention_factor:
        told.append(
            f"attention_factor {scaling.attention_factor:g} has no effect: it multiplies by YaRN's own {own:g}"
        )
    if (scaling.beta_fast, scaling.beta_slow, scaling.truncate) != (32.0, 1.0, True):
        told.append("beta_fast, beta_slow and truncate are dropped: it ramps between 32 and 1, rounded outwards")
    return left, told
