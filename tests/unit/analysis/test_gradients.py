"""Gradients of predictions: finite differences, models whose reach is known, and what is refused."""

import pytest
import torch
from analysis_models import biased, sliding, tokens
from helpers import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from ctxext.analysis.field import cumulative_gradient, empirical_receptive_field
from ctxext.analysis.gradients import check_causal, gradient_norms


def in_float64(model):
    """The model without the float32 steps of transformers' norms, in which differences would drown."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
    return model.double()


def finite_differences(model, ids, step=1e-5):
    """Norms by position, each coordinate of each embedding moved up and down."""
    embeddings = model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        best = model(inputs_embeds=embeddings).logits[0, -1].argmax()
        slopes = torch.zeros_like(embeddings[0])
        for position in range(embeddings.shape[1]):
            for coordinate in range(embeddings.shape[2]):
                ends = []
                for sign in (1, -1):
                    moved = embeddings.clone()
                    moved[0, position, coordinate] += sign * step
                    ends.append(model(inputs_embeds=moved).logits[0, -1].log_softmax(-1)[best])
                slopes[position, coordinate] = (ends[0] - ends[1]) / (2 * step)
    return slopes.norm(dim=-1)


@pytest.mark.parametrize("model", ["llama", "alibi"])
def test_equal_finite_differences(model):
    made = tiny_model(initializer_range=0.2, hidden_size=16) if model == "llama" else biased(bias_type="alibi")
    made = in_float64(made)
    ids = tokens(9)
    wanted = finite_differences(made, ids)
    assert wanted.min() > 1e-6
    torch.testing.assert_close(gradient_norms(made, ids)[0], wanted, rtol=1e-5, atol=1e-9)


def test_the_model_is_left_as_it_was_and_rows_do_not_mix():
    model, ids = tiny_model(attention_dropout=0.5), tokens(20, rows=2)
    both = gradient_norms(model, ids)
    alone = torch.cat([gradient_norms(model, row[None]) for row in ids])
    torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-9)
    assert not any(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not model.is_activation_checkpointing


def test_layers_are_recomputed():
    model, calls = tiny_model(), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *given: calls.append(1))
    gradient_norms(model, tokens(12))
    assert len(calls) == 2, "once forward, once for the gradient"


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("build", ["windowed", "sliding"])
def test_a_window_bounds_the_receptive_field(build, layers):
    length, fields = 90, []
    for window in (3, 8, 20):
        model = sliding(window, layers) if build == "sliding" else biased(layers, bias_type="windowed", window=window)
        norms = gradient_norms(model, tokens(length))
        reach = layers * (window - 1) + 1
        assert bool((norms[0, : length - reach] == 0).all()), "exactly nothing beyond"
        assert norms[0, length - reach] > 0, "and something right up to there"
        field = empirical_receptive_field(cumulative_gradient(norms.numpy())[0])
        assert field <= reach
        fields.append(field)
    assert fields == sorted(set(fields)), "it grows with the window"


def test_alibi_with_one_slope():
    """Figure 4 of arXiv 2212.10356: the smaller the slope 2^-h, the larger the receptive field."""
    ids, fields = tokens(400, rows=4), []
    for exponent in (0.0, 2.0, 4.0, 6.0, 8.0):
        model = biased(bias_type="alibi", shared_exponent=exponent)
        curve = cumulative_gradient(gradient_norms(model, ids).numpy()).mean(axis=0)
        fields.append(empirical_receptive_field(curve))
    assert fields == sorted(set(fields)) and fields[0] < 20 and fields[-1] > 300


def test_a_model_that_sees_what_follows_is_refused():
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", vocab_size=50, **shape)).eval()
    with pytest.raises(ValueError, match="BertLMHeadModel is not causal.*decoder-only"):
        check_causal(bert)
    check_causal(tiny_model())


def test_gradients_that_are_no_numbers_are_refused():
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite: try --dtype float32"):
        gradient_norms(model, tokens(5))
    with torch.no_grad():
        model.model.norm.weight.zero_()
    with pytest.raises(ValueError, match="no input token moves the prediction"):
        gradient_norms(model, tokens(5))
