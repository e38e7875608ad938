"""Helpers to wait, and to be interrupted, for test processes that must load nothing else."""

import signal
import time
from collections.abc import Callable


def wait_until(happened: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def hear_ctrl_c() -> None:
    """In a new process: a shell's background job ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
