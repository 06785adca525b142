"""A reader with a memory in float64, one row, head, query and key at a time, from the formulas and without ctxext.

And the tiny models and the batches that it is compared on.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from helpers import stock, tiny_model
from torch.nn.functional import silu

Vector = torch.Tensor
Pair = tuple[list[Vector], list[Vector]]  # the key and the value of a token, one for each key head

VOCABULARY, DIM = 97, 8
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def model_of(family: str = "llama", rope: dict[str, Any] = PLAIN, **more: Any) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 32, "head_dim": DIM, "initializer_range": 0.3}
    return tiny_model(family, rope_theta=None, rope_parameters=dict(rope), **{**shape, **more}).double()


def turning(rope: dict[str, Any]) -> dict[str, Any]:
    """Frequencies and attention factor, without the model."""
    if rope["rope_type"] == "default":
        return {"inv_freq": [10000.0 ** (-2 * j / DIM) for j in range(DIM // 2)]}
    more = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    frequencies, factor = stock(rope["rope_type"], DIM, rope["rope_theta"], 128, **more)
    assert factor > 1.1  # the factor matters
    return {"inv_freq": frequencies, "factor": factor}


def draw(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for row, tokens in enumerate(rows):
        place = slice(length - len(tokens), None) if side == "left" else slice(0, len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(tokens), 1
    return ids, mask


def cached(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword for a cache, which transformers 5.24 renamed."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def attend_one(
    query: Vector, keys: list[Vector], values: list[Vector], top_k: int | None, attended: set[int] | None = None
) -> Vector:
    """What one query of one head reads of the keys, which are given oldest first; which of them it attends."""
    scores = [torch.dot(query, key) / math.sqrt(len(query)) for key in keys]
    ranking = sorted(range(len(keys)), key=lambda place: (scores[place].item(), place), reverse=True)
    chosen = ranking[:top_k]
    weights = torch.softmax(torch.stack([scores[place] for place in chosen]), dim=0)
    if attended is not None:
        attended |= {place for weight, place in zip(weights, chosen, strict=True) if weight * len(chosen) >= 0.999}
    return sum(weight * values[place] for weight, place in zip(weights, chosen, strict=True))


class Token:
    """A token of one layer's memory, with the number of the query that last attended it, and of all that did."""

    def __init__(self, pair: Pair, now: int) -> None:
        self.key, self.value = ([state.detach() for state in states] for states in pair)
        self.last, self.hits, self.kept_from = now, 0, 0


class ReferenceReader:
    """A llama, mistral, qwen2 or qwen3 whose rows each read windows of their own, without padding."""

    def __init__(
        self,
        model: Any,
        *,
        size: int,
        inv_freq: Any,
        top_k: int | None = None,
        sinks: int = 0,
        gate: bool = False,
        distance: int = 1,
        factor: float = 1.0,
        eviction: str = "fifo",
        wait: int = 0,
        **how_keys_are_found: Any,
    ) -> None:
        self.eviction, self.wait = eviction, wait
        self.queries: dict[int, int] = {}  # that each row has read with
        self.config, self.size, self.top_k, self.sinks, self.gate = model.config, size, top_k, sinks, gate
        self.inv_freq, self.factor = torch.as_tensor(inv_freq, dtype=torch.float64), factor
        self.weights = {name: p.detach().double().clone().requires_grad_() for name, p in model.named_parameters()}
        self.sliding = model.config.sliding_window if model.config.model_type == "mistral" else None
        self.distance = distance
        self.memory: dict[int, list[list[Token]]] = {}

    def forget(self, row: int) -> None:
        self.memory.pop(row, None)
        self.queries.pop(row, None)

    def read(self, row: int, tokens: list[int], start: int, append: bool = True) -> torch.Tensor:
        """Logits `(tokens, vocabulary)` of a window whose first token stands at `start`."""
        remembered = self.memory.setdefault(row, [[] for _ in range(self.config.num_hidden_layers)])
        begun = self.queries.get(row, 0) if append else None
        hidden, added = self._layers(tokens, start, remembered, begun, 0)
        if begun is not None:
            if self.wait:
                added = self._layers(tokens, start, remembered, None, self.wait)[1]
            self.queries[row] = begun + len(tokens)
            for layer, pairs in enumerate(added):
                self._remember(remembered[layer], pairs, begun)
        states = [self._norm(state, self.weights["model.norm.weight"]) for state in hidden]
        return torch.stack([self.weights["lm_head.weight"] @ state for state in states])

    def _layers(
        self, tokens: list[int], start: int, remembered: list[list[Token]], begun: int | None, ahead: int
    ) -> tuple[list[Vector], list[list[Pair]]]:
        hidden, added = [self.weights["model.embed_tokens.weight"][token] for token in tokens], []
        for layer in range(self.config.num_hidden_layers):
            hidden, pairs = self._layer(layer, hidden, start, remembered[layer], begun, ahead)
            added.append(pairs)
        return hidden, added

    def _remember(self, memory: list[Token], pairs: list[Pair], begun: int) -> None:
        new = [Token(pair, begun + place) for place, pair in enumerate(pairs)]
        memory += new
        now = begun + len(pairs)
        while len(memory) > self.size:
            evictable = [token for token in memory[self.sinks :] if token not in new] or memory[self.sinks :]
            worth = {
                "fifo": lambda token: 0,
                "lra": lambda token: token.last,
                "lfa": lambda token: token.hits / max(1, now - token.kept_from),
            }[self.eviction if evictable[0] not in new else "fifo"]
            memory.remove(min(evictable, key=worth))  # of equals the first
        for token in new:
            token.kept_from = now

    def _layer(
        self,
        layer: int,
        hidden: list[Vector],
        start: int,
        remembered: list[Token],
        begun: int | None,
        ahead: int,
    ) -> tuple[list[Vector], list[Pair]]:
        prefix = f"model.layers.{layer}."
        normed = [self._norm(state, self.weights[prefix + "input_layernorm.weight"]) for state in hidden]
        queries = [self._heads(prefix + "self_attn.q", state) for state in normed]
        pairs = [(self._heads(prefix + "self_attn.k", s), self._heads(prefix + "self_attn.v", s)) for s in normed]
        out = []
        for place, state in enumerate(hidden):
            heads = [
                self._read(prefix, head, query, place, start, pairs, remembered, begun, ahead)
                for head, query in enumerate(queries[place])
            ]
            state = state + self.weights[prefix + "self_attn.o_proj.weight"] @ torch.cat(heads)
            out.append(state + self._mlp(prefix, state))
        return out, pairs

    def _read(
        self,
        prefix: str,
        head: int,
        query: Vector,
        place: int,
        start: int,
        pairs: list[Pair],
        memory: list[Token],
        begun: int | None,
        ahead: int,
    ) -> Vector:
        shared = head // (self.config.num_attention_heads // self.config.num_key_value_heads)
        query = self._rotated(query, start + place)
        old = [self._rotated(token.key[shared], start - self.distance) for token in memory]
        last = min(place + ahead, len(pairs) - 1)
        visible = range(0 if self.sliding is None else max(0, place - self.sliding + 1), last + 1)
        new = [self._rotated(pairs[seen][0][shared], start + seen) for seen in visible]
        old_values = [token.value[shared] for token in memory]
        new_values = [pairs[seen][1][shared] for seen in visible]
        attended: set[int] = set()
        if not self.gate:
            out = attend_one(query, old + new, old_values + new_values, self.top_k, attended)
        else:
            out = window = attend_one(query, new, new_values, None)
        if self.gate and memory:
            share = 1 / (1 + torch.exp(-self.weights[prefix + "self_attn.memory_gate"][head]))
            out = share * attend_one(query, old, old_values, self.top_k, attended) + (1 - share) * window
        for number in attended if begun is not None else ():
            if number < len(memory):
                memory[number].hits += 1
                memory[number].last = begun + place
        return out

    def _heads(self, name: str, state: Vector) -> list[Vector]:
        projected = self.weights[name + "_proj.weight"] @ state
        if name + "_proj.bias" in self.weights:
            projected = projected + self.weights[name + "_proj.bias"]
        heads = list(projected.split(2 * len(self.inv_freq)))
        norm = self.weights.get(name + "_norm.weight")
        return heads if norm is None else [self._norm(head, norm) for head in heads]

    def _rotated(self, head: Vector, position: int) -> Vector:
        """Pairs of dimensions (j, j + d/2) as complex numbers, turned by position * theta_j."""
        half = len(head) // 2
        turn = torch.polar(torch.full_like(self.inv_freq, self.factor), position * self.inv_freq)
        turned = torch.complex(head[:half], head[half:]) * turn
        return torch.cat([turned.real, turned.imag])

    def _norm(self, state: Vector, weight: Vector) -> Vector:
        return weight * state / torch.sqrt((state * state).mean() + self.config.rms_norm_eps)

    def _mlp(self, prefix: str, state: Vector) -> Vector:
        normed = self._norm(state, self.weights[prefix + "post_attention_layernorm.weight"])
        gate, up, down = (self.weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ (silu(gate @ normed) * (up @ normed))
