"""A terminal on standard error, with rich: its console, and the columns of a progress bar."""

from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
from rich.table import Column
from rich.text import Text


class _Console(Console):
    """A console that ignores failed writes, because a closed pipe or a full disk must not stop a run."""

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True  # rich would exit, and redirect standard output


console = _Console(stderr=True, highlight=False)


def bars() -> Progress:
    """Return a display of bars, each of which is a task with the fields `title` and `status`."""
    columns = (_OneLine("title"), BarColumn(bar_width=10), TimeElapsedColumn(), _OneLine("status"))
    return Progress(*columns, console=console)


class _OneLine(ProgressColumn):
    """A column that shows a field of a task on one line, cut at the edge of the terminal."""

    def __init__(self, field: str) -> None:
        super().__init__(Column(no_wrap=False))
        self._field = field

    def render(self, task: Task) -> Text:
        return Text(task.fields[self._field], no_wrap=True, overflow="ellipsis")
