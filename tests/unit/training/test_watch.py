"""A lost run stops, and says at which step, over which documents, and what to do."""

from __future__ import annotations

import math

import pytest

from ctxext.training.watch import LossWatch, TrainingStopped


def watch() -> LossWatch:
    return LossWatch(3.0, lambda step: [f"corpus: document {step}"])


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_before_the_gradient(loss: float) -> None:
    with pytest.raises(TrainingStopped, match="step 7.*corpus: document 7.*learning_rate"):
        watch().micro(7, loss)


def test_a_gradient_that_is_no_number_stops() -> None:
    with pytest.raises(TrainingStopped, match="gradient's norm is nan"):
        watch().step(1, math.nan)


def test_an_exploding_loss_stops_and_a_noisy_one_does_not() -> None:
    one = watch()
    for step in range(1, 30):
        one.micro(step, 1.0 + step % 3)
        one.step(step, 1.0)
    one.micro(30, 3.0)
    one.micro(30, 4.0)
    with pytest.raises(TrainingStopped, match="step 30: the loss is 7, more than 3 times the median 2"):
        one.step(30, 1.0)


def test_the_first_steps_are_never_called_explosions() -> None:
    one = watch()
    for step, loss in enumerate([1.0, 50.0, 1.0], 1):
        one.micro(step, loss)
        one.step(step, None)
