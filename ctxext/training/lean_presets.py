"""What a training step keeps in memory, as data: three presets and the function that gives one to a model.

`plain` is transformers' Trainer as it comes. `fast` keeps the outputs of the matrix products and of attention and
computes again what is cheap (norms, activations, products of elements). `lean` keeps one hidden state a layer and
computes each layer again; on a CPU it also has the C library give freed blocks back to the system at once. Both take
the loss by chunks.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ctxext.positions.base import nearest
from ctxext.training.lean import causal_model, enable_lean_loss

Recompute = Literal["nothing", "cheap", "layers"]
_SAVED_OPERATIONS = (
    "mm",
    "addmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_M_MMAP_THRESHOLD = -3  # of malloc.h
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class MemoryPreset:
    """What a training step keeps between its forward and its backward.

    Attributes:
        chunk_tokens: Tokens whose logits exist at once; None for those of the whole batch.
        recompute: What the backward computes again: `nothing`; what is `cheap`, all but matrix products and attention;
            or whole `layers`.
    """

    chunk_tokens: int | None
    recompute: Recompute


PRESETS: dict[str, MemoryPreset] = {
    "plain": MemoryPreset(chunk_tokens=None, recompute="nothing"),
    "fast": MemoryPreset(chunk_tokens=512, recompute="cheap"),
    "lean": MemoryPreset(chunk_tokens=256, recompute="layers"),
}


def get_preset(name: str) -> MemoryPreset:
    """Return a preset by name.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in PRESETS:
        raise ValueError(
            f"no memory preset is called {name!r}{nearest(name, tuple(PRESETS))}; there are {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def apply_preset(model: nn.Module, preset: str | MemoryPreset, *, offload: bool = False) -> None:
    """Prepare a model for training within less memory; call it before Trainer or `accelerator.prepare`.

    With Trainer leave `activation_checkpointing` off: it would enable its own way on top of this one.

    Args:
        model: A causal language model of transformers, or peft's wrapper around one.
        preset: One of `PRESETS` by name, or your own.
        offload: Keep the hidden state that `layers` saves for each layer in the host's memory.

    Raises:
        ValueError: If `offload` could not take effect, or for the reasons of `get_preset` and `enable_lean_loss`.
    """
    chosen = get_preset(preset) if isinstance(preset, str) else preset
    if offload and chosen.recompute != "layers":
        raise ValueError(
            f"offload=True moves what recompute='layers' saves, and this preset has recompute={chosen.recompute!r}; "
            "choose the preset 'lean', or offload=False"
        )
    if offload and not torch.accelerator.is_available():
        raise ValueError(
            "offload=True moves activations from an accelerator to the host's memory, and there is no accelerator: "
            "they are in the host's memory already; leave it off"
        )
    if chosen.chunk_tokens is not None:
        enable_lean_loss(model, chunk_tokens=chosen.chunk_tokens)
    if chosen.recompute == "layers" and not torch.accelerator.is_available():
        give_back_freed_memory()
    if chosen.recompute != "nothing":
        causal_model(model).activation_checkpointing_enable(checkpointing_arguments(chosen.recompute), offload=offload)


def checkpointing_arguments(recompute: Literal["cheap", "layers"]) -> dict[str, Any]:
    """Return the arguments of `torch.utils.checkpoint.checkpoint` for a way of computing again."""
    if recompute == "layers":
        return {"use_reentrant": False}
    operations = [getattr(torch.ops.aten, name).default for name in _SAVED_OPERATIONS if hasattr(torch.ops.aten, name)]
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, operations)}


def give_back_freed_memory() -> bool:
    """Make glibc map every block of a megabyte or more by itself, for the rest of the process; say whether it did.

    Otherwise glibc raises that limit to 32 MB as tensors come and go, and keeps what is freed in a heap that
    fragments: the peak of a `lean` step on SmolLM2 (1 x 4096 tokens) was 2.8 GB instead of 1.9. Fresh pages cost time:
    about a quarter of that step.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _BLOCK_BYTES))
    except (AttributeError, OSError, TypeError):  # another C library than glibc
        return False
