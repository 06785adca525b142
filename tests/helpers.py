"""Tiny random checkpoints of every family, and frequencies computed without ctxext."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

WINDOW = 128
LENGTH = 512

# What differs from the shape that all tiny models share; head dimensions are 16 unless said.
TINY: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10000.0},
    "mistral": {"rope_theta": 10000.0, "sliding_window": None},
    "mixtral": {"rope_theta": 1e6, "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen2": {"rope_theta": 1e6},
    "qwen3": {"rope_theta": 1e6, "head_dim": 16},
    "qwen3_moe": {
        "rope_theta": 1e6,
        "head_dim": 16,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
    },
    "smollm3": {"rope_theta": 2e6, "num_hidden_layers": 4},
    "phi3": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "gemma": {"rope_theta": 10000.0, "head_dim": 16},
    "gemma3_text": {"rope_theta": 1e6, "head_dim": 16, "sliding_window": 32, "num_hidden_layers": 6},
    "gemma3": {"rope_theta": 1e6, "head_dim": 16, "sliding_window": 32, "num_hidden_layers": 6},
    "olmo2": {"rope_theta": 500000.0},
    "gpt_neox": {"rotary_emb_base": 10000.0, "rotary_pct": 0.25, "hidden_size": 128},
}
ROTARY_DIM = {"phi3": 8, "gpt_neox": 8}  # phi3: half of 16, gpt_neox: a quarter of 32
METHODS = ("linear", "theta", "ntk", "dynamic", "ntk_by_parts", "yarn", "longrope", "llama3")


def rotary_dim(family: str) -> int:
    return ROTARY_DIM.get(family, 16)


def theta_of(family: str) -> float:
    return TINY[family].get("rope_theta", 10000.0)


def options_for(method: str, theta: float, dim: int) -> dict[str, Any]:
    """The options that a method cannot do without."""
    if method == "theta":
        return {"rope_theta": 20 * theta}
    if method == "longrope":
        return {"long_factor": tuple(1.0 + 0.5 * j for j in range(dim // 2))}
    return {}


def tiny_config(family: str, **overrides: Any) -> Any:
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "max_position_embeddings": WINDOW,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        **TINY[family],
        **overrides,
    }
    if family == "gemma3":
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
        return AutoConfig.for_model("gemma3", text_config=values, vision_config=vision, mm_tokens_per_image=4)
    return AutoConfig.for_model(family, **values)


def tiny_model(family: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(family, **overrides)).eval()


def save_tiny(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    tiny_model(family, **overrides).save_pretrained(folder)
    if family == "qwen3_moe":  # transformers 5 writes num_local_experts alone, which 4 does not read
        config = read_config(folder)
        write_config(folder, {**config, "num_experts": config["num_local_experts"]})
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def with_config(source: Path, folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint with `config` and the weights of `source`, hard-linked."""
    folder.mkdir(parents=True)
    for path in source.glob("*.safetensors*"):
        os.link(path, folder / path.name)
    write_config(folder, config)
    return folder


def llama_config(**values: Any) -> dict[str, Any]:
    """A config.json of the tiny llama as transformers 4 wrote it; None takes a key away."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "max_position_embeddings": WINDOW,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **values,
    }
    return {key: value for key, value in config.items() if value is not None}


def snapshot(folder: Path) -> dict[str, tuple[str, str]]:
    """Every file below a folder: what it links to, and its content."""
    return {
        str(path.relative_to(folder)): (
            os.readlink(path) if path.is_symlink() else "",
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stock(
    rope_type: str, dim: int, theta: float, window: int, seq_len: int | None = None, partial: float = 1.0, **more: Any
) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor from transformers' own function, for a head whose `partial` share is `dim`."""
    parameters = {"rope_type": rope_type, "rope_theta": theta, "partial_rotary_factor": partial, **more}
    config = LlamaConfig(
        head_dim=round(dim / partial),
        hidden_size=4 * round(dim / partial),
        num_attention_heads=4,
        max_position_embeddings=window,
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=seq_len)
    return frequencies.double().numpy(), float(factor)


def expected(
    method: str, theta: float, dim: int, window: int, length: int, seq_len: int | None = None
) -> tuple[np.ndarray, float]:
    """What a model of `window` tokens that `method` extended to `length` turns with, computed without ctxext."""
    s = length / window
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    options = options_for(method, theta, dim)
    if method == "linear":
        return plain / s, 1.0
    if method == "theta":
        return (20 * theta) ** (-np.arange(0, dim, 2) / dim), 1.0
    if method == "ntk":
        return (theta * s ** (dim / (dim - 2))) ** (-np.arange(0, dim, 2) / dim), 1.0
    if method == "dynamic":
        return stock("dynamic", dim, theta, window, seq_len, factor=s)
    if method == "longrope":
        divisor = np.array(options["long_factor"]) if (seq_len or 0) > window else 1.0
        return plain / divisor, math.sqrt(1 + math.log(s) / math.log(window))
    original = {"original_max_position_embeddings": window}
    if method == "llama3":
        return stock("llama3", dim, theta, length, factor=s, low_freq_factor=1.0, high_freq_factor=4.0, **original)
    attention = {"attention_factor": 1.0} if method == "ntk_by_parts" else {}
    return stock("yarn", dim, theta, length, factor=s, **original, **attention)


def rotary(model: Any) -> Any:
    """The rotary module of the language model, found without ctxext."""
    return next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))


def frequencies_at(model: Any, seq_len: int) -> tuple[np.ndarray, float]:
    """What a live model turns with once it has seen a sequence of `seq_len` tokens, on its full-attention layers."""
    module = rotary(model)
    nested = isinstance(module.rope_type, dict)
    layer = {"layer_type": "full_attention"} if nested else {}
    prefix = "full_attention_" if nested else ""
    module(torch.zeros(1), torch.tensor([[seq_len - 1]]), **layer)
    return getattr(module, f"{prefix}inv_freq").double().numpy(), getattr(module, f"{prefix}attention_scaling")


BOS, EOS = 256, 257


def byte_tokenizer(bos: bool = True) -> Any:
    """A tokenizer whose tokens are bytes; 256 is its begin-of-sequence token, if it has one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    vocabulary |= {"<s>": BOS, "</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "</s>", **({"bos_token": "<s>"} if bos else {})}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
