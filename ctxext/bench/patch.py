"""`ctxext bench patch`: patch a sharded 10 GB checkpoint by hard links; its shards are sparse, their headers real."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from ctxext.bench.measure import interleave, machine, summarize
from ctxext.checkpoint.files import write_json

WIDTH, INNER, LAYERS, VOCABULARY, WINDOW = 4096, 11008, 24, 32000, 4096
SHARDS = 6
BYTES_PER_NUMBER = 2  # bfloat16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": WINDOW,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def tensors() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a LLaMA of about 5 billion parameters."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (WIDTH, INNER)
        shapes |= {f"{prefix}.{name}.weight": (WIDTH,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {**shapes, "model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}


def write_sparse_checkpoint(folder: Path) -> int:
    """Write a sharded checkpoint whose weights take no room on the disk; return its size in bytes."""
    folder.mkdir(parents=True)
    shapes = list(tensors().items())
    per_shard = -(-len(shapes) // SHARDS)
    weight_map, total = {}, 0
    for number in range(SHARDS):
        name = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        header, offset = {}, 0
        for tensor, shape in shapes[number * per_shard : (number + 1) * per_shard]:
            size = BYTES_PER_NUMBER
            for dimension in shape:
                size *= dimension
            header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
            weight_map[tensor] = name
            offset += size
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            file.truncate(8 + len(encoded) + offset)
        total += offset
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", CONFIG)
    return total


def bench_patch(rounds: int) -> dict[str, Any]:
    """Time the whole command, with and without building the result in stock transformers."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".ctxext-bench-") as scratch:
        source = Path(scratch) / "source"
        size = write_sparse_checkpoint(source)
        sides = {
            "patch --link hard": _command(source, Path(scratch) / "verified"),
            "patch --link hard --no-verify": [*_command(source, Path(scratch) / "plain"), "--no-verify"],
        }
        samples = interleave(sides, rounds, "patch")
        shutil.rmtree(source)
    return {
        "bench": "patch",
        "what": f"whole command on a checkpoint of {size / 1e9:.1f} GB in {SHARDS} shards (sparse files)",
        "machine": machine(),
        "sides": {name: summarize(runs) for name, runs in samples.items()},
        "targets": {"seconds": 3.0, "peak_mb": 600},
    }


def _command(source: Path, output: Path) -> list[str]:
    options = ["--method", "yarn", "--length", str(4 * WINDOW), "--link", "hard", "--force"]
    return [sys.executable, "-m", "ctxext", "patch", str(source), str(output), *options]
