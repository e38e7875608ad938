"""The watch over Ray's own processes on this machine: where one is killed, Ray's calls wait for long, or for ever.

Ray does not report that its raylet is gone: a round would wait for all of `system.deadline`. So a thread checks, and
ends the process as SIGKILL would; of all ends of a run, tests cover that one best.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from flsim.base.logs import log
from flsim.base.progress import say
from server.cluster import causes
from server.cluster.internals import arguments_of_own_processes, logs_folder

LOOK = 0.1  # seconds between two checks
GRACE = 5.0  # seconds before the exit: a signal to all processes asks for a checkpoint of the last round


@contextmanager
def watched() -> Iterator[None]:
    """End this process, with exit code 1, where Ray ends on this machine before the block does.

    Without a raylet no result comes, and no call fails; without the control store any thread may be inside a call of
    Ray for a minute. So no thread is asked to stop: the process ends as if it had been killed, and `--resume` continues
    the run. Ray ends it without a word where a thread calls the raylet before this one looks: with the same exit code.
    On other machines Ray may end: a run continues without those nodes.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(_processes(), over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _processes() -> list[psutil.Process]:
    """Return the raylet of this machine, and the control store where it is on this machine, without hidden ones."""
    arguments = arguments_of_own_processes()
    return [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] in ("raylet", "gcs_server") and arguments.intersection(process.info["cmdline"] or ())
    ]


def _watch(processes: list[psutil.Process], over: threading.Event) -> None:
    while not over.wait(LOOK):
        ended = next((process for process in processes if not is_alive(process)), None)
        if ended is not None:
            try:  # at once: Ray itself may end this process within the grace, without a word
                reason = f"Ray's {ended.info['name']} on this machine has ended{_cause(ended.info['name'])}"
                log.error("failed", extra={"reason": reason})
                say(f"flsim: {reason}; `flsim run --resume` continues from the newest checkpoint")
            finally:  # without memory the message may fail, and the process must end all the same
                if not over.wait(GRACE):
                    os._exit(1)
            return


def _cause(name: str) -> str:
    """Return the cause of the end of one of Ray's processes, from its logs, after a colon; empty if none is logged."""
    folder = logs_folder()
    cause = causes.named_in(*folder.glob(f"{name}.*")) if folder else None
    return f": {cause}" if cause else ""


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process lives, as far as can be seen; True where memory or descriptors do not suffice to see."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except (MemoryError, OSError, psutil.Error):
        return True
