"""Short runs and their logs, and times and amounts of training as products that tests compute by hand."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Experiment, Flsim

from flsim.base.errors import RunFailed
from flsim.canaries.spec import CanaryHParams, configurations
from flsim.planning import measure
from flsim.planning.measure import (
    Cost,
    Machine,
    Scale,
    UserNumbers,
    configuration_of,
    cost_of,
    evaluations_of,
    published_scale,
    rows_of,
    scale_of,
    short_run,
    time_of,
    times_of,
)
from flsim.planning.plan import groups_of, privacy_of, provable_of
from flsim.results.rows import Evaluation, log_evaluation
from flsim.runs import roundlog
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.runs.sweeps.definition import Definition, Planned, longest_first, planned_runs, tier_of
from flsim.runs.sweeps.definition import load as load_sweep
from flsim.runs.sweeps.folder import shortened
from server.sweep import JobEnd, SweepJob

USERS = UserNumbers(400, 12_000, 100_000, 600)
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
    """Write the logs of a short run: seconds of its parts, each of `steps` steps, and of its evaluations."""
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
    """The process takes 20 s, with parts of 5, 0.5 and 0.9 s and evaluations of 3 and 2 s."""
    write_log(tmp_path / "run", [5.0, 0.5, 0.9], steps, [3.0, 2.0])
    measured = cost_of(tmp_path / "run", 20.0)
    assert (measured.start, measured.round, measured.evaluation) == pytest.approx((start, round_, 2.0))
    assert cost_of(tmp_path / "run", 1.0).start == 0, "evaluations beside training can take longer than the process"
    write_log(tmp_path / "other", [5.0, 0.5, 0.9], steps, [3.0])
    with pytest.raises(RunFailed, match="3 lines of rounds and 1 evaluations"):
        cost_of(tmp_path / "other", 20.0)


def test_the_time_of_a_run_is_start_and_rounds_and_evaluations(sweep_file: Path) -> None:
    """16 runs have 400 rounds or 1,488 steps, 4 evaluations of 3 s, and a start of 10 s; twins share a row."""
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


def test_as_many_short_runs_are_measured_as_train_at_once(sweep_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One configuration on four cores has four short runs, whose median is used; a failure ends the measurement."""
    jobs: list[SweepJob] = []

    def train(given: Sequence[SweepJob], *_: object) -> Iterator[JobEnd]:
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
def test_the_time_of_a_run_follows_from_a_real_short_run(experiment: Experiment, flsim: Flsim) -> None:
    """The run trains in a separate process. Its time is the measured start, 4 rounds and 2 evaluations."""
    code, out, err = flsim("plan", experiment.config, "--set", "system.shards=1", "--json")
    assert code == 0, err
    (row,) = json.loads(out)["times"]
    assert (row["rounds"], row["evaluations"], row["runs"]) == (4, 2, 1)
    assert row["round"] > 0
    assert row["seconds"] == pytest.approx(row["start"] + 4 * row["round"] + 2 * row["evaluation"])
    time = json.loads(out)["time"]
    assert time["longest"] == time["one_by_one"] == row["seconds"]
    assert json.loads(out)["measurement"]["memory"] > 1e8


SMALL = UserNumbers(users=400, records=12_000, words=100_000, vocabulary=600)


def planned_of(file: Path, only: tuple[str, ...] = (), tier: str = "smoke") -> tuple[Definition, list[Planned]]:
    definition = load_sweep(file)
    return definition, planned_runs(definition, tier_of(definition, tier, "here"), Path("corpus"), "here", only=only)


def here_and_published(
    definition: Definition, planned: list[Planned], only: tuple[str, ...] = ()
) -> tuple[Scale, Scale]:
    published = published_scale(definition, planned, "here", only)
    assert published is not None
    return scale_of(rows_of(planned), SMALL.split(), published), published


def test_rows_and_canaries_equal_values_computed_by_hand(sweep_file: Path) -> None:
    """400 users of 30 records are assumed. Batch size 32 has 375 steps an epoch; a cohort of 40 is a tenth."""
    _, planned = planned_of(sweep_file)
    scale = scale_of(rows_of(planned), SMALL.split())
    rows = {row.name: row for row in scale.rows}
    assert len(rows) == 18
    assert {row.runs for row in scale.rows} == {1}
    assert rows["sgd batch_size 32, IID"].epochs == pytest.approx(1488 / 375)
    assert rows["sgd batch_size 32, IID"].of_users is None
    assert rows["fedavg cohort 40, Non-IID"].of_users == 0.1
    assert rows["fedavg cohort 40, Non-IID"].epochs == pytest.approx(400 * 40 / 400)
    assert scale.number == 36
    free = math.prod((1 - p_u * p_e) ** 4 for p_u in (0.01, 0.005, 0.0025) for p_e in (0.25, 0.5, 1))
    assert scale.share == pytest.approx(1 - free)
    assert [(each.sharers, each.copies) for each in scale.canaries[:3]] == [(4, 30), (4, 60), (4, 120)]


def test_the_scale_of_the_published_experiment(sweep_file: Path) -> None:
    """The paper's section 4.1 has 392,000 users and 90 canaries; 8,000 rounds of 5,000 users are 102 epochs."""
    here, scale = here_and_published(*planned_of(sweep_file))
    assert [row.name for row in scale.rows] == [row.name for row in here.rows]
    assert scale.rows[-3].epochs == pytest.approx(8000 * 5000 / 392_000, rel=1e-6)
    assert scale.rows[-3].of_users == pytest.approx(5000 / 392_000)
    assert scale.rows[0].epochs == pytest.approx(37_500_000 * 32 / (392_000 * 237), rel=1e-4)
    assert scale.number == 90
    assert scale.canaries[0].sharers == pytest.approx(392_000 / 5_000)
    assert scale.canaries[-1].copies == pytest.approx(392_000 * 237 / 50_000)


def test_amounts_of_training_equal_values_computed_by_hand(sweep_file: Path) -> None:
    """SGD: 0.005 x steps. FedAvg: 0.3 x rounds x steps of a user, with 30 records by 4 or about 237 by 16."""
    only = ("sgd", "fedavg")
    here, published = here_and_published(*planned_of(sweep_file, only), only)
    assert [row.amount for row in here.rows] == pytest.approx([0.005 * 1_488] * 8 + [0.3 * 400 * 8] * 8)
    assert [row.amount for row in published.rows] == pytest.approx([187_500] * 8 + [0.3 * 8_000 * 15] * 8)
    assert here.rows[0].of_published == pytest.approx(7.44 / 187_500)
    # Table 1, b_r = 32 and b_u = 5000
    utility = {row.name: row.utility for row in published.rows}
    assert (utility["sgd batch_size 32, IID"], utility["sgd batch_size 32, Non-IID"]) == (62.2, 64.3)
    assert (utility["fedavg cohort 40, IID"], utility["fedavg cohort 40, Non-IID"]) == (57.3, 58.2)


@pytest.mark.parametrize(
    ("overrides", "amount"),
    [
        (("training.server_learning_rate=0.5",), 0.5 * 4 * 0.5),
        (("training.server_optimizer=adam", "training.server_learning_rate=0.01"), 4 * 0.01),
        (("local.max_records=3", "local.epochs=2"), 4 * 2 * 0.5),
        (("training.server_schedule=linear", "training.rounds=2000"), 0.5 * 2_001 / 2),
        (("local.schedule=linear",), 0.5 * (4 + 3 + 2 + 1) / 4),
    ],
)
def test_amounts_of_federated_settings(experiment: Experiment, overrides: tuple[str, ...], amount: float) -> None:
    """Four rounds of users of 8 records in batches of 8 have one step a round, with learning rate 0.5."""
    config = load(experiment.config, ("local.batch_size=8", "local.learning_rate=0.5", *overrides))
    assert config.rounds_over(UserNumbers(24, 192, 900, 40).split()) in (4, 2_000)
    assert config.rate_steps(UserNumbers(24, 192, 900, 40).split()) == pytest.approx(amount, rel=1e-3)


@pytest.mark.parametrize("table", ["table1", "table4"])
def test_small_tiers_are_trained_for_similar_shares_of_the_published_amounts(table: str) -> None:
    """Otherwise, techniques would also differ in their amounts of training."""
    definition, planned = planned_of(Path(__file__).parents[2] / "experiments" / f"{table}.toml", tier="small")
    train = UserNumbers(4_000, 943_473, 8_000_000, 10_000).split()  # as `flsim plan` counts them
    published = published_scale(definition, planned, "here")
    shares = [row.of_published for row in scale_of(rows_of(planned), train, published).rows]
    known = [share for share in shares if share is not None]
    assert len(known) == len(shares)
    assert max(known) < 1.1 * min(known)


@pytest.mark.parametrize(
    ("trained", "left_out"),
    [("federated", ("data.shadow='user'", "seed=3")), ("central", ("data.shadow='record'", "data.user_holdout=0.1"))],
)
def test_excluded_users_and_records_are_not_counted(
    experiment: Experiment, tmp_path: Path, trained: str, left_out: tuple[str, ...]
) -> None:
    """Rounds, epochs, sharers and the population of epsilon are those that the run itself counts."""
    lengths = {"federated": ("training.epochs=3", "training.sampler='poisson'"), "central": ("training.epochs=2",)}
    private = ("privacy.mechanism='dp'", "privacy.clip=1.0", "privacy.noise_multiplier=1.0", "canaries.p_u=[0.05]")
    text = experiment.config.read_text().replace("rounds = 4\n", "")
    if trained == "central":
        text = text.replace("cohort = 6", "kind = 'central'").replace("[local]\n", "").replace("shards = 1\n", "")
    experiment.config.write_text(text)
    config = load(experiment.config, [*left_out, *lengths[trained], *private])
    run = Run.create(config, tmp_path / "run")
    train, planned = run.corpus.split("train"), [Planned("run", "run", config.seed, {}, None, config)]
    scale = scale_of(rows_of(planned), train)
    (row,) = scale.rows
    assert row.length == run.rounds
    assert row.epochs == pytest.approx(run.rounds / run.rounds_per_epoch)
    assert scale.users.users == len(train) >= len(run.train)
    assert scale.canaries[0].sharers == pytest.approx(0.05 * len(run.train))
    assert scale.canaries[0].copies == pytest.approx(0.05 * 0.5 * run.train.records)
    (privacy,) = privacy_of(planned, train)
    assert privacy.delta == run.delta == 1 / (10 * run.population)
    (provable,) = provable_of(planned, train)
    assert provable.group == max(groups_of(config, UserNumbers.counted(run.train)))
    assert shortened(config, 1.0, train)[1] == run.rounds


@pytest.mark.parametrize(
    "overrides",
    [
        ("evaluation.every=3",),
        ("evaluation.every=100",),
        ("evaluation.every_epochs=0.01",),
        ("evaluation.every_epochs=1.7", "training.rounds=37"),
    ],
)
def test_the_number_of_evaluations_is_that_of_the_schedule(experiment: Experiment, overrides: tuple[str, ...]) -> None:
    text = experiment.config.read_text().replace("every = 2\n", "")
    path = experiment.folder / "due.toml"
    path.write_text(text.replace("rounds = 4", "rounds = 25"))
    config, train = load(path, overrides), UserNumbers(24, 192, 900, 40).split()
    rounds = config.rounds_over(train)
    per_epoch = config.rounds_per_epoch(train)
    due = [each for each in range(1, rounds + 1) if each == rounds or config.evaluation.is_due(each, per_epoch)]
    assert evaluations_of(config, train) == len(due)


def test_runs_with_the_most_epochs_are_first(sweep_file: Path) -> None:
    _, planned = planned_of(sweep_file)
    names = [run.name for run in longest_first(planned, SMALL.split())]
    assert names[:2] == ["fedavg-iid-cohort40-seed0", "fedavg-non-iid-cohort40-seed0"]
    assert names[-1] == "sgd-non-iid-batch_size32-seed0", "3.97 epochs, fewer than the 4 of 4 users in 400 rounds"
    assert len(names) == 18
