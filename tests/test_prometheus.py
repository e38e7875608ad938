"""What Prometheus reads from a real Ray node while real runs train on it, against what their folders say."""

import json
import os
import shutil
import signal
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers import PRIVATE, WORLD, Experiment, Trained, finish, start, wait_for_round
from prometheus_client.parser import text_string_to_metric_families
from raynodes import free_place, free_port, started
from waiting import wait_until

from flsim.runs.folder import Run
from server.metrics import COUNTERS, GAUGES, HISTOGRAMS, TAGS, exposed

ROOT = Path(__file__).parents[1]
RAYS_TAGS = {"Component", "NodeAddress", "SessionName", "Version", "WorkerId"}
Key = tuple[str, frozenset[tuple[str, str]]]


class Prometheus:
    """Looks at a node again and again, and keeps the last value of each of our figures, by driver."""

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
        """The newest driver's figures of a run, by name and tags."""
        drivers = [
            {(n, t - {("run", run)}): v for (n, t), v in each.items() if ("run", run) in t}
            for each in self._seen.values()
        ]
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
    """A head with two CPUs that tells its figures every half second."""
    place, metrics_port = free_place(), free_port()
    options = [f"--port={place.rpartition(':')[2]}", f"--metrics-export-port={metrics_port}", "--num-cpus=2"]
    options += ["--include-dashboard=false", '--system-config={"metrics_report_interval_ms": 500}']
    with started("--head", *options, "--min-worker-port=0", "--max-worker-port=0"):
        yield Prometheus(place, metrics_port)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_folder_says(seen: dict[Key, float], run: Path, rounds: int) -> None:
    """Everything but what tells of processes."""
    log, events = lines(run / "rounds.jsonl"), lines(run / "log.jsonl")
    attempts = lines(run / "evaluations.jsonl")
    spent = [(key, line[key]) for line in log for key in ("epsilon", "record_epsilon") if line.get(key)]
    ran = [0, *(line["round"] for line in log)]
    seconds = [line["seconds"] / (line["round"] - before) for line, before in zip(log, ran, strict=False)]
    expected = {
        figure("round"): rounds,
        figure("rounds"): rounds,
        figure("checkpoint_round"): rounds,
        figure("evaluations_pending"): 0,
        figure("loss"): log[-1]["loss"],
        figure("examples_total"): sum(line["examples" if "examples" in line else "records"] for line in log),
        figure("round_seconds_count"): len(log),
        figure("round_seconds_bucket", le="+Inf"): len(log),
    }
    if "users" in log[0]:
        expected[figure("users_total")] = sum(line["users"] for line in log)
    if "overhead" in log[0]:
        expected[figure("round_overhead_seconds_count")] = len(log)
    for key, of_round in spent:
        of = "user" if key == "epsilon" else "record"
        expected |= {figure("epsilon", convention=name, of=of): value for name, value in of_round.items()}
    for outcome, count in Counter(each["outcome"] for each in attempts).items():
        expected[figure("evaluations_total", outcome=outcome)] = count
    for kind, count in Counter(line["failure"] for line in events if "failure" in line).items():
        expected[figure("failures_total", kind=kind)] = count
    assert {key: seen[key] for key in expected} == pytest.approx(expected)
    buckets = {dict(tags)["le"]: count for (name, tags), count in seen.items() if name == "round_seconds_bucket"}
    assert buckets == {le: sum(each <= float(le) for each in seconds) for le in buckets}
    assert len(buckets) == 22


@pytest.mark.nightly
def test_a_federated_run_is_seen_while_it_trains_and_counts_on_when_it_is_resumed(
    experiment: Experiment, prometheus: Prometheus
) -> None:
    """A client process is killed in between."""
    settings = (*PRIVATE, "training.rounds=80", "evaluation.every=40", "system.shards=2", "system.checkpoint_every=20")
    options = [
        "--out",
        "run",
        "--address",
        prometheus.address,
        *(part for text in settings for part in ("--set", text)),
    ]
    run = experiment.folder / "run"
    process = start(experiment, *options)
    worker = wait_for_round(run, 3)[0]
    prometheus.wait("run", lambda seen: seen.get(figure("client_processes")) == 2)
    os.kill(int(worker.split("/")[1]), signal.SIGKILL)
    during = prometheus.wait("run", lambda seen: seen.get(figure("round"), 0) > 0)
    assert process.poll() is None
    assert 0 < during[figure("round")] < during[figure("rounds")] == 80
    code, said = finish(experiment, process)
    assert code == 0, said
    after = prometheus.wait("run", lambda seen: seen.get(figure("round")) == 80)
    assert_folder_says(after, run, 80)
    assert after[figure("failures_total", kind="client died")] >= 1
    ready = [(line["processes"], line["machines"]) for line in lines(run / "log.jsonl") if "processes" in line]
    assert (after[figure("client_processes")], after[figure("machines")]) == ready[-1]

    experiment.flsim("run", experiment.config, *options, "--resume", "--set", "training.rounds=82")
    resumed = prometheus.wait("run", lambda seen: seen.get(figure("round")) == 82)
    assert_folder_says(resumed, run, 82)
    assert resumed[figure("users_total")] > after[figure("users_total")]


@pytest.mark.nightly
def test_a_central_run_is_seen_in_steps(experiment: Experiment, prometheus: Prometheus) -> None:
    experiment.config.write_text(f"{WORLD}[evaluation]\nevery = 20\nreferences = 200\n[system]\ncheckpoint_every = 7\n")
    settings = ("training.kind=central", "training.steps=40", "training.batch_size=9")
    private = ("privacy.mechanism=dp", "privacy.clip=0.5", "privacy.noise_multiplier=0.8")
    run = experiment.run("steps", *settings, *private, options=["--address", prometheus.address])
    seen = prometheus.wait("steps", lambda seen: seen.get(figure("round")) == 40)
    assert_folder_says(seen, run, 40)
    assert not {"users_total", "client_processes", "round_overhead_seconds_count"} & {name for name, _ in seen}
    assert {dict(tags)["of"] for name, tags in seen if name == "epsilon"} == {"record"}


@pytest.mark.slow
def test_figures_that_cannot_be_told_stop_nothing(
    tmp_path: Path, trained: Trained, prometheus: Prometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines that are none, a loss that Prometheus does not get, and a file that is another one at the next look."""
    path = shutil.copytree(trained(), tmp_path / "odd")
    (path / "rounds.jsonl").write_bytes(
        b'\xff\n{"round": 1, "loss": Infinity, "users": 5, "examples": 7, "seconds": 1}\n{"rou'
    )
    ray.init(address=prometheus.address, log_to_driver=False)
    try:
        with exposed(Run.open(path)):
            seen = prometheus.wait("odd", lambda seen: figure("round") in seen)
            assert figure("loss") not in seen
            assert seen[figure("users_total")] == 5
            (path / "rounds.jsonl").write_text('{"round": "two"}\n')
            wait_until(lambda: "odd: metrics failed, and the run continues without them" in capsys.readouterr().err)
    finally:
        ray.shutdown()
    with exposed(Run.open(path)):
        assert not ray.is_initialized()


def test_all_of_them_are_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    for name in (*GAUGES, *HISTOGRAMS, *(f"{name}_total" for name in COUNTERS)):
        tags = ", ".join(f"`{tag}`" for tag in TAGS.get(name.removesuffix("_total"), ()))
        assert f"| `ray_flsim_{name}` | {tags} |" in text, name
