"""SIGTERM and Ctrl-C end a run in good order: a checkpoint is written, and the run can go on from it."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from flsim.base.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOOK = 0.2  # seconds between two looks at the disk


class Stop(threading.Event):
    """Set when the run shall end; `signal` says by whom, 0 where by nobody outside."""

    signal = 0

    def check(self) -> None:
        """Raises Interrupted where it is set."""
        if self.is_set():
            raise Interrupted(self.signal)


class StopFile:
    """A word from the driver to the process that trains, which may be on another machine: save, and end."""

    def __init__(self, run: Path) -> None:
        self._path, self._looked, self._found = run / ".stop", -LOOK, False

    def __call__(self) -> bool:
        """Whether the driver has said it; looks at the disk now and then."""
        if not self._found and time.monotonic() - self._looked >= LOOK:
            self._found, self._looked = self._path.exists(), time.monotonic()
        return self._found

    def write(self) -> None:
        self._path.touch()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


@contextmanager
def stopping(stop: Stop) -> Iterator[None]:
    """In the block the first signal sets `stop`; a second one ends the process at once, as signals do elsewhere.

    Only Python's main thread hears signals; in any other this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (signal's signature)
        stop.signal = number
        stop.set()
        _restore(before)

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: C code had set it
