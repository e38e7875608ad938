"""Short runs and what their logs say; times of runs as products that tests count by hand."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Experiment, Flsim

from flsim.base.errors import RunFailed
from flsim.canaries.spec import CanaryHParams, configurations
from flsim.planning import measure
from flsim.planning.measure import Cost, Machine, Users, configuration_of, cost_of, short_run, time_of, times_of
from flsim.results.store import Evaluation, log_evaluation
from flsim.runs import roundlog
from flsim.runs.config import load
from flsim.runs.sweeps.definition import Planned, planned_runs, tier_of
from flsim.runs.sweeps.definition import load as load_sweep
from server.sweep import Job, JobEnd

USERS = Users(400, 12_000, 100_000, 600)
MACHINE = Machine(cores=2, gpus=0)
COST = Cost(start=10, round=0.5, evaluation=3)


def runs_of(file: Path, tier: str = "smoke", *only: str) -> list[Planned]:
    definition = load_sweep(file)
    return planned_runs(definition, tier_of(definition, tier, "here"), Path("corpus"), "here", only=only)


@pytest.mark.parametrize("tier", ["smoke", "paper"])
def test_short_runs_have_three_parts_and_are_evaluated_after_the_second_and_the_third(
    sweep_file: Path, tier: str
) -> None:
    for run in runs_of(sweep_file, tier):
        config, train = short_run(run.config), USERS.split()
        part = 20 if run.grid == "sgd" else 1
        assert config.rounds_over(train) == 3 * part
        due = [end for end in range(1, 3 * part) if config.evaluation.is_due(end, config.rounds_per_epoch(train))]
        assert due == [2 * part]
        assert run.grid != "sgd" or config.system.checkpoint_every == part
        assert (config.canaries, config.round_size) == (run.config.canaries, run.config.round_size)


@pytest.mark.parametrize(
    "canaries",
    [
        CanaryHParams(windows=((0, 50), (50, 100), (900, 1000))),
        CanaryHParams(windows=((0.0, 0.5), (0.9, 0.95))),
        CanaryHParams(injections=(0, 3, 700)),
        CanaryHParams(injections=(0.1, 0.95)),
    ],
)
def test_windows_and_injections_fit_into_three_rounds(experiment: Experiment, canaries: CanaryHParams) -> None:
    config = replace(load(experiment.config, ["training.rounds=1000"]), canaries=canaries)
    short = short_run(config).canaries
    assert len(configurations(short)) == len(configurations(canaries))
    assert short.parting(3) <= 3


def write_log(run: Path, seconds: Sequence[float], steps: int, evaluations: Sequence[float]) -> None:
    """Write the logs of a short run: seconds of its parts of so many steps each, and of its evaluations."""
    run.mkdir()
    for part, taken in enumerate(seconds, start=1):
        roundlog.append(run, round=part * steps, seconds=taken)
    for number, taken in enumerate(evaluations):
        log_evaluation(run, Evaluation(f"round-{number:06d}.safetensors", "stored", 1, taken, 1e6 + number))


@pytest.mark.parametrize(
    ("steps", "round_", "start"),
    [(1, 0.5, 20 - 3 * 0.5 - 2 * 2), (10, 0.05, 20 - 30 * 0.05 - 2 * 2)],
    ids=["rounds", "steps"],
)
def test_the_second_round_and_the_second_evaluation_are_measured(
    tmp_path: Path, steps: int, round_: float, start: float
) -> None:
    """A process of 20 s: parts of 5, 0.5 and 0.9 s, evaluations of 3 and 2 s."""
    write_log(tmp_path / "run", [5.0, 0.5, 0.9], steps, [3.0, 2.0])
    measured = cost_of(tmp_path / "run", 20.0)
    assert (measured.start, measured.round, measured.evaluation) == pytest.approx((start, round_, 2.0))
    assert cost_of(tmp_path / "run", 1.0).start == 0, "evaluations beside training can take longer than the process"
    write_log(tmp_path / "other", [5.0, 0.5, 0.9], steps, [3.0])
    with pytest.raises(RunFailed, match="3 lines of rounds and 1 evaluations"):
        cost_of(tmp_path / "other", 20.0)


def test_the_time_of_a_run_is_start_and_rounds_and_evaluations(sweep_file: Path) -> None:
    """16 runs: 400 rounds or 1,488 steps, 4 evaluations of 3 s, and 10 s of start; twins are one row."""
    planned = runs_of(sweep_file, "smoke", "sgd", "fedavg")
    costs = {configuration_of(run): COST for run in planned}
    rows = times_of(planned, costs, USERS.split(), MACHINE)
    assert [row.seconds for row in rows] == pytest.approx([10 + 1_488 * 0.5 + 4 * 3] * 4 + [10 + 400 * 0.5 + 4 * 3] * 4)
    assert {(row.runs, row.at_once, row.evaluations) for row in rows} == {(2, 2, 4)}
    whole = times_of(planned, costs, USERS.split(), MACHINE, whole_cluster=True)
    assert {row.at_once for row in whole} == {1}
    for chosen, seconds in ((rows, 5 + (8 * 766 + 8 * 222) / 2), ([replace(rows[0], runs=1)], 5 + 766)):
        time = time_of(chosen, overhead=5.0)
        assert time.seconds == pytest.approx(seconds), "the sum by slots, and at least the longest"
        assert time.longest == pytest.approx(766)
        assert time.one_by_one == pytest.approx(sum(row.runs * row.seconds for row in chosen))


def test_runs_at_once_are_as_many_as_cores_and_shares_of_gpus_allow(experiment: Experiment) -> None:
    config = load(experiment.config, ["system.shards=2", "system.gpus_per_client=0"])
    assert Machine(cores=5, gpus=0).runs_at_once(config) == 2
    assert Machine(cores=5, gpus=0).runs_at_once(config, at_once=1) == 1
    assert Machine(cores=1, gpus=0).runs_at_once(config) == 1, "a run that does not fit is refused elsewhere"
    tenths = load(experiment.config, ["system.gpus_per_client=0.08", "system.gpus_for_evaluation=0.02"])
    assert Machine(cores=16, gpus=1).runs_at_once(tenths) == 10


def test_as_many_short_runs_as_train_at_once(sweep_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One configuration on four cores has four short runs, whose median counts; a failure ends the measurement."""
    jobs: list[Job] = []

    def train(given: Sequence[Job], *_: object) -> Iterator[JobEnd]:
        time.sleep(0.2)
        for number, job in enumerate(given):
            jobs.append(job)
            assert load(job.file).digest == job.config.digest
            write_log(job.out, [5.0, 1.0 + number, 1.0], 1, [3.0, 2.0])
            yield JobEnd(job.name, "no such file" if number == fails else None, 0.0)

    monkeypatch.setattr(measure, "train_all", train)
    planned, fails = runs_of(sweep_file, "smoke", "dp") * 3, -1
    costs, measurement = measure.measure(planned, Machine(cores=4, gpus=0))
    assert (len(jobs), measurement.at_once) == (4, 4)
    assert not jobs[0].out.exists()
    (cost,) = costs.values()
    assert cost.round == 2.5
    assert measurement.memory > 0
    assert 0.2 <= measurement.overhead <= measurement.seconds, "before the first run and after the last one"
    fails = 1
    with pytest.raises(RunFailed, match="nothing is predicted: no such file"):
        measure.measure(planned, Machine(cores=4, gpus=0))


@pytest.mark.slow
def test_a_real_short_run(experiment: Experiment, flsim: Flsim) -> None:
    """A run of a process of its own: 4 rounds and 2 evaluations as measured."""
    code, out, err = flsim("plan", experiment.config, "--set", "system.shards=1", "--json")
    assert code == 0, err
    (row,) = json.loads(out)["times"]
    assert (row["rounds"], row["evaluations"], row["runs"]) == (4, 2, 1)
    assert row["round"] > 0
    assert row["seconds"] == pytest.approx(row["start"] + 4 * row["round"] + 2 * row["evaluation"])
    time = json.loads(out)["time"]
    assert time["longest"] == time["one_by_one"] == row["seconds"]
    assert json.loads(out)["measurement"]["memory"] > 1e8
