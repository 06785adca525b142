"""One evaluation over several processes: `accelerate launch --num_processes 4 -m ctxext eval ...`, or torchrun.

Every process loads the model onto a device of its own and makes the same plan; process r of n scores the units r,
r + n, ...; then all know all scores. Units are never split and are summed in the plan's order, so that any number of
processes gives the score of one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
        rank: of this one, from 0.
        count: of all of them.
        local_rank: of this one among those of its machine: the index of its device.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        """Say whether this process writes the result."""
        return self.rank == 0

    def gather(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of all processes together; waits for them."""
        if self.count == 1:
            return dict(mine)
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.count
        dist.all_gather_object(gathered, dict(mine))
        return {name: value for part in gathered for name, value in part.items()}

    def wait(self) -> None:
        """Return when every process is here."""
        self.gather({})


def join_processes() -> Processes:
    """Return the processes that a launcher started this one among; connects them the first time."""
    return Processes() if int(os.environ.get("WORLD_SIZE", "1")) == 1 else _connect()


@cache
def _connect() -> Processes:
    import atexit
    from datetime import timedelta

    import torch
    from accelerate import PartialState

    # accelerate joins processes on the CPU only if it is told so; one with nothing left to score waits for the others
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=7))
    atexit.register(state.destroy_process_group)
    return Processes(state.process_index, state.num_processes, state.local_process_index)
