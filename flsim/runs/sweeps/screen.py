"""Progress of all runs of a sweep on one screen: a table in a terminal, otherwise plain lines."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flsim.base.errors import InputError
from flsim.base.files import from_json
from flsim.base.progress import LINES_EVERY, clock, say
from flsim.base.terminal import console
from flsim.results.rows import ON_SCREEN, in_short
from flsim.results.store import read_run
from flsim.runs import roundlog
from flsim.runs.sweeps.folder import SweepFolder

SHOWN = 16  # largest number of shown runs


@dataclass(frozen=True)
class State:
    status: str  # "waits", "runs", or the final status in run.json
    done: float = 0.0  # share of its rounds, 0 to 1
    note: str = ""  # text next to the progress bar


def state_of(run: Path, began: float, is_finished: bool = False) -> State:
    """Return the state of a run's folder, which can be missing; without changes since `began` (s), the run waits.

    `is_finished` is whether the run was complete at that time, when the sweep was last continued.
    """
    try:
        known = from_json((run / "run.json").read_text(encoding="utf-8"))
        status, round_, rounds = str(known["status"]), int(known["round"]), int(known["rounds"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return State("waits")
    touched = (run / "run.json").stat()
    is_over = status in {"completed", "diverged"}
    if is_over and (is_finished or touched.st_mtime >= began):
        return State(status, 1.0, _results_in_short(run, touched.st_mtime_ns))
    if is_over or touched.st_mtime < began:
        return State("waits", note=f"stopped at {round_:,}" if round_ else "")
    last = roundlog.last(run)
    done, loss = last.get("round", round_), last.get("loss")
    note = f"{done:,}/{rounds:,}" + (f", loss {loss:.2f}" if isinstance(loss, int | float) and isfinite(loss) else "")
    return State("runs" if status == "running" else status, done / max(rounds, 1), note)


class Screen:
    def __init__(self, folder: SweepFolder, names: Sequence[str], began: float, finished: Collection[str] = ()) -> None:
        self._folder, self._names, self._began, self._finished = folder, names, began, frozenset(finished)
        self._said_at = time.monotonic()
        self._started: set[str] = set()
        self._live: Live | None = None

    @contextmanager
    def live(self) -> Iterator["Screen"]:
        if not console.is_terminal:
            yield self
            return
        with Live(console=console, refresh_per_second=2, transient=True) as live:
            self._live = live
            yield self
        self._live = None

    def look(self) -> None:
        states = {name: self._state_of(name) for name in self._names}
        if self._live is not None:
            self._live.update(self._table(states))
            return
        for name in [name for name, state in states.items() if state.status == "runs" and name not in self._started]:
            self._started.add(name)
            say(f"{name}: started")
        if time.monotonic() - self._said_at >= LINES_EVERY:
            self._said_at = time.monotonic()
            running = [f"{name} {100 * state.done:.0f}%" for name, state in states.items() if state.status == "runs"]
            if running:
                say(f"{self._summary(states)}; {', '.join(running)}")

    def ended(self, name: str, failure: str | None, remaining: int) -> None:
        state = self._state_of(name)
        over = state.status in {"completed", "diverged"}
        outcome = " ".join(filter(None, (state.status, state.note))) if over else f"failed: {failure}"
        say(f"{name}: {outcome} ({remaining} run{'s' * (remaining != 1)} remaining)")

    def _state_of(self, name: str) -> State:
        return state_of(self._folder.run(name), self._began, name in self._finished)

    def _summary(self, states: dict[str, State]) -> str:
        over = sum(state.status in {"completed", "diverged"} for state in states.values())
        return f"{over} of {len(states)} runs, {clock(time.time() - self._began)}"

    def _table(self, states: dict[str, State]) -> Table:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=3)
        table.add_column(width=10)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=2)
        whole = sum(state.done for state in states.values()) / max(len(states), 1)
        left = clock((time.time() - self._began) * (1 - whole) / whole) if 0.02 < whole < 1 else ""
        remaining = Text(f"about {left} remaining" if left else "")
        table.add_row(Text(self._summary(states), style="bold"), _bar(whole), remaining)
        order = {"runs": 0, "failed": 1, "completed": 2, "diverged": 2, "waits": 3}
        by_need = sorted(states, key=lambda name: order.get(states[name].status, 1))  # stable
        for name in by_need[:SHOWN]:
            state = states[name]
            waits = state.status == "waits"
            text = f"{state.note}" if state.status in {"runs", "completed"} else f"{state.status} {state.note}"
            table.add_row(Text(name, style="dim" if waits else ""), _bar(state.done), Text(text.strip()))
        if len(states) > SHOWN:
            table.add_row(Text(f"and {len(states) - SHOWN} more", style="dim"))
        return table


def _bar(done: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=done, width=10)


@cache  # the result is cached, because it needs all rows and is used every second
def _results_in_short(run: Path, _when: int) -> str:
    """Return the results of an ended run in a few words; `_when` distinguishes several ends of a run."""
    try:
        results = read_run(run)
        if results.status == "diverged":
            return f"at {results.round:,}"
        last = results.evaluation()
        measured = {quantity: results.of_planted(quantity.name, last) for quantity in ON_SCREEN}
        if any(values is None for quantity, values in measured.items() if quantity.is_flag):
            return ""
        return in_short({quantity: values for quantity, values in measured.items() if values is not None})
    except InputError:
        return ""
