"""Losses of chosen tokens against the model's own full logits, for models whose heads do more than multiply."""

import pytest
import torch
from helpers import tiny_model

from ctxext.evaluation import scoring
from ctxext.evaluation.scoring import TokenScorer, bucket_edges, position_loss

FAMILIES = ["llama", "gpt_neox", "gemma", "qwen2", "mixtral", "gemma3_text", "gemma2", "granite"]


def model_of(family):
    if family in ("gemma2", "granite"):
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        more = {"final_logit_softcapping": 0.05} if family == "gemma2" else {"logits_scaling": 8.0}
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, num_key_value_heads=2, vocab_size=97, pad_token_id=0, **shape, **more)
        return AutoModelForCausalLM.from_config(config).eval()
    return tiny_model(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_full_logits(family, monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 5 * 97)  # so that pieces are joined
    model = model_of(family)
    tokens = torch.randint(0, 97, (3, 41), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, :7] = -1
    targets[2, 30:] = -1
    scorer = TokenScorer(model)
    assert scorer.split == (family != "granite"), "a head that does more must be noticed"
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits.double()
    wanted = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(
        scorer.nll(tokens[:, :-1], targets).double(), wanted[targets >= 0], atol=1e-5, rtol=1e-5
    )


def test_no_piece_of_logits_is_larger_than_allowed(monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 4 * 97)
    model = tiny_model()
    scorer = TokenScorer(model)
    rows = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[0]))
    scorer.nll(torch.ones(1, 30, dtype=torch.long), torch.ones(1, 30, dtype=torch.long))
    assert max(rows) == 4 and sum(rows) == 30


def test_losses_that_are_no_numbers_are_refused():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    scorer = TokenScorer(model)
    with pytest.raises(ValueError, match="NaN or infinite in torch.float32: try --dtype float32 or bfloat16"):
        scorer.nll(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))


def test_position_loss():
    model = tiny_model()
    tokens = torch.randint(0, 97, (21,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        log = model(input_ids=tokens[None, :-1]).logits[0].double().log_softmax(-1)
    single = [-float(log[p, tokens[p + 1]]) for p in range(20)]
    wanted = [sum(single[:5]) / 5, sum(single[5:20]) / 15]
    *means, beyond = position_loss(model, tokens, [0, 5, 20, 30])
    assert means == pytest.approx(wanted, rel=1e-5) and beyond is None
    with pytest.raises(ValueError, match="at least two tokens, not 1"):
        position_loss(model, [3], [0, 1])


def test_bucket_edges():
    assert bucket_edges(100, "4") == [0, 25, 50, 75, 100]
    assert bucket_edges(100, "10,50") == bucket_edges(100, "0,10,50,100") == [0, 10, 50, 100]
    for wrong, message in [
        ("50,10", "must ascend"),
        ("0", "between 1 and"),
        ("x", "must be a number"),
        ("5,200", "between 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            bucket_edges(100, wrong)
