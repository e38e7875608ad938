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

TRAINED = ".training"  # file in the run folder with the node and the process that train the run
DRIVEN = ".driving"  # file of a central run with the process that supervises training
PATIENCE = 2.0  # seconds until flsim prints that such a process exists
LOCK_DEADLINE = 60.0  # seconds that flsim waits for the end of a previous training process


@contextmanager
def hold_lock(run: Run, lock: str = TRAINED) -> Iterator[None]:
    """Hold a lock of the run in the block, after the end of a process whose driver died; RunFailed after a deadline."""
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
                    raise RunFailed(f"{run.path}: {holder} trains this run; end that process first") from None
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
    """Remove the folder of a run that this process has just made, unless a process trained or trains the run."""
    with ExitStack() as stack:
        try:
            for lock in (TRAINED, DRIVEN):
                (run.path / lock).touch()
                stack.enter_context(held(run.path / lock))
        except OSError:  # another process trains the run, or the folder no longer exists
            return
        of_value = [run.path / name for name in (roundlog.FILE, EVALUATIONS)]
        of_value += [path for name in ("checkpoints", "rows") for path in (run.path / name).glob("*")]
        if not any(path.exists() for path in of_value) and not run.path.is_symlink():
            removed = Path(tempfile.mkdtemp(prefix=f".{run.name}.partial-", dir=run.path.parent))
            run.path.rename(removed)
            shutil.rmtree(removed)
