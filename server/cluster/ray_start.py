"""The start of Ray on this machine: refused without room, watched while it lasts, and explained where it fails."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from flsim.base.errors import RunFailed, first_line
from flsim.base.progress import say
from server.cluster import causes
from server.cluster.internals import temporary_folder
from server.cluster.watch import LOOK, is_alive

ROOM = 1 << 20  # bytes: a short run writes a quarter of it, and without room Ray waits for itself
THREADS = 300  # a run of two clients and an evaluator has 250; with a few less Ray hangs within a call, for ever
FILES = 100  # open at once in one process: the raylet of a run of two clients and an evaluator has 70
MAKE_ROOM = "make room there, or set RAY_TMPDIR to another folder"
GRACE = 2.0  # seconds in which Ray may say by itself that a process of its own has ended


@contextmanager
def starting() -> Iterator[None]:
    """Watch a start of Ray within the block.

    Ray would wait for half a minute for a process of its own that ends meanwhile, in a call that nothing interrupts. So
    a thread watches those processes, reports why one has ended, and ends this process with exit code 1.

    Raises:
        RunFailed: Ray does not start; the message says why, and what to do.
    """
    folder = temporary_folder()
    refuse_without_room(folder)
    _refuse_without_files()
    _refuse_without_threads()
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(folder, over), daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:  # Ray raises bare ones, too
        raise RunFailed(_failure(folder, first_line(error))) from error
    finally:
        over.set()
        thread.join()


def refuse_without_room(folder: Path) -> None:
    """Raise RunFailed where Ray's temporary folder cannot be made, or its filesystem is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        left = shutil.disk_usage(folder).free
    except OSError as error:
        raise RunFailed(f"{folder}: Ray cannot use it ({error.strerror}); set RAY_TMPDIR to another folder") from error
    if left < ROOM:
        raise RunFailed(f"{folder}: Ray needs {ROOM:,} bytes there, and {left:,} are left; {MAKE_ROOM}")


def _refuse_without_files() -> None:
    """Raise RunFailed if Ray's processes could not open their files; its raylet would end while clients start."""
    if 0 <= (most := causes.most_files()) < FILES:  # no limit is -1
        raise RunFailed(
            f"Ray's processes need {FILES} open files each, and `ulimit -n` is {most}: there would "
            f"be too many open files; raise the limit (`ulimit -n 1024`), or run without Ray "
            f"(--in-process)"
        )


def _refuse_without_threads() -> None:
    """Raise RunFailed where Ray could not start its threads; they are tried, as limits are of many kinds."""
    over, threads = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(THREADS):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as error:
        raise RunFailed(
            f"a run needs some {THREADS} threads on this machine, and may not start them ({causes.limits()}); "
            f"raise the limit"
        ) from error
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _failure(folder: Path, reason: str) -> str:
    """Return the message for a start that failed: the cause in Ray's logs, or else the reason that Ray gave."""
    if "AF_UNIX path length" in reason:
        reason = f"{folder} is too long a path for its sockets; set RAY_TMPDIR to a shorter one, such as /tmp"
    else:
        logs = [path for session in folder.glob(f"session_*_{os.getpid()}") for path in (session / "logs").glob("*.*")]
        reason = causes.named_in(reason, *logs) or causes.memory_that_ran_out() or reason
    return f"Ray does not start on this machine: {reason}"


def _watch(folder: Path, over: threading.Event) -> None:
    while not over.wait(LOOK):
        ended = next((process for process in _of_ray() if not is_alive(process)), None)
        if ended is not None:
            if over.wait(GRACE):
                return
            say(f"flsim: {_failure(folder, f'its {ended.name()} has ended')}")
            os._exit(1)


def _of_ray() -> list[psutil.Process]:
    """Return the control store and the raylet that this process has started, even where they have ended."""
    return [child for child in psutil.Process().children() if child.name() in ("gcs_server", "raylet")]
