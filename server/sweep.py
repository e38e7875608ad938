"""Many runs on a Ray cluster, as resources allow: each is `flsim run` in a process of its own, within a Ray task.

The task holds what the run takes of a node, and the run starts a Ray of its own there with as much, which takes some
ten seconds: a run counts on all the cores of the machines that its Ray sees, so that two federated runs on one Ray
would wait for each other's processes. A process for each run also means that a failure stays with its run, and that its
memory is given back. Linux ends the process when its task ends (PR_SET_PDEATHSIG), and Ray ends with that process, so
that nothing outlives a sweep that was killed.

There is no `--resume`: a sweep is a folder that says what it is to hold, and each call trains what is missing.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import ray
from ray.exceptions import RayError

from flsim.base.errors import InputError, RunFailed
from flsim.base.memory import PeakMemory
from flsim.base.progress import say
from flsim.data.corpus import Split
from flsim.runs.config import Config
from flsim.sweeps.definition import Planned, longest_first
from flsim.sweeps.folder import SweepFolder
from flsim.sweeps.screen import Screen
from server.cluster.start import cluster, end_with_parent, nodes
from server.launch import share

TRIES = 2  # of a run whose process died
LOOK = 1.0  # seconds between two looks at how far runs are
MEMORY_EVERY = 2.0  # seconds: a look costs some milliseconds for each process
BAD_INPUT = 2  # exit code
OVER = {"completed", "diverged"}  # both are results


@dataclass(frozen=True)
class Job:
    """A run to be trained.

    Attributes:
        name: of the run.
        config: its settings.
        file: a TOML file with them.
        out: its folder; a run that is there already goes on.
        log: a file for what it prints.
    """

    name: str
    config: Config
    file: Path
    out: Path
    log: Path


@dataclass(frozen=True)
class Ended:
    """What became of a job: why it failed, or None."""

    name: str
    failure: str | None


def sweep(
    folder: SweepFolder,
    planned: Sequence[Planned],
    train: Split,
    address: str | None = None,
    at_once: int | None = None,
    whole_cluster: bool = False,
) -> dict[str, str]:
    """Train what is not over yet, the longest runs first so that none is left alone at the end.

    Args:
        folder: of the sweep, which says what became of it when this ends, however it ends.
        planned: its runs.
        train: what they train on.
        address, at_once, whole_cluster: as of `train_all`.

    Returns:
        Run -> why, of those that failed.

    Raises:
        InputError, RunFailed: as `train_all`.
    """
    rounds = {each.name: each.config.rounds_over(train) for each in planned}
    left = [each for each in longest_first(planned, train) if folder.status(each.name, rounds[each.name]) not in OVER]
    if len(left) < len(planned):
        say(f"{folder.path}: {len(planned) - len(left)} of {len(planned)} runs are finished")
    if not left:
        return {}
    jobs = [
        Job(each.name, each.config, folder.config(each.name), folder.run(each.name), folder.log(each.name))
        for each in left
    ]
    began, trained, failed = time.time(), list[str](), dict[str, str]()
    memory = PeakMemory(os.getpid(), every=MEMORY_EVERY)
    try:
        with memory, Screen(folder, [each.name for each in planned], began).shown() as screen:
            for ended in train_all(jobs, address, at_once, whole_cluster, screen.look):
                if ended.failure and folder.status(ended.name, rounds[ended.name]) not in OVER:
                    failed[ended.name] = ended.failure
                else:
                    trained.append(ended.name)
                screen.ended(ended.name, ended.failure, len(jobs) - len(trained) - len(failed))
    finally:
        folder.add_session(
            {
                "began": datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
                "seconds": round(time.time() - began, 1),
                "peak_memory": None if address else memory.total,
                "cores": os.cpu_count(),
                "at_once": at_once,
                "trained": trained,
                "failed": failed,
            }
        )
    return failed


def train_all(
    jobs: Sequence[Job],
    address: str | None = None,
    at_once: int | None = None,
    whole_cluster: bool = False,
    look: Callable[[], None] = lambda: None,
) -> Iterator[Ended]:
    """Train all jobs, in their order, as many at once as fit.

    Args:
        jobs: what to train.
        address: of a Ray cluster that runs already; a local one is started where this is None.
        at_once: how many at most.
        whole_cluster: each run takes all of the cluster, one after another.
        look: called about once a second.

    Yields:
        What became of each, as they end.

    Raises:
        InputError: no cluster at that address, or none with a node that a run fits on.
        RunFailed: interrupted from the keyboard.
    """
    with nullcontext() if whole_cluster else cluster(address):
        try:
            if whole_cluster:
                yield from (_ended(job, *_in_process(_command(job, address), job.log, look)) for job in jobs)
            else:
                yield from _as_resources_allow(jobs, at_once, look)
        except KeyboardInterrupt:
            raise RunFailed("interrupted; repeat the command to train the other runs") from None


def _as_resources_allow(jobs: Sequence[Job], at_once: int | None, look: Callable[[], None]) -> Iterator[Ended]:
    """`train_all` on the cluster that is connected; by tasks, as an actor would cost each run a new process."""
    shares = {job.name: share(job.config, nodes()) for job in jobs}
    for job in jobs:
        _refuse_what_does_not_fit(job, *shares[job.name])
    waiting, working, tries = list(jobs), dict[ray.ObjectRef, Job](), dict.fromkeys(shares, 0)
    while waiting or working:
        while waiting and (at_once is None or len(working) < at_once):
            job = waiting.pop(0)
            tries[job.name] += 1
            cpus, gpus = shares[job.name]
            task = ray.remote(_in_process).options(num_cpus=cpus, num_gpus=gpus, max_retries=0)
            working[task.remote(_command(job, cpus=cpus), job.log)] = job
        done, _ = ray.wait(list(working), timeout=LOOK)
        for reference in done:
            job = working.pop(reference)
            try:
                code, said = ray.get(reference)
            except RayError as error:
                cause = getattr(error, "cause", None) or type(error).__name__
                code, said = -signal.SIGKILL, f"its task ended with: {cause}"
            if code not in {0, 1, BAD_INPUT} and tries[job.name] < TRIES:
                waiting.insert(0, job)
            else:
                yield _ended(job, code, said)
        look()


def _refuse_what_does_not_fit(job: Job, cpus: int, gpus: float) -> None:
    if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes()):
        raise InputError(
            f"run {job.name} takes {cpus} CPUs and {gpus:g} GPUs, and no Ray node has them; lower system.shards, "
            f"system.workers or their shares by --set"
        )


def _command(job: Job, address: str | None = None, cpus: int | None = None) -> list[str]:
    command = [sys.executable, "-m", "flsim", "run", str(job.file), "--out", str(job.out)]
    command += ["--resume"] if (job.out / "config.toml").exists() else []
    command += ["--address", address] if address else []
    return [*command, "--cpus", str(cpus)] if cpus else command


def _in_process(command: list[str], log: Path, look: Callable[[], None] | None = None) -> tuple[int, str]:
    """Exit code and last line of a command that dies with this process. Ray's variables stay out of it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with log.open("ab") as file:  # what it printed before it was killed stays there
        before = file.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=end_with_parent,
        )
        try:
            while True:
                try:
                    code = process.wait(LOOK)
                    break
                except subprocess.TimeoutExpired:
                    if look is not None:
                        look()
        finally:
            process.kill()
    lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
    return code, next((line for line in reversed(lines) if line.strip()), "")


def _ended(job: Job, code: int, said: str) -> Ended:
    if code == 0:
        return Ended(job.name, None)
    why = said.removeprefix("flsim: ") if code in {1, BAD_INPUT} else f"its process ended with {code}: {said}"
    return Ended(job.name, " ".join(why.split()))
