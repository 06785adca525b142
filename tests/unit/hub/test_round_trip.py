"""Push, pull, load and generate: what comes back from the Hub computes what went there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from expected import TOKEN
from helpers import LENGTH, tiny_model
from server import Hub
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.checkpoint.patch import patch_checkpoint
from ctxext.hub.push import push
from ctxext.training.adapters import add_adapters
from ctxext.training.arguments import Lora
from ctxext.training.checkpoints import finish_folder

# Runs where only HF_ENDPOINT says where the Hub is, with none of the folders that were pushed.
PULL = """
import json, sys
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer
import torch

ids = torch.tensor([json.loads(sys.argv[1])])
answers = {}
for name, options in (("native", {}), ("bias", {"trust_remote_code": True}), ("adapter", None)):
    if options is None:
        import ctxext
        model = ctxext.load_adapter("team/adapter")
    else:
        model = AutoModelForCausalLM.from_pretrained(f"team/{name}", **options)
        tokenizer = AutoTokenizer.from_pretrained(f"team/{name}")
        assert snapshot_download(f"team/{name}") and tokenizer.model_max_length == 512
    model = model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, -1].tolist()
        made = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1]:].tolist()
    answers[name] = {"logits": logits, "made": made, "class": type(model).__module__}
json.dump(answers, open(sys.argv[2], "w"))
"""


def make_adapter(base: Path, folder: Path) -> None:
    """An adapter as a recipe saves it, its matrices random, whose base is what the Hub will call it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = add_adapters(model, Lora(r=4))
    torch.manual_seed(1)
    for name, weights in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weights, std=0.3)
    adapted.peft_config["default"].base_model_name_or_path = "team/native"
    adapted.save_pretrained(folder)
    finish_folder(folder, LENGTH, model.config)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)


def answer(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[0, -1]
        made = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
    return logits, made.tolist()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft still asks for it
def test_push_pull_load_generate(hub: Hub, yarn_folder: Path, tmp_path: Path) -> None:
    folders = {"native": yarn_folder, "bias": tmp_path / "bias", "adapter": tmp_path / "adapter"}
    patch_checkpoint(yarn_folder.parent / "source", folders["bias"], method="kerple_log", length=LENGTH)
    make_adapter(yarn_folder, folders["adapter"])
    for name, folder in folders.items():
        assert push(folder, f"team/{name}", private=True)["pushed"]
    assert {"modeling_ctxext.py", "configuration_ctxext.py", "model-score-bias.safetensors"} <= set(
        hub.files("team/bias")
    )
    assert {"adapter_model.safetensors", "adapter_config.json", "config.json"} <= set(hub.files("team/adapter"))

    ids = torch.randint(3, 256, (1, 300), generator=torch.Generator().manual_seed(0))
    settings = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "hf"),
    }
    call = [sys.executable, "-c", PULL, json.dumps(ids[0].tolist()), str(tmp_path / "pulled.json")]
    done = subprocess.run(call, capture_output=True, text=True, env={**os.environ, **settings}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    pulled = json.loads((tmp_path / "pulled.json").read_text())

    import ctxext.modeling  # registers the bias models, so that the local one loads without its remote code

    base = AutoModelForCausalLM.from_pretrained(yarn_folder)
    wanted = {
        "native": answer(base, ids),
        "bias": answer(AutoModelForCausalLM.from_pretrained(folders["bias"]), ids),
        "adapter": answer(ctxext.load_adapter(folders["adapter"], base=str(yarn_folder)), ids),
    }
    for name, (logits, made) in wanted.items():
        assert torch.equal(torch.tensor(pulled[name]["logits"]), logits), name
        assert pulled[name]["made"] == made and len(made) == 5
    assert pulled["bias"]["class"].startswith("transformers_modules.")
    # Three different models, none of them the unpatched one: equality above says something.
    plain = answer(tiny_model("llama", vocab_size=300), ids)[0]
    every = [plain, *(logits for logits, _ in wanted.values())]
    for i, one in enumerate(every):
        assert all(not torch.allclose(one, other, atol=1e-3) for other in every[:i])
