"""Candidates of a LongRoPE search on a live model, and the methods that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ctxext.analysis.longrope_operators import Candidate
from ctxext.evaluation.scoring import TokenScorer
from ctxext.positions.base import FloatArray
from ctxext.positions.live import fit_length, patch, rotary_modules

if TYPE_CHECKING:
    import torch

Sequences = Sequence[Sequence[int]]


class LiveFactors:
    """A model whose frequencies are divided by the factors of one candidate after another.

    Stock transformers' longrope has no first tokens that stay unscaled (the paper's n); a hook gives those positions
    the cos and sin of the original frequencies. The attention factor is longrope's own for `length` throughout.
    """

    def __init__(self, model: Any, base: FloatArray, length: int) -> None:
        """Turn `model` into a longrope model of `length` tokens; `base` are its own frequencies, `(dimensions,)`."""
        import torch

        ones = (1.0,) * len(base)
        self.model = fit_length(patch(model, method="longrope", length=length, long_factor=ones), length)
        self.base = base
        self.original = torch.tensor(base, dtype=torch.float32)
        self.unscaled = 0
        self.scorer = TokenScorer(self.model)
        for module in rotary_modules(self.model).values():
            module.register_forward_hook(self._restore_first, with_kwargs=True)

    def _restore_first(
        self, module: Any, given: tuple[Any, ...], named: dict[str, Any], turned: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace cos and sin, `(batch, tokens, rotary_dim)`, of the first positions by the original model's."""
        import torch

        if not self.unscaled:
            return turned
        positions = named["position_ids"] if "position_ids" in named else given[1]
        angles = positions[..., None].float() * self.original.to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        first = (positions < self.unscaled)[..., None]
        cos, sin = (made * module.attention_scaling for made in (angles.cos(), angles.sin()))
        return torch.where(first, cos.to(turned[0].dtype), turned[0]), torch.where(
            first, sin.to(turned[1].dtype), turned[1]
        )

    def put(self, candidate: Candidate) -> None:
        """Turn with the candidate's frequencies from now on.

        Raises:
            ValueError: if it has unscaled tokens and the model has frequencies by layer type.
        """
        import torch

        frequencies = torch.tensor(self.base / candidate.factors, dtype=torch.float32)
        for module in rotary_modules(self.model).values():
            prefix = "full_attention_" if isinstance(module.rope_type, dict) else ""
            if prefix and candidate.unscaled:
                raise ValueError("this model turns by layer type: only 0 unscaled first tokens can be searched")
            getattr(module, f"{prefix}inv_freq").copy_(frequencies)
        self.unscaled = candidate.unscaled

    def losses(self, candidate: Candidate, sequences: Sequences) -> list[float]:
        """Return the candidate's mean loss on each sequence, nats per token: one forward pass each."""
        self.put(candidate)
        return sequence_losses(self.scorer, sequences)


def sequence_losses(scorer: TokenScorer, sequences: Sequences) -> list[float]:
    """Return the mean loss of each sequence of `length + 1` tokens, nats per token."""
    import torch

    tokens = [torch.tensor([ids], dtype=torch.long) for ids in sequences]
    return [float(scorer.nll(row[:, :-1], row[:, 1:]).double().mean()) for row in tokens]


def method_losses(
    model: Any, method: str, length: int, read: Sequence[Sequences], **options: Any
) -> list[list[float]]:
    """Return the losses of a fresh model under a method for `length` tokens, for each list of sequences in `read`.

    Within a list all sequences are equally long, and frequencies that depend on the length are those for that length.
    An empty method leaves the model as it is.
    """
    import copy

    patched = patch(model, method=method, length=length, **options) if method else model
    made = []
    for sequences in read:
        fitted = copy.deepcopy(patched) if method == "longrope" else patched
        made.append(sequence_losses(TokenScorer(fit_length(fitted, len(sequences[0]) - 1)), sequences))
    return made
