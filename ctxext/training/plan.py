"""Predict the peak memory of training on each device: one formula, its terms named; nothing is run.

Legend: N tokens a device reads at once (batch x length), D width, I inner width, Q query heads x head dimension,
K the same of the keys, h query heads, V vocabulary, n layers, P parameters, T trained ones, G devices. Training runs
in bfloat16 (2 bytes) with AdamW. Sources:

- *weights, gradients, optimizer*: ZeRO (arXiv 1910.02054, section 3) for DeepSpeed: 2 P, 2 T and 12 T bytes (float32
  master, two moments), divided by G from stage 3, 2 and 1 on. Trainer without DeepSpeed (stage 0) keeps both moments
  in the weights' dtype and no master: 4 T. LoRA's adapters, their gradients and moments are float32 (peft's
  `autocast_adapter_dtype`): 4 + 4 + 8. QLoRA: NF4 with double quantization, as the recipe loads it: 0.5 bytes, a scale
  of one byte for each 64 numbers, and a float32 for each 256 scales (arXiv 2305.14314, section 3).
- *activations*: what autograd keeps of a transformers decoder layer in bfloat16, tensor by tensor (`layer_bytes`).
- *logits*: bfloat16, log-probabilities, and two gradients in float32 (14 V bytes a token) for the plain loss;
  12 V for a chunk, and the head's gradient, summed in float32, kept in bfloat16 from the forward on.
- *workspace*: the gradients alive inside a layer's backward, and under recomputation that layer's own activations.
- *buckets*: DeepSpeed's `reduce_bucket_size` and `allgather_bucket_size` (5e8 numbers), ZeRO-3's
  `stage3_max_live_parameters` (1e9), DDP's copy of the gradients.
- *base*: CUDA context and libraries, or a Python process with torch, transformers and accelerate imported.
- *allocator*: a tenth of all that comes and goes (activations, logits, workspace): cached or fragmented blocks. On a
  CPU this holds where freed blocks go back to the system, as the preset `lean` sees to; by itself glibc keeps more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ctxext.training.plan_shape import ModelShape

Method = Literal["full", "lora", "qlora"]
Recompute = Literal["nothing", "cheap", "layers"]
Device = Literal["cuda", "cpu"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
DEFAULT_RANK = 8  # LongLoRA (arXiv 2309.12307): q, k, v, o at rank 8
BASE = {"cuda": 0.8e9, "cpu": 0.55e9}
NF4_BYTES = 0.5 + (1 + 4 / 256) / 64
BUCKET_NUMBERS, LIVE_NUMBERS = 5e8, 1e9
ALLOCATOR_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train.

    Attributes:
        method: `full`, `lora` (attention projections) or `qlora`.
        stage: ZeRO stage; 0 is Trainer alone, or DDP on several devices.
        recompute: `nothing`, `cheap` or `layers`: the presets' word.
        chunk_tokens: Tokens whose logits exist at once; None for all.
        offload: `none`, `activations` (checkpoints to the host), `optimizer`, or `all` (optimizer and weights).
    """

    method: Method
    stage: int
    recompute: Recompute
    chunk_tokens: int | None
    offload: Literal["none", "activations", "optimizer", "all"] = "none"


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much is trained: `length` and `batch` of one device, `gpus` devices, LoRA's `rank`, the kind of device."""

    length: int
    batch: int = 1
    gpus: int = 1
    rank: int = DEFAULT_RANK
    device: Device = "cuda"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Bytes of one device: the terms as they stand at the peak, and what the host holds for it (`host`)."""

    weights: float
    optimizer: float
    gradients: float
    activations: float
    logits: float
    workspace: float
    buckets: float
    base: float
    allocator: float
    peak: float
    host: float
    moment: str


def layer_bytes(shape: ModelShape, method: Method, recompute: str, rank: int = DEFAULT_RANK) -> float:
    """Return the bytes that a layer keeps a token between its forward and its backward.

    Full, nothing recomputed: each norm its float32 input, scale, bfloat16 normalized value and output (8D + 4, twice);
    rotated queries, keys, values and attention's output (4Q + 4K) with its log-sum (4h); the gate, its activation,
    the up projection and their product (8I). LoRA keeps no input of a frozen matrix or norm weight, but a float32 copy
    of the input of each adapter (4D for q, k, v and 4Q for o) and what its first matrix makes (4r each).
    Cheap recomputed: the layer's input and the output of every matrix product and attention. Layers: the input.
    """
    attention = 4 * shape.query_width + 4 * shape.key_width + 4 * shape.query_heads
    adapters = 0 if method == "full" else 4 * 4 * rank
    if recompute == "layers":
        return 2 * shape.width
    if recompute == "cheap":
        products = 2 * (shape.query_width + 2 * shape.key_width + 2 * shape.width + 2 * shape.inner)
        second = 0 if method == "full" else 4 * (shape.query_width + 2 * shape.key_width + shape.width)
        kept_attention = 2 * shape.query_width + 4 * shape.query_heads
        return 2 * shape.width + products + kept_attention + adapters + second
    if method == "full":
        return 16 * shape.width + 8 + attention + 8 * shape.inner
    return 8 * shape.width + 8 + attention + 6 * shape.inner + 12 * shape.width + 4 * shape.query_width + adapters


def trained_parameters(shape: ModelShape, method: Method, rank: int) -> float:
    """Return T: all of them, or the adapters' `rank x (inputs + outputs)`."""
    return shape.parameters if method == "full" else rank * sum(a + b for a, b in shape.attention_matrices)


def predict(shape: ModelShape, setting: Setting, load: Load) -> Prediction:
    """Return the predicted peak of one device.

    Raises:
        ValueError: If the setting cannot be: offload without its stage, quantized weights under ZeRO-3.
    """
    _check(setting)
    tokens = load.batch * load.length
    states = _states(shape, setting, load)
    kept = tokens * (
        shape.layers * layer_bytes(shape, setting.method, setting.recompute, load.rank) + 10 * shape.width
    )
    on_host = 0.0
    if setting.offload == "activations":
        on_host = tokens * shape.layers * 2.0 * shape.width
        kept -= on_host
    logits, head_gradient = _logits(shape, setting, tokens)
    workspace = 1.0 * tokens * (6 * shape.inner + 8 * shape.width)
    if setting.recompute != "nothing":
        again = layer_bytes(shape, setting.method, "nothing", load.rank)
        if setting.recompute == "cheap":  # what is kept is not computed again
            again -= layer_bytes(shape, setting.method, "cheap", load.rank) - 2 * shape.width
        workspace += tokens * again
    if setting.method == "qlora":
        workspace += 2 * shape.largest_matrix
    one_layer = kept / max(shape.layers, 1)
    moments = {
        "loss": (0.0, kept, logits, 0.0),
        "backward of the last layer": (head_gradient, kept, 0.0, workspace),
        "backward of the first layer": (states["gradients"], one_layer, 0.0, workspace),
        "optimizer step": (states["gradients"] + states["step"], 0.0, 0.0, 0.0),
    }
    moment, (gradients, activations, loss, space) = max(moments.items(), key=lambda item: sum(item[1]))
    allocator = ALLOCATOR_SHARE * (activations + loss + space)
    fixed = states["weights"] + states["optimizer"] + states["buckets"] + BASE[load.device]
    return Prediction(
        weights=states["weights"],
        optimizer=states["optimizer"],
        gradients=gradients,
        activations=activations,
        logits=loss,
        workspace=space,
        buckets=states["buckets"],
        base=BASE[load.device],
        allocator=allocator,
        peak=fixed + gradients + activations + loss + space + allocator,
        host=on_host + states["host"],
        moment=moment,
    )


def _check(setting: Setting) -> None:
    if setting.offload in ("optimizer", "all") and setting.stage < (3 if setting.offload == "all" else 1):
        needed = "ZeRO-3" if setting.offload == "all" else "ZeRO-1 or more"
        raise ValueError(f"offload={setting.offload!r} needs {needed}, not stage {setting.stage}")
    if setting.offload == "activations" and setting.recompute != "layers":
        raise ValueError(f"offload='activations' needs recompute='layers', not {setting.recompute!r}")
    if setting.method == "qlora" and setting.stage == 3:
        raise ValueError("qlora cannot be partitioned by ZeRO-3: bitsandbytes packs its weights; use stage 0 to 2")


def _states(shape: ModelShape, setting: Setting, load: Load) -> dict[str, float]:
    """Return the bytes of weights, gradients, optimizer, its step, buckets, and what the host holds of them."""
    trained, devices = trained_parameters(shape, setting.method, load.rank), load.gpus
    full = setting.method == "full"
    weights = 2.0 * shape.parameters
    if setting.method == "qlora":
        weights -= (2 - NF4_BYTES) * shape.linear_parameters
    number = 2.0 if full else 4.0
    weights += 0.0 if full else 4.0 * trained
    moments = 2 * number if setting.stage == 0 else 12.0
    shares = [devices if setting.stage >= stage else 1 for stage in (3, 2, 1)]
    weights, gradients, optimizer = (
        weights / shares[0],
        number * trained / shares[1],
        moments * trained / shares[2],
    )
    buckets, host = 0.0, 0.0
    if setting.stage == 0 and devices > 1:
        buckets = number * trained
    elif setting.stage > 0:
        buckets = number * min(trained, BUCKET_NUMBERS)
    if setting.stage == 3:
        buckets += 2 * min(shape.parameters, LIVE_NUMBERS)
    step = 4 * trained / devices if setting.stage else 0.0  # the gradients of the own share in float32
    if setting.offload in ("optimizer", "all"):
        host, optimizer, step = optimizer + step, 0.0, 0.0
    if setting.offload == "all":
        host, weights = host + weights, 0.0
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "step": step,
        "buckets": buckets,
        "host": host,
    }


def _logits(shape: ModelShape, setting: Setting, tokens: int) -> tuple[float, float]:
    """Return the bytes at the worst moment of the loss, and those of the head's gradient that then waits."""
    full = setting.method == "full"
    if setting.chunk_tokens is None:
        return 14.0 * shape.vocabulary * tokens, 2.0 * shape.head_parameters if full else 0.0
    chunk = 12.0 * shape.vocabulary * min(setting.chunk_tokens, tokens)
    sums = 6.0 * shape.head_parameters if full else 0.0  # the float32 sum and one chunk's or the rounded one
    return chunk + sums, 2.0 * shape.head_parameters if full else 0.0
