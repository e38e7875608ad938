"""Progress on standard error: a bar in a terminal, otherwise plain lines. Standard output is for results."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from flsim.base.logs import log

Item = TypeVar("Item")


class _PlainConsole:
    """A console without rich, for machines that have only torch and numpy; each message is a line."""

    is_terminal = False

    def print(self, message: str, **_: Any) -> None:
        with suppress(OSError, ValueError):  # ValueError: standard error is closed
            print(message, file=sys.stderr, flush=True)  # noqa: T201


try:
    from flsim.base.terminal import console
except ModuleNotFoundError:
    console = _PlainConsole()  # type: ignore[assignment]

LINES_EVERY = 15.0  # seconds between two plain lines


class Advance(Protocol):
    """A function that reports the completed amount, `done`, and the `work`, if its unit differs, with a short note."""

    def __call__(self, done: float, note: str = "", work: float | None = None) -> None: ...


def say(message: str, **about: Any) -> None:
    """Print one line for a person, and log it with details such as round and shard."""
    console.print(message, markup=False, soft_wrap=True)
    log.info(message, extra=about)


@contextmanager
def progress(title: str, total: float, start: float = 0, unit: str = "") -> Iterator[Advance]:
    """Show the progress of a long job, its rate, and the remaining time; `total` is 0 if unknown, `start` done before.

    >>> with progress("training", total=100, unit="rounds") as advance:      # doctest: +SKIP
    ...     advance(1, "loss 6.91")
    """
    last = began = time.monotonic()

    def status(done: float, note: str, work: float | None) -> list[str]:
        seconds = time.monotonic() - began
        rate = (done - start if work is None else work) / seconds if seconds else 0.0
        remaining = (total - done) * seconds / (done - start) if done > start and total > done else 0.0
        words = [f"{done:,.0f} of {total:,.0f}" if total else f"{done:,.0f}"]
        words += [f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"] if rate and unit else []
        words += [f"{clock(remaining)} remaining"] if remaining else []
        return [*words, note] if note else words

    if console.is_terminal:
        from flsim.base.terminal import bars

        with bars() as display:
            task = display.add_task("", total=total or None, completed=int(start), title=title, status="")

            def advance_bar(done: float, note: str = "", work: float | None = None) -> None:
                display.update(task, completed=done, status=", ".join(status(done, note, work)))

            yield advance_bar
        return

    def advance(done: float, note: str = "", work: float | None = None) -> None:
        nonlocal last
        if 0 < total <= done or time.monotonic() - last >= LINES_EVERY:
            last = time.monotonic()
            counted, *more = status(done, note, work)
            say(f"{title}: {', '.join([counted, f'{last - began:.0f} s', *more])}")

    yield advance


def clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds, such as "1:02:03"."""
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def tracked(title: str, items: Sequence[Item], unit: str = "") -> Iterator[Item]:
    with progress(title, len(items), unit=unit) as advance:
        for done, item in enumerate(items, start=1):
            yield item
            advance(done)
