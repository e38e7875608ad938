"""Users, cohorts, epochs and copies, by hand."""

from pathlib import Path

import pytest
from helpers import Experiment

from flsim.canaries.spec import CanaryHParams
from flsim.planning.amounts import amounts_of
from flsim.planning.plan import privacy_of
from flsim.planning.predicting import evaluations_of
from flsim.planning.proof import provable_of
from flsim.planning.scale import Users, canaries_of, published_scale, scale_of
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.sweeps.definition import Planned, longest_first, planned_runs, tier_of
from flsim.sweeps.definition import load as load_sweep
from flsim.sweeps.tuning import shortened

SMALL = Users(users=400, records=12_000, words=100_000, vocabulary=600)


def test_rows_and_canaries_by_hand(sweep_file: Path) -> None:
    """An assumed population of 400 users of 30 records. Batch 32: 375 steps an epoch. Cohort 40: a tenth."""
    definition = load_sweep(sweep_file)
    planned = planned_runs(definition, tier_of(definition, "smoke", "here"), Path("corpus"), "here")
    scale = scale_of(planned, SMALL, SMALL.split())
    rows = {row.name: row for row in scale.rows}
    assert len(rows) == 9
    assert {row.runs for row in scale.rows} == {2}, "both worlds"
    assert rows["sgd batch_size 32"].epochs == pytest.approx(1488 / 375)
    assert rows["sgd batch_size 32"].share is None
    assert rows["fedavg cohort 40"].share == 0.1
    assert rows["fedavg cohort 40"].epochs == pytest.approx(400 * 40 / 400)
    assert scale.number == 36
    assert scale.share == pytest.approx(4 * (0.01 + 0.005 + 0.0025) * (0.25 + 0.5 + 1))
    assert [(each.sharers, each.copies) for each in scale.canaries[:3]] == [(4, 30), (4, 60), (4, 120)]


def test_the_published_experiment(sweep_file: Path) -> None:
    """The paper's section 4.1: 392,000 users, 90 canaries; 8,000 rounds of 5,000 are 102 epochs."""
    definition = load_sweep(sweep_file)
    planned = planned_runs(definition, tier_of(definition, "smoke", "here"), Path("corpus"), "here", seeds=[0, 1])
    scale = published_scale(definition, planned, "here")
    assert scale is not None
    assert [row.name for row in scale.rows] == [row.name for row in scale_of(planned, SMALL, SMALL.split()).rows]
    assert scale.rows[-2].epochs == pytest.approx(8000 * 5000 / 392_000, rel=1e-6)
    assert scale.rows[-2].share == pytest.approx(5000 / 392_000)
    assert scale.rows[0].epochs == pytest.approx(37_500_000 * 32 / (392_000 * 237), rel=1e-4)
    assert scale.number == 90
    assert scale.canaries[0].sharers == pytest.approx(392_000 / 5_000)
    assert scale.canaries[-1].copies == pytest.approx(392_000 * 237 / 50_000)


@pytest.mark.parametrize(
    "left_out",
    [("data.user_holdout=0.25",), ("data.shadow='user'", "seed=3"), ("data.shadow='record'", "data.user_holdout=0.1")],
    ids=["holdout", "users", "records"],
)
@pytest.mark.parametrize("trained", ["federated", "central"])
def test_what_is_left_out_is_not_counted(
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
    scale = scale_of(planned, Users.counted(train), train)
    (row,) = scale.rows
    assert row.length == run.rounds
    assert row.epochs == pytest.approx(run.rounds / run.rounds_per_epoch)
    assert scale.users.users == len(train) >= len(run.train)
    assert scale.canaries[0].sharers == pytest.approx(0.05 * len(run.train))
    assert scale.canaries[0].copies == pytest.approx(0.05 * 0.5 * run.train.records)
    (privacy,) = privacy_of(planned, lambda entry: entry.name, train)
    assert privacy.delta == run.delta == 1 / (10 * run.population)
    (provable,) = provable_of(planned, lambda entry: entry.name, train)
    assert provable.delta == run.delta
    (amount,) = amounts_of({"run": planned}, train)
    assert amount.epochs == row.epochs
    assert shortened(config, 1.0, train)[1] == run.rounds


def test_numbers_of_copies_have_no_sharers() -> None:
    found = canaries_of(CanaryHParams(insertions=(1, 8), count=3), SMALL)
    assert [(each.count, each.sharers, each.copies) for each in found] == [(3, None, 1), (3, None, 8)]


def test_assumed_users_take_no_memory() -> None:
    """Of 93 million records there are offsets of users alone."""
    split = Users(392_000, 392_000 * 237, 392_000 * 2_000, 10_000).split()
    assert (len(split), split.records, split.words) == (392_000, 392_000 * 237, 392_000 * 2_000)
    assert split.record_offsets.strides == split.tokens.strides == (0,)


@pytest.mark.parametrize(
    "overrides",
    [
        ("evaluation.every=3",),
        ("evaluation.every=100",),
        ("evaluation.every=1",),
        ("evaluation.every_epochs=0.3",),
        ("evaluation.every_epochs=0.01",),
        ("evaluation.every_epochs=1.7", "training.rounds=37"),
    ],
)
def test_as_many_evaluations_as_the_schedule_asks_for(experiment: Experiment, overrides: tuple[str, ...]) -> None:
    text = experiment.config.read_text().replace("every = 2\n", "")
    path = experiment.folder / "due.toml"
    path.write_text(text.replace("rounds = 4", "rounds = 25"))
    config, train = load(path, overrides), Users(24, 192, 900, 40).split()
    rounds = config.rounds_over(train)
    per_epoch = config.rounds_per_epoch(train)
    due = [each for each in range(1, rounds + 1) if each == rounds or config.evaluation.is_due(each, per_epoch)]
    assert evaluations_of(config, train) == (len(due), due[0])


def test_runs_of_most_epochs_are_first(sweep_file: Path) -> None:
    definition = load_sweep(sweep_file)
    planned = planned_runs(definition, tier_of(definition, "smoke", "here"), Path("corpus"), "here")
    names = [run.name for run in longest_first(planned, SMALL.split())]
    assert names[:2] == ["fedavg-iid-cohort40-seed0", "fedavg-non-iid-cohort40-seed0"]
    assert names[-1] == "sgd-non-iid-batch_size32-seed0", "3.97 epochs, fewer than the 4 of 4 users in 400 rounds"
    assert len(names) == 18
