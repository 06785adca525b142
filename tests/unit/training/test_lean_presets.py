"""The presets change what is kept, and neither the loss nor a gradient."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers import tiny_model
from torch.utils.flop_counter import FlopCounterMode

from ctxext.training.lean_presets import PRESETS, MemoryPreset, apply_preset, get_preset


def step(model: Any) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Loss, gradients, and the bytes that autograd holds at the end of the forward."""
    torch.manual_seed(0)
    ids = torch.randint(1, 97, (2, 64))
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return loss.detach(), [p.grad for p in model.parameters()], sum(b for at, b in held.items() if at not in weights)


@pytest.mark.parametrize("name", ["fast", "lean"])
def test_same_loss_and_gradients(name: str) -> None:
    plain, model = tiny_model().train(), tiny_model().train()
    apply_preset(model, name)
    wanted, got = step(plain), step(model)
    torch.testing.assert_close(got[0], wanted[0])
    for one, other in zip(got[1], wanted[1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_lean_holds_less() -> None:
    plain, model = tiny_model().train(), tiny_model().train()
    apply_preset(model, MemoryPreset(chunk_tokens=16, recompute="layers"))
    assert step(model)[2] < step(plain)[2] / 4


@pytest.mark.parametrize(("recompute", "again"), [("cheap", False), ("layers", True)])
def test_fast_computes_no_product_again(recompute: Any, again: bool) -> None:
    def operations(way: Any) -> int:
        model = tiny_model().train()
        apply_preset(model, MemoryPreset(chunk_tokens=16, recompute=way))
        ids = torch.randint(1, 97, (2, 64))
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        return int(counter.get_total_flops())

    assert (operations(recompute) > operations("nothing")) is again


def test_names_and_refusals() -> None:
    assert get_preset("plain") == MemoryPreset(chunk_tokens=None, recompute="nothing") == PRESETS["plain"]
    with pytest.raises(ValueError, match="no memory preset is called 'leen'.*lean"):
        get_preset("leen")
    with pytest.raises(ValueError, match="recompute='cheap'"):
        apply_preset(tiny_model(), "fast", offload=True)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="offload takes effect where there is an accelerator")
def test_offload_without_an_accelerator_is_refused() -> None:
    with pytest.raises(ValueError, match="no accelerator"):
        apply_preset(tiny_model(), "lean", offload=True)


def test_freed_blocks_go_back_to_the_system() -> None:
    """In a process of its own: the limit stays for the rest of a process."""
    code = """
import psutil, torch
from ctxext.training.lean_presets import give_back_freed_memory
if WANTED: assert give_back_freed_memory()
torch.ones(30 * 2**20, dtype=torch.uint8)  # freed at once, it raises the limit where that may rise
blocks = [torch.ones(6 * 2**20, dtype=torch.uint8) for _ in range(60)]
full = psutil.Process().memory_info().rss
del blocks[:-1]
print(full - psutil.Process().memory_info().rss)
"""
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("another C library than glibc")
    freed = {}
    for wanted in (False, True):
        command = [sys.executable, "-c", code.replace("WANTED", str(wanted))]
        freed[wanted] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert freed[True] > 300e6 > freed[False]
