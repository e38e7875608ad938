"""A run's metrics for Prometheus, which Ray's agents expose; docs/operations.md lists them.

As for trackers, the run's folder is the source: a thread of the driver reads its new lines, so that no round waits, and
no failure here fails a run. Counters are totals of the run, including its earlier drivers.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from flsim.algorithms import checkpoint
from flsim.base import logs
from flsim.base.files import NewLines
from flsim.base.progress import say
from flsim.results import evaluations
from flsim.results.rows import rows_in
from flsim.runs import roundlog
from flsim.runs.folder import Run

LOOK = 2.0  # seconds between two reads: Ray exports every 10, and exposes a gauge only where it was set since
PATIENCE = 10.0  # seconds that the end of a run waits for the last read
BUCKETS = [0.01 * 2**power for power in range(21)]  # seconds, up to three hours

GAUGES = {
    "round": "completed rounds, of central training steps",
    "rounds": "rounds, or steps, that the run is to have",
    "loss": "training loss of the last round, nats a position",
    "epsilon": "epsilon at the last evaluated round, by convention, of a user or a record",
    "client_processes": "client processes that are ready",
    "machines": "machines with a client process that is ready",
    "checkpoint_round": "round of the newest checkpoint",
    "evaluations_pending": "checkpoints that are due to be evaluated and have no rows",
}
COUNTERS = {
    "users": "users trained",
    "examples": "records trained",
    "failures": "client processes, machines and trainings that were lost, by kind",
    "evaluations": "attempts to evaluate a checkpoint that have ended, by outcome",
}
HISTOGRAMS = {
    "round_seconds": "seconds of a round, of a step the mean since the line before",
    "round_overhead_seconds": "seconds of a round beyond those that its busiest client process trained",
}
TAGS = {"epsilon": ("convention", "of"), "failures": ("kind",), "evaluations": ("outcome",)}


@contextmanager
def exposed(run: Run) -> Iterator[None]:
    """Let Ray's agents expose the run's metrics during the block; without Ray there are none."""
    if not ray.is_initialized():
        yield
        return
    ended = Event()
    thread = Thread(target=_expose, args=(run, ended), name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE)


def _expose(run: Run, ended: Event) -> None:
    try:
        figures, is_last = _Figures(run), False
        while not is_last and ray.is_initialized():  # Ray's metrics would otherwise start another Ray
            is_last = ended.is_set()
            figures.look()
            ended.wait(LOOK)
    except Exception as error:
        reason = " ".join(str(error).split()) or repr(error)
        say(f"{run.name}: metrics failed, and the run continues without them: {reason}")


class _Figures:
    """The figures of a run's folder as Ray metrics, whose names begin with ``flsim_``."""

    def __init__(self, run: Run) -> None:
        self._run, self._round = run, 0
        self._lines = {name: NewLines(run.path / name) for name in (roundlog.FILE, logs.FILE, evaluations.FILE)}
        self._now: dict[tuple[str, tuple[str, ...]], float] = {}  # values of gauges, by name and tags
        self._gauges = {name: Gauge(*_about(name, GAUGES)) for name in GAUGES}
        self._counters = {name: Counter(*_about(name, COUNTERS)) for name in COUNTERS}
        self._histograms = {
            name: Histogram(f"flsim_{name}", about, BUCKETS, ("run",)) for name, about in HISTOGRAMS.items()
        }

    def look(self) -> None:
        """Read new lines and files, and set the metrics."""
        self._set("rounds", self._run.rounds)
        for line in self._lines[roundlog.FILE].take():
            if line["round"] > self._round and not line.get("lost"):  # after a fault lines are written again
                self._see_round(line)
        for line in self._lines[logs.FILE].take():
            self._set("client_processes", line.get("processes"))
            self._set("machines", line.get("machines"))
            if "failure" in line:
                self._add("failures", 1, line["failure"])
        for line in self._lines[evaluations.FILE].take():
            self._add("evaluations", 1, line["outcome"])
        self._see_files()
        for (name, tags), value in self._now.items():
            self._gauges[name].set(value, self._tags(name, *tags))

    def _see_round(self, line: Mapping[str, Any]) -> None:
        done = line["round"] - self._round
        self._round = line["round"]
        self._set("round", self._round)
        self._set("loss", line["loss"])
        for key, unit in (("epsilon", "user"), ("record_epsilon", "record")):
            for convention, epsilon in (line.get(key) or {}).items():
                self._set("epsilon", epsilon, convention, unit)
        self._add("users", line.get("users", 0))
        self._add("examples", line.get("examples", line.get("records", 0)))
        tags = self._tags("round_seconds")
        self._histograms["round_seconds"].observe(line["seconds"] / done, tags)
        if "overhead" in line:
            self._histograms["round_overhead_seconds"].observe(line["overhead"], tags)

    def _see_files(self) -> None:
        checkpoints = checkpoint.all_in(self._run.path / "checkpoints")
        measured = {path.stem for path in rows_in(self._run.path)}
        due = [path for path in checkpoints if self._run.is_evaluated_at(checkpoint.round_of(path))]
        self._set("checkpoint_round", checkpoint.round_of(checkpoints[-1]) if checkpoints else 0)
        self._set("evaluations_pending", sum(path.stem not in measured for path in due))

    def _set(self, name: str, value: float | None, *tags: str) -> None:
        if value is not None and math.isfinite(value):
            self._now[name, tags] = value

    def _add(self, name: str, value: float, *tags: str) -> None:
        if value:
            self._counters[name].inc(value, self._tags(name, *tags))

    def _tags(self, name: str, *tags: str) -> dict[str, str]:
        return {"run": self._run.name} | dict(zip(TAGS.get(name, ()), tags, strict=True))


def _about(name: str, table: Mapping[str, str]) -> tuple[str, str, tuple[str, ...]]:
    """Return a metric's name, its description, and its tags."""
    return f"flsim_{name}", table[name], ("run", *TAGS.get(name, ()))
