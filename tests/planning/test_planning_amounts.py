"""Amounts of training, by hand, beside the published ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Experiment

from flsim.planning.amounts import amounts_of, beside, measured_utility, published_utility, shares_of, sweep_of
from flsim.planning.scale import PUBLISHED, Users, published_rows, rows_of
from flsim.results.rows import Row, frame
from flsim.results.store import RunResults
from flsim.results.sweeps import Sweep, SweepRun
from flsim.runs.config import CentralConfig, load
from flsim.sweeps.definition import Planned, planned_runs, tier_of
from flsim.sweeps.definition import load as load_sweep

USERS = Users(users=400, records=12_000, words=100_000, vocabulary=600)  # 30 records each


def planned_of(sweep_file: Path) -> tuple[list[Planned], dict[str, list[Planned]]]:
    """The runs of the smoke tier, and the published runs by row."""
    definition = load_sweep(sweep_file)
    only = ["sgd", "fedavg"]
    planned = planned_runs(definition, tier_of(definition, "smoke", "here"), Path("corpus"), "here", only=only)
    theirs = published_rows(definition, planned, "here", only)
    assert theirs is not None
    return planned, theirs


def test_amounts_by_hand(sweep_file: Path) -> None:
    """SGD: 0.005 x steps. FedAvg: 0.3 x rounds x steps of a user, 30 records by 4 or about 237 by 16."""
    planned, theirs = planned_of(sweep_file)
    ours = amounts_of(rows_of(planned), USERS.split())
    published = amounts_of(theirs, PUBLISHED["thakkar2020.csv"].split(), published_utility(theirs))
    assert [amount.name for amount in ours] == [amount.name for amount in published]
    assert [amount.rate_steps for amount in ours] == pytest.approx([0.005 * 1_488] * 4 + [0.3 * 400 * 8] * 4)
    assert [amount.rate_steps for amount in published] == pytest.approx([187_500] * 4 + [0.3 * 8_000 * 15] * 4)
    assert ours[0].epochs == pytest.approx(1_488 / 375)
    assert shares_of(ours, published)[0] == pytest.approx(7.44 / 187_500)
    # Table 1, b_r = 32 and b_u = 5000
    assert (published[0].utility, published[-1].utility) == (
        {"iid": 62.2, "non-iid": 64.3},
        {"iid": 57.3, "non-iid": 58.2},
    )
    assert not ours[0].utility


def test_worlds_with_rates_of_their_own_have_an_amount_each(sweep_file: Path) -> None:
    """Half the rate in the non-IID world of the first row alone; the published amount stands beside both."""
    planned, theirs = planned_of(sweep_file)
    rows = {name: list(runs) for name, runs in rows_of(planned).items()}
    first = next(iter(rows))
    for place, run in enumerate(rows[first]):
        if run.axes["data.world"] == "non-iid":
            config = run.config
            assert isinstance(config, CentralConfig)
            training = replace(config.training, learning_rate=0.0025)
            rows[first][place] = replace(run, config=replace(config, training=training))
    ours = amounts_of(rows, USERS.split(), {first: {"iid": 40.0, "non-iid": 50.0}})
    assert [amount.rate_steps for amount in ours[:3]] == pytest.approx([7.44, 3.72, 7.44])  # 1,488 steps
    assert [(amount.world, amount.utility) for amount in ours[:3]] == [
        ("iid", {"iid": 40.0}),
        ("non-iid", {"non-iid": 50.0}),
        (None, {}),
    ]
    published = beside(ours, amounts_of(theirs, PUBLISHED["thakkar2020.csv"].split(), published_utility(theirs)))
    assert published is not None
    assert [amount.name for amount in published] == [amount.name for amount in ours]
    assert [amount.utility for amount in published[:2]] == [{"iid": 62.2}, {"non-iid": 64.3}]
    assert beside(ours[2:], published) is None


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


def results(name: str, world: str, perplexity: float, status: str = "completed") -> SweepRun:
    rows = frame([Row(name, 10, "perplexity", "", perplexity), Row(name, 5, "perplexity", "", 999.0)])
    run = RunResults(name, "FedAvg, b_u=4", status, None, 10, 10, rows, roster=rows.iloc[:0])
    return SweepRun(name, "fedavg", 0, {"data.world": world, "training.cohort": 4}, None, run)


def test_utility_of_results_is_the_mean_over_completed_seeds() -> None:
    runs = [
        results("a", "iid", 60),
        results("b", "iid", 70),
        results("c", "non-iid", 80),
        results("d", "non-iid", 500, "running"),
    ]
    texts = dict.fromkeys(("name", "title", "question", "tier", "about", "source", "command"), "x")
    sweep = Sweep(Path(), **texts, commands=(), chosen=(), versions={}, sessions=[], runs=runs)
    assert measured_utility(sweep) == {"fedavg cohort 4": {"iid": 65, "non-iid": 80}}


def test_results_of_another_tier_are_of_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "table1-smoke"
    assert sweep_of(None, "table1", "smoke") is None
    folder.mkdir(parents=True)
    words = dict.fromkeys(("title", "question", "about", "source", "command"), "x")
    about = {**words, "name": "table1", "tier": "smoke", "versions": {}, "sessions": [], "runs": []}
    (folder / "sweep.json").write_text(json.dumps(about))
    assert sweep_of(None, "table1", "smoke") is not None
    assert sweep_of(folder, "table1", "small") is None
    assert sweep_of(tmp_path / "elsewhere", "table1", "smoke") is None


@pytest.mark.parametrize("table", ["table1", "table2", "table3", "table4"])
def test_small_tiers_are_trained_for_alike_shares_of_the_published_amounts(table: str) -> None:
    """Otherwise techniques would differ by how much they are trained."""
    file = Path(__file__).parents[2] / "experiments" / f"{table}.toml"
    definition = load_sweep(file)
    planned = planned_runs(definition, tier_of(definition, "small", str(file)), Path("corpus"), str(file))
    small = Users(4_000, 943_473, 8_000_000, 10_000)  # as `flsim plan` counts them
    theirs = published_rows(definition, planned, str(file))
    assert theirs is not None
    ours = amounts_of(rows_of(planned), small.split())
    shares = shares_of(ours, amounts_of(theirs, PUBLISHED["thakkar2020.csv"].split()))
    known = [share for share in shares if share is not None]
    assert len(known) == len(ours)
    assert max(known) < 1.1 * min(known)
