"""Contrasts of a sweep's settings, on simulated rows whose effects are known, and on rows without any effect."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from simulated_report import CEILING, gathered_of, run_of, table_1

from flsim.base.rng import stream
from flsim.base.statistics import holm
from flsim.models.architectures import ModelHParams
from flsim.privacy.ledger import PrivacyHParams
from flsim.report.gather import Gathered, RunView, SettingLine, contrasts
from flsim.results.sweeps import Sweep, SweepRun
from flsim.runs.config import (
    CentralConfig,
    CentralTrainingHParams,
    Config,
    DataHParams,
    FederatedConfig,
    TrainingHParams,
)
from flsim.training.update import LocalHParams

FEDERATED = [config for config in table_1() if isinstance(config, FederatedConfig)]
ONE_PAIR = [config for config in FEDERATED if config.round_size == 4]
TWO_PAIRS = [config for config in FEDERATED if config.round_size < 16]


def noise(config: Config, seed: int, scale: float = 0.3) -> float:
    """Return the random part of a seed's level."""
    return scale * float(stream(seed, "factors", config.setting).standard_normal())


frame_of = cache(contrasts)


def rows_of(gathered: Gathered, quantity: str = "exposure", at: str = "end") -> list[dict[str, Any]]:
    """Return the main contrasts of a quantity."""
    frame = frame_of(gathered)
    chosen = frame[frame["is_main"].astype(bool) & (frame["quantity"] == quantity) & (frame["at"] == at)]
    chosen = chosen[chosen["test"].fillna("") != "signed ranks"]
    return [{str(name): value for name, value in row.items()} for row in chosen.to_dict("records")]


def partition(gathered: Gathered, quantity: str = "exposure", at: str = "end") -> dict[str, Any]:
    """Return the row of IID minus non-IID within FedAvg, or of all runs."""
    rows = rows_of(gathered, quantity, at)
    (row,) = [row for row in rows if row["factor"] == "Partition" and row["setting"] != "SGD"]
    return row


def test_contrasts_of_table_1_are_the_simulated_differences() -> None:
    """IID adds 2 bits within FedAvg and 0 within SGD, FedAvg adds 1 bit, and 16 instead of 4 users add -0.5."""

    def level(config: Config, seed: int) -> float:
        if not isinstance(config, FederatedConfig):
            return 4.0
        return 5.0 + 2.0 * (config.data.partition == "iid") + {4: 0.5, 8: 0.4, 16: 0.0}[config.round_size]

    frame = contrasts(gathered_of(table_1(), level, seeds=2))
    frame = frame[(frame["quantity"] == "exposure") & (frame["at"] == "end")]
    measured = {
        (row["factor"], row["setting"]): (row["a"], row["b"], row["pairs"], row["n"], row["difference"])
        for row in frame[frame["scope"] == "factor"].to_dict("records")
    }
    assert measured == {
        ("Partition", "SGD"): ("IID", "non-IID", 2, 2, 0.0),
        ("Partition", "FedAvg"): ("IID", "non-IID", 3, 2, 2.0),
        ("Technique", "IID data"): ("FedAvg", "SGD", 6, 2, pytest.approx(3.3)),
        ("Technique", "non-IID data"): ("FedAvg", "SGD", 6, 2, pytest.approx(1.3)),
        ("Batch size", "SGD"): ("b_r=32", "b_r=16", 2, 2, 0.0),
        ("Cohort size, 1 more between", "FedAvg"): ("b_u=16", "b_u=4", 2, 2, -0.5),
    }
    of_pairs = frame[frame["scope"] == "pair"]
    assert dict(zip(of_pairs["setting"], of_pairs["difference"], strict=True)) == {
        **{f"SGD, b_r={size}": 0.0 for size in (16, 32)},
        **{f"FedAvg, b_u={size}": 2.0 for size in (4, 8, 16)},
    }


def test_intervals_and_p_are_those_of_student_over_seeds_and_p_is_corrected() -> None:
    gathered = gathered_of(TWO_PAIRS, lambda config, seed: 5.0 + noise(config, seed))
    row = partition(gathered)
    settings = {(config.partition, config.round_size): config for config in TWO_PAIRS}
    means = [
        np.mean([noise(settings["iid", k], seed) - noise(settings["non-iid", k], seed) for k in (4, 8)])
        for seed in range(3)
    ]
    tested = stats.ttest_1samp(means, 0)
    interval = tested.confidence_interval(0.95)
    expected = [np.mean(means), interval.low, interval.high, tested.pvalue]
    assert [row[name] for name in ("difference", "low", "high", "p")] == pytest.approx(expected)
    assert row["difference"] == pytest.approx(row["value_a"] - row["value_b"])
    assert partition(gathered, at="equal perplexity")["difference"] == pytest.approx(np.mean(means))
    assert partition(gathered, "perplexity")["value_a"] == 60
    every = rows_of(gathered)
    assert [row["p_holm"] for row in every] == pytest.approx(holm([row["p"] for row in every]))


def test_a_difference_of_utility_is_separate_from_one_at_equal_perplexity() -> None:
    """IID data ends 4 bits higher, at perplexity 30, but has only 1 bit more at perplexity 60.

    Perplexity 60 is halfway between its evaluations at 120 and 30 in logarithms, so it has 5 bits, between 2 and 8."""

    def trained(config: Config) -> RunView:
        end = (8.0, 30.0) if config.partition == "iid" else (4.0, 60.0)
        earlier, last = run_of(config, 2.0, perplexity=120.0), run_of(config, end[0], perplexity=end[1])
        rows = pd.concat([earlier.results.rows.assign(round=5), last.results.rows], ignore_index=True)
        return replace(last, results=replace(last.results, rows=rows))

    gathered = gathered_of(ONE_PAIR, lambda *_: 0.0)
    for setting in gathered.settings:
        setting.runs[:] = [trained(run.config) for run in setting.runs if run.config]
    assert partition(gathered)["difference"] == pytest.approx(4.0)
    assert partition(gathered, at="equal perplexity")["difference"] == pytest.approx(1.0)


def test_one_seed_has_no_interval_over_seeds() -> None:
    gathered = gathered_of(TWO_PAIRS, lambda *_: 5.0, seeds=1)
    assert (partition(gathered)["n"], partition(gathered)["difference"]) == (1, 0.0)
    assert all(pd.isna(partition(gathered)[name]) for name in ("low", "high", "p", "p_holm"))
    one_pair = partition(gathered_of(ONE_PAIR, lambda config, _: 4.0 + (config.data.partition == "iid"), seeds=1))
    assert (one_pair["n"], one_pair["over"], one_pair["low"]) == (8, "canaries", 1.0)


@pytest.mark.parametrize("momentums_rate", [0.1, 1.0])
def test_techniques_are_compared_at_equal_optimizers_whose_learning_rates_may_differ(momentums_rate: float) -> None:
    """Table 3 has SGD, Momentum and Adam, FedAvg and FedAvg with Adam. SGD and Momentum may share a learning rate."""
    data = DataHParams(Path("corpus"))
    central = [
        CentralConfig(data, training=CentralTrainingHParams(optimizer=name, learning_rate=rate))
        for name, rate in (("sgd", 1.0), ("momentum", momentums_rate), ("adam", 0.002))
    ]
    federated = [
        FederatedConfig(data, training=TrainingHParams(rounds=50)),
        FederatedConfig(
            data, training=TrainingHParams(rounds=50, server_optimizer="adam", server_learning_rate=0.1),
            local=LocalHParams(learning_rate=0.5),
        ),
    ]  # fmt: skip
    levels = {"SGD": 5.0, "Momentum": 6.0, "Adam": 7.5, "FedAvg": 4.0, "FedAvg+Adam": 4.5}
    measured = rows_of(gathered_of([*central, *federated], lambda config, _: levels[config.label.partition(",")[0]], 2))
    assert {(row["setting"], row["a"], row["b"]): row["difference"] for row in measured} == {
        ("", "FedAvg", "central training"): pytest.approx(((4.0 - 5.0) + (4.5 - 7.5)) / 2),
        ("central training", "Momentum", "SGD"): pytest.approx(1.0),
        ("central training", "Adam", "SGD"): pytest.approx(2.5),
        ("FedAvg", "FedAvg+Adam", "FedAvg"): pytest.approx(0.5),
    }
    with_rate = "Optimizer (each with its learning rate)"
    assert {(row["a"], row["factor"]) for row in measured} == {
        ("FedAvg", "Technique"),
        ("Momentum", "Optimizer" if momentums_rate == 1.0 else with_rate),
        ("Adam", with_rate),
        ("FedAvg+Adam", with_rate),
    }


def test_a_learning_rate_that_is_an_axis_is_a_factor() -> None:
    configs = [
        CentralConfig(DataHParams(Path("corpus")), training=CentralTrainingHParams(optimizer=name, learning_rate=rate))
        for name, rate in product(("sgd", "momentum"), (0.1, 0.2, 0.4))
    ]
    measured = rows_of(gathered_of(configs, lambda config, _: 5.0 + config.training.learning_rate, 2))  # type: ignore[attr-defined]
    assert [(row["factor"], row["a"], row["b"], row["pairs"]) for row in measured] == [
        ("Optimizer", "Momentum", "SGD", 3),
        ("Learning rate, 1 more between", "0.4", "0.1", 2),
    ]
    assert measured[1]["difference"] == pytest.approx(0.3)


def test_clip_and_noise_are_two_factors_and_8000_and_7840_rounds_are_one_length() -> None:
    """Table 2 of the paper has clips against none, and noise with the same clip, after 100 and 10 epochs."""
    data = DataHParams(Path("corpus"))
    mechanisms = {"none": PrivacyHParams(), "clip": PrivacyHParams("clip", 0.2), "dp": PrivacyHParams("dp", 0.2, 1.0)}
    rows = (("none", 8_000), ("clip", 8_000), ("dp", 7_840), ("clip", 784), ("dp", 784))
    trained = [(mechanisms[name], TrainingHParams(rounds=rounds, cohort=5_000)) for name, rounds in rows]
    configs = [FederatedConfig(data, training=training, privacy=privacy) for privacy, training in trained]

    def level(config: Config, _seed: int) -> float:
        assert isinstance(config, FederatedConfig)
        mechanism = {"none": 6.0, "clip": 5.0, "dp": 2.0}[config.privacy.mechanism]
        return mechanism + (config.training.rounds > 1_000)

    measured = rows_of(gathered_of(configs, level, seeds=2))
    assert [(row["factor"], row["a"], row["b"], row["pairs"]) for row in measured] == [
        ("Clip", "clip 0.2", "no clip", 1),
        ("Noise multiplier", "z=1", "no noise", 2),
        ("Length of training", "8,000 rounds", "784 rounds", 2),
    ]
    assert [row["difference"] for row in measured] == pytest.approx([-1.0, -3.0, 1.0])


def test_settings_that_a_search_chose_are_no_factor() -> None:
    """Partitions have different learning rates, which are chosen by a search, or are part of the factor."""
    configs = [
        FederatedConfig(
            DataHParams(Path("corpus"), partition),  # type: ignore[arg-type]
            training=TrainingHParams(rounds=50),
            local=LocalHParams(learning_rate=rate),
        )
        for partition, rate in (("iid", 0.4), ("non-iid", 3.2))
    ]
    others = [replace(config, model=ModelHParams(units=9)) for config in configs]
    by_hand = gathered_of([*configs, *others], lambda *_: 5.0, seeds=2)
    assert rows_of(by_hand)[0]["factor"] == "Partition (each with its learning rate)"
    for chosen in (["local.learning_rate"], []):  # a sweep file may lack their names
        sweep = Sweep(Path(), "", "", "", "", "", None, "", {}, [], [], tuned="By a search.", chosen=chosen)
        lines = [
            SettingLine(line.label, [replace(each, runs=[planned(run) for run in each.runs]) for each in line.settings])
            for line in by_hand.lines
        ]
        assert rows_of(Gathered([sweep], lines, []))[0]["factor"] == "Partition"


def planned(run: RunView) -> RunView:
    """Return a run as a run of the sweep in the working directory."""
    entry = SweepRun(run.results.name, "fedavg", run.results.seed or 0, {}, None, run.results)
    return replace(run, path=Path("runs") / run.results.name, planned=entry)


def with_status(gathered: Gathered, setting: int, seed: int, status: str) -> None:
    runs = gathered.settings[setting].runs
    runs[seed] = replace(runs[seed], results=replace(runs[seed].results, status=status))


def test_a_seed_that_diverged_is_excluded_from_all_pairs_and_running_ones_do_not_count() -> None:
    gathered = gathered_of(TWO_PAIRS, lambda config, seed: 5.0 + (config.data.partition == "iid") * (1 + seed))
    with_status(gathered, 0, 1, "diverged")
    with_status(gathered, 2, 2, "running")
    row = partition(gathered)
    assert (row["pairs"], row["n"], row["difference"]) == (2, 1, 1.0)
    (left_out,) = {row["left_out"] for row in rows_of(gathered, "left out") if row["factor"] == "Partition"}
    assert left_out == "seeds 1: a run diverged"


def test_a_pair_without_a_common_seed_is_excluded() -> None:
    """All but seed 0 of one setting diverged, and seed 0 of another: seeds 1 and 2 of two of three pairs remain."""
    gathered = gathered_of(FEDERATED, lambda config, seed: 5.0 + (config.data.partition == "iid") * (1 + seed))
    for setting, seed in ((0, 1), (0, 2), (2, 0)):
        with_status(gathered, setting, seed, "diverged")
    row = partition(gathered)
    assert (row["pairs"], row["of_pairs"], row["n"], row["difference"]) == (2, 3, 2, 2.5)


def test_a_seed_without_an_equal_perplexity_is_excluded_with_its_reason() -> None:
    """In one of two pairs, perplexity of seed 3 is lower at the first IID evaluation than at the last non-IID one."""
    gathered = gathered_of(TWO_PAIRS, lambda config, seed: 4.0 + (config.data.partition == "iid") * seed, seeds=4)
    runs = gathered.settings[0].runs
    assert runs[3].config
    runs[3] = run_of(runs[3].config, 7.0, perplexity=40.0)
    assert (partition(gathered)["n"], partition(gathered)["difference"]) == (4, 1.5)
    row = partition(gathered, at="equal perplexity")
    assert (row["n"], row["difference"]) == (3, 1.0)
    assert "its first evaluation is already below perplexity 60, at 40" in row["left_out"]


def test_canaries_at_the_ceiling_are_counted_on_each_side() -> None:
    """2 of 8 canaries have rank 1 at a level of the ceiling minus 0.5 bits, and none at the ceiling minus 3 bits."""
    gathered = gathered_of(ONE_PAIR, lambda config, _: CEILING - (0.5 if config.data.partition == "iid" else 3.0), 2)
    for quantity in ("at_ceiling", "rs"):
        row = partition(gathered, quantity)
        assert (row["value_a"], row["value_b"], row["difference"]) == (2, 0, 2)
