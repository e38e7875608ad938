"""A sweep: many runs on a Ray cluster, each with `flsim run` in a separate process, within a Ray task.

The task has the share of the run on a node. A run of one process on a CPU trains without Ray, any other one on a Ray of
its own: a run assumes all cores of its Ray, so two on one Ray would wait for each other's processes. Linux kills the
process when its task ends (PR_SET_PDEATHSIG), so nothing outlives a killed sweep. On SIGTERM or Ctrl-C, the sweep asks
its runs to write a checkpoint, and waits some seconds. A sweep has no `--resume`: each call trains the missing runs.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import ray
from ray.exceptions import RayError

from flsim.base.errors import Interrupted, RunFailed
from flsim.base.machine import PeakMemory, cores
from flsim.base.progress import say
from flsim.base.rng import stream
from flsim.data.corpus import Split
from flsim.runs.config import Config
from flsim.runs.config.base import settings_of_both, shared_rounds
from flsim.runs.sweeps.definition import (
    GroupOutcome,
    Planned,
    Trial,
    TrialGroup,
    TuningOutcome,
    longest_first,
    middle,
    search,
    training_digest,
)
from flsim.runs.sweeps.folder import OBJECTIVE, TUNED, Screen, Search, SweepFolder, TuningFolder, shortened
from server.cluster.start import cluster, ending_with_this_process, nodes
from server.launch import needs_no_ray, refuse_what_does_not_fit, share
from server.stopping import Stop, StopFile, stopping

TRIES = 2  # attempts at a run whose process died
LOOK = 1.0  # seconds between two checks of the runs' progress
MEMORY_EVERY = 2.0  # seconds between two measurements, which cost some milliseconds for each process
BAD_INPUT = 2  # exit code
SAVING = 15.0  # seconds for a run to save; batch systems kill processes 30 s after SIGTERM
OVER = {"completed", "diverged"}  # statuses of runs that have a result


@dataclass(frozen=True)
class SweepJob:
    name: str
    config: Config
    file: Path
    out: Path  # folder of the run; an existing one is resumed
    log: Path
    # the folder of the finished run of arm IN whose first rounds this run of arm OUT copies; None for none
    twin: Path | None = None


@dataclass(frozen=True)
class JobEnd:
    name: str
    failure: str | None  # the reason why it failed; None if it did not fail
    seconds: float = 0.0  # duration of its process; 0 if the process was lost


def sweep(
    folder: SweepFolder,
    planned: Sequence[Planned],
    train: Split,
    address: str | None = None,
    at_once: int | None = None,
    whole_cluster: bool = False,
) -> dict[str, str]:
    """Train all unfinished runs, the longest first, so that no long run is last; return failures by name."""
    rounds = {entry.name: entry.config.rounds_over(entry.config.trained_on(train)) for entry in planned}
    remaining = [
        entry for entry in longest_first(planned, train) if folder.status(entry.name, rounds[entry.name]) not in OVER
    ]
    if len(remaining) < len(planned):
        say(f"{folder.path}: {len(planned) - len(remaining)} of {len(planned)} runs are finished")
    if not remaining:
        return {}
    twins = twins_of(planned, rounds)
    jobs = [
        SweepJob(
            entry.name,
            entry.config,
            file=folder.config(entry.name),
            out=folder.run(entry.name),
            log=folder.log(entry.name),
            twin=folder.run(twins[entry.name]) if entry.name in twins else None,
        )
        for entry in sorted(remaining, key=lambda entry: entry.name in twins)
    ]
    began, trained, failed = time.time(), list[str](), dict[str, str]()
    memory = PeakMemory(os.getpid(), every=MEMORY_EVERY)
    try:
        finished = {entry.name for entry in planned} - {job.name for job in jobs}
        with memory, Screen(folder, [entry.name for entry in planned], began, finished).live() as screen:
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
                "cores": cores(),
                "at_once": at_once,
                "trained": trained,
                "failed": failed,
            }
        )
    return failed


def twins_of(planned: Sequence[Planned], rounds: Mapping[str, int]) -> dict[str, str]:
    """Return, by the name of a run of arm OUT, the run of arm IN with which it shares its first rounds."""
    planting = {settings_of_both(entry.config): entry.name for entry in planned if entry.config.canaries.arm == "in"}
    return {
        entry.name: planting[key]
        for entry in planned
        if entry.config.canaries.arm == "out"
        and (key := settings_of_both(entry.config)) in planting
        and shared_rounds(entry.config, rounds[entry.name])
    }


def train_all(
    jobs: Sequence[SweepJob],
    address: str | None = None,
    at_once: int | None = None,
    whole_cluster: bool = False,
    look: Callable[[], None] = lambda: None,
) -> Iterator[JobEnd]:
    """Train all jobs in order, as many as possible at the same time, and yield the end of each when it ends.

    At most `at_once` run together, on the Ray cluster at `address` or a local one; with `whole_cluster` one after
    another. `look` is called about once a second. InputError without a cluster, or a node on which a run fits;
    Interrupted after runs saved their training.
    """
    stop = Stop()
    try:
        with nullcontext() if whole_cluster else cluster(address), stopping(stop):
            if whole_cluster:
                for job in jobs:
                    code, message, seconds = _in_process(_command(job, address), job.log, look, stop.is_set)
                    stop.check()
                    yield _end_of(job, code, message, seconds)
            else:
                yield from _as_resources_allow(jobs, at_once, look, stop)
    except Interrupted as error:
        raise Interrupted(error.signal, "repeat the command to continue") from None


def _as_resources_allow(
    jobs: Sequence[SweepJob], at_once: int | None, look: Callable[[], None], stop: Stop
) -> Iterator[JobEnd]:
    """Train jobs on the connected cluster, as tasks, because an actor would need a new process for each run."""
    machines = nodes()
    for job in jobs:
        refuse_what_does_not_fit(job.name, job.config, machines)
    shares = {job.name: share(job.config, machines) for job in jobs}
    waiting, working, tries = list(jobs), dict[ray.ObjectRef, SweepJob](), dict.fromkeys(shares, 0)
    stop_file = StopFile(jobs[0].log.parent)
    stop_file.remove()
    while waiting or working:
        unfinished = {job.name for job in (*waiting, *working.values())}
        ready = [job for job in waiting if job.twin is None or job.twin.name not in unfinished]
        while ready and (at_once is None or len(working) < at_once):
            waiting.remove(job := ready.pop(0))
            tries[job.name] += 1
            cpus, gpus = shares[job.name]
            without_ray = needs_no_ray(job.config, gpus)
            task = ray.remote(_in_process).options(num_cpus=cpus, num_gpus=gpus, max_retries=0)
            working[task.remote(_command(job, cpus=cpus, without_ray=without_ray), job.log)] = job
        done, _ = ray.wait(list(working), timeout=LOOK)
        for reference in done:
            job = working.pop(reference)
            try:
                code, message, seconds = ray.get(reference)
            except RayError as error:
                cause = getattr(error, "cause", None) or type(error).__name__
                code, message, seconds = -signal.SIGKILL, f"its task ended with: {cause}", 0.0
            if code not in {0, 1, BAD_INPUT} and tries[job.name] < TRIES:
                waiting.insert(0, job)
            else:
                yield _end_of(job, code, message, seconds)
        look()
        if stop.is_set() and working:
            _let_save(list(working), stop_file)
        stop.check()


def _let_save(tasks: Sequence[ray.ObjectRef], stop_file: StopFile) -> None:
    """Wait until the runs of these tasks have saved their training, or until a deadline."""
    say("Runs save a checkpoint and end. A second signal ends them immediately.")
    stop_file.write()  # `ray.cancel` of Ray has no effect in the background of a shell, where Ctrl-C is ignored
    try:
        ray.wait(list(tasks), num_returns=len(tasks), timeout=SAVING + 2 * LOOK)
    finally:
        stop_file.remove()


def _command(
    job: SweepJob, address: str | None = None, cpus: int | None = None, without_ray: bool = False
) -> list[str]:
    command = [sys.executable, "-m", "flsim", "run", str(job.file), "--out", str(job.out)]
    if (job.out / "config.toml").exists():
        command += ["--resume"]
    elif job.twin and (job.twin / "config.toml").exists():
        command += ["--begin-from", str(job.twin)]
    command += ["--address", address] if address else []
    if without_ray:
        return [*command, "--in-process"]
    return [*command, "--cpus", str(cpus)] if cpus else command


def _in_process(
    command: list[str],
    log: Path,
    look: Callable[[], None] = lambda: None,
    is_told_to_end: Callable[[], bool] | None = None,
) -> tuple[int, str, float]:
    """Return exit code, last line and seconds of a command that ends with this process, without variables of Ray."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    is_told_to_end = is_told_to_end or StopFile(log.parent)
    with log.open("ab") as file:  # keeps the output of earlier attempts
        before, began = file.tell(), time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=ending_with_this_process(),
            process_group=0,  # Ctrl-C in a terminal would be a first signal, and that of `_end` a second signal
        )
        try:
            while not _has_ended(process, LOOK) and not is_told_to_end():
                look()
        finally:
            code = _end(process)
    lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
    silence = "it printed nothing; check that the disk has free space"
    return code, next((line for line in reversed(lines) if line.strip()), silence), time.monotonic() - began


def _has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process, ended by SIGTERM, after which a run writes a checkpoint, or by SIGKILL."""
    try:
        process.terminate()
        _has_ended(process, SAVING)
    finally:
        process.kill()
    return process.wait()


def _end_of(job: SweepJob, code: int, message: str, seconds: float = 0.0) -> JobEnd:
    if code == 0:
        return JobEnd(job.name, None, seconds)
    why = message.removeprefix("flsim: ") if code in {1, BAD_INPUT} else f"its process ended with {code}: {message}"
    return JobEnd(job.name, " ".join(why.split()), seconds)


# A search for settings: trials are trained like runs of a sweep, in shares of their length.
#
# A killed search continues when it is repeated: perplexities are read from run folders. The order in which runs end
# does not affect choices, because all trials of a share are compared together.

Measured = tuple[str, Config, int]  # a run: its name, its settings, and the number of rounds after which it is measured


@dataclass(frozen=True)
class Tuner:
    """A search for the settings of all groups, whose trials train at the same time."""

    folder: TuningFolder  # its folder; measured trials in it are not trained again
    search: Search
    train: Split
    address: str | None = None  # address, at_once: see `server.sweep.train_all`
    at_once: int | None = None

    def tune(self, corpus: str) -> TuningOutcome:
        """Search for the settings of all groups, write the result into the folder, and return it.

        Raises InputError if the folder has another search; RunFailed if a run or all trials failed, or the best value
        is at an edge.
        """
        groups, tuning = self.search.groups(), self.search.tuning
        first = [run for group in groups for run in self.search.runs_of(group, 0, middle(group.ranges))]
        digest = self.search.digest(first, self.train, corpus)
        self.folder.begin(self.search, digest)
        searched = {name for group in groups for name in group.ranges}
        tuned = TuningOutcome(
            title=self.search.definition.title,
            tier=self.search.tier_name,
            training=training_digest(self.search.definition, self.search.tier, searched),
            search=digest,
            objective=OBJECTIVE,
            method=tuning.method,
            trials=tuning.trials,
            halving=tuning.halving,
            runs=len(first) // len(groups),
            by=tuning.by,
            seeds=tuning.seeds,
            corpus=corpus,
            has_own_corpus=self.search.at.corpus is not None or self.search.at.corpus_seed is not None,
            groups=self._outcomes(groups),
        )
        tuned.write(self.folder.path / TUNED)
        return tuned

    def _outcomes(self, groups: Sequence[TrialGroup]) -> tuple[GroupOutcome, ...]:
        """Search for the values of all groups, which train the next share of their trials together."""
        searches = {group.name: self._search(group) for group in groups}
        requested = {group.name: (group, *next(searches[group.name])) for group in groups}
        outcomes = dict[str, GroupOutcome]()
        while requested:
            runs = {
                name: [self._runs(group, number, trial, share) for number, trial in trials.items()]
                for name, (group, share, trials) in requested.items()
            }
            self._train_missing([run for trials in runs.values() for of_trial in trials for run in of_trial])
            for name, (group, _, _) in list(requested.items()):
                try:
                    requested[name] = group, *searches[name].send(list(map(self._perplexity, runs[name])))
                except StopIteration as end:
                    outcomes[name] = end.value
                    del requested[name]
                    say(_chosen(outcomes[name]))
        return tuple(outcomes[group.name] for group in groups)

    def _search(self, group: TrialGroup) -> Generator[tuple[float, dict[int, Trial]], list[float], GroupOutcome]:
        # Groups of a grid draw the same values, so that the partitions are tuned equally.
        rng = stream(self.search.tuning.seeds[0], "tuning", group.grid)
        return search(group, self.search.tuning, rng, lambda values: self.search.is_possible(group, values))

    def _runs(self, group: TrialGroup, number: int, trial: Trial, share: float) -> list[Measured]:
        """Return the runs of a trial up to a share of their length, each with its number of rounds."""
        runs = self.search.runs_of(group, number, trial.values)
        return [(run.name, *shortened(run.config, share, self.train)) for run in runs]

    def _perplexity(self, runs: Sequence[Measured]) -> float:
        """Return the geometric mean of perplexity over the runs of a trial; infinite if one diverged."""
        perplexities = [self.folder.perplexity(name, rounds) or math.inf for name, _, rounds in runs]
        return math.exp(sum(map(math.log, perplexities)) / len(perplexities))

    def _train_missing(self, runs: Sequence[Measured]) -> None:
        folder = self.folder
        rounds = {name: rounds for name, _, rounds in runs if folder.perplexity(name, rounds) is None}
        if len(rounds) < len(runs):
            say(f"{folder.path}: {len(runs) - len(rounds)} of {len(runs)} runs are measured")
        if not rounds:
            return
        jobs = [
            SweepJob(name, config, file=folder.write_config(name, config), out=folder.run(name), log=folder.log(name))
            for name, config, _ in sorted(runs, key=lambda run: -run[2] * run[1].round_size)
            if name in rounds
        ]
        failed, remaining = dict[str, str](), len(jobs)
        with Screen(folder, [job.name for job in jobs], time.time()).live() as screen:
            for ended in train_all(jobs, self.address, self.at_once, self.search.tier.whole_cluster, screen.look):
                remaining -= 1
                if folder.perplexity(ended.name, rounds[ended.name]) is None:
                    failed[ended.name] = ended.failure or "it was not measured"
                screen.ended(ended.name, failed.get(ended.name), remaining)
        if failed:
            name, why = next(iter(failed.items()))
            raise RunFailed(
                f"{len(failed)} of {len(jobs)} runs failed, the first {name}: {why}; read {folder.log(name)}, and "
                f"repeat the command to try again"
            )


def _chosen(outcome: GroupOutcome) -> str:
    values = ", ".join(f"{name} {value:g}" for name, value in outcome.values.items())
    limit = (
        "; trials at an adjacent value diverged, so stability is the limit" if outcome.is_limited_by_stability else ""
    )
    return f"{outcome.name}: {values}, perplexity {outcome.perplexity:.2f}, of {len(outcome.trials)} trials{limit}"
