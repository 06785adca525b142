"""The chunked loss under DDP and DeepSpeed ZeRO-3, two processes whose sequences differ in length."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import json, os, sys
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from transformers import AutoConfig, AutoModelForCausalLM

mode, lean, tied, out = sys.argv[1], sys.argv[2] == "lean", sys.argv[3] == "tied", sys.argv[4]
gloo = [InitProcessGroupKwargs(backend="gloo")]
if mode == "zero3":
    config = {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }
    accelerator = Accelerator(kwargs_handlers=gloo, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
else:
    accelerator = Accelerator(kwargs_handlers=gloo, cpu=True)
torch.manual_seed(0)
shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
config = AutoConfig.for_model("llama", vocab_size=61, tie_word_embeddings=tied, **shape)
model = AutoModelForCausalLM.from_config(config).train()
if lean:
    from ctxext.training.lean_presets import MemoryPreset, apply_preset
    apply_preset(model, MemoryPreset(chunk_tokens=8, recompute="layers"))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
torch.manual_seed(5 + accelerator.process_index)
losses = []
for _ in range(2):
    ids = torch.randint(0, 61, (1, 20 + 20 * accelerator.process_index))  # 3 chunks on one, 5 on the other
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=58 / 2).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(accelerator.gather(loss.detach().reshape(1)).sum()))
state = accelerator.get_state_dict(model)  # under ZeRO-3 on the main process alone
if accelerator.is_main_process:
    weights = {name: float(value.double().norm()) for name, value in state.items()}
    with open(out, "w") as file:
        json.dump({"losses": losses, "weights": weights}, file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def run(folder: Path, mode: str, loss: str, tied: str) -> dict[str, object]:
    (folder / "worker.py").write_text(WORKER)
    out = folder / f"{mode}-{loss}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(folder / "worker.py"), mode, loss, tied, str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tied", ["tied", "untied"])
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_equals_the_plain_loss(tmp_path: Path, mode: str, tied: str) -> None:
    if mode == "zero3":
        pytest.importorskip("deepspeed")
        if shutil.which("g++") is None:
            pytest.skip("DeepSpeed builds its communication with g++, which is not here")
    plain, lean = run(tmp_path, mode, "plain", tied), run(tmp_path, mode, "lean", tied)
    assert lean["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert lean["weights"] == pytest.approx(plain["weights"], rel=1e-6)
