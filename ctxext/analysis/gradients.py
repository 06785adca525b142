"""How much each input token moves a model's next prediction: gradients with respect to the input embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PROBE_TOKENS = 8


@contextmanager
def _frozen_and_checkpointed(model: Any) -> Iterator[None]:
    """Take gradients of inputs only, and recompute each layer's activations where the model can.

    transformers checkpoints only what is in training mode; the mode is therefore set on the layers themselves and not
    on what is inside them, whose dropout stays off.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    can = bool(getattr(model, "supports_gradient_checkpointing", False)) and not model.is_activation_checkpointing
    for parameter in parameters:
        parameter.requires_grad_(False)
    if can:
        model.activation_checkpointing_enable({"use_reentrant": False})
    resting = [one for one in model.modules() if getattr(one, "gradient_checkpointing", False) and not one.training]
    for module in resting:
        module.training = True
    try:
        yield
    finally:
        for module in resting:
            module.training = False
        if can:
            model.activation_checkpointing_disable()
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextmanager
def _embeddings_kept(model: Any) -> Iterator[list[torch.Tensor]]:
    """Put what the embedding layer returns into a list, as a leaf that gradients reach.

    A hook rather than `inputs_embeds`, which not every model takes.
    """
    kept: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kept.append(output.detach().requires_grad_(True))
        return kept[-1]

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


def gradient_norms(model: Any, input_ids: torch.Tensor, position: int = -1) -> torch.Tensor:
    """Return the norm of the gradient of a prediction with respect to each input embedding.

    The Sandwich paper (arXiv 2212.10356, section 5.1) takes "the gradient of each input token with respect to the
    prediction of the next token" and leaves the scalar open. Here it is log p(y), with y the token that the model
    itself finds most likely after `position`. So no label enters, the normalised gradient is that of p(y) itself (the
    gradients differ by the factor p(y), the same for all tokens), and what shifts all logits alike counts for nothing.

    Args:
        model: a causal language model of transformers, in eval mode.
        input_ids: tokens, `(batch, length)`; rows do not influence each other.
        position: where the prediction is made; the last token by default.

    Returns:
        Euclidean norms, float64 on the CPU, `(batch, length)`.

    Raises:
        ValueError: if one is NaN or infinite, or all of a row are zero.
    """
    import torch

    length = input_ids.shape[1]
    keep = length - position % length
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_frozen_and_checkpointed(model))
        kept = stack.enter_context(_embeddings_kept(model))
        output = model(input_ids=input_ids.to(model.device), use_cache=False, logits_to_keep=keep)
        logits = output.logits[:, -keep]
        chances = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
        (gradient,) = torch.autograd.grad(chances.amax(dim=-1).sum(), kept[0])
    norms: torch.Tensor = gradient.double().norm(dim=-1).cpu()
    if not bool(norms.isfinite().all()):
        raise ValueError(f"gradients in {model.dtype} are NaN or infinite: try --dtype float32")
    if not bool((norms.sum(dim=1) > 0).all()):
        raise ValueError(f"no input token moves the prediction in {model.dtype}: try --dtype float32")
    return norms


def check_causal(model: Any) -> None:
    """Refuse a model whose predictions depend on later tokens.

    Raises:
        ValueError: if the prediction at a token has a gradient with respect to one after it.
    """
    import torch

    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    probe = torch.arange(PROBE_TOKENS)[None] % int(config.vocab_size)
    middle = PROBE_TOKENS // 2
    if bool(gradient_norms(model, probe, middle)[0, middle + 1 :].any()):
        raise ValueError(
            f"{type(model).__name__} is not causal: its prediction at a token depends on the tokens after it; "
            "give a decoder-only language model"
        )
