"""The next-token loss without the logits of a whole batch: some tokens at a time, any transformers causal model.

At 8192 tokens and 49152 words the logits of one sequence take 0.8 GB in bfloat16, and the plain loss keeps them in
four forms (bfloat16, float32, log-probabilities, gradient). Here the output head reads `chunk_tokens` hidden states at
a time and the gradients of the chunk are taken at once, before its logits go: as many matrix products as the plain
loss needs, and memory for one chunk. The idea is that of Liger-Kernel's fused linear cross entropy; this form runs on
every device and with every head (LoRA, bias, soft-capped or scaled logits), since a chunk passes through the model's
own forward. The sums over chunks are kept in float32: in bfloat16, 256 chunks of 512 tokens would round away.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeModelOutputWithPast

DEFAULT_CHUNK_TOKENS = 512
IGNORE_INDEX = -100
_NO_ARGUMENTS = ("self", "labels", "logits_to_keep")


def chunked_cross_entropy(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    parameters: list[nn.Parameter],
    *,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Return the SUM of the cross entropies of `head(hidden)` and `targets`; the logits exist a chunk at a time.

    The number of chunks follows from the shape alone, never from the targets, so that processes that gather a
    partitioned head together stay in step.

    Args:
        hidden: `(tokens, width)`.
        head: Makes logits `(chunk, vocabulary)` of hidden states `(chunk, width)`.
        targets: `(tokens,)`, already shifted: the token to predict at each place, or `ignore_index`.
        parameters: All parameters that `head` uses; those that require a gradient get one.
        chunk_tokens: Tokens whose logits exist at once.
        ignore_index: Targets of this value count nothing.

    Returns:
        A scalar in float32 (float64 for a float64 head); 0 where every target is ignored.

    Raises:
        ValueError: If the shapes do not fit, or `chunk_tokens` is not positive.
    """
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden states of shape {tuple(hidden.shape)} and targets of shape {tuple(targets.shape)} do not fit; "
            "give (tokens, width) and (tokens,): flatten the batch first"
        )
    _check_chunk_tokens(chunk_tokens)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    total: Tensor = _ChunkedLoss.apply(hidden, targets, head, chunk_tokens, ignore_index, *trained)  # type: ignore[no-untyped-call]
    return total


class _ChunkedLoss(torch.autograd.Function):
    """Takes the gradients of the sum in its forward; its backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        head: Callable[[Tensor], Tensor],
        chunk_tokens: int,
        ignore_index: int,
        *trained: nn.Parameter,
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        sums: list[Tensor | None] = [None] * len(trained)
        losses = []
        for start in range(0, len(hidden), chunk_tokens):
            piece = hidden[start : start + chunk_tokens].detach().requires_grad_(hidden_grad is not None)
            with torch.set_grad_enabled(wanted):
                logits = head(piece)
            loss, logits_grad = _loss_and_gradient(logits, targets[start : start + chunk_tokens], ignore_index, wanted)
            losses.append(loss)
            if logits_grad is None:
                continue
            sources = [*([piece] if hidden_grad is not None else []), *trained]
            grads = list(torch.autograd.grad(logits, sources, logits_grad, allow_unused=True))
            del logits, logits_grad
            if hidden_grad is not None:
                piece_grad = grads.pop(0)
                hidden_grad[start : start + chunk_tokens] = 0 if piece_grad is None else piece_grad
            sums = [_added(so_far, grad) for so_far, grad in zip(sums, grads, strict=True)]
        ctx.hidden_grad = hidden_grad
        ctx.sums = [None if grad is None else grad.to(own.dtype) for grad, own in zip(sums, trained, strict=True)]
        return torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=_accurate(hidden.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, sums = ctx.hidden_grad, ctx.sums
        ctx.hidden_grad = ctx.sums = None  # scaled in place below, so they serve once
        assert sums is not None, "the graph of a chunked loss is walked once"
        scaled = [None if grad is None else grad.mul_(outer[0]) for grad in (hidden_grad, *sums)]
        return (scaled[0], None, None, None, None, *scaled[1:])


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, ignore_index: int, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the cross entropies and, if `wanted`, its gradient `softmax - one_hot`, `logits`' shape."""
    with torch.no_grad():
        work = logits.detach().to(_accurate(logits.dtype), copy=True)
        normalizer = work.logsumexp(-1, keepdim=True)
        kept = (targets != ignore_index).unsqueeze(-1)
        places = targets.unsqueeze(-1).clamp_min(0)
        loss = ((normalizer - work.gather(-1, places)) * kept).sum()
        if not wanted:
            return loss, None
        work.sub_(normalizer).exp_()
        work.scatter_add_(-1, places, -torch.ones_like(normalizer))
        return loss, work.mul_(kept).to(logits.dtype)


def _added(so_far: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return so_far
    return grad.to(_accurate(grad.dtype)) if so_far is None else so_far.add_(grad)


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_chunk_tokens(chunk_tokens: int) -> None:
    if chunk_tokens < 1:
        raise ValueError(
            f"chunk_tokens is {chunk_tokens}; it must be at least 1 (the default is {DEFAULT_CHUNK_TOKENS})"
        )


def enable_lean_loss(model: nn.Module, *, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> None:
    """Make `model(..., labels=...)` in training mode compute its loss by chunks and return no logits.

    Works under Trainer, accelerate, DDP and DeepSpeed ZeRO-3, with peft and with activation checkpointing: it replaces
    the `forward` of this one model object, so a wrapper put around it before or after calls it. Evaluation mode,
    calls without labels and `generate` run the model's own forward as before. A call takes `num_items_in_batch` and
    `shift_labels` as transformers' models do. Two things differ from the plain loss: where every label is ignored it
    is 0, not NaN; and the call makes no key/value cache, so that position ids that start anew isolate the documents of
    a packed row, which transformers does for `use_cache=False` only.

    Args:
        model: A causal language model of transformers, or peft's wrapper around one.
        chunk_tokens: Tokens whose logits exist at once: memory of about 8 bytes x vocabulary x this (bfloat16).

    Raises:
        ValueError: If the model has no decoder and head to part, adds a router's loss, or is lean already.
    """
    _check_chunk_tokens(chunk_tokens)
    causal = causal_model(model)
    if hasattr(causal, "_plain_forward"):
        raise ValueError(
            f"{type(causal).__name__} has the lean loss already; call disable_lean_loss first to change it"
        )
    if getattr(causal.config, "output_router_logits", False):
        raise ValueError(
            f"{type(causal).__name__} adds its router's balancing loss (output_router_logits=True), which needs the "
            "whole batch; set config.output_router_logits to False, or train without the lean loss"
        )
    _child_name(causal, causal.base_model, "decoder")
    _child_name(causal, causal.get_output_embeddings(), "output head")
    plain = causal.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if not self.training or given.arguments.get("labels") is None:
            return plain(*args, **kwargs)
        return _lean_forward(self, plain, {**given.arguments, **given.arguments.pop("kwargs", {})}, chunk_tokens)

    signature = inspect.signature(plain)
    forward.__signature__ = inspect.signature(plain.__func__)  # type: ignore[attr-defined]  # Trainer reads it
    causal._plain_forward = plain
    causal.forward = MethodType(forward, causal)


def disable_lean_loss(model: nn.Module) -> None:
    """Give a model its own forward back.

    Raises:
        ValueError: If it does not have the lean loss.
    """
    causal = causal_model(model)
    if not hasattr(causal, "_plain_forward"):
        raise ValueError(f"{type(causal).__name__} does not have the lean loss; enable_lean_loss gives it")
    plain = causal.__dict__.pop("_plain_forward")
    del causal.forward
    if causal.forward != plain:  # something else had replaced it before
        causal.forward = plain


def causal_model(model: Any) -> Any:
    """Return the causal model itself: what peft has wrapped, or the model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _child_name(model: Any, child: nn.Module | None, what: str) -> str:
    for name, module in model.named_children():
        if module is child:
            return str(name)
    raise ValueError(
        f"{type(model).__name__} has no {what} of its own; the lean loss needs a causal language model of "
        "transformers such as AutoModelForCausalLM gives"
    )


def _lean_forward(model: Any, plain: Callable[..., Any], given: dict[str, Any], chunk_tokens: int) -> Any:
    """Run the decoder on the call's own arguments, then the head by chunks."""
    labels, num_items = given["labels"], given.get("num_items_in_batch")
    shifted = given.get("shift_labels")
    if shifted is None:
        shifted = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)
    arguments = {name: value for name, value in given.items() if name not in _NO_ARGUMENTS}
    outputs = model.base_model(**{**arguments, "use_cache": False})
    hidden = outputs.last_hidden_state
    targets = shifted.reshape(-1).to(hidden.device)
    total = _through_head(model, plain, hidden.flatten(0, -2), targets, chunk_tokens)
    if num_items is None:
        num_items = (targets != IGNORE_INDEX).sum()
    count = torch.as_tensor(num_items, device=total.device).clamp_min(1)
    return CausalLMOutputWithPast(
        loss=total / count, hidden_states=outputs.hidden_states, attentions=outputs.attentions
    )


def _through_head(model: Any, plain: Callable[..., Any], hidden: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    """Return the summed loss, computed inside ONE call of the head module.

    ZeRO-3 gathers a module's weights when it is called and lets them go afterwards, and again in the backward: all
    chunks in one call is one gather each way. A chunk runs the model's own forward, so that its logits are soft-capped
    or scaled as ever, with the decoder replaced by the chunk's hidden states and the head by its bare forward.
    """
    head = model.get_output_embeddings()
    bare = head.forward

    def logits(piece: Tensor) -> Tensor:
        replaced = {
            _child_name(model, model.base_model, "decoder"): _Decoded(piece.unsqueeze(0)),
            _child_name(model, head, "output head"): _Bare(bare),
        }
        with _replaced_children(model, replaced):
            made: Tensor = plain(use_cache=False).logits
        return made.squeeze(0)

    def chunks(states: Tensor) -> Tensor:
        return chunked_cross_entropy(states, logits, targets, list(head.parameters()), chunk_tokens=chunk_tokens)

    own = head.__dict__.get("forward")  # accelerate's dispatch hooks live there
    head.forward = chunks
    try:
        total: Tensor = head(hidden)
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own
    return total


class _Decoded(nn.Module):
    """Stands for the decoder and returns hidden states that were computed before."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


class _Bare(nn.Module):
    """Stands for the head, without the hooks that its call would run for each chunk."""

    def __init__(self, bare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bare = bare

    def forward(self, hidden: Tensor) -> Tensor:
        return self.bare(hidden)


@contextmanager
def _replaced_children(model: nn.Module, replaced: dict[str, nn.Module]) -> Iterator[None]:
    modules = model._modules
    own = {name: modules[name] for name in replaced}
    modules.update(replaced)
    try:
        yield
    finally:
        modules.update(own)
