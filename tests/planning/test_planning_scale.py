"""Users, cohorts, epochs, amounts of training and copies, by hand, next to the published ones."""

from pathlib import Path

import pytest
from helpers import Experiment

from flsim.planning.measure import (
    Scale,
    Users,
    evaluations_of,
    published_scale,
    rows_of,
    scale_of,
)
from flsim.planning.plan import groups_of, privacy_of, provable_of
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.runs.sweeps.definition import Definition, Planned, longest_first, planned_runs, tier_of
from flsim.runs.sweeps.definition import load as load_sweep
from flsim.runs.sweeps.tuning import shortened

SMALL = Users(users=400, records=12_000, words=100_000, vocabulary=600)


def planned_of(file: Path, only: tuple[str, ...] = (), tier: str = "smoke") -> tuple[Definition, list[Planned]]:
    definition = load_sweep(file)
    return definition, planned_runs(definition, tier_of(definition, tier, "here"), Path("corpus"), "here", only=only)


def here_and_published(
    definition: Definition, planned: list[Planned], only: tuple[str, ...] = ()
) -> tuple[Scale, Scale]:
    published = published_scale(definition, planned, "here", only)
    assert published is not None
    return scale_of(rows_of(planned), SMALL.split(), published), published


def test_rows_and_canaries_by_hand(sweep_file: Path) -> None:
    """An assumed population of 400 users of 30 records. Batch 32: 375 steps an epoch. Cohort 40: a tenth."""
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
    assert scale.share == pytest.approx(4 * (0.01 + 0.005 + 0.0025) * (0.25 + 0.5 + 1))
    assert [(each.sharers, each.copies) for each in scale.canaries[:3]] == [(4, 30), (4, 60), (4, 120)]


def test_the_published_experiment(sweep_file: Path) -> None:
    """The paper's section 4.1: 392,000 users, 90 canaries; 8,000 rounds of 5,000 are 102 epochs."""
    here, scale = here_and_published(*planned_of(sweep_file))
    assert [row.name for row in scale.rows] == [row.name for row in here.rows]
    assert scale.rows[-3].epochs == pytest.approx(8000 * 5000 / 392_000, rel=1e-6)
    assert scale.rows[-3].of_users == pytest.approx(5000 / 392_000)
    assert scale.rows[0].epochs == pytest.approx(37_500_000 * 32 / (392_000 * 237), rel=1e-4)
    assert scale.number == 90
    assert scale.canaries[0].sharers == pytest.approx(392_000 / 5_000)
    assert scale.canaries[-1].copies == pytest.approx(392_000 * 237 / 50_000)


def test_amounts_by_hand(sweep_file: Path) -> None:
    """SGD: 0.005 x steps. FedAvg: 0.3 x rounds x steps of a user, 30 records by 4 or about 237 by 16."""
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
    """Four rounds of users of 8 records in batches of 8 at a rate of 0.5: a step a round."""
    config = load(experiment.config, ("local.batch_size=8", "local.learning_rate=0.5", *overrides))
    assert config.rounds_over(Users(24, 192, 900, 40).split()) in (4, 2_000)
    assert config.rate_steps(Users(24, 192, 900, 40).split()) == pytest.approx(amount, rel=1e-3)


@pytest.mark.parametrize("table", ["table1", "table4"])
def test_small_tiers_are_trained_for_alike_shares_of_the_published_amounts(table: str) -> None:
    """Otherwise techniques would differ by how much they are trained."""
    definition, planned = planned_of(Path(__file__).parents[2] / "experiments" / f"{table}.toml", tier="small")
    train = Users(4_000, 943_473, 8_000_000, 10_000).split()  # as `flsim plan` counts them
    published = published_scale(definition, planned, "here")
    shares = [row.of_published for row in scale_of(rows_of(planned), train, published).rows]
    known = [share for share in shares if share is not None]
    assert len(known) == len(shares)
    assert max(known) < 1.1 * min(known)


@pytest.mark.parametrize(
    ("trained", "left_out"),
    [
        ("federated", ("data.shadow='user'", "seed=3")),
        ("central", ("data.shadow='record'", "data.user_holdout=0.1")),
    ],
)
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
    assert provable.group == max(groups_of(config, Users.counted(run.train)))
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
def test_as_many_evaluations_as_the_schedule_asks_for(experiment: Experiment, overrides: tuple[str, ...]) -> None:
    text = experiment.config.read_text().replace("every = 2\n", "")
    path = experiment.folder / "due.toml"
    path.write_text(text.replace("rounds = 4", "rounds = 25"))
    config, train = load(path, overrides), Users(24, 192, 900, 40).split()
    rounds = config.rounds_over(train)
    per_epoch = config.rounds_per_epoch(train)
    due = [each for each in range(1, rounds + 1) if each == rounds or config.evaluation.is_due(each, per_epoch)]
    assert evaluations_of(config, train) == len(due)


def test_runs_of_most_epochs_are_first(sweep_file: Path) -> None:
    _, planned = planned_of(sweep_file)
    names = [run.name for run in longest_first(planned, SMALL.split())]
    assert names[:2] == ["fedavg-iid-cohort40-seed0", "fedavg-non-iid-cohort40-seed0"]
    assert names[-1] == "sgd-non-iid-batch_size32-seed0", "3.97 epochs, fewer than the 4 of 4 users in 400 rounds"
    assert len(names) == 18
