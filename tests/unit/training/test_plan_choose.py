"""`ctxext plan`: the cheapest that fits, in the order it states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ctxext.cli import app
from ctxext.training.plan_choose import parse_memory, plan_checkpoint, render_plan


def test_cheapest_is_the_first_that_fits(llama: Path) -> None:
    roomy = plan_checkpoint(str(llama), length=4096, memory="80GB")
    assert (roomy["cheapest"]["method"], roomy["cheapest"]["stage"]) == ("full", 0)
    assert roomy["cheapest"]["recompute"] == "nothing" and roomy["cheapest"]["chunk_tokens"] is None
    peaks = sorted(row["bytes"]["peak"] for row in roomy["settings"] if row["method"] == "full")
    tight = plan_checkpoint(str(llama), length=4096, memory=str(peaks[0]))
    assert tight["cheapest"]["bytes"]["peak"] == peaks[0]
    for row in tight["settings"]:
        if row["fits"]:
            assert row["relative_time"] >= tight["cheapest"]["relative_time"] or row["method"] != "full"
    nothing = plan_checkpoint(str(llama), length=4096, memory="1MB", method="lora")
    assert nothing["cheapest"] is None and "Nothing fits. The least is lora" in render_plan(nothing)
    assert {row["method"] for row in nothing["settings"]} == {"lora"}


def test_command(llama: Path) -> None:
    call = ["plan", str(llama), "--length", "512", "--gpus", "2", "--memory", "24GB"]
    answer = json.loads(CliRunner().invoke(app, [*call, "--json"]).stdout)
    assert answer["memory"] == 24e9 and answer["gpus"] == 2
    text = CliRunner().invoke(app, call).stdout
    assert "The cheapest that fits: full, ZeRO-0" in text


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80e9), ("24 GiB", 24 * 2**30), ("1.5gb", 1.5e9), ("1000", 1000.0)]
)
def test_memory(text: str, size: float) -> None:
    assert parse_memory(text) == size


def test_refusals(llama: Path) -> None:
    for text in ("80 G", "-1GB", "0GB", "much"):
        with pytest.raises(ValueError, match="such as 80GB"):
            parse_memory(text)
    with pytest.raises(ValueError, match="--gpus is 0; it must be at least 1"):
        plan_checkpoint(str(llama), length=512, gpus=0)
    with pytest.raises(ValueError, match="did you mean 'qlora'"):
        plan_checkpoint(str(llama), length=512, method="qlor")
    with pytest.raises(ValueError, match="--device is 'tpu'"):
        plan_checkpoint(str(llama), length=512, device="tpu")
