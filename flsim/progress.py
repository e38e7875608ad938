"""Progress on standard error: a bar where someone watches, plain lines elsewhere. Standard output is for results."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")

console = Console(stderr=True, highlight=False)
LINES_EVERY = 15.0  # seconds between two plain lines


class Advance(Protocol):
    """Says that `done` of the total is done, with a short note."""

    def __call__(self, done: float, note: str = "") -> None: ...


def say(message: str) -> None:
    """One line for a person."""
    console.print(message, markup=False, soft_wrap=True)


@contextmanager
def progress(title: str, total: float, start: float = 0) -> Iterator[Advance]:
    """Show how far a long job is.

    >>> with progress("training", total=100) as advance:                     # doctest: +SKIP
    ...     advance(1, "loss 6.91")
    """
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console) as bars:
            task = bars.add_task(title, total=total, completed=int(start), note="")
            yield lambda done, note="": bars.update(task, completed=done, note=note)
        return
    last = began = time.monotonic()

    def advance(done: float, note: str = "") -> None:
        nonlocal last
        if done >= total or time.monotonic() - last >= LINES_EVERY:
            last = time.monotonic()
            say(f"{title}: {done:,.0f} of {total:,.0f}, {last - began:.0f} s{', ' + note if note else ''}")

    yield advance


def tracked(title: str, items: Sequence[Item]) -> Iterator[Item]:
    """The items, with progress as they are done."""
    with progress(title, len(items)) as advance:
        for done, item in enumerate(items, start=1):
            yield item
            advance(done)
