"""Metrics of a run's rounds, which Ray's agent of each node exposes for Prometheus; docs/operations.md lists them."""

import math
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge

from flsim.runs.folder import Run

GAUGES = {
    "round": "Completed rounds, of central training steps.",
    "rounds": "Rounds, or steps, that the run is to have.",
    "loss": "Training loss of the last round, nats a position.",
    "seconds": "Seconds of the last round, of central training since the line before.",
    "epsilon": "Epsilon at the last evaluated round, by convention, of a user or a record.",
}
COUNTERS = {"users": "Users trained by this process.", "examples": "Records trained by this process."}
TAGS = {"epsilon": ("convention", "of")}


class RoundMetrics:
    """Ray metrics of the process that trains a run; their names begin with ``flsim_``. Without Ray there are none."""

    def __init__(self, run: Run) -> None:
        self._run, self._metrics = run, dict[str, Gauge | Counter]()
        if ray.is_initialized():  # otherwise Ray's metrics would start another Ray
            for kind, texts in ((Gauge, GAUGES), (Counter, COUNTERS)):
                for name, text in texts.items():
                    self._metrics[name] = kind(f"flsim_{name}", text, ("run", *TAGS.get(name, ())))

    def report(self, line: Mapping[str, Any]) -> None:
        """Report a line of rounds.jsonl."""
        for name in ("round", "loss", "seconds"):
            self._add(name, line[name])
        self._add("rounds", self._run.rounds)
        self._add("users", line.get("users"))
        self._add("examples", line.get("examples", line.get("records")))
        for key, unit in (("epsilon", "user"), ("record_epsilon", "record")):
            for convention, epsilon in (line.get(key) or {}).items():
                self._add("epsilon", epsilon, convention=convention, of=unit)

    def _add(self, name: str, value: float | None, **tags: str) -> None:
        """Set a gauge, or raise a counter; values that are missing, not finite or 0 of a counter change nothing."""
        metric = self._metrics.get(name)
        if metric is None or value is None or not math.isfinite(value):
            return
        tags = {"run": self._run.name, **tags}
        if isinstance(metric, Gauge):
            metric.set(value, tags)
        elif value:
            metric.inc(value, tags)
