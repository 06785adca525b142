"""The plain ways that the benchmarks compare with: what one writes from the documentation of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def plain_perplexity(model: Any, ids: Sequence[int], length: int, stride: int, batch: int) -> float:
    """Return the perplexity of one document by a sliding window, with the logits of every position.

    Windows of `length` tokens start every `stride` tokens; targets that an earlier window has scored are -100.

    Args:
        model: A causal language model in eval mode.
        ids: The document's tokens: `length + n * stride + 1` of them, so that all windows are whole.
        length: Window, in tokens.
        stride: Tokens from one window to the next.
        batch: Windows read at once.
    """
    import torch
    from torch.nn.functional import cross_entropy

    tokens = torch.tensor(ids, device=model.device)
    total, count = torch.zeros((), dtype=torch.float64), 0
    starts = list(range(0, len(ids) - length, stride))
    for at in range(0, len(starts), batch):
        chosen = starts[at : at + batch]
        inputs = torch.stack([tokens[start : start + length] for start in chosen])
        targets = torch.stack([tokens[start + 1 : start + length + 1] for start in chosen])
        for row, start in enumerate(chosen):
            if start > 0:
                targets[row, : length - stride] = -100
        with torch.inference_mode():
            logits = model(input_ids=inputs, use_cache=False).logits
            losses = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        total += losses.double().sum().cpu()
        count += int((targets >= 0).sum())
    return float((total / count).exp())


def plain_passkey(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, batch: int) -> list[list[int]]:
    """Return greedy continuations, every prompt read anew and decoded with a cache by the model's own `generate`.

    Args:
        model: A causal language model in eval mode.
        prompts: Token sequences of equal length.
        new_tokens: Tokens to generate.
        batch: Prompts read at once.
    """
    import torch

    continuations: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        ids = torch.tensor(prompts[start : start + batch], device=model.device)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        continuations += output[:, ids.shape[1] :].tolist()
    return continuations
