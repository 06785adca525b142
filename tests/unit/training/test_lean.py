"""The chunked loss equals the plain one: value and every gradient, in every family, with every kind of head."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from ctxext.training.lean import chunked_cross_entropy, disable_lean_loss, enable_lean_loss

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "phi3": {},
    "gemma2": {"final_logit_softcapping": 1.5, "sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "olmo2": {},
    "granite": {"logits_scaling": 3.0},
    "cohere2": {"logit_scale": 0.25},
    "mixtral": {"num_local_experts": 2},
    "gpt_neox": {},
}
# (dtype, absolute, relative): between two ways of the same sums in that dtype.
TOLERANCES = [(torch.float64, 1e-12, 1e-10), (torch.float32, 1e-6, 1e-4)]


def make(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config).to(dtype).train()


def batch(rows: int = 2, length: int = 21) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    ids = torch.randint(1, 61, (rows, length))
    labels = ids.clone()
    labels[0, 3:7] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(
    one: tuple[torch.Tensor, dict[str, torch.Tensor]],
    other: tuple[torch.Tensor, dict[str, torch.Tensor]],
    atol: float = 1e-6,
    rtol: float = 1e-4,
) -> None:
    # transformers rounds the logits of a float64 model to float32 before its loss: 1e-6 is its accuracy, not ours
    torch.testing.assert_close(one[0].double(), other[0].double(), atol=atol, rtol=rtol)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def test_hand_worked() -> None:
    # Two words; logits (0, ln 3) and (ln 3, 0): probabilities (1/4, 3/4) and (3/4, 1/4); targets 1 and 1.
    hidden = torch.tensor(
        [[0.0, math.log(3)], [math.log(3), 0.0], [5.0, 5.0]], dtype=torch.float64, requires_grad=True
    )
    weight = torch.nn.Parameter(torch.eye(2, dtype=torch.float64))
    loss = chunked_cross_entropy(hidden, lambda h: h @ weight.T, torch.tensor([1, 1, -100]), [weight], chunk_tokens=2)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(4 / 3) + math.log(4))
    expected = torch.tensor([[0.25, -0.25], [0.75, -0.75], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(hidden.grad, expected)
    # dL/dW = sum over tokens of (p - y) h^T
    torch.testing.assert_close(weight.grad, expected[:2].T @ hidden.detach()[:2])


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_equals_full_logits(dtype: torch.dtype, atol: float, rtol: float, chunk: int) -> None:
    torch.manual_seed(1)
    hidden, targets = torch.randn(16, 8, dtype=dtype), torch.randint(0, 11, (16,))
    targets[[2, 15]] = -100
    head = torch.nn.Linear(8, 11, dtype=dtype)
    plain, ours = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    reference = cross_entropy(head(plain), targets, reduction="sum")
    wanted = torch.autograd.grad(3 * reference, [plain, head.weight, head.bias])
    loss = chunked_cross_entropy(ours, head, targets, list(head.parameters()), chunk_tokens=chunk)
    got = torch.autograd.grad(3 * loss, [ours, head.weight, head.bias])
    torch.testing.assert_close(loss, reference, atol=atol, rtol=rtol)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)


def test_bfloat16_weight_gradient_is_summed_in_float32() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(1024, 8).bfloat16()
    targets = torch.randint(0, 11, (1024,))
    head = torch.nn.Linear(8, 11, bias=False).bfloat16()
    exact = copy.deepcopy(head).double()
    cross_entropy(exact(hidden.double()), targets, reduction="sum").backward()
    chunked_cross_entropy(hidden, head, targets, [head.weight], chunk_tokens=2).backward()
    error = (head.weight.grad.double() - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert error < 0.01  # 512 chunks summed in bfloat16 are off by ten times as much
    summed = torch.zeros_like(head.weight)
    for start in range(0, 1024, 2):
        piece = cross_entropy(head(hidden[start : start + 2]), targets[start : start + 2], reduction="sum")
        summed += torch.autograd.grad(piece, head.weight)[0]
    assert error < (summed.double() - exact.weight.grad).norm() / exact.weight.grad.norm() / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model = make(
        family, torch.float32 if family == "mixtral" else torch.float64
    )  # its grouped products have no float64
    inputs = batch()
    plain = loss_and_gradients(model, inputs)
    enable_lean_loss(model, chunk_tokens=8)
    assert_same(loss_and_gradients(model, inputs), plain)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_with_checkpointing(tied: bool) -> None:
    model = make(tie_word_embeddings=tied)
    plain = loss_and_gradients(model, batch())
    enable_lean_loss(model, chunk_tokens=8)
    model.activation_checkpointing_enable()
    assert_same(loss_and_gradients(model, batch()), plain)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    "adapter",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["frozen head", "adapted head", "trained copy of the head"],
)
def test_lora(adapter: dict[str, Any]) -> None:
    model = get_peft_model(make(), LoraConfig(r=2, init_lora_weights=False, **adapter)).double().train()
    plain = loss_and_gradients(model, batch())
    enable_lean_loss(model, chunk_tokens=8)
    assert_same(loss_and_gradients(model, batch()), plain)


def test_packed_documents() -> None:
    """Positions that start anew isolate documents; the first label of each is ignored."""
    model = make()
    ids = batch(rows=1, length=24)["input_ids"]
    positions = torch.cat([torch.arange(9), torch.arange(15)]).unsqueeze(0)
    labels = ids.masked_fill(positions == 0, -100)
    inputs = {"input_ids": ids, "position_ids": positions, "labels": labels}
    plain = loss_and_gradients(model, {**inputs, "use_cache": False})
    enable_lean_loss(model, chunk_tokens=8)
    lean = loss_and_gradients(model, inputs)
    assert_same(lean, plain)
    parts = [
        model(input_ids=ids[:, cut], labels=ids[:, cut], num_items_in_batch=22).loss
        for cut in (slice(9), slice(9, 24))
    ]
    torch.testing.assert_close(sum(parts).detach(), lean[0])


def test_all_ignored_is_zero_not_nan() -> None:
    model = make()
    enable_lean_loss(model)
    inputs = batch()
    loss, gradients = loss_and_gradients(model, {**inputs, "labels": torch.full_like(inputs["labels"], -100)})
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.parametrize("items", [77, torch.tensor(77)])
def test_num_items_and_shift_labels(items: Any) -> None:
    model, inputs = make(), batch()
    shifted = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    plain = loss_and_gradients(model, {**inputs, "num_items_in_batch": items})
    enable_lean_loss(model, chunk_tokens=8)
    assert_same(loss_and_gradients(model, {**inputs, "num_items_in_batch": items}), plain)
    assert_same(loss_and_gradients(model, {**inputs, "num_items_in_batch": items, "shift_labels": shifted}), plain)


def test_accumulation_invariance() -> None:
    """A batch of 8 rows equals 8 batches of one row, whatever the number of labels in each."""
    model = make()
    enable_lean_loss(model, chunk_tokens=8)
    inputs = batch(rows=8)
    for row in range(8):
        inputs["labels"][row, : 2 * row] = -100
    items = int((inputs["labels"][:, 1:] != -100).sum())
    whole = loss_and_gradients(model, inputs)
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(8):
        loss = model(**{name: t[row : row + 1] for name, t in inputs.items()}, num_items_in_batch=items).loss
        loss.backward()
        total += loss.detach()
    assert_same((total, {name: p.grad for name, p in model.named_parameters()}), whole, atol=1e-12, rtol=1e-9)


def test_evaluation_and_generation_are_untouched() -> None:
    model, inputs = make().eval(), batch()
    before = model(**inputs)
    tokens = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    enable_lean_loss(model)
    after = model(**inputs)
    assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)
    assert torch.equal(model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False), tokens)
    model.train()
    assert model(input_ids=inputs["input_ids"]).logits is not None  # no labels, no loss
    assert model(**inputs).logits is None
    disable_lean_loss(model)
    assert model(**inputs).logits is not None
    assert "forward" not in model.__dict__


def test_training_mode_without_gradients() -> None:
    model, inputs = make(), batch()
    enable_lean_loss(model, chunk_tokens=8)
    with torch.no_grad():
        loss = model(**inputs).loss
    assert not loss.requires_grad
    torch.testing.assert_close(loss, loss_and_gradients(model, inputs)[0])


def test_refusals() -> None:
    model = make()
    with pytest.raises(ValueError, match="chunk_tokens is 0; it must be at least 1"):
        enable_lean_loss(model, chunk_tokens=0)
    with pytest.raises(ValueError, match="does not have the lean loss"):
        disable_lean_loss(model)
    enable_lean_loss(model)
    with pytest.raises(ValueError, match="has the lean loss already"):
        enable_lean_loss(model)
    with pytest.raises(ValueError, match="output_router_logits"):
        enable_lean_loss(make("mixtral", output_router_logits=True))
    with pytest.raises(ValueError, match="causal language model"):
        enable_lean_loss(make().model)
    with pytest.raises(ValueError, match="flatten the batch"):
        chunked_cross_entropy(torch.zeros(1, 2, 3), torch.nn.Identity(), torch.zeros(1, 2), [])
