"""Measured attention logits against a naive computation from the projections, and through every family's weights."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from helpers import tiny_model

from ctxext import cli
from ctxext.analysis.bounds_measured import MeasureOptions, check_rotary, measure_checkpoints
from ctxext.analysis.logits import (
    BINS_PER_UNIT,
    Counts,
    LogitCounter,
    count_logits,
    distance_edges,
    largest_product,
    watched_attention,
)
from ctxext.evaluation.loading import RunSettings

LENGTH, WINDOW = 40, 16


def tokens(length=LENGTH, seed=0):
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def double_model(family="llama", **overrides):
    model = tiny_model(family, attn_implementation="sdpa", **overrides).double()
    with torch.no_grad():  # logits of a few nats instead of hundredths
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(8)
    return model


def naive_products(model, ids):
    """h_j of every query head, query and key by the definition: `(layers, heads, queries, keys, pairs)` complex."""
    seen = {}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: seen.__setitem__(name, out[0].numpy()))
        for name, module in model.named_modules()
        if name.endswith(("q_proj", "k_proj"))
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    config, products = model.config, []
    for layer in range(config.num_hidden_layers):
        states = []
        for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            array = seen[f"model.layers.{layer}.self_attn.{part}_proj"].reshape(len(ids), heads, -1)
            half = array.shape[-1] // 2
            states.append(array[..., :half] + 1j * array[..., half:])
        query, key = states[0], np.repeat(states[1], config.num_attention_heads // config.num_key_value_heads, axis=1)
        products.append(np.einsum("qhj,khj->hqkj", query, np.conj(key)))
    return np.array(products)


def naive_logits(products, dim, theta=10000.0):
    """Re sum_j h_j exp(i s theta_j) / sqrt(d): `(layers, heads, queries, keys)`."""
    frequencies = theta ** (-np.arange(0, dim, 2) / dim)
    distance = np.subtract.outer(np.arange(products.shape[2]), np.arange(products.shape[3]))
    return (products * np.exp(1j * distance[..., None] * frequencies)).sum(-1).real / math.sqrt(dim)


def counted(model, sequences, positions, window=WINDOW, rotary_dim=16):
    counter = LogitCounter(
        window=window, edges=distance_edges(window, len(sequences[0])), positions=positions, rotary_dim=rotary_dim
    )
    count_logits(model, sequences, counter, lambda _: None)
    return counter


@pytest.mark.parametrize("positions", [list(range(LENGTH)), [0, 9, 15, 16, 27, 39]])
def test_logits_of_a_double_model_are_those_of_the_definition(positions, monkeypatch):
    monkeypatch.setattr("ctxext.analysis.logits.LOGITS_AT_ONCE", 7 * 4 * LENGTH)  # blocks of seven queries
    model, sequences = double_model(), [tokens(), tokens(seed=1)]
    counter = counted(model, sequences, positions)
    both = [naive_products(model, ids) for ids in sequences]
    logits = np.stack([naive_logits(products, 16) for products in both])
    place = np.arange(LENGTH)
    distance = np.subtract.outer(place, place)
    chosen = np.isin(place, positions)[:, None] & (distance >= 0)
    groups = {
        "trained": chosen & (place < WINDOW)[:, None],
        "inside": chosen & (place >= WINDOW)[:, None] & (distance < WINDOW),
        "beyond": chosen & (place >= WINDOW)[:, None] & (distance >= WINDOW),
    }
    edges = counter.edges
    cells = {cell: chosen & (distance >= edges[cell]) & (distance < edges[cell + 1]) for cell in range(len(edges) - 1)}
    for layer, counts in counter.layers.items():
        for found, where in [
            *((counts.summary(counter.rows(name)), mask) for name, mask in groups.items()),
            *((counts.summary(counter.cell(cell)), mask) for cell, mask in cells.items() if mask.any()),
        ]:
            values = logits[:, layer][..., where].ravel()
            assert found["logits"] == values.size
            assert found["min"] == pytest.approx(values.min(), abs=1e-5)
            assert found["max"] == pytest.approx(values.max(), abs=1e-5)
            for quantile in (0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999):
                exact = np.sort(values)[max(0, math.ceil(quantile * values.size) - 1)]
                width = math.sqrt(1 + exact**2) / BINS_PER_UNIT
                assert found[f"q{quantile:g}"] == pytest.approx(exact, abs=1.01 * width + 1e-5)
        sizes = np.abs(np.stack([products[layer] for products in both])) / 4
        causal = distance >= 0
        assert counts.max_product == pytest.approx(sizes[:, :, causal].max(), rel=1e-6), "over all queries"
        assert counts.reachable == pytest.approx(sizes.sum(-1)[:, :, chosen].max(), rel=1e-6)
    assert sorted(counter.layers) == [0, 1] and not counter.left_out


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox", "olmo2", "gemma"])
def test_what_is_watched_makes_the_models_own_attention_weights(family):
    ids, seen = torch.tensor([tokens(24)]), {}

    def watch(module, query, key, scaling, sliding_window):
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        hidden = torch.ones(24, 24, dtype=torch.bool).triu(1)
        seen[module.layer_idx] = (query @ key.mT * scaling).masked_fill(hidden, -math.inf).softmax(-1)

    model = tiny_model(family, attn_implementation="sdpa")
    with torch.no_grad(), watched_attention(model, watch):
        logits = model(input_ids=ids).logits
    with torch.no_grad():
        eager = tiny_model(family, attn_implementation="eager")(input_ids=ids, output_attentions=True)
        again = model(input_ids=ids).logits
    assert torch.equal(logits, again), "watching changes nothing, and ends"
    assert sorted(seen) == [0, 1]
    for layer, weights in seen.items():
        torch.testing.assert_close(weights, eager.attentions[layer], atol=1e-5, rtol=1e-4)


def test_watching_ends_also_when_the_model_fails():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    model = tiny_model(attn_implementation="sdpa")
    with pytest.raises(RuntimeError), watched_attention(model, lambda *_: None):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
        raise RuntimeError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    with (
        pytest.raises(ValueError, match="eager"),
        watched_attention(tiny_model(attn_implementation="eager"), lambda *_: None),
    ):
        pass


def test_the_largest_product_is_of_a_key_before_its_query():
    query, key = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
    query[0, :, 0], query[0, :, 2] = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([4.0, 0.0, 0.0])
    key[0, :, 0] = torch.tensor([1.0, 2.0, 100.0])
    # |q_0| = 5, 1, 2 over the queries; the largest |k_0| so far is 1, 2, 100.
    assert largest_product(query[:, :2], key[:, :2], 4) == 5
    assert largest_product(query, key, 4) == 200


@pytest.mark.parametrize(
    ("window", "length", "edges"),
    [
        (4, 8, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (32, 48, [*range(0, 33, 2), *range(34, 49, 2)]),
        (100, 8, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (256, 1024, list(range(0, 1025, 16))),
        (3, 4, [0, 1, 2, 3, 4]),
    ],
)
def test_distance_edges(window, length, edges):
    assert distance_edges(window, length) == edges


def test_distance_edges_are_never_too_many():
    for window, length in ((2, 100000), (1, 5000), (8192, 12288), (1000, 1001)):
        edges = distance_edges(window, length)
        assert edges == sorted(set(edges)) and edges[0] == 0 and edges[-1] == length and window in edges


def test_nothing_counted_is_no_summary():
    assert Counts.empty(2).summary([0, 1]) is None


def test_layers_that_slide_are_left_out_and_a_model_of_them_alone_is_refused():
    model = tiny_model("gemma3_text", attn_implementation="sdpa")  # five layers slide over 32 tokens, one sees all
    counter = counted(model, [tokens()], list(range(LENGTH)))
    assert len(counter.left_out) == 5 and len(counter.layers) == 1
    slides = tiny_model("mistral", attn_implementation="sdpa", sliding_window=8)
    with pytest.raises(ValueError, match="sliding window"):
        counted(slides, [tokens()], list(range(LENGTH)))


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("some", "more"):
        (folder / f"{name}.txt").write_text(f"{name} text, and then again of it. " * 20)
    return folder


def test_checkpoints_are_measured_on_the_same_tokens(byte_checkpoint, corpus, tmp_path, monkeypatch, capsys):
    from ctxext.checkpoint.patch import patch_checkpoint

    patched = tmp_path / "patched"
    patch_checkpoint(str(byte_checkpoint()), patched, method="yarn", length=512)
    output = tmp_path / "out"
    arguments = ["--length", 256, "--data", corpus, "--dtype", "float32", "--queries", 32, "--documents", 2]
    sources = ["--checkpoint", byte_checkpoint(), "--checkpoint", patched]
    monkeypatch.setattr(
        sys, "argv", ["ctxext", "analyze", "score-bounds", *map(str, [*sources, *arguments]), "--output", str(output)]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    assert "queries before 128" in said.out and "keys beyond the window" in said.out and "patched" in said.out
    assert (output / "logits.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((output / "score-bounds.json").read_text())
    plain, yarn = report["checkpoints"]
    assert (report["format"], report["queries"], report["documents"]) == ("ctxext-attention-logits", 32, 2)
    assert (plain["window"], yarn["window"], plain["dtype"], plain["attention"]) == (128, 128, "float32", "sdpa")
    assert len(plain["hash"]) == len(report["corpus"]["hash"]) == 64 and plain["hash"] != yarn["hash"]
    assert yarn["attention_factor"] == pytest.approx(1 + 0.1 * math.log(4))
    assert yarn["frequencies"] != plain["frequencies"] == pytest.approx(10000.0 ** (-np.arange(0, 16, 2) / 16))
    # 32 queries, evenly spaced from 0 to 255: every one of them sees as many keys as its position and one more.
    places = [round(i * 255 / 31) for i in range(32)]
    for found in (plain, yarn):
        for part in (found["all_layers"], *found["layers"]):
            layers = 2 if part is found["all_layers"] else 1
            assert sum(group["logits"] for group in part["groups"].values()) == 2 * 4 * layers * sum(
                p + 1 for p in places
            )
            for cell, bound in zip(part["cells"], part["bound"], strict=True):
                assert max(-cell["min"], cell["max"]) <= min(part["reachable"], bound) * (1 + 1e-6)
            excess = part["groups"]["beyond"]["q0.999"] - part["groups"]["trained"]["q0.999"]
            assert part["excess"]["q0.999"] == pytest.approx(excess)
    assert plain["bounds"]["interpolation"]["bound"] == pytest.approx(np.sum(np.square(plain["frequencies"])) / 8)


def test_within_the_window_there_is_nothing_beyond(byte_checkpoint, corpus):
    options = MeasureOptions(length=64, data=str(corpus), queries=0)
    [found] = measure_checkpoints([str(byte_checkpoint())], options, RunSettings(dtype="float32"))["checkpoints"]
    assert found["all_layers"]["groups"]["beyond"] is None and found["all_layers"]["excess"] is None


@pytest.mark.parametrize("keep_rotary", [True, False])
def test_a_bias_checkpoint_needs_its_rotary_embedding(byte_checkpoint, corpus, tmp_path, keep_rotary):
    from ctxext.checkpoint.patch import patch_checkpoint

    folder = tmp_path / "alibi"
    patch_checkpoint(str(byte_checkpoint()), folder, method="alibi", length=256, keep_rotary=keep_rotary or None)
    options = MeasureOptions(length=200, data=str(corpus), queries=16)

    def measure():
        return measure_checkpoints([str(folder)], options, RunSettings(dtype="float32"))

    if keep_rotary:
        report = measure()
        [found] = report["checkpoints"]
        assert any("without the alibi bias" in note for note in report["notes"])
        assert found["attention"] == "ctxext_sdpa" and len(found["layers"]) == 2
    else:
        with pytest.raises(ValueError, match="alibi.*in place of a rotary embedding.*--keep-rotary"):
            measure()


def test_what_cannot_be_measured(byte_checkpoint, corpus, tmp_path):
    with pytest.raises(ValueError, match="--length 1 .*--documents 0 .*--queries -1 .*--window 0 "):
        MeasureOptions(length=1, documents=0, queries=-1, window=0)
    with pytest.raises(ValueError, match="not a checkpoint"):
        check_rotary(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="gpt2"):
        check_rotary(tmp_path)
    settings = RunSettings(dtype="float32")
    with pytest.raises(ValueError, match="fewer than --documents 9"):
        options = MeasureOptions(length=500, data=str(corpus), documents=9)
        measure_checkpoints([str(byte_checkpoint())], options, settings)
    with pytest.raises(ValueError, match="another tokenizer"):
        options = MeasureOptions(length=100, data=str(corpus))
        measure_checkpoints([str(byte_checkpoint()), str(byte_checkpoint(bos=False))], options, settings)


@pytest.mark.parametrize("option", [["--head-dim", "64"], ["--method", "yarn"], ["--theta", "10000"], ["--seed", "0"]])
def test_formulas_and_checkpoints_are_asked_apart(option, llama, monkeypatch, capsys):
    call = ["ctxext", "analyze", "score-bounds", "--length", "64", "--checkpoint", str(llama), *option]
    monkeypatch.setattr(sys, "argv", call)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and f"{option[0]} cannot take effect with --checkpoint" in capsys.readouterr().err
