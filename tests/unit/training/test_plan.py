"""The planner: its bytes of a layer are those that autograd keeps, its terms behave, its answers are checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model
from peft import LoraConfig, get_peft_model

from ctxext.training.lean_presets import MemoryPreset, apply_preset
from ctxext.training.plan import Load, Setting, layer_bytes, predict, trained_parameters
from ctxext.training.plan_shape import ModelShape, read_shape

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
LLAMA_7B = ModelShape(
    width=4096,
    inner=11008,
    layers=32,
    query_width=4096,
    key_width=4096,
    query_heads=32,
    vocabulary=32000,
    parameters=6_738_415_616,
    head_parameters=131_072_000,
    linear_parameters=6_476_005_376,
    largest_matrix=45_088_768,
    attention_matrices=((4096, 4096),) * 128,
)
FULL = Setting(method="full", stage=0, recompute="nothing", chunk_tokens=512)


def kept(layers: int, method: str, recompute: Any) -> int:
    """The bytes that autograd holds at the end of a forward over 64 tokens, weights left out."""
    model = tiny_model(num_hidden_layers=layers, intermediate_size=176).bfloat16().train()
    if method == "lora":
        model = get_peft_model(model, LoraConfig(r=8, target_modules=TARGETS)).train()
    apply_preset(model, MemoryPreset(chunk_tokens=16, recompute=recompute))
    held: dict[int, torch.Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: held.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
    ):
        model(input_ids=torch.ones(1, 64, dtype=torch.long), labels=torch.ones(1, 64, dtype=torch.long))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(t.untyped_storage().nbytes() for at, t in held.items() if at not in weights)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(("method", "recompute"), [("full", "nothing"), ("lora", "nothing"), ("full", "layers")])
def test_layer_bytes_are_what_autograd_keeps(llama: Path, method: Any, recompute: str) -> None:
    shape = replace(read_shape(llama), inner=176)
    counted = (kept(3, method, recompute) - kept(1, method, recompute)) / 2 / 64
    assert counted == layer_bytes(shape, method, recompute)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_shape_of_a_checkpoint(llama: Path) -> None:
    shape, model = read_shape(llama), tiny_model()
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.head_parameters == model.lm_head.weight.numel()
    assert (shape.width, shape.layers, shape.vocabulary) == (64, 2, 97)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=TARGETS))
    assert trained_parameters(shape, "lora", 8) == adapted.get_nb_trainable_parameters()[0]


def test_zero_states_of_the_paper() -> None:
    """Of 16 bytes a parameter, stages 1 to 3 divide 12, 14, 16 by the devices (arXiv 1910.02054, figure 1).

    The optimizer's step adds the own share of the gradients in float32.
    """
    sizes = {}
    for stage in (1, 2, 3):
        made = predict(LLAMA_7B, replace(FULL, stage=stage, chunk_tokens=None), Load(length=16, gpus=64))
        assert made.moment == "optimizer step"
        sizes[stage] = (made.weights + made.gradients + made.optimizer) / LLAMA_7B.parameters
    step = 4 / 64
    assert sizes[1] == pytest.approx(2 + 2 + 12 / 64 + step)
    assert sizes[2] == pytest.approx(2 + 14 / 64 + step)
    assert sizes[3] == pytest.approx(16 / 64 + step)


def test_each_saving_saves() -> None:
    load = Load(length=32768, gpus=8)
    ways = [
        Setting(method="full", stage=3, recompute="nothing", chunk_tokens=None),
        Setting(method="full", stage=3, recompute="nothing", chunk_tokens=512),
        Setting(method="full", stage=3, recompute="cheap", chunk_tokens=512),
        Setting(method="full", stage=3, recompute="layers", chunk_tokens=512),
        Setting(method="full", stage=3, recompute="layers", chunk_tokens=512, offload="optimizer"),
        Setting(method="full", stage=3, recompute="layers", chunk_tokens=512, offload="all"),
    ]
    peaks = [predict(LLAMA_7B, way, load).peak for way in ways]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
    adapters = [
        predict(LLAMA_7B, Setting(method=m, stage=0, recompute="layers", chunk_tokens=512), Load(length=8192)).peak
        for m in ("full", "lora", "qlora")
    ]
    assert adapters == sorted(adapters, reverse=True)


def test_terms_add_up() -> None:
    made = predict(LLAMA_7B, FULL, Load(length=4096))
    terms = ("weights", "optimizer", "gradients", "activations", "logits", "workspace", "buckets", "base", "allocator")
    assert made.peak == pytest.approx(sum(getattr(made, term) for term in terms))


def test_refusals(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ValueError, match="needs ZeRO-3, not stage 2"):
        predict(LLAMA_7B, replace(FULL, stage=2, offload="all"), Load(length=8))
    with pytest.raises(ValueError, match="bitsandbytes"):
        predict(LLAMA_7B, replace(FULL, method="qlora", stage=3), Load(length=8))
    with pytest.raises(ValueError, match="recompute='layers'"):
        predict(LLAMA_7B, replace(FULL, offload="activations"), Load(length=8))
    with pytest.raises(ValueError, match="lacks config.json"):
        read_shape(tmp_path)
