"""Waiting, for tests in whose processes nothing else may be loaded, too."""

import time
from collections.abc import Callable


def wait_until(happened: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)
