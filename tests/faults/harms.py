"""Harm that is done to a process of a run, or to a place that it writes to, and is over after a while."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from faulty import fill

Relief = Callable[[], None]
PLACES = {"TMPDIR": 64, "/dev/shm": 64}  # MB of each; Ray's shared memory needs some
SHARED_MEMORY = "/dev/shm"
EARLIER = 1.5  # seconds


@dataclass(frozen=True)
class Harm:
    """A kind of harm.

    Attributes:
        name: in the table.
        strike: do it; what ends it.
        lasts: whether it is over some time later, rather than at once.
        ends: exit codes of the command that it may lead to, beside those of every harm.
    """

    name: str
    strike: Callable[[psutil.Process], Relief]
    lasts: bool = False
    ends: frozenset[int] = frozenset()


def signalled(number: signal.Signals, process: psutil.Process) -> Relief:
    process.send_signal(number)
    return lambda: None


def stopped(process: psutil.Process) -> Relief:
    process.suspend()
    return process.resume


def short_of_memory(process: psutil.Process) -> Relief:
    """Nothing that the process maps from now on is there; on what it has, it may go on."""
    before = resource.prlimit(process.pid, resource.RLIMIT_AS)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (process.memory_info().vms, before[1]))
    return partial(_allow, process, before)


def _allow(process: psutil.Process, limits: tuple[int, int]) -> None:
    if process.is_running():  # and it is not another one with its number
        resource.prlimit(process.pid, resource.RLIMIT_AS, limits)
