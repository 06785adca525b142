"""One progress bar for everything that takes more than a few seconds, on stderr, with the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, total: float, shown: bool = True) -> Iterator[Callable[[float], None]]:
    """Show a bar on stderr and give a function that advances it.

    Args:
        title: what is being done.
        total: the whole work, in any unit.
        shown: False where another process shows it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)
