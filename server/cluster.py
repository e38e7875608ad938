"""A Ray cluster for as long as a run needs it: the one place that starts Ray."""

import io
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import ray

from flsim.errors import InputError, RunFailed
from flsim.progress import say


@contextmanager
def cluster(address: str | None = None, cpus: int | None = None) -> Iterator[None]:
    """Ray, initialised in this thread, until the block ends.

    Args:
        address: of a cluster that runs already ("auto" finds it); a local one is started where this is None.
        cpus: cores of the local one; all where this is None.

    Raises:
        InputError: no cluster at that address.
        RunFailed: interrupted from the keyboard.
    """
    _connect(address, cpus)
    try:
        with redirect_stdout(_RayMessages()):
            yield
    except KeyboardInterrupt:
        raise RunFailed("interrupted; `flsim run --resume` continues from the newest checkpoint") from None
    finally:
        ray.shutdown()


def nodes() -> list[dict[str, float]]:
    """Total resources of each Ray node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _connect(address: str | None, cpus: int | None) -> None:
    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address and ":" in address and "://" not in address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for minutes
        if address is None:  # "local": without it Ray would join any cluster of this machine, a dying one too
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)
        else:
            ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"--address {address}: no Ray cluster answers there; start one with `ray start --head`"
        ) from error


class _RayMessages(io.TextIOBase):
    """Ray prints its messages on standard output, which is for results: they go to standard error, line by line."""

    def __init__(self) -> None:
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            say(line)
        return len(text)
