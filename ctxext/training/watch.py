"""Stop a run whose loss or gradient is lost, before it writes that into the weights."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

_HISTORY = 50
_LEAST_HISTORY = 10
_NAMED_DOCUMENTS = 12


class TrainingStopped(RuntimeError):
    """A run that would only get worse; the message names step, documents and remedy."""


class LossWatch:
    """Watch the losses of each step.

    Args:
        limit: Stop when a step's loss is so many times the median of the 50 steps before it (at least 10).
        documents: From a step, counted from 1, to the documents of its batch in words.
    """

    def __init__(self, limit: float, documents: Callable[[int], Sequence[str]]) -> None:
        self.limit, self.documents = limit, documents
        self._history: deque[float] = deque(maxlen=_HISTORY)
        self._sum = 0.0

    def micro(self, step: int, loss: float) -> None:
        """Take the share of one forward in a step's loss, before its gradient is computed.

        Raises:
            TrainingStopped: If it is no finite number.
        """
        if not math.isfinite(loss):
            raise TrainingStopped(self._message(step, f"the loss is {loss}"))
        self._sum += loss

    def step(self, step: int, gradient_norm: float | None) -> None:
        """Take the end of a step's gradient, before the weights change.

        Raises:
            TrainingStopped: If the gradient is not finite, or the step's loss has exploded.
        """
        loss, self._sum = self._sum, 0.0  # exactly 0: no prediction of this step counts
        if gradient_norm is not None and not math.isfinite(gradient_norm):
            raise TrainingStopped(self._message(step, f"the gradient's norm is {gradient_norm}"))
        if len(self._history) >= _LEAST_HISTORY and loss > self.limit * (median := statistics.median(self._history)):
            said = (
                f"the loss is {loss:.4g}, more than {self.limit:g} times the median {median:.4g} of the steps before"
            )
            raise TrainingStopped(self._message(step, said))
        if loss:
            self._history.append(loss)

    def _message(self, step: int, said: str) -> str:
        named = list(self.documents(step))
        more = f" and {len(named) - _NAMED_DOCUMENTS} more" if len(named) > _NAMED_DOCUMENTS else ""
        return (
            f"stopped at step {step}: {said}. The batch: {'; '.join(named[:_NAMED_DOCUMENTS])}{more}. The checkpoints "
            "from before are whole. If these documents are damaged, leave them out; else lower learning_rate or "
            "max_grad_norm, lengthen warmup_steps, or use bf16 in place of fp16; loss_limit says what is exploding"
        )
