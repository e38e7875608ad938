"""Helpers to wait and to receive interrupts, for test processes that must load no other module."""

import signal
import time
from collections.abc import Callable


def wait_until(happened: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def hear_ctrl_c() -> None:
    """Let a new process handle Ctrl-C, which a shell's background job ignores, as do its child processes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
