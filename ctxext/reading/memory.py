"""A memory of past keys and values at every layer, read together with the window.

Random-access reading gives the reader a memory (arXiv 2405.13216, section 3, "Working with Memory Mechanism"): past
keys and values of every layer, of which each query and head retrieves the k best among the window's keys and the
remembered ones together (Attendre, arXiv 2401.04881). Which keys are the best is found by scoring all of them, or by
an index of them (`ctxext.reading.memory_index`). The oldest are evicted first, or the least attended
(`ctxext.reading.memory_state`). A gate by head, that mixes attention to the window with attention to the memory
instead, is Memorizing Transformers' (arXiv 2203.08913, section 3.2).

Positions. A remembered key was rotated by a position in a window that is gone, and true distances outgrow what the
model was trained on. Keys are therefore stored without their rotation, and are read as if all of them stood at one
position: the one right before the row's first token of the window. A query p tokens into the window (p = 0 is the
first) is then p + 1 from everything remembered: within a window of L tokens no distance is above L, whatever was read
before; remembered keys are told apart by what they say, not by when they were said; and, unlike at the window's first
position itself (Focused Transformer, arXiv 2307.03170), none takes the place of the window's own first token. The
stored key is k = R(-p) k_rotated / a^2 with the cosines and sines of the forward pass, where a^2 = cos^2 + sin^2:
under YaRN and LongRoPE these are scaled by the attention factor a, which must not pile up. Reading it multiplies by a
again, so that memory and window share one temperature. A sliding window of the model's own hides keys of the window,
never the memory. `MemoryConfig.distance` puts the memory further away.

Memory and gradients. What is remembered is detached: gradients flow through the window, the queries and the gate.
Each forward pass reads the memory as it was when the pass began, also where layers run again in the backward pass
(gradient checkpointing).

Waiting to attend. In Attendre queries wait in a memory of their own and attend when they are evicted from it, so that
they read keys of tokens behind theirs, as an encoder's do. A causal model predicts the next token from every query's
output, and layers pass on what they read: if any layer let a query wait, predictions would see their targets. Here a
window is therefore read twice. The first reading is causal, and alone predicts. In the
second each query sees the next `wait` tokens of the window too; its keys and values are what is remembered, and
nothing else of it is used. Later windows alone read them, whose targets all lie behind the window. Nothing trains the
second reading itself, as what is remembered is detached: the model learns to read what it gives.

    memory = add_memory(model, MemoryConfig(size=1536, top_k=128))
    for windows in server:  # of rows of one document each
        memory.reset([window.fresh for window in windows])
        model(input_ids, attention_mask=attention_mask)  # reads the memory, then appends the window
    with memory.frozen():
        model.generate(prompt)  # reads, and appends nothing
    memory.remove()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import nn
from transformers.cache_utils import Cache

from ctxext.reading.memory_attention import GATE, NAME
from ctxext.reading.memory_index import faiss
from ctxext.reading.memory_pass import Reading
from ctxext.reading.memory_state import EVICTIONS, Remembered

INDEXES = ("exact", "approximate")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_GATE_START = -3.0  # sigmoid 0.05: a pretrained model begins nearly as it was, and the gate still has a gradient


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What is remembered and how it is read.

    Attributes:
        size: Tokens that each row remembers at most, at every layer.
        top_k: Keys that a query reads, by head: the best-scoring of the window's visible ones and the remembered ones
            together; of equal scores the most recent keys. None: all of them. With a gate: of the remembered ones.
        gate: Whether a learned gate by head mixes two attentions, g * memory + (1 - g) * window; the window is then
            read in full.
        sinks: The first tokens of each document, which are never evicted; part of `size`.
        distance: Of the remembered keys' one position from the window's first token, in tokens. 1 keeps within the
            window's own distances; a model trained on longer ones may read the memory better from further away.
        offload: Whether the memory lies in the CPU's memory and is copied to the device layer by layer.
        eviction: What goes when the memory is full: `fifo`, the oldest; `lra`, the least recently attended; `lfa`, the
            least frequently attended. See `ctxext.reading.memory_state`.
        index: `exact`, every remembered key is scored, or `approximate`, those that an index finds (faiss, on the CPU;
            extra `read`): for memories of many thousands of tokens. Needs `top_k`.
        probed: Share of the index's cells that a query looks into: recall against time. 1 finds what `exact` does.
        wait: Tokens that a query waits for before it attends, when a window is read a second time to be remembered; 0
            remembers the first reading. A window then costs two forward passes.
    """

    size: int = 1536
    top_k: int | None = None
    gate: bool = False
    sinks: int = 0
    distance: int = 1
    offload: bool = False
    eviction: str = "fifo"
    index: str = "exact"
    probed: float = 0.0625
    wait: int = 0

    def __post_init__(self) -> None:
        wrong = []
        if self.size < 1:
            wrong.append(f"size {self.size} must be at least 1 token")
        if self.top_k is not None and self.top_k < 1:
            wrong.append(f"top_k {self.top_k} must be at least 1 key, or None to read all")
        if not 0 <= self.sinks < max(self.size, 1):
            wrong.append(f"sinks {self.sinks} must be 0 or more, and fewer than size {self.size}")
        if self.distance < 1:
            wrong.append(f"distance {self.distance} must be at least 1 token: 0 is the window's own first position")
        if self.eviction not in EVICTIONS:
            wrong.append(f"eviction {self.eviction!r} is none of {', '.join(EVICTIONS)}")
        if self.index not in INDEXES:
            wrong.append(f"index {self.index!r} is none of {', '.join(INDEXES)}")
        if self.index == "approximate" and self.top_k is None:
            wrong.append("index 'approximate' needs top_k, how many keys it is to find")
        if not 0 < self.probed <= 1:
            wrong.append(f"probed {self.probed} must be above 0, and 1 at most")
        if self.wait < 0:
            wrong.append(f"wait {self.wait} must be 0 or a number of tokens")
        if wrong:
            raise ValueError("; ".join(wrong))


class Memory:
    """The memory of a model; `add_memory` makes it.

    With a KV cache, as in generation, the forward pass that begins the cache (the prompt) is a window like any other;
    those that continue it attend to the cache and to the memory as the prompt found it, and append nothing.

    Args:
        model: It is changed in place.
        config: What is remembered and how it is read.

    Raises:
        ValueError: If the model is of no family that `add_memory` takes, or an approximate index lacks its library.

    Attributes:
        remembered: What the rows of a batch remember. It never changes in place: a training loop that reads several
            batches in turn, as with gradient accumulation, keeps one for each and puts it here before it reads on.
    """

    def __init__(self, model: nn.Module, config: MemoryConfig) -> None:
        if config.index == "approximate":
            faiss()
        self.model, self.config = model, config
        self._decoder = _decoder_of(model)
        self._attentions = [layer.self_attn for layer in self._decoder.layers]
        self.remembered: Remembered | None = None
        self._frozen = False
        self._reading: Reading | None = None
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = (), {}  # of the decoder
        self._waiting = False  # the window is being read the second time
        self._begun: WeakKeyDictionary[Any, Reading] = WeakKeyDictionary()
        self._attention_before = self._decoder.config._attn_implementation
        self._decoder.set_attn_implementation(NAME)
        if config.gate:
            for attention in self._attentions:
                weight = attention.o_proj.weight
                start = weight.new_full((self._decoder.config.num_attention_heads,), _GATE_START)
                attention.register_parameter(GATE, nn.Parameter(start))
        self._hooks = [
            self._decoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._decoder.rotary_emb.register_forward_hook(self._place, with_kwargs=True),
            self._decoder.register_forward_hook(self._end),
        ]

    @property
    def tokens(self) -> list[int]:
        """Tokens that each row remembers; empty before anything is read."""
        return [] if self.remembered is None else self.remembered.valid.sum(dim=1).tolist()

    def reset(self, rows: Sequence[bool] | torch.Tensor | None = None) -> None:
        """Forget: what a row that begins a new document must do first.

        Args:
            rows: `(batch,)`, true for the rows that forget. None: all of them, and the next batch may have any size.

        Raises:
            ValueError: If there is not one for every row.
        """
        if rows is None:
            self.remembered = None
            return
        if self.remembered is None:
            return
        valid = self.remembered.valid
        forget = torch.as_tensor(rows, device=valid.device)
        if forget.dtype != torch.bool or forget.shape != valid.shape[:1]:
            raise ValueError(f"rows must be {len(valid)} of true and false, one for each row, not {rows}")
        self.remembered = self.remembered.forget(forget)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within it, forward passes read the memory and append nothing."""
        before, self._frozen = self._frozen, True
        try:
            yield
        finally:
            self._frozen = before

    def load_gates(self, folder: str | Path) -> None:
        """Read the gates that `save_pretrained` wrote beside the other weights, which stock loading leaves out.

        Args:
            folder: A checkpoint with safetensors files.

        Raises:
            ValueError: If a gate of this model is not there or has another shape; then none is changed.
        """
        gates = {name: value for name, value in self.model.named_parameters() if name.endswith(f".{GATE}")}
        found: dict[str, torch.Tensor] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys() if name in gates}
        wrong = [name for name, gate in gates.items() if name not in found or found[name].shape != gate.shape]
        if wrong or not gates:
            reason = f"has no gates that fit {', '.join(wrong)}" if gates else "gates need MemoryConfig(gate=True)"
            raise ValueError(f"{folder}: {reason}")
        with torch.no_grad():
            for name, gate in gates.items():
                gate.copy_(found[name])

    def remove(self) -> None:
        """Give the model back as it was, without hooks and gates; a second time does nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._decoder.set_attn_implementation(self._attention_before)
        for attention in self._attentions if self.config.gate else ():
            delattr(attention, GATE)
        self.reset()

    def _begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give a forward pass its reading; transformers hands the keyword on to every layer's attention."""
        if self._waiting:
            return None
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        if cache is None or int(cache.get_seq_length()) == 0:
            mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
            self._reading = Reading(self.config, self.remembered, not self._frozen, mask)
        elif cache in self._begun:
            begun = self._begun[cache]
            self._reading = Reading(self.config, begun.remembered, False, before=begun.before)
        else:
            raise ValueError("this cache was not begun with the memory: begin with an empty one, and do not copy it")
        if self.config.wait and self._reading.appends:
            self._call = args, kwargs
        return args, {**kwargs, "reading": self._reading}

    def _place(self, rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], window: Any) -> None:
        if self._reading is not None and self._reading.before is None:
            self._reading.window = window
            positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
            self._reading.place(rotary, args[0], positions)

    def _end(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._waiting:
            return
        reading, self._reading = self._reading, None
        assert reading is not None
        if reading.appends:
            kept = self._read_again(reading) if self.config.wait else reading
            with torch.inference_mode(False), torch.no_grad():  # what inference remembers, training may read
                self.remembered = kept.append()
        reading.finish()
        values = output if isinstance(output, tuple) else output.values()
        cache = next((value for value in values if isinstance(value, Cache)), None)
        if cache is not None and reading.real is not None:  # it read a window, and does not continue one
            self._begun[cache] = reading

    def _read_again(self, reading: Reading) -> Reading:
        """Read the window a second time, by queries that have waited; return that reading."""
        again = reading.again()
        (args, kwargs), self._call = self._call, ((), {})
        tokens = reading.window[0].shape[1] if reading.window is not None else 0
        args = tuple(None if isinstance(value, Cache) else _of_window(value, tokens) for value in args)
        kwargs = {name: _of_window(v, tokens) for name, v in kwargs.items() if not isinstance(v, Cache)}
        self._waiting = True
        try:
            with torch.no_grad():
                self._decoder(*args, **{**kwargs, "use_cache": False, "reading": again})
        finally:
            self._waiting = False
        return again


def _of_window(value: Any, tokens: int) -> Any:
    """Return a mask of queries by keys, or one for each kind of layer, without the keys of an empty static cache."""
    if isinstance(value, dict):
        return {kind: _of_window(mask, tokens) for kind, mask in value.items()}
    return value[..., :tokens] if isinstance(value, torch.Tensor) and value.ndim == 4 else value


def _decoder_of(model: nn.Module) -> Any:
    """Return the module that has the layers.

    Raises:
        ValueError: If the model is of no family whose memory is known to be right, or has a memory.
    """
    decoder = next((part for part in model.modules() if hasattr(part, "rotary_emb") and hasattr(part, "layers")), None)
    family = getattr(getattr(decoder, "config", None), "model_type", type(model).__name__)
    if decoder is None or family not in FAMILIES:
        raise ValueError(f"a memory can be added to {', '.join(FAMILIES)}, not to {family!r}")
    if decoder.config._attn_implementation == NAME:  # type: ignore[union-attr]
        raise ValueError("the model has a memory already: remove() it first")
    return decoder


def add_memory(model: nn.Module, config: MemoryConfig) -> Memory:
    """Give a RoPE model a memory, in place; no forward pass is replaced.

    Without a gate the model's state is unchanged, and what `save_pretrained` writes is a plain checkpoint. Gates are
    parameters `memory_gate` of the attention modules: they train and are saved with the rest. Stock transformers loads
    such a checkpoint too, and reports them as weights that it does not use; `Memory.load_gates` reads them.

    Args:
        model: A llama, mistral, qwen2 or qwen3 of transformers.
        config: What is remembered and how it is read.

    Returns:
        The memory, empty; `remove` undoes this.

    Raises:
        ValueError: If the model is of another family, or has a memory already.
    """
    return Memory(model, config)
