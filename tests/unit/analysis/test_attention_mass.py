"""Attention by distance against the whole matrices that eager attention returns."""

import numpy as np
import pytest
import torch
from analysis_models import biased, sliding, tokens
from helpers import tiny_model

from ctxext.analysis.attention_mass import attention_mass, powers_of_two, summarize_mass


def by_distance(model, ids, queries):
    """From one pass with whole matrices, query by query and key by key: `(layers, heads, length)`."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(ids[None], output_attentions=True, use_cache=False).attentions
    length = len(ids)
    mass = np.zeros((len(layers), layers[0].shape[1], length))
    for layer, weights in enumerate(layers):
        for query in range(length - queries, length):
            for key in range(query + 1):
                mass[layer, :, query - key] += weights[0, :, query, key].numpy() / queries
    return mass


@pytest.mark.parametrize("name", ["llama", "alibi", "sliding", "gpt_neox"])
@pytest.mark.parametrize("queries", [5, 30])
def test_equals_whole_matrices(name, queries):
    made = {"alibi": lambda: biased(bias_type="alibi"), "sliding": lambda: sliding(7)}
    model = made.get(name, lambda: tiny_model(name, initializer_range=0.2))()
    usual = model.config._attn_implementation
    ids = tokens(30)[0]
    mass = attention_mass(model, ids, queries)
    assert model.config._attn_implementation == usual
    np.testing.assert_allclose(mass, by_distance(model, ids, queries), atol=1e-6)
    assert mass.sum(axis=-1) == pytest.approx(1.0)


def test_summary_by_hand():
    mass = np.array([[[0.5, 0.0, 0.0, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0, 0.0]]])
    found = summarize_mass(mass)
    assert found.mean_distance.tolist() == [[0.25 * 3 + 0.25 * 4, 0.0]]
    assert found.distance_99.tolist() == [[4.0, 0.0]]
    assert powers_of_two(5) == [1, 2, 4, 5] and powers_of_two(4) == [1, 2, 4]
    assert found.within.tolist() == [[0.75, 0.75, 0.875, 1.0]]
