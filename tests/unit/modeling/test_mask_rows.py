"""Rows that see nothing: padding before a hole must not turn what comes after it into no number."""

from __future__ import annotations

import pytest
import torch
from tiny_bias import bias_model, tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_padding_before_a_hole(attention: str) -> None:
    ids = tokens(40)
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    mask[:, 17:21] = 0
    logits = bias_model("alibi", backend=attention)(ids, attention_mask=mask, use_cache=False).logits
    assert bool(logits.isfinite().all())
