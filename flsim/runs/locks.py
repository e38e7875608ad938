"""Locks on a run folder: one process trains a run at a time, and no other process removes its folder."""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flsim.base.errors import RunFailed
from flsim.base.files import held, naming
from flsim.base.progress import say
from flsim.results.run_file import EVALUATIONS
from flsim.runs import roundlog
from flsim.runs.folder import Run

TRAINED = ".training"  # in the run's folder: the node and the process that train it
DRIVEN = ".driving"  # of a central run: the process that looks after the one that trains it
PATIENCE = 2.0  # seconds until someone is told that there is such a process
LOCK_DEADLINE = 60.0  # seconds in which a process that trained the run before has to end


@contextmanager
def hold_lock(run: Run, lock: str = TRAINED) -> Iterator[None]:
    """Hold a lock of the run in the block, so that no other process trains the run.

    A process whose driver died may live for a moment and still write. Such a process is waited for.

    Raises:
        RunFailed: another process still holds the lock after `LOCK_DEADLINE` seconds.
    """
    path = run.path / lock
    path.touch()
    with ExitStack() as stack:
        until, is_said = time.monotonic() + LOCK_DEADLINE, False
        while True:
            try:
                stack.enter_context(held(path))
            except BlockingIOError:
                holder = path.read_text()
                if time.monotonic() > until:
                    raise RunFailed(f"{run.path}: is trained by {holder}; end that process first") from None
                if not is_said and time.monotonic() > until - LOCK_DEADLINE + PATIENCE:
                    is_said = True
                    say(f"{run.name}: waiting for the end of {holder}, which trains this run")
                time.sleep(0.1)
                continue
            except OSError:
                pass  # a filesystem without locks
            break
        with naming(path):
            path.write_text(f"{socket.gethostname()}/{os.getpid()}")
        yield


def discard(run: Run) -> None:
    """Remove the folder of a run that this process has just made, unless a process has trained it or trains it now.

    The folder is renamed first, so that half of it is never taken for a run.
    """
    with ExitStack() as stack:
        try:
            for lock in (TRAINED, DRIVEN):
                (run.path / lock).touch()
                stack.enter_context(held(run.path / lock))
        except OSError:  # another process trains it, or there is no such folder any more
            return
        of_value = [run.path / name for name in (roundlog.FILE, EVALUATIONS)]
        of_value += [path for name in ("checkpoints", "rows") for path in (run.path / name).glob("*")]
        if not any(path.exists() for path in of_value) and not run.path.is_symlink():
            removed = Path(tempfile.mkdtemp(prefix=f".{run.name}.partial-", dir=run.path.parent))
            run.path.rename(removed)
            shutil.rmtree(removed)
