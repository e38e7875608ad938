"""Metrics that Prometheus reads from a real Ray node, on which runs trained, equal the values in the run folders."""

import json
import math
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers import PARTITION, PRIVATE, Experiment, Trained
from prometheus_client.parser import text_string_to_metric_families
from raynodes import free_place, free_port, started
from waiting import wait_until

from flsim.runs.folder import Run
from server.central import COUNTERS, GAUGES, TAGS, RoundMetrics

ROOT = Path(__file__).parents[1]
RAYS_TAGS = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId"}
Key = tuple[str, frozenset[tuple[str, str]]]


class Prometheus:
    """A reader of a node's metrics page, with the last value of each of flsim's metrics, by driver."""

    def __init__(self, address: str, port: int) -> None:
        self.address, self._url = address, f"http://127.0.0.1:{port}/metrics"
        self._seen: dict[str, dict[Key, float]] = {}

    def look(self) -> None:
        with urllib.request.urlopen(self._url, timeout=10) as page:
            families = text_string_to_metric_families(page.read().decode())
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.startswith("ray_flsim_"):
                assert sample.labels.keys() >= RAYS_TAGS
                tags = {k: v for k, v in sample.labels.items() if k not in RAYS_TAGS and not k.startswith("otel_")}
                driver = self._seen.setdefault(sample.labels["WorkerId"], {})
                driver[sample.name.removeprefix("ray_flsim_"), frozenset(tags.items())] = sample.value

    def figures_of(self, run: str) -> dict[Key, float]:
        """Return the metrics of a run from its newest driver, by name and tags."""
        of_run = ("run", run)
        drivers = [{(n, t - {of_run}): v for (n, t), v in each.items() if of_run in t} for each in self._seen.values()]
        return next((each for each in reversed(drivers) if each), {})

    def wait(self, run: str, happened: Callable[[dict[Key, float]], bool]) -> dict[Key, float]:
        def look() -> bool:
            self.look()
            return happened(self.figures_of(run))

        wait_until(look, 60)
        return self.figures_of(run)


def figure(name: str, **tags: str) -> Key:
    return name, frozenset(tags.items())


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    """Start a head node with two CPUs that reports its metrics every half second, and yield a reader of them."""
    place, metrics_port = free_place(), free_port()
    options = [f"--port={place.rpartition(':')[2]}", f"--metrics-export-port={metrics_port}", "--num-cpus=2"]
    options += ["--include-dashboard=false", '--system-config={"metrics_report_interval_ms": 500}']
    with started("--head", *options, "--min-worker-port=0", "--max-worker-port=0"):
        yield Prometheus(place, metrics_port)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_folder_says(seen: dict[Key, float], run: Path, rounds: int) -> None:
    log = lines(run / "rounds.jsonl")
    expected = {
        figure("round"): rounds,
        figure("rounds"): rounds,
        figure("loss"): log[-1]["loss"],
        figure("seconds"): log[-1]["seconds"],
        figure("examples_total"): sum(line["examples" if "examples" in line else "records"] for line in log),
    }
    if "users" in log[0]:
        expected[figure("users_total")] = sum(line["users"] for line in log)
    for key, of in (("epsilon", "user"), ("record_epsilon", "record")):
        for line in log:
            for name, value in (line.get(key) or {}).items():
                expected[figure("epsilon", convention=name, of=of)] = value
    assert seen == pytest.approx(expected)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["federated", "central"])
def test_prometheus_reads_values_of_the_folder(experiment: Experiment, prometheus: Prometheus, kind: str) -> None:
    settings = [*PRIVATE[3:6], "evaluation.every=1000"]
    length = "training.rounds=30"
    if kind == "central":
        experiment.config.write_text(f"{PARTITION}[evaluation]\nreferences = 200\n[system]\ncheckpoint_every = 50\n")
        settings += ["training.kind=central", "training.batch_size=9"]
        length = "training.steps=1000"
    run = experiment.run(kind, *settings, length, options=["--address", prometheus.address])
    rounds = len(lines(run / "rounds.jsonl")) if kind == "federated" else 1000
    assert_folder_says(prometheus.wait(kind, lambda seen: seen.get(figure("round")) == rounds), run, rounds)


def test_reporting_without_ray_does_not_start_ray(trained_here: Trained) -> None:
    metrics = RoundMetrics(Run.open(trained_here()))
    metrics.report({"round": 1, "loss": None, "seconds": math.inf})
    assert not ray.is_initialized()


def test_all_metrics_are_documented() -> None:
    text = (ROOT / "docs" / "prometheus.md").read_text()
    for name in (*GAUGES, *(f"{name}_total" for name in COUNTERS)):
        tags = ", ".join(f"`{tag}`" for tag in TAGS.get(name, ()))
        assert f"| `ray_flsim_{name}` | {tags} |" in text, name
