"""One process trains a run at a time."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flsim.errors import RunFailed
from flsim.progress import say
from flsim.runs import Run

LOCK = ".training"  # in the run's folder: the node and the process that train it
PATIENCE = 2.0  # seconds until someone is told that there is such a process
LOCK_DEADLINE = 60.0  # seconds in which a process that trained the run before has to end


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """Nobody else trains the run in the block: a process whose driver died may live for a moment, and still write.

    Raises:
        RunFailed: someone does, and goes on.
    """
    with (run.path / LOCK).open("a+") as file:
        until, is_said = time.monotonic() + LOCK_DEADLINE, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read()
                if time.monotonic() > until:
                    raise RunFailed(f"{run.path}: is trained by {holder}; end that process first") from None
                if not is_said and time.monotonic() > until - LOCK_DEADLINE + PATIENCE:
                    is_said = True
                    say(f"{run.name}: waits for {holder}, which trains it, to end")
                time.sleep(0.1)
                continue
            except OSError:
                pass  # a filesystem without locks
            break
        file.truncate(0)
        file.write(f"{socket.gethostname()}/{os.getpid()}")
        file.flush()
        yield
