"""Eviction by attention, the approximate index and the second reading, each by itself.

`test_memory.py` compares whole models that have them with the float64 reader.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memory_reference import cached, draw, model_of, padded
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from ctxext import cli
from ctxext.reading import memory_index
from ctxext.reading.memory import MemoryConfig, add_memory
from ctxext.reading.memory_index import RowIndex
from ctxext.reading.memory_state import Remembered, Uses, add_uses, attended, keep

NEAR = {"index": "approximate", "probed": 0.5, "top_k": 3}
OPTIONS = {
    "lra": {"eviction": "lra", "top_k": 3},
    "lfa": {"eviction": "lfa", "sinks": 2},
    "near": NEAR,
    "near-lfa-gate": {**NEAR, "eviction": "lfa", "gate": True},
    "wait": {"wait": 3, "top_k": 3},
}


@pytest.fixture(autouse=True)
def small_indexes_have_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_index, "ALONE", 4)


def kept(policy: str, hits: list[int], since: list[int], valid: list[int], **how: Any) -> list[int]:
    uses = Uses(torch.tensor([hits]), torch.tensor([since])) if policy != "fifo" else None
    order, real = keep(torch.tensor([valid]).bool(), uses, policy=policy, **{"sinks": 0, **how})
    return order[0, real[0]].tolist()


def test_what_is_kept_by_hand() -> None:
    hits, since, full = [4, 1, 0, 3, 0, 0], [9, 2, 5, 2, 1, 0], [1] * 6
    assert kept("fifo", hits, since, full, new=2, size=4) == [2, 3, 4, 5]
    assert kept("lra", hits, since, full, new=2, size=4) == [1, 3, 4, 5], (
        "of equals neither goes before the longest ago"
    )
    assert kept("lra", hits, since, full, new=2, size=3) == [3, 4, 5], "of equals the oldest goes"
    assert kept("lfa", hits, since, full, new=2, size=4) == [1, 3, 4, 5], "1/2 and 3/2 are above 4/9 and 0/5"
    assert kept("lfa", hits, since, full, new=2, size=4, sinks=1) == [0, 3, 4, 5]
    assert kept("lra", hits, since, full, new=2, size=5, sinks=2) == [0, 1, 3, 4, 5]
    assert kept("lfa", hits, since, full, new=4, size=3) == [3, 4, 5], "a window longer than the memory"
    assert kept("lra", hits, since, [0, 1, 1, 1, 1, 0], new=2, size=3) == [1, 3, 4], "padding is never kept"
    assert kept("lfa", hits, since, [1, 1, 0, 0, 0, 0], new=2, size=4) == [0, 1]


def test_who_attends_by_hand() -> None:
    """Two heads, three queries of which the first is padding, each reading four keys: an even share is a quarter."""
    weights = torch.zeros(1, 2, 3, 3)
    weights[0, 0, 0] = 0.9  # padding
    weights[0, 0, 1] = torch.tensor([0.25, 0.2499, 0.0])
    weights[0, 1, 1] = torch.tensor([0.5, 0.1, 0.0])
    weights[0, 1, 2] = torch.tensor([0.24, 0.6, 0.0])
    read, real = torch.full((1, 2, 3, 1), 4), torch.tensor([[False, True, True]])
    uses = attended(weights, read, real, None, 3)
    assert uses.hits.tolist() == [[2, 2, 0]]
    assert uses.since.tolist() == [[1, 0, 3]]
    slots = torch.tensor([4, 0, 2]).expand(1, 2, 3, 3)  # the same of an index, in another order
    found = attended(weights, read, real, slots, 5)
    assert found.hits.tolist() == [[2, 0, 0, 0, 2]]
    assert found.since.tolist() == [[0, 3, 3, 3, 1]]
    old = Uses(torch.tensor([[5, 0, 7]]), torch.tensor([[8, 8, 8]]))
    lra, lfa = (add_uses(policy, old, uses, real) for policy in ("lra", "lfa"))
    assert lra.since.tolist() == [[1, 0, 10, 2, 1, 0]], "the window's first slot is padding and counts nothing"
    assert (lfa.hits.tolist(), lfa.since.tolist()) == ([[7, 2, 7, 0, 0, 0]], [[10, 10, 10, 0, 0, 0]])


def naive_cells(keys: np.ndarray, cells: np.ndarray, query: np.ndarray, count: int, probes: int) -> list[int]:
    """The best keys of those whose nearest centre is among the best for the query, one by one."""
    mine = sorted(range(len(cells)), key=lambda cell: float(query @ cells[cell]), reverse=True)[:probes]
    where = [min(range(len(cells)), key=lambda cell: float(((key - cells[cell]) ** 2).sum())) for key in keys]
    found = [slot for slot in range(len(keys)) if where[slot] in mine]
    return sorted(sorted(found, key=lambda slot: float(query @ keys[slot]), reverse=True)[:count])


def test_an_index_finds_what_a_loop_over_its_cells_does_while_keys_come_and_go() -> None:
    random = np.random.default_rng(0)
    index, keys = RowIndex.of(0, np.zeros((2, 1, 4), dtype=np.float32)), torch.zeros(2, 0, 4)
    finds_all, counts = True, []
    for window in range(9):
        new = torch.from_numpy(random.standard_normal((2, 8, 4)).astype(np.float32))
        order = np.sort(random.permutation(keys.shape[1] + 8)[:40])  # evicted anywhere
        slots, both = keys.shape[1], torch.cat([keys, new], dim=1)
        keys = both[:, order]
        before, index = index, index.follow(order, slots, keys)
        counts.append(index.cells.shape[1])
        queries = torch.from_numpy(random.standard_normal((2, 5, 4)).astype(np.float32))
        found = index.search(keys, queries, 6, 0.5)
        probes = max(1, counts[-1] // 2)
        for head in range(2):
            for number in range(5):
                wanted = naive_cells(keys[head].numpy(), index.cells[head], queries[head, number].numpy(), 6, probes)
                got = sorted(slot for slot in found[head, number].tolist() if slot >= 0)
                assert got == wanted, (window, head, number)
                best = (keys[head] @ queries[head, number]).topk(6).indices.tolist()
                finds_all &= got == sorted(best)
        again = RowIndex.of(keys.shape[1], index.cells).search(keys, queries, 6, 0.5)
        assert (np.sort(again) == np.sort(found)).all(), "built anew"
        if slots:
            earlier = before.search(both[:, :slots], queries, 6, 1.0)
            exact = (queries @ both[:, :slots].transpose(1, 2)).topk(6).indices
            assert (np.sort(earlier) == exact.sort(dim=-1).values.numpy()).all(), "the one before still reads its own"
    assert not finds_all and counts[0] == 4 and counts[-1] == 8, "powers of two next to the roots of 8 and 40"


def windows(*seeds: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of two rows, of which the second is shorter."""
    return [padded([draw(8, seed), draw(6, seed + 50)], "left") for seed in seeds]


def read(model: Any, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([model(ids, attention_mask=mask, use_cache=False).logits for ids, mask in batches])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_prediction_depends_on_what_stands_behind_it(options: dict[str, Any]) -> None:
    """Each token of the third window is changed in turn: nothing before it moves, and what is read later does."""
    batches, width = windows(1, 2, 3, 4), 8
    outcomes = []
    for changed in (None, 0, 3, 6, 7):
        model = model_of("qwen3", num_key_value_heads=2)
        add_memory(model, MemoryConfig(size=12, **options))
        ids = batches[2][0].clone()
        if changed is not None:
            ids[0, changed] = (ids[0, changed] + 7) % 90 + 3
        outcomes.append(
            (changed, read(model, [*batches[:2], (ids, batches[2][1]), batches[3]])[:, 0].flatten(0, 1).detach())
        )
    whole = outcomes[0][1]
    for changed, logits in outcomes[1:]:
        assert changed is not None
        place = 2 * width + changed
        assert torch.equal(logits[:place], whole[:place])
        assert (logits[place] - whole[place]).abs().max() > 1e-3
        assert (logits[3 * width :] - whole[3 * width :]).abs().max() > 1e-3, "the fourth window reads the third"


@torch.no_grad()
def test_each_option_changes_what_is_read_and_only_then() -> None:
    batches, logits = windows(1, 2, 3, 4, 5), {}
    for name, options in {"fifo": {"top_k": 3}, **OPTIONS}.items():
        model = model_of("qwen3", num_key_value_heads=2)
        memory = add_memory(model, MemoryConfig(size=12, **options))
        logits[name] = read(model, batches)
        assert memory.tokens == [12, 12]
    for name in OPTIONS:
        if "gate" not in name and "sinks" not in OPTIONS[name]:
            assert torch.equal(logits[name][0], logits["fifo"][0]), "the first window finds nothing"
        assert (logits[name][-1] - logits["fifo"][-1]).abs().max() > 1e-3, name


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("alone", [4, 2048])
def test_what_is_remembered_is_saved_and_read_on(
    options: dict[str, Any], alone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a resumed run does: also what decides on evictions, and the cells, be they one that all rows share."""
    monkeypatch.setattr(memory_index, "ALONE", alone)
    batches, model = windows(1, 2, 3, 4, 5, 6), model_of("qwen3", num_key_value_heads=2)
    memory = add_memory(model, MemoryConfig(size=12, **options))
    with torch.no_grad():
        read(model, batches[:3])
        assert memory.remembered is not None
        save_file(memory.remembered.tensors(), tmp_path / "memory")
        wanted = read(model, batches[3:])
        memory.remembered = Remembered.from_tensors(load_file(tmp_path / "memory"), "cpu")
        real = torch.stack([mask for _, mask in batches[3:]]).bool()  # all keys are equal to a query of padding
        assert torch.equal(read(model, batches[3:])[real], wanted[real])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_a_row_that_forgets_reads_as_a_new_one(options: dict[str, Any]) -> None:
    batches, model = windows(1, 2, 3, 4, 5, 6), model_of("qwen3", num_key_value_heads=2)
    memory = add_memory(model, MemoryConfig(size=12, **options))
    whole = read(model, batches)
    memory.reset()
    read(model, windows(11, 12, 13))
    memory.reset([True, False])
    after = read(model, batches)
    assert (after[:, 0] - whole[:, 0]).abs().max() < 1e-9
    assert (after[0, 1] - whole[0, 1])[batches[0][1][1].bool()].abs().max() > 1e-3, "the other row remembers"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_layers_that_run_again_read_what_they_read(options: dict[str, Any]) -> None:
    grads = []
    for checkpointing in (False, True):
        model = model_of("qwen3", num_key_value_heads=2).train()
        if checkpointing:
            name = "activation_checkpointing_enable"  # from transformers 5.24
            (getattr(model, name, None) or model.gradient_checkpointing_enable)()
        add_memory(model, MemoryConfig(size=12, **options))
        loss = sum(model(ids, labels=ids, attention_mask=m, use_cache=False).loss for ids, m in windows(1, 2, 3, 4))
        loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_decoding_reads_the_memory_as_the_prompt_found_it(options: dict[str, Any]) -> None:
    """Though the prompt was remembered since, and its index went on; one step is the same without a cache."""
    batches, model = windows(1, 2, 3), model_of("qwen3", num_key_value_heads=2)
    memory = add_memory(model, MemoryConfig(size=12, **options))
    read(model, batches)
    found, cache = memory.remembered, DynamicCache()
    prompt, token = torch.tensor([draw(6, 7), draw(6, 8)]), torch.tensor([[5], [6]])
    model(prompt, **cached(model, cache))
    behind = memory.remembered
    assert behind is not found
    steps = [model(token, **cached(model, cache)).logits[:, -1], model(token, **cached(model, cache)).logits[:, -1]]
    assert memory.remembered is behind
    memory.remembered = found
    with memory.frozen():
        whole = model(torch.cat([prompt, token, token], dim=1), use_cache=False).logits
    assert memory.remembered is found, "what only reads counts no use"
    assert (torch.stack(steps, dim=1) - whole[:, -2:]).abs().max() < 1e-5


def test_without_faiss_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    model = model_of()
    with pytest.raises(ValueError, match=r"needs faiss: pip install 'ctxext\[read\]', or use index 'exact'"):
        add_memory(model, MemoryConfig(**NEAR))
    memory = add_memory(model, MemoryConfig(top_k=3))  # the model is as it was
    memory.remove()


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(
        ValueError, match=r"'lru' is none of fifo, lra, lfa; .*'near' is none of .*; probed 0 .*; wait -1"
    ):
        MemoryConfig(eviction="lru", index="near", probed=0, wait=-1)
    with pytest.raises(ValueError, match="needs top_k"):
        MemoryConfig(index="approximate")


def test_the_command_takes_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(arguments: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", ["ctxext", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    document = tmp_path / "words.txt"
    document.write_text(" ".join(f"word{number}" for number in range(80)))
    call = ["read", "tiny", str(document), "--memory-size", "60", "--top-k", "9", "--window", "40", "--json"]
    more = ["--eviction", "lfa", "--index", "approximate", "--probed", "0.5", "--wait", "4"]
    losses = []
    for options in ([], more):
        assert main([*call, "--dtype", "float32", *options]) == 0
        report = json.loads(capsys.readouterr().out)
        losses.append(report["reading"]["loss"])
    memory = report["settings"]["memory"]
    assert [memory[name] for name in ("eviction", "index", "probed", "wait")] == ["lfa", "approximate", 0.5, 4]
    assert losses[0] != losses[1]
    assert main(["read", "tiny", str(document), "--eviction", "lru", "--index", "x", "--wait", "-1"]) == 2
    err = capsys.readouterr().err
    assert "--eviction, --index, --wait need --memory-size above 0" in err
    assert "--eviction 'lru' is none of fifo, lra, lfa; --index 'x' is none of exact, approximate; --wait -1" in err
    assert main(["read", "tiny", str(document), "--memory-size", "9", "--index", "approximate"]) == 2
    assert "--index approximate needs --top-k" in capsys.readouterr().err
