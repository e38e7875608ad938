"""The end of a run on SIGTERM or Ctrl-C: training writes a checkpoint from which the run can be resumed."""

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
FILE_LOOK = 0.2  # seconds between two checks of the disk


class Stop(threading.Event):
    """An event that is set when the run must end; `signal` is the number of the signal, or 0 without a signal."""

    signal = 0

    def check(self) -> None:
        if self.is_set():
            raise Interrupted(self.signal)


class StopFile:
    """A file with which the driver asks a training process on any machine to save and end."""

    def __init__(self, run: Path) -> None:
        self._path, self._looked, self._is_asked = run / ".stop", -FILE_LOOK, False

    def __call__(self) -> bool:
        """Return whether the driver has written the file; the disk is checked every `FILE_LOOK` seconds."""
        if not self._is_asked and time.monotonic() - self._looked >= FILE_LOOK:
            self._is_asked, self._looked = self._path.exists(), time.monotonic()
        return self._is_asked

    def write(self) -> None:
        self._path.touch()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


@contextmanager
def stopping(stop: Stop) -> Iterator[None]:
    """Let the first signal in the block set `stop`, and a second end the process; only in Python's main thread."""
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


@contextmanager
def no_signal_lost() -> Iterator[None]:
    """Raise Interrupted after the block if a signal arrived in it, whose exception a library such as Ray caught."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, received = {number: signal.getsignal(number) for number in SIGNALS}, list[int]()

    def remembered(handler: Any) -> Any:
        def handle(number: int, frame: FrameType | None) -> None:
            received.append(number)
            handler(number, frame)

        return handle

    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, remembered(handler))
    try:
        yield
    finally:
        _restore(before)
    if received:
        raise Interrupted(received[0])


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set by C code, not by Python
