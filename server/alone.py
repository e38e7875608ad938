"""One process trains a run at a time."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flsim.errors import RunFailed
from flsim.runs import Run

LOCK = ".training"  # in the run's folder: the node and the process that train it
LOCK_DEADLINE = 60.0  # seconds in which a process that trained the run before has to end


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """Nobody else trains the run in the block: a process whose driver died may live for a moment, and still write.

    Raises:
        RunFailed: someone does, and goes on.
    """
    with (run.path / LOCK).open("a+") as file:
        until = time.monotonic() + LOCK_DEADLINE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    file.seek(0)
                    raise RunFailed(f"{run.path}: is trained by {file.read()}; end that process first") from None
                time.sleep(0.1)
                continue
            except OSError:
                pass  # a filesystem without locks
            break
        file.truncate(0)
        file.write(f"{socket.gethostname()}/{os.getpid()}")
        file.flush()
        yield
