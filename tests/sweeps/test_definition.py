"""Tests of sweep files and of the runs that they define, among them the files in experiments/."""

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from flsim.base.errors import InputError
from flsim.privacy.ledger import Ledger, spent
from flsim.results.published import published_rows
from flsim.runs.config import CentralConfig, FederatedConfig
from flsim.runs.config import load as load_config
from flsim.runs.sweeps.definition import Planned, Tier, load, planned_runs, tier_of

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TABLES = ("table1", "table2", "table3", "table4")
TIERS = ("smoke", "small", "paper")
RECORDS = 1_479  # in the synthetic corpus of the smoke tier of the Secret Sharer's table 7
SECRET_SHARER = {"1": 7, "2": 35, "3": 3, "4": 20, "7": 9}  # by table: rows of flsim's architectures
TINY: dict[str, Any] = {"about": "x", "corpus": {"synthetic": {"users": 10}}, "seeds": [3, 4]}
TINY |= {"set": {"local": {"learning_rate": 0.5}}}
MINIMAL: dict[str, Any] = {
    "title": "t",
    "question": "q",
    "base": {"training": {"rounds": 7, "cohort": 3}, "local": {"batch_size": 2}},
    "grids": [
        {
            "name": "a",
            "set": {"training": {"cohort": 5}, "local": {"learning_rate": 0.25}},
            "axes": {"data.partition": ["iid", "non-iid"], "training.rounds": [1, 2, 3]},
        },
        {"name": "b", "axes": {"model": [{"units": 8, "embedding": 4}, {"units": 16, "embedding": 8}]}},
    ],
    "tiers": {
        "tiny": TINY
        | {"grids": {"a": {"set": {"local": {"batch_size": 9}}, "axes": {"training.rounds": [10, 20, 30]}}}}
    },
}


@cache
def experiment(name: str, tier: str) -> tuple[Tier, list[Planned]]:
    """Return a tier of a sweep in experiments/, and the tier's runs with seed 0."""
    path = EXPERIMENTS / f"{name}.toml"
    definition = load(path)
    return definition.tiers[tier], planned_runs(definition, definition.tiers[tier], "corpus", str(path), [0])


def planned(tmp_path: Path, definition: dict[str, Any], **options: Any) -> list[Planned]:
    path = tmp_path / "sweep.toml"
    path.write_text(tomli_w.dumps(definition))
    found = load(path)
    return planned_runs(found, tier_of(found, "tiny", str(path)), tmp_path / "corpus", str(path), **options)


def test_a_grid_is_the_product_of_its_axes_and_seeds(tmp_path: Path) -> None:
    runs = planned(tmp_path, MINIMAL)
    found = [(run.config.data.partition, run.config.training.rounds, run.seed) for run in runs if run.grid == "a"]  # type: ignore[attr-defined]
    assert found == list(product(["iid", "non-iid"], [10, 20, 30], [3, 4]))
    assert len({run.name for run in runs}) == len(runs) == 12 + 4
    assert all(run.config.seed == run.seed for run in runs)


def test_later_settings_replace_earlier_ones_in_the_documented_order(tmp_path: Path) -> None:
    """The order is base, grid, tier, the tier's grid, axes."""
    first = planned(tmp_path, MINIMAL)[0].config
    assert isinstance(first, FederatedConfig)
    assert first.training.cohort == 5  # grid over base
    assert first.local.learning_rate == 0.5  # tier over grid
    assert first.local.batch_size == 9  # the tier's grid over base
    assert first.training.rounds == 10  # axis over base


def test_a_table_on_an_axis_is_merged_into_its_section(tmp_path: Path) -> None:
    runs = [run for run in planned(tmp_path, MINIMAL, seeds=[0]) if run.grid == "b"]
    assert [(run.config.model.units, run.config.model.embedding) for run in runs] == [(8, 4), (16, 8)]
    assert runs[0].axes == {"model.units": 8, "model.embedding": 4}


def test_seeds_grids_and_settings_can_be_chosen(tmp_path: Path) -> None:
    runs = planned(tmp_path, MINIMAL, seeds=range(2), only=["b"], overrides=["evaluation.references=5"])
    assert {run.grid for run in runs} == {"b"}
    assert [run.seed for run in runs] == [0, 1, 0, 1]
    assert {run.config.evaluation.references for run in runs} == {5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"typo": 1}, "typo"),
        ({"grids": [{"name": "a", "axes": {"seed": [1, 2]}}]}, "grids.a: seed cannot be an axis; use seeds of a tier"),
        ({"grids": []}, "there must be at least one"),
        ({"grids": [{"name": "a", "axes": {}}, {"name": "a", "axes": {}}]}, "names of grids must differ"),
        ({"tiers": {"tiny": {"about": "x", "corpus": {}}}}, "either synthetic or a path"),
        ({"tiers": {"tiny": TINY | {"grids": {"a": {"axes": {"training.rounds": [1]}}}}}}, "has 1 values in a tier"),
    ],
)
def test_errors_in_a_sweep_file_are_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        planned(tmp_path, MINIMAL | change)
    assert "\n" not in str(error.value)


def test_settings_in_which_runs_differ_cannot_be_overridden(tmp_path: Path) -> None:
    for override, message in (
        ("seed=3", "use --seeds"),
        ("training.rounds=7", "grids.a varies it; choose other grids"),
        ("training={cohort=4}", "grids.a varies training.rounds; choose other grids"),
        ('data={partition="iid"}', "use --corpus for data.corpus"),
    ):
        with pytest.raises(InputError, match=message):
            planned(tmp_path, MINIMAL, overrides=[override])


def test_a_configuration_is_refused_as_a_sweep_and_a_sweep_as_a_configuration() -> None:
    with pytest.raises(InputError, match="not a sweep, because it has no grids"):
        load(EXPERIMENTS / "demo.toml")
    with pytest.raises(InputError, match="this file is a sweep, not the configuration of a run; train it with"):
        load_config(EXPERIMENTS / "table1.toml")


def test_a_published_row_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    published = {"file": "thakkar2020.csv", "table": "1", "source": "s", "columns": {"data.partition": "data"}}
    grid = {"name": "a", "axes": {"data.partition": ["iid"]}, "published": {"optimizer": "Adagrad"}}
    with pytest.raises(InputError, match="has no row with optimizer Adagrad, data iid"):
        planned(tmp_path, MINIMAL | {"published": published, "grids": [grid], "tiers": {"tiny": TINY}})


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("tier", TIERS)
def test_the_papers_tables_have_a_run_for_each_published_row(table: str, tier: str) -> None:
    _, runs = experiment(table, tier)
    rows = published_rows("thakkar2020.csv", table.removeprefix("table"))
    assert sorted((dict(run.published or {}) for run in runs), key=str) == sorted(rows, key=str)
    for run in runs:
        assert run.published is not None
        assert str(run.published["data"]).casefold() == run.config.data.partition
        kind = CentralConfig if run.published["batch_unit"] == "records" else FederatedConfig
        assert isinstance(run.config, kind)


@pytest.mark.parametrize("table", TABLES)
def test_the_paper_tier_has_the_papers_settings(table: str) -> None:
    for run in experiment(table, "paper")[1]:
        published, config = run.published or {}, run.config
        assert (config.evaluation.references, len(config.canaries.p_u), config.canaries.count) == (2_000_000, 3, 10)
        if isinstance(config, FederatedConfig):
            assert config.training.cohort == published["batch_size"]
            assert (config.privacy.noise_multiplier > 0) == ("epsilon_paper" in published)
        elif isinstance(config, CentralConfig):
            assert config.training.batch_size == published["batch_size"]
            assert published["budget"] in {f"{(config.training.steps or 0) / 1e6:g}M steps", "10 epochs"}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("tier", "users"), [("smoke", 400), ("small", 4_000)])
def test_tiers_scale_cohorts_and_canaries_with_the_population(table: str, tier: str, users: int) -> None:
    """Cohort sizes keep the paper's ratios, canaries expect at least one sharer, and replace at most 1/8 of records."""
    at, runs = experiment(table, tier)
    assert at.corpus.synthetic is not None
    assert at.corpus.synthetic.users == users
    for run in runs:
        canaries = run.config.canaries
        assert min(canaries.p_u) * users >= 1
        assert canaries.count * sum(canaries.p_u) * sum(canaries.p_e) <= 1 / 8
    cohorts = {
        run.published["batch_size"]: run.config.training.cohort
        for run in runs
        if run.published is not None and isinstance(run.config, FederatedConfig)
    }
    least = min(cohorts)
    for theirs, ours in cohorts.items():
        assert ours == pytest.approx(cohorts[least] * theirs / least, rel=0.02)


@pytest.mark.parametrize(("table", "rows"), SECRET_SHARER.items())
@pytest.mark.parametrize("tier", ["smoke", "paper"])
def test_the_secret_sharers_tables_have_a_run_for_each_published_row(table: str, rows: int, tier: str) -> None:
    _, runs = experiment(f"secret-sharer-table{table}", tier)
    published = [str(run.published) for run in runs if run.published is not None]
    assert len(published) == len(set(published)) == rows


def test_the_secret_sharers_noise_gives_the_published_epsilons() -> None:
    """Steps, epsilon and delta follow from the number of records of the smoke tier's corpus."""
    for run in experiment("secret-sharer-table7", "smoke")[1]:
        config, published = run.config, run.published or {}
        if config.privacy.mechanism == "dp" and published["epsilon"] < 10:
            assert isinstance(config, CentralConfig)
            steps = round(config.training.epochs * RECORDS / config.training.batch_size)
            ledger = Ledger((config.planned(RECORDS, steps),))
            [epsilon] = spent(ledger, "poisson", config.privacy.delta_for(RECORDS)).values()
            assert epsilon == pytest.approx(published["epsilon"], rel=0.01)


def test_all_missing_keys_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[grids]]\n[tiers.smoke]\nabout = "small"\n')
    with pytest.raises(InputError) as caught:
        load(path)
    missing = "title, grids.0.name, grids.0.axes, tiers.smoke.corpus"
    assert str(caught.value) == f"{path}: {missing} is missing"
