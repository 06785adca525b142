"""Negative log-likelihoods of chosen tokens, without ever holding the logits of a whole sequence.

A full `(tokens, vocabulary)` matrix of logits is what fills memory when a long sequence is read: 12288 tokens of a
model with 49152 words are 2.4 GB in float32, several times over. Here the hidden states of one pass are kept, and the
output head runs over the scored positions only, a bounded number of logits at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LOGITS_AT_ONCE = 1 << 24
PROBE_TOKENS = 8
# Relative to the largest logit: two ways of computing the same logits differ by rounding, a missing step by far more.
PROBE_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}


def reading(model: Any) -> Any:
    """Return the context for forwards without gradients: inference mode, or no_grad where tensors outlive it.

    DeepSpeed's ZeRO-3 gathers weights during a forward and keeps some for the next one, which may be in training.
    """
    import torch

    partitioned = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return torch.no_grad() if partitioned else torch.inference_mode()


class TokenScorer:
    """Scores tokens with a causal language model of transformers.

    The output head is taken to be the model's output embedding, with a softcap where the config has one (Gemma 2).
    That is checked on a few tokens against the model's own logits; a model that does more there is scored through its
    own forward with `logits_to_keep`, which holds the logits of all scored positions of a batch at once.
    """

    def __init__(self, model: Any) -> None:
        """Prepare scoring with `model`, which should be in eval mode."""
        self.model = model
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.vocabulary = int(config.vocab_size)
        self.split = self._can_split()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits `(tokens, vocabulary)` of hidden states `(tokens, width)`."""
        import torch

        logits: torch.Tensor = self.model.get_output_embeddings()(hidden).float()
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def _hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden

    def _can_split(self) -> bool:
        """Say whether base model and output head, run apart, give the model's own logits."""
        import torch

        if self.model.get_output_embeddings() is None or self.model.base_model is self.model:
            return False
        probe = torch.arange(PROBE_TOKENS, device=self.model.device)[None] % self.vocabulary
        with reading(self.model):
            wanted = self.model(input_ids=probe, use_cache=False).logits[0].float()
            ours = self._logits(self._hidden(probe)[0]).to(wanted.device)
        if ours.shape != wanted.shape:
            return False
        tolerance = PROBE_TOLERANCE.get(str(self.model.dtype).removeprefix("torch."), 3e-2)
        return bool((ours - wanted).abs().max() <= tolerance * wanted.abs().max())

    def _nll_of_rows(
        self, logits_of: Callable[[int, int], torch.Tensor], targets: torch.Tensor, own: bool
    ) -> torch.Tensor:
        """Return the float32 losses in nats of `targets` `(tokens,)`, a bounded number of logits at a time."""
        import torch

        rows = max(1, LOGITS_AT_ONCE // self.vocabulary)
        losses = []
        for start in range(0, len(targets), rows):
            logits = logits_of(start, start + rows)
            wanted = targets[start : start + rows].to(logits.device)
            chosen = logits.amax(dim=-1) if own else logits.gather(-1, wanted[:, None])[:, 0]
            losses.append((torch.logsumexp(logits, dim=-1) - chosen).cpu())
        return torch.cat(losses)

    def nll(self, input_ids: torch.Tensor, targets: torch.Tensor, own: bool = False) -> torch.Tensor:
        """Return the loss of every wanted prediction of a batch of windows, read at once without a cache.

        Args:
            input_ids: the windows' tokens, `(batch, length)`.
            targets: the token that follows each position, `(batch, length)`; negative where it is not to be scored.
            own: score the token that the model gives the largest probability in place of the target.

        Returns:
            Losses in nats, float32 on the CPU, `(scored,)`, row by row in order of position.

        Raises:
            ValueError: if the logits hold a NaN or infinity.
        """
        device = self.model.device
        wanted = (targets >= 0).to(device)
        flat_targets = targets[targets >= 0]
        with reading(self.model):
            if self.split:
                hidden = self._hidden(input_ids.to(device))
                chosen = hidden[wanted.to(hidden.device)]
                losses = self._nll_of_rows(lambda start, stop: self._logits(chosen[start:stop]), flat_targets, own)
            else:
                columns = wanted.any(dim=0).nonzero()[:, 0]
                logits = self.model(input_ids=input_ids.to(device), use_cache=False, logits_to_keep=columns).logits
                chosen = logits[wanted[:, columns].to(logits.device)]
                losses = self._nll_of_rows(lambda start, stop: chosen[start:stop].float(), flat_targets, own)
        check_finite(losses, self.model)
        return losses


def check_finite(values: torch.Tensor, model: Any) -> None:
    """Refuse losses or logits that are not numbers.

    Raises:
        ValueError: if one is NaN or infinite.
    """
    if not bool(values.isfinite().all()):
        bad = int((~values.isfinite()).sum())
        raise ValueError(
            f"{bad} of {values.numel()} values are NaN or infinite in {model.dtype}: "
            "try --dtype float32 or bfloat16, and run `ctxext doctor` on the checkpoint"
        )


def bucket_edges(length: int, buckets: str) -> list[int]:
    """Return the edges of position buckets.

    Args:
        length: the largest position.
        buckets: a number of even buckets (`16`), or the inner edges, comma-separated (`256,1024,4096`).

    Returns:
        Ascending edges from 0 to `length`; bucket i holds the positions from edges[i] up to but without edges[i + 1].

    Raises:
        ValueError: if `buckets` is neither, or an edge lies outside.
    """
    try:
        numbers = [int(word) for word in buckets.split(",")]
    except ValueError as error:
        raise ValueError(f"buckets {buckets!r} must be a number, or edges like 256,1024,4096") from error
    if "," not in buckets:
        if not 1 <= numbers[0] <= length:
            raise ValueError(f"buckets {buckets} must lie between 1 and the length {length}")
        return [round(index * length / numbers[0]) for index in range(numbers[0] + 1)]
    edges = [0, *(edge for edge in numbers if edge not in (0, length)), length]
    if edges != sorted(set(edges)):
        raise ValueError(f"bucket edges {buckets!r} must ascend and lie between 0 and the length {length}")
    return edges


def position_loss(model: Any, input_ids: Sequence[int] | torch.Tensor, edges: Sequence[int]) -> list[float | None]:
    """Return the mean loss by position of one sequence, read in one pass.

    Position p is that of the last token read: the loss at p is that of predicting token p + 1 from tokens 0..p.
    Nothing larger than `LOGITS_AT_ONCE` logits is held, so sequences far beyond the window fit.

    Args:
        model: a causal language model in eval mode.
        input_ids: the tokens, `(length + 1,)`: the last one is only predicted.
        edges: ascending bucket edges, as from `bucket_edges`.

    Returns:
        For each bucket the mean loss in nats per token, None where it holds no position.

    Raises:
        ValueError: if there are fewer than two tokens, or a loss is not a number.
    """
    import torch

    tokens = torch.as_tensor(input_ids, dtype=torch.long).flatten()
    if len(tokens) < 2:
        raise ValueError(f"loss by position needs at least two tokens, not {len(tokens)}")
    losses = TokenScorer(model).nll(tokens[None, :-1], tokens[None, 1:]).double()
    parts = [losses[start:stop] for start, stop in zip(edges[:-1], edges[1:], strict=True)]
    return [float(part.mean()) if len(part) else None for part in parts]
