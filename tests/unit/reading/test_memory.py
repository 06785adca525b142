"""The memory against a float64 reader that knows lists and formulas only, through real tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from helpers import tiny_model
from memory_reference import PLAIN, YARN, ReferenceReader, cached, draw, model_of, padded, turning
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache

import ctxext
from ctxext.reading.memory import FAMILIES, Memory, MemoryConfig, add_memory
from ctxext.reading.memory_attention import GATE

WINDOW, SIZE, TOP_K = 8, 16, 3  # k is below a quarter of the size
# Largest error of a logit, and of a gradient over its largest: transformers computes norms and angles in float32.
# Logits have a standard deviation above 1, and any change of the rule moves them by more than 0.01.
SAME = 2e-5


def remembering(model: Any, rope: dict[str, Any] = PLAIN, **options: Any) -> tuple[Memory, ReferenceReader]:
    memory = add_memory(model, MemoryConfig(**options))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith(GATE):  # each head elsewhere
            parameter.data += 3 + torch.randn(parameter.shape, generator=generator)
    return memory, ReferenceReader(model, **options, **turning(rope))


def read_both(model: Any, memory: Memory, reference: ReferenceReader, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both readers' logits of seven windows of three rows: the first reads to its end, the others begin anew within.

    The first row reads 56 tokens, so that a memory of 16 is wrapped around more than twice.
    """
    lengths = [(8, 5, 8), (8, 8, 2), (8, 3, 8), (8, 8, 1), (8, 6, 8), (8, 8, 0), (8, 1, 8)]
    live, wanted = [], []
    for number, counts in enumerate(lengths):
        fresh = [number == 0, number in (0, 4), number in (0, 1)]
        rows = [draw(count, 10 * number + row) for row, count in enumerate(counts)]
        ids, mask = padded(rows, side)
        memory.reset(fresh)
        logits = model(ids, attention_mask=mask).logits
        for row, tokens in enumerate(rows):
            if fresh[row]:
                reference.forget(row)
            start = WINDOW - len(tokens) if side == "left" else 0
            live.append(logits[row, mask[row].bool()])
            if not tokens:  # a window of padding alone
                continue
            wanted.append(reference.read(row, tokens, start))
    assert memory.tokens == [len(reference.memory[row][0]) for row in range(3)]
    return torch.cat(live), torch.cat(wanted)


CASES = {
    "llama": ("llama", "right", PLAIN, {"top_k": TOP_K, "sinks": 2}),
    "everything": ("llama", "left", PLAIN, {"distance": 5}),
    "mistral": ("mistral", "left", YARN, {"top_k": TOP_K}),
    "sliding": ("mistral", "right", PLAIN, {"top_k": TOP_K}),
    "qwen2": ("qwen2", "left", PLAIN, {"top_k": TOP_K, "gate": True}),
    "qwen3": ("qwen3", "right", YARN, {"top_k": TOP_K, "sinks": 3}),
    "gate": ("qwen3", "right", YARN, {"gate": True, "sinks": 1}),
    "lra": ("qwen3", "right", YARN, {"eviction": "lra", "sinks": 2}),
    "lfa": ("qwen3", "right", YARN, {"top_k": TOP_K, "eviction": "lfa"}),
    "lfa-gate": ("qwen2", "left", PLAIN, {"top_k": TOP_K, "eviction": "lfa", "gate": True, "sinks": 1}),
    "wait-lfa": ("mistral-sliding", "right", PLAIN, {"top_k": TOP_K, "wait": 9, "eviction": "lfa"}),
    "index": ("qwen3", "right", YARN, {"top_k": TOP_K, "sinks": 3, "index": "approximate", "probed": 1.0}),
    "index-gate-lra": (
        "llama",
        "left",
        PLAIN,
        {"top_k": TOP_K, "gate": True, "index": "approximate", "probed": 1.0, "eviction": "lra", "wait": 1},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_the_references(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxext.reading.memory_index.ALONE", 4)
    family, side, rope, options = CASES[case]
    family, _, slides = family.partition("-")
    sliding = {"sliding_window": 4} if slides or case == "sliding" else {}
    model = model_of(family, rope, **sliding).train()
    memory, reference = remembering(model, rope, size=SIZE, **options)
    live, wanted = read_both(model, memory, reference, side)
    assert wanted.std() > 1
    assert (live - wanted).abs().max() < SAME
    towards = torch.randn(live.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (live * towards).sum().backward()
    (wanted * towards).sum().backward()
    for name, parameter in model.named_parameters():
        grad, other = parameter.grad, reference.weights[name].grad
        assert other.abs().max() > 1e-3, name
        assert (grad - other).abs().max() < SAME * other.abs().max().clamp(min=1), name


def values_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """What the first layer remembers of tokens: values have no position."""
    layer = model.model.layers[0]
    return layer.self_attn.v_proj(layer.input_layernorm(model.model.embed_tokens(torch.tensor(tokens))))


@torch.no_grad()
def test_the_oldest_are_evicted_but_for_the_sinks_and_padding_is_never_remembered() -> None:
    model = model_of()
    memory = add_memory(model, MemoryConfig(size=5, sinks=2))
    for rows in ([[10, 11, 12], [20]], [[13, 14, 15], [21, 22]], [[16], [23, 24, 25]]):
        ids, mask = padded(rows, "left")
        model(ids, attention_mask=mask)
    assert memory.tokens == [5, 5]
    _, values = memory.remembered.layers[0]
    for row, kept in enumerate(([10, 11, 14, 15, 16], [20, 21, 23, 24, 25])):
        assert torch.allclose(values[row].transpose(0, 1).flatten(1), values_of(model, kept))


@torch.no_grad()
def test_a_mask_of_queries_by_keys_says_what_is_padding() -> None:
    ids, mask = padded([draw(8, 1), draw(3, 2)], "left")
    whole = torch.ones(8, 8, dtype=torch.bool).tril() & mask.bool()[:, None, None, :]
    read = []
    for given in (mask, whole):
        model = model_of()
        memory = add_memory(model, MemoryConfig(size=SIZE, top_k=TOP_K))
        read += [model(ids, attention_mask=given).logits[mask.bool()] for _ in range(2)]
        assert memory.tokens == [16, 6]
    assert (read[1] - read[3]).abs().max() < 1e-12
    with pytest.raises(ValueError, match="must be bool with a memory, not torch.float64"):
        model(ids, attention_mask=torch.zeros(2, 1, 8, 8, dtype=torch.float64))


@pytest.mark.parametrize("rope", [PLAIN, YARN, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}])
@torch.no_grad()
def test_stored_keys_are_what_the_projection_gave(rope: dict[str, Any]) -> None:
    model, ids = model_of(rope=rope), torch.tensor([draw(6, 1)])
    memory = add_memory(model, MemoryConfig(size=6))
    model(ids, position_ids=torch.arange(200, 206)[None])  # beyond the 128 where dynamic changes its base
    layer = model.model.layers[0]
    raw = layer.self_attn.k_proj(layer.input_layernorm(model.model.embed_tokens(ids)))
    key, _ = memory.remembered.layers[0]
    assert (key[0].transpose(0, 1).flatten(1) - raw[0]).abs().max() < 1e-5


@torch.no_grad()
def test_where_the_window_stands_does_not_matter() -> None:
    model = model_of()
    ids, again = torch.tensor([draw(8, 1)]), torch.tensor([draw(8, 2)])
    read = []
    for start in (0, 50):
        memory = add_memory(model, MemoryConfig(size=SIZE, top_k=TOP_K))
        model(ids)
        read.append(model(again, position_ids=torch.arange(start, start + 8)[None]).logits)
        memory.remove()
    assert (read[0] - read[1]).abs().max() < 1e-4  # the angles' float32 grows with the position
    assert (read[0] - model(again).logits).abs().max() > 0.1


@pytest.mark.parametrize("options", [{"top_k": TOP_K}, {"gate": True}], ids=["top_k", "gate"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_decoding_reads_the_cache_and_the_memory_as_the_prompt_found_it(kind: str, options: dict[str, Any]) -> None:
    model = model_of("qwen3", YARN)
    memory, reference = remembering(model, YARN, size=SIZE, **options)
    first, prompts = [draw(8, 1), draw(5, 2)], [draw(6, 3), draw(4, 4)]
    ids, mask = padded(first, "left")
    model(ids, attention_mask=mask)
    for row, tokens in enumerate(first):
        reference.read(row, tokens, 8 - len(tokens))
    ids, mask = padded(prompts, "left")
    cache = DynamicCache() if kind == "dynamic" else StaticCache(model.config, max_cache_len=16)
    logits = [model(ids, attention_mask=mask, **cached(model, cache)).logits[:, -1]]
    assert memory.tokens == [14, 9]  # the prompt was a window
    for step in range(4):
        token = torch.tensor([[30 + step], [40 + step]])
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
        logits.append(model(token, attention_mask=mask, **cached(model, cache)).logits[:, -1])
    assert memory.tokens == [14, 9]
    for row, prompt in enumerate(prompts):
        more = [30 + 10 * row + step for step in range(4)]
        wanted = reference.read(row, prompt + more, 6 - len(prompt), append=False)[-5:]
        assert (torch.stack(logits)[:, row] - wanted).abs().max() < SAME


@torch.no_grad()
def test_a_cache_that_is_emptied_begins_anew() -> None:
    model, ids, steps = model_of(), torch.tensor([draw(8, 1)]), []
    for used in (False, True):
        memory, cache = add_memory(model, MemoryConfig(size=SIZE)), StaticCache(model.config, max_cache_len=16)
        model(ids, **(cached(model, cache) if used else {}))
        cache.reset()
        model(ids, **cached(model, cache))
        steps.append(model(ids[:, :1], **cached(model, cache)).logits)
        memory.remove()
    assert (steps[0] - steps[1]).abs().max() < 1e-12


@torch.no_grad()
def test_generate_within_frozen_appends_nothing() -> None:
    model = model_of()
    memory = add_memory(model, MemoryConfig(size=SIZE, top_k=TOP_K))
    model(torch.tensor([draw(8, 1)]))
    prompt = torch.tensor([draw(5, 2)])
    with memory.frozen():
        generated = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert memory.tokens == [8]
        for end in range(5, 11):  # each token again without a cache
            logits = model(generated[:, :end], use_cache=False).logits[0, -1].index_fill(0, torch.tensor([2]), -1e9)
            assert int(logits.argmax()) == int(generated[0, end])
    model(prompt)
    assert memory.tokens == [13]


def test_gradient_checkpointing_reads_the_memory_that_was() -> None:
    windows, grads = [torch.tensor([draw(8, seed)]) for seed in range(4)], []
    for checkpointing in (False, True):
        model = model_of().train()
        if checkpointing:
            name = "activation_checkpointing_enable"  # from transformers 5.24
            (getattr(model, name, None) or model.gradient_checkpointing_enable)()
        memory = add_memory(model, MemoryConfig(size=SIZE, top_k=TOP_K))
        loss = sum(model(ids, labels=ids, use_cache=False).loss for ids in windows)
        loss.backward()
        assert memory.tokens == [SIZE]
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_empty_memory_changes_nothing_and_remove_leaves_nothing(family: str) -> None:
    model, ids = model_of(family), torch.tensor([draw(8, 1), draw(8, 2)])
    before, names, attention = model(ids).logits, list(model.state_dict()), model.config._attn_implementation
    memory = add_memory(model, MemoryConfig(gate=True))
    assert all(0.04 < torch.sigmoid(getattr(layer.self_attn, GATE)).max() < 0.05 for layer in model.model.layers)
    assert (model(ids).logits - before).abs().max() < 1e-12
    assert (model(ids).logits - before).abs().max() > 1e-3
    memory.reset()
    assert (model(ids[:1]).logits - before[:1]).abs().max() < 1e-12  # another batch size
    assert [n for n in model.state_dict() if n not in names] == [
        f"model.layers.{layer}.self_attn.{GATE}" for layer in range(2)
    ]
    memory.remove()
    memory.remove()
    assert torch.equal(model(ids).logits, before)
    assert (list(model.state_dict()), model.config._attn_implementation) == (names, attention)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def test_gates_are_saved_and_read_again_and_stock_loading_still_works(tmp_path: Path) -> None:
    model, windows = model_of(), [torch.tensor([draw(8, seed)]) for seed in range(3)]
    plain = model(windows[2]).logits
    memory, _ = remembering(model, size=SIZE, gate=True)
    wanted = [model(ids).logits for ids in windows]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config._attn_implementation != "ctxext_memory"
    assert (loaded(windows[2]).logits - plain).abs().max() < 1e-12
    again = add_memory(loaded, MemoryConfig(size=SIZE, gate=True))
    assert (torch.stack([loaded(ids).logits for ids in windows]) - torch.stack(wanted)).abs().max() > 1e-2
    again.reset()
    again.load_gates(tmp_path)
    assert (torch.stack([loaded(ids).logits for ids in windows]) - torch.stack(wanted)).abs().max() < 1e-12
    memory.remove()
    add_memory(model, MemoryConfig())
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="no gates that fit model.layers.0"):
        again.load_gates(tmp_path / "plain")


@torch.no_grad()
def test_bf16_models_follow_float64() -> None:
    exact, short = model_of(rope=YARN, initializer_range=0.1), model_of(rope=YARN, initializer_range=0.1).bfloat16()
    memories = [add_memory(model, MemoryConfig(size=SIZE, sinks=1)) for model in (exact, short)]
    for seed in range(5):
        ids = torch.tensor([draw(8, seed), draw(8, seed + 50)])
        wanted = exact(ids).logits
        assert (short(ids).logits.double() - wanted).abs().mean() < 0.03 * wanted.std()
    assert memories[1].remembered.layers[1][0].dtype == torch.bfloat16


def test_batches_read_in_turn_remember_apart_and_training_reads_what_inference_remembered() -> None:
    model = model_of(num_key_value_heads=4)
    memory = add_memory(model, MemoryConfig(size=SIZE, gate=True))
    batches = [[torch.tensor([draw(8, 10 * batch + number)]) for number in range(2)] for batch in range(2)]
    wanted = []
    for first, second in batches:
        memory.reset()
        model(first)
        wanted.append(model(second).logits)
    kept = []
    for first, _ in batches:
        memory.reset()
        with torch.inference_mode():
            model(first)
        kept.append(memory.remembered)
    for (_, second), remembered, logits in zip(batches, kept, wanted, strict=True):
        memory.remembered = remembered
        again = model(second).logits
        again.sum().backward()
        assert torch.equal(again, logits)


@torch.no_grad()
def test_a_pretrained_model_reads_better_with_a_memory_of_what_came_before() -> None:
    """The small model that ctxext ships, without training: source code in windows of half its own."""
    folder, document = Path(ctxext.__file__).parent / "reproduce" / "tiny", Path(sympy.__file__).parent / "core/add.py"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(document.read_text()[:12000], verbose=False).input_ids[:2048]])

    def loss() -> float:
        starts = range(0, 2048, 128)
        return sum(float(model(ids[:, s : s + 128], labels=ids[:, s : s + 128]).loss) for s in starts) / len(starts)

    alone = loss()
    add_memory(model, MemoryConfig(size=128, top_k=64))
    assert loss() < alone - 0.03


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match=r"size 0 .*; top_k 0 .*; sinks -1 .*; distance 0 "):
        MemoryConfig(size=0, top_k=0, sinks=-1, distance=0)
    with pytest.raises(ValueError, match="fewer than size 4"):
        MemoryConfig(size=4, sinks=4)
    with pytest.raises(ValueError, match="llama, mistral, qwen2, qwen3, not to 'gemma'"):
        add_memory(tiny_model("gemma"), MemoryConfig())
    model, ids = model_of(), torch.tensor([draw(8, 1), draw(8, 2)])
    early = DynamicCache()
    model(ids, **cached(model, early))
    memory = add_memory(model, MemoryConfig())
    with pytest.raises(ValueError, match="has a memory already"):
        add_memory(model, MemoryConfig())
    with pytest.raises(ValueError, match="not begun with the memory"):
        model(ids[:, :1], **cached(model, early))
    with pytest.raises(ValueError, match="positions jump"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), use_cache=False)
    assert memory.tokens == []  # what failed left nothing
    model(ids)
    with pytest.raises(ValueError, match="a batch of 1 rows, but the memory is of 2"):
        model(ids[:1])
    with pytest.raises(ValueError, match="rows must be 2 of true and false"):
        memory.reset([True])
    with pytest.raises(ValueError, match="rows must be 2 of true and false"):
        memory.reset([0, 1])
    with pytest.raises(ValueError, match="MemoryConfig"):
        memory.load_gates(".")
    assert memory.tokens == [8, 8]
