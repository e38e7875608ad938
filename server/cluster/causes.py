"""The reasons why processes of Ray ended or do not start, in one line, from logs and system limits."""

import os
import re
import resource
from contextlib import suppress
from pathlib import Path

from ray.exceptions import ObjectLostError, OutOfMemoryError, RayError, RayTaskError

from flsim.base.errors import InputError, RunFailed, in_one_line, last_line
from flsim.base.machine import machine_memory, of_group, text_of
from server.cluster.internals import logs_folder

TAIL = 1 << 16  # number of bytes that are read at the end of a log
FEWER = "run fewer processes at once (system.shards, system.evaluators)"

# Errors of the system in logs of C++ and Python.
NO_PROCESS = re.compile(r"Resource temporarily unavailable|can't start new thread")
NO_ROOM = re.compile(r"No space left on device")
NO_MEMORY = re.compile(r"Cannot allocate memory|std::bad_alloc|MemoryError")
NO_FILE = re.compile(r"Too many open files|Try setting `ulimit -n")  # the message of the system, and that of the raylet


def death(error: RayError) -> str:
    """Return how and why a process died, from data of this machine, without Ray's guesses."""
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError):
        used = re.search(r" was (\S+ / \S+) ", text)
        return f"its process died: Ray ended it before memory ran out ({used[1] if used else 'full'}); {FEWER}"
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", text)
    folder, pid = logs_folder(), re.search(r" pid: (\d+) ", text)  # of a process on this machine
    logs = folder.glob(f"worker-*-{pid[1]}.*") if folder and pid else ()
    reason = named_in(*logs) or memory_that_ran_out()
    return f"its process died: {reason or (detail.group(1) if detail else last_line(error))}"


def one_line(error: BaseException) -> str:
    """Return an exception's message as one line, with its type unless it is one of flsim's errors."""
    if isinstance(error, (InputError, RunFailed)) or not str(error).strip():
        return in_one_line(error)
    return f"{type(error).__name__}: {in_one_line(error)}"


def reason_of(error: RayError) -> str:
    """Return, in one line, the error that code in a process of Ray raised, or how that process died."""
    if isinstance(error.cause if isinstance(error, RayTaskError) else error, ObjectLostError):
        return "data on another machine was lost when that machine left the cluster"
    return one_line(error.cause or error) if isinstance(error, RayTaskError) else death(error)


def named_in(*texts: str | Path) -> str | None:
    """Return the cause that stops processes, with the remedy, from texts or ends of logs; None if unknown."""
    text = "\n".join(_tail(text) if isinstance(text, Path) else text for text in texts)
    if NO_PROCESS.search(text):
        return f"the system refuses further processes or threads ({limits()}); raise the limit, or {FEWER}"
    if NO_ROOM.search(text):
        return (
            "a disk is full, most likely that of the temporary folder; free space there, or set RAY_TMPDIR to "
            "another folder"
        )
    if NO_MEMORY.search(text):
        return f"there is not enough memory ({limits()}); {FEWER}, or give them more memory"
    if NO_FILE.search(text):
        return f"the system refuses further open files (`ulimit -n` is {most_files()}); raise the limit, or {FEWER}"
    return None


def memory_that_ran_out() -> str | None:
    """Return the number of processes killed by the kernel for lack of memory, with the remedy; None if none."""
    kills = oom_kills() - _BEFORE
    if kills <= 0:
        return None
    times = "once" if kills == 1 else f"{kills} times"
    size = _in_gigabytes(machine_memory())
    return (
        f"the kernel killed processes {times} because memory ran out ({size} on this machine); {FEWER}, or "
        "give them more memory"
    )


def oom_kills() -> int:
    """Return the number of processes that the kernel killed for lack of memory, in this control group if known."""
    for text in (of_group("memory", "memory.events", "memory.oom_control"), text_of(Path("/proc/vmstat"))):
        if line := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
            return int(line[1])
    return 0


def most_files() -> int:
    """Return the number of files that this process, and each child process, can have open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most


def limits() -> str:
    """Return the limits of this process and its children on threads and memory, as text."""
    known = []
    for option, number, unit in (("u", resource.RLIMIT_NPROC, 1), ("v", resource.RLIMIT_AS, 1024)):
        most, _ = resource.getrlimit(number)
        if most != resource.RLIM_INFINITY:
            known.append(f"`ulimit -{option}` is {most // unit}")
    if (most_tasks := of_group("pids", "pids.max").strip()).isdigit():
        known.append(f"pids.max of its control group is {most_tasks}")
    return ", ".join([*known, f"memory is {_in_gigabytes(machine_memory())}"])


def _in_gigabytes(amount: int) -> str:
    return f"{amount / 1e9:.1f} GB"


def _tail(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        return file.read().decode(errors="replace")
    return ""


_BEFORE = oom_kills()
