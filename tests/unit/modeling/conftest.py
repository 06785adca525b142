"""flex_attention on a CPU in a time that a matrix of shapes can bear."""

from __future__ import annotations

import pytest
from torch.nn.attention import flex_attention


@pytest.fixture(autouse=True)
def untraced_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run flex_attention's operator as it is: tracing it for every new shape would take a second or more each.

    `test_flex_attention_as_users_call_it` traces. Without this private switch the tests are slower and no other.
    """
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
