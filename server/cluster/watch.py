"""Ray's own processes on this machine, watched: where one of them is killed, Ray's calls wait for long, or for ever.

Ray does not say that its raylet is gone: a round would wait for all of `system.deadline`. So a thread looks, and ends
the process as SIGKILL would, which is the end of a run that is tested most.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from flsim.base.logs import log
from flsim.base.progress import say
from server.cluster.internals import arguments_of_own_processes

LOOK = 0.5  # seconds between two looks
GRACE = 5.0  # seconds to leave in: whoever signals all processes at once wants a checkpoint of the last round


@contextmanager
def watched() -> Iterator[None]:
    """End this process, with exit code 1, where Ray ends on this machine before the block does.

    Without a raylet nothing that was asked for comes, and nothing fails; without the control store any thread may be
    inside a call of Ray for a minute. So no thread is asked to stop: it is as if this process had been killed, from
    which `--resume` continues. On other machines Ray may end: a run continues without those nodes.
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
    """The raylet of this machine, and the control store where it is on this machine; none that are hidden from us."""
    wanted = arguments_of_own_processes()
    return [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] in ("raylet", "gcs_server") and wanted.intersection(process.info["cmdline"] or ())
    ]


def _watch(processes: list[psutil.Process], over: threading.Event) -> None:
    while not over.wait(LOOK):
        ended = next((process for process in processes if not is_alive(process)), None)
        if ended is not None:
            if over.wait(GRACE):
                return
            try:
                reason = f"Ray's {ended.info['name']} on this machine has ended"
                log.error("failed", extra={"reason": reason})
                say(f"flsim: {reason}; `flsim run --resume` continues from the newest checkpoint")
            finally:  # without memory there may be no words, and there must be an end
                os._exit(1)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process lives, as far as can be seen: without memory or descriptors for a moment, that is not far."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except (MemoryError, OSError, psutil.Error):
        return True
