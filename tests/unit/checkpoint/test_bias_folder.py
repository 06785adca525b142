"""What a patch with an attention bias writes, who loads it, and what inspect and doctor say of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LENGTH, WINDOW, read_config, snapshot, tiny_model, write_config
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import ctxext
from ctxext import diagnose, inspect_checkpoint, patch_checkpoint
from ctxext.checkpoint.bias_files import BIAS_SHARD

OPTIONS: dict[str, dict[str, Any]] = {
    "alibi": {"slope_shift": -1.0},
    "sandwich": {},
    "smoothed_sandwich": {"fit_points": 50},
    "windowed": {"window": 24, "with_alibi": True},
    "kerple_log": {},
    "kerple_power": {},
    "t5": {"keep_rotary": True},
}
CODE = {"attention.py", "bias.py", "blocked.py", "configuration_ctxext.py", "masks.py", "modeling_ctxext.py"}
IDS = torch.arange(1, 91)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture(scope="module")
def biased(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a bias to a patched llama; tests must not change it."""
    folder = tmp_path_factory.mktemp("biased")

    def patched(method: str) -> Path:
        if not (folder / method).exists():
            patch_checkpoint(llama, folder / method, method=method, length=LENGTH, **OPTIONS[method])
        return folder / method

    return patched


@pytest.mark.parametrize("method", OPTIONS)
def test_a_patch_keeps_the_weights_and_is_healthy(method: str, biased: Callable[[str], Path], llama: Path) -> None:
    folder = biased(method)
    config, before = read_config(folder), load_file(llama / "model.safetensors")
    after = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    assert {name: value.tobytes() for name, value in before.items()}.items() <= {
        name: value.tobytes() for name, value in after.items()
    }.items()
    assert config["model_type"] == "ctxext_llama" and config["max_position_embeddings"] == LENGTH
    assert config["bias_parameters"]["bias_type"] == method
    assert config["ctxext"]["method"] == method and config["ctxext"]["original_length"] == WINDOW
    assert CODE <= {path.name for path in folder.iterdir()}
    assert {fault.code for fault in diagnose(folder)} == {"bias-loaders"}  # a notice


ISOLATED = """
import importlib.util, sys
sys.path += {paths!r}
assert importlib.util.find_spec("ctxext") is None
import torch
from transformers import AutoModelForCausalLM
found = {{}}
for name, folder in {folders!r}.items():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    with torch.no_grad():
        logits = model(torch.arange(1, 91)[None]).logits
    found[name] = logits, model.generate(torch.arange(1, 9)[None], max_new_tokens=8, do_sample=False)
torch.save(found, "found.pt")
"""


def isolated(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter that does not know ctxext; -S, for an editable install hooks into site."""
    (folder / "script.py").write_text(script)
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_MODULES_CACHE": str(folder / "modules")}
    command = [sys.executable, "-I", "-S", str(folder / "script.py")]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
    )


SITE = [path for path in sys.path if path.endswith("site-packages")]


def test_the_same_logits_without_ctxext(biased: Callable[[str], Path], tmp_path: Path) -> None:
    folders = {method: str(biased(method)) for method in OPTIONS}
    done = isolated(ISOLATED.format(paths=SITE, folders=folders), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert set(found) == set(OPTIONS)
    for method, (theirs, tokens) in found.items():
        model = AutoModelForCausalLM.from_pretrained(biased(method))
        assert type(model).__module__ == "ctxext.modeling.modeling_ctxext"
        torch.testing.assert_close(logits(model), theirs, rtol=0, atol=0)
        assert torch.equal(model.generate(IDS[:, :8], max_new_tokens=8, do_sample=False), tokens)


def test_without_the_flag_and_without_ctxext_it_does_not_load(biased: Callable[[str], Path], tmp_path: Path) -> None:
    script = (
        f"import sys\nsys.path += {SITE!r}\nfrom transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({str(biased('alibi'))!r})\n"
    )
    done = isolated(script, tmp_path)
    assert done.returncode != 0 and "trust_remote_code" in done.stderr


def test_learned_values_of_the_checkpoint_reach_the_live_model(biased: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    shutil.copytree(biased("kerple_log"), tmp_path / "copy")
    shard = tmp_path / "copy" / BIAS_SHARD
    values = {name: (value + 0.25).astype(np.float32) for name, value in load_file(shard).items()}
    save_file(values, shard, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.bfloat16)
    live = model.model.score_bias.kernel
    assert live.log_r1.dtype == torch.float32
    np.testing.assert_array_equal(live.log_r1.detach().numpy(), values["model.score_bias.kernel.log_r1"])
    changed = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "copy"))
    assert not torch.equal(changed, logits(AutoModelForCausalLM.from_pretrained(biased("kerple_log"))))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("link", ["copy", "hard", "symlink"])
def test_a_learned_bias_is_one_more_file_beside_linked_weights(shards: int, link: str, tmp_path: Path) -> None:
    model, source = tiny_model(), tmp_path / "source"
    model.save_pretrained(source, max_shard_size="10GB" if shards == 1 else "60KB")
    before = snapshot(source)
    patch_checkpoint(source, tmp_path / "out", method="t5", length=LENGTH, link=link)
    assert snapshot(source) == before
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {*model.state_dict(), "model.score_bias.kernel.weight"}
    assert not (tmp_path / "out" / "model.safetensors").exists()  # loaders would take it and never see the index
    placed = [path for path in (tmp_path / "out").glob("*.safetensors") if path.name != BIAS_SHARD]
    if shards > 1:
        assert len(placed) > 1
    if link == "hard":
        assert all(path.stat().st_nlink == 2 for path in placed)
    if link == "symlink":
        assert all(path.is_symlink() for path in placed)
    total = sum(
        array.nbytes for path in [*placed, tmp_path / "out" / BIAS_SHARD] for array in load_file(path).values()
    )
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_the_other_families(family: str, tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    patch_checkpoint(tiny_source(family), tmp_path / "out", method="sandwich", length=LENGTH)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(tiny_source(family))
    assert model.config.model_type == f"ctxext_{family}"
    assert not torch.allclose(logits(model), logits(stock))
    in_memory = ctxext.patch(stock, method="sandwich", length=LENGTH)
    torch.testing.assert_close(logits(in_memory), logits(model), rtol=0, atol=0)
    in_memory.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    assert CODE <= {path.name for path in (tmp_path / "saved").iterdir()}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": "windowed"}, "method 'windowed' needs --window"),
        ({"method": "windowed", "window": 0}, "window is 0; it must be a whole number"),
        ({"method": "alibi", "window": 3}, "--window has no effect with method 'alibi'; its options are"),
        ({"method": "alibi", "length": WINDOW - 1}, "length is 127; the model reads 128 tokens already"),
        ({"method": "sandwich", "dimension": 7}, "dimension is 7; it must be even"),
        ({"method": "smoothed_sandwich", "fit_points": 50, "offset": 1.0}, "fit_points computes offset"),
        ({"method": "smoothed_sandwich", "fit_points": 2}, "fit_points is 2; two coefficients need at least 3"),
        ({"method": "t5", "max_distance": 16}, "max_distance is 16; it must be above num_buckets / 2, 16"),
        ({"method": "t5", "keep_rotary": "yes"}, "keep_rotary is 'yes'; it must be true or false"),
        ({"method": "sandwhich"}, r"unknown method 'sandwhich' \(did you mean 'sandwich'\?\)"),
    ],
)
def test_wrong_input_is_refused_with_nothing_written(
    changes: dict[str, Any], told: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=told):
        patch_checkpoint(llama, tmp_path / "out", **{"length": LENGTH, **changes})
    assert not list(tmp_path.iterdir())


def test_a_family_without_code_and_a_model_with_a_bias_are_refused(
    biased: Callable[[str], Path], tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="'olmo2' has no code for attention biases; llama, mistral, qwen2, qwen3"):
        patch_checkpoint(tiny_source("olmo2"), tmp_path / "out", method="alibi", length=LENGTH)
    for method in ("yarn", "t5"):
        with pytest.raises(ValueError, match=r"the model has an attention bias already \(alibi\)"):
            patch_checkpoint(biased("alibi"), tmp_path / "out", method=method, length=2 * LENGTH)


def test_a_replaced_rotary_embedding_needs_no_scaling_and_a_kept_one_must_be_fixed(
    llama: Path, tmp_path: Path
) -> None:
    patch_checkpoint(llama, tmp_path / "dynamic", method="dynamic", length=LENGTH)
    told = "the rotary embedding to be kept has a dynamic scaling, which changes with the length"
    with pytest.raises(ValueError, match=told):
        patch_checkpoint(tmp_path / "dynamic", tmp_path / "out", method="t5", length=LENGTH, keep_rotary=True)
    patch_checkpoint(tmp_path / "dynamic", tmp_path / "out", method="t5", length=LENGTH)
    config = read_config(tmp_path / "out")
    assert config["rope_scaling"] is None and config["rope_parameters"]["rope_type"] == "default"
    patch_checkpoint(llama, tmp_path / "yarn", method="yarn", length=LENGTH)
    patch_checkpoint(tmp_path / "yarn", tmp_path / "kept", method="t5", length=LENGTH, keep_rotary=True)
    zero_bias = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    yarn = AutoModelForCausalLM.from_pretrained(tmp_path / "yarn")
    torch.testing.assert_close(logits(zero_bias), logits(yarn))


def test_inspect_names_the_bias_and_the_loaders_that_refuse_it(biased: Callable[[str], Path]) -> None:
    answer = inspect_checkpoint(biased("windowed"))
    assert answer["bias"] == {"bias_type": "windowed", "keep_rotary": False, "window": 24, "with_alibi": True}
    assert answer["wavelengths"] is None and answer["rope_theta"] is None
    supported = {reading["loader"].split()[0]: reading["supported"] for reading in answer["loaders"][1:]}
    assert answer["loaders"][0]["supported"] and supported == {
        "transformers": False,
        "vLLM": False,
        "llama.cpp": False,
    }
    assert inspect_checkpoint(biased("t5"))["rope_theta"] == 10000.0


def break_bias(folder: Path, how: str) -> None:
    config = read_config(folder)
    if how == "type":
        config["bias_parameters"]["bias_type"] = "kerple"
    elif how == "option":
        config["bias_parameters"]["windw"] = 3
    elif how == "record":
        config["bias_parameters"] = {"bias_type": "t5", "keep_rotary": False}
    elif how == "auto_map":
        del config["auto_map"]
    elif how == "code":
        (folder / "blocked.py").unlink()
    elif how == "other code":
        (folder / "blocked.py").write_text("print('mine')\n")
    elif how == "values":
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != BIAS_SHARD}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_config(folder, config)


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("type", "bias-parameters", r"bias_type is 'kerple' \(did you mean"),
        ("option", "bias-parameters", "windw"),
        ("record", "provenance", "recorded method 'kerple_log', but config.json has the bias t5"),
        ("auto_map", "bias-code", "no auto_map"),
        ("code", "bias-code", "the code of the bias is not there: blocked.py"),
        ("other code", "bias-code-differs", "blocked.py are not those of the installed ctxext"),
        ("values", "bias-values", "the weights have no model.score_bias.kernel.log_r1"),
    ],
)
def test_doctor_finds_what_is_broken(
    how: str, code: str, told: str, biased: Callable[[str], Path], tmp_path: Path
) -> None:
    import re

    shutil.copytree(biased("kerple_log"), tmp_path / "ill")
    break_bias(tmp_path / "ill", how)
    faults = {fault.code: fault for fault in diagnose(tmp_path / "ill", verify=False)}
    assert code in faults, list(faults)
    assert re.search(told, faults[code].message), faults[code].message


def test_a_bias_in_memory_needs_a_stock_model(tmp_path: Path) -> None:
    class Mine(type(tiny_model())):  # type: ignore[misc]
        pass

    model = tiny_model()
    model.__class__ = Mine
    with pytest.raises(ValueError, match="the model is a Mine; a bias can be put into a LlamaForCausalLM"):
        ctxext.patch(model, method="alibi", length=LENGTH)


@pytest.mark.slow
def test_transformers_4_refuses_it(biased: Callable[[str], Path], transformers4: str) -> None:
    for flag in ("False", "True"):
        script = (
            "from transformers import AutoModelForCausalLM;"
            f"AutoModelForCausalLM.from_pretrained({str(biased('alibi'))!r}, trust_remote_code={flag})"
        )
        command = [transformers4, "-I", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode != 0
        assert ("trust_remote_code" if flag == "False" else "needs transformers 5") in done.stderr
