"""One side of `ctxext bench train` on a tiny model: Trainer gives the same losses with every preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxext.bench.measure import run_once
from ctxext.bench.train import SIDES, side_command


@pytest.mark.slow  # three processes that import Trainer
def test_sides_agree(llama: Path) -> None:
    options: dict[str, Any] = {"checkpoint": str(llama), "length": 32, "batch": 2, "steps": 1}
    samples = {side: run_once(side_command({**options, "preset": side})) for side in SIDES}
    plain = samples["plain"].answer["losses"]
    assert len(plain) == 2
    for sample in samples.values():
        assert sample.answer["losses"] == pytest.approx(plain, rel=1e-2)  # bfloat16 weights after a step
        assert sample.answer["losses"][0] == pytest.approx(plain[0], rel=1e-3)
        assert sample.seconds > 0
