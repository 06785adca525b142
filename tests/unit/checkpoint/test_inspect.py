"""What inspect says of a checkpoint, against numbers computed by hand or by stock transformers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import LENGTH, METHODS, WINDOW, expected, options_for, read_config, write_config
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from ctxext import inspect_checkpoint, patch_checkpoint
from ctxext.checkpoint.headers import read_floats, read_headers
from ctxext.checkpoint.render import render_inspect


@pytest.mark.parametrize("method", METHODS)
def test_wavelengths_are_those_of_the_formula(method: str, llama: Path, tmp_path: Path) -> None:
    options = options_for(method, 10000.0, 16)
    patch_checkpoint(llama, tmp_path / "out", method=method, length=LENGTH, link="hard", verify=False, **options)
    answer = inspect_checkpoint(tmp_path / "out")
    wanted, factor = expected(method, 10000.0, 16, WINDOW, LENGTH, LENGTH)
    after = answer["wavelengths"]["after"]
    assert after["shortest"] == pytest.approx(2 * math.pi / wanted.max(), rel=1e-5)
    assert after["longest"] == pytest.approx(2 * math.pi / wanted.min(), rel=1e-5)
    assert after["beyond_window"] == [j for j in range(8) if wanted[j] * WINDOW < 2 * math.pi]
    assert answer["attention_factor"] == pytest.approx(factor)
    assert (answer["method"], answer["length"], answer["original_length"]) == (method, LENGTH, WINDOW)
    assert answer["total_factor"] == 4.0
    before = answer["wavelengths"]["before"]
    if method == "theta":  # the patch replaces the base, and nothing tells the old one
        assert before is None
    else:  # 2 pi 10000^(j / 8) passes 128 at j = 3
        assert before["longest"] == pytest.approx(2 * math.pi * 10000 ** (7 / 8))
        assert before["beyond_window"] == [3, 4, 5, 6, 7]


def test_smollm2s_geometry_by_hand(llama: Path, tmp_path: Path) -> None:
    config = {**read_config(llama), "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    config |= {"head_dim": 64, "rope_theta": 1e5, "rope_parameters": None, "max_position_embeddings": 8192}
    write_config(tmp_path, config)
    answer = inspect_checkpoint(tmp_path)
    # 32 ln(8192 / 2 pi) / ln(1e5) = 19.94: pair 20 is the first that never completes a turn
    assert answer["wavelengths"]["after"]["beyond_window"] == list(range(20, 32))
    assert answer["wavelengths"]["count"] == 32 and answer["rotary_dim"] == answer["head_dim"] == 64
    assert answer["weights"]["problem"].startswith(f"{tmp_path} has neither")


def test_the_weights_are_counted_from_their_headers(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    weights = inspect_checkpoint(tmp_path)["weights"]
    assert weights["dtypes"] == ["BF16"] and weights["tensors"] == len(model.state_dict())
    assert weights["files"][0] == "model.safetensors.index.json" and len(weights["files"]) > 2
    assert weights["bytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors*"))


@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
def test_floats_are_read_as_they_were_written(kind: str, tmp_path: Path) -> None:
    values = np.linspace(-2, 3, 7).astype(kind)
    save_file({"before": np.zeros(3, dtype="int8"), "values": values}, tmp_path / "a.safetensors")
    headers = read_headers(tmp_path / "a.safetensors")
    assert headers["values"].shape == (7,)
    read = read_floats(headers["values"])
    assert read is not None
    np.testing.assert_array_equal(read, values.astype("float64"))
    assert read_floats(headers["before"]) is None


def test_bfloat16_is_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    values = torch.linspace(-2, 3, 7).bfloat16()
    save_torch({"values": values}, tmp_path / "a.safetensors")
    read = read_floats(read_headers(tmp_path / "a.safetensors")["values"])
    assert read is not None
    np.testing.assert_array_equal(read, values.double().numpy())


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", b"\x02" + bytes(9)])
def test_what_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        read_headers(tmp_path / "a.safetensors")


def test_provenance_keeps_its_history(llama: Path, tmp_path: Path) -> None:
    patch_checkpoint(llama, tmp_path / "one", method="ntk", length=256, verify=False)
    patch_checkpoint(tmp_path / "one", tmp_path / "two", method="ntk", length=LENGTH, verify=False)
    answer = inspect_checkpoint(tmp_path / "two")
    assert [step["length"] for step in answer["provenance"]["history"]] == [256]
    assert answer["wavelengths"]["before"]["longest"] == pytest.approx(2 * math.pi * 10000 ** (7 / 8))
    text = render_inspect(answer)
    assert "ntk to 256 tokens" in text and "ntk to 512 tokens" in text


def test_limits_and_sliding_windows(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    patch_checkpoint(tiny_source("gemma3_text"), tmp_path / "out", method="linear", length=LENGTH, verify=False)
    (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 300}))
    answer = inspect_checkpoint(tmp_path / "out")
    assert (answer["tokenizer_limit"], answer["sliding_window"]) == (300, 32)
    assert answer["model_type"] == "gemma3_text"


def test_an_ambiguous_length_is_said(llama: Path, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    write_config(tmp_path, {**read_config(llama), "rope_scaling": scaling, "rope_parameters": None})
    answer = inspect_checkpoint(tmp_path)
    assert "--original-length" in answer["ambiguity"] and answer["length"] == WINDOW
    assert "ambiguous" in render_inspect(answer)


def test_every_loader_is_named_with_its_version(llama: Path, tmp_path: Path) -> None:
    patch_checkpoint(llama, tmp_path / "out", method="dynamic", length=LENGTH, verify=False)
    answer = inspect_checkpoint(tmp_path / "out")
    names = [reading["loader"] for reading in answer["loaders"]]
    assert [name.rsplit(" ", 1)[0] for name in names] == [
        "transformers",
        "transformers",
        "vLLM",
        "llama.cpp conversion",
    ]
    text = render_inspect(answer)
    assert text.count("NOT SUPPORTED") == 2 and f"--max-model-len {LENGTH} --hf-overrides '{{" in text
    assert all(len(line) <= 118 for line in text.splitlines() if "--hf-overrides" not in line and "/" not in line)


def test_the_command_prints_one_json_document_and_imports_neither_torch_nor_transformers(
    llama: Path, tmp_path: Path
) -> None:
    patch_checkpoint(llama, tmp_path / "out", method="yarn", length=LENGTH, verify=False)
    code = (
        "import sys; from ctxext.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "assert not {'torch', 'transformers', 'safetensors'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(tmp_path / "out"), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == inspect_checkpoint(tmp_path / "out")


def test_what_is_no_checkpoint_ends_with_two(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ctxext", "inspect", str(tmp_path), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "has no config.json" in done.stderr
