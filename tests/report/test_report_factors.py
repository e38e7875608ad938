"""Sentences on each factor of a sweep, on simulated rows whose effects are known, and on rows without any."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from simulated_report import CEILING, gathered_of, run_of, table_1

from flsim.base.rng import stream
from flsim.models.hparams import ModelHParams
from flsim.privacy.mechanism import PrivacyHParams
from flsim.report.effects import Effect, effects, sentences
from flsim.report.gather import Gathered, Line, RunView
from flsim.results.sweeps import Sweep, SweepRun
from flsim.runs.config import (
    CentralConfig,
    CentralTrainingHParams,
    Config,
    DataHParams,
    FederatedConfig,
    TrainingHParams,
)
from flsim.training.hparams import LocalHParams


def is_federated(config: Config) -> bool:
    return isinstance(config, FederatedConfig)


def drawn(config: Config, seed: int, scale: float = 0.3) -> float:
    """Return the part of a seed's level that is chance."""
    return scale * float(stream(seed, "factors", config.setting).standard_normal())


def by_name(measured: Sequence[Effect]) -> dict[tuple[str, str], Effect]:
    return {(effect.contrast.factor, effect.contrast.within): effect for effect in measured}


def test_effects_of_table_1_are_the_differences_that_were_made() -> None:
    """World is worth 2 bits within FedAvg and none within SGD; FedAvg 1 bit; a round of 16 users for 4, -0.5."""

    def level(config: Config, seed: int) -> float:
        world = 2.0 * (config.data.world == "iid")
        cohort = {4: 0.5, 8: 0.4, 16: 0.0}.get(config.round_size, 0.0) if is_federated(config) else 0.0
        return 4.0 + is_federated(config) * (1.0 + world) + cohort

    measured = by_name(effects(gathered_of(table_1(), level)))
    expected = {
        ("World", "SGD"): ("IID", "non-IID", 2, 0.0),
        ("World", "FedAvg"): ("IID", "non-IID", 3, 2.0),
        ("Technique", "IID data"): ("FedAvg", "SGD", 6, 3.0 + 0.3),
        ("Technique", "non-IID data"): ("FedAvg", "SGD", 6, 1.0 + 0.3),
        ("Batch size", "SGD"): ("b_r=32", "b_r=16", 2, 0.0),
        ("Cohort", "FedAvg"): ("b_u=16", "b_u=4", 2, -0.5),
    }
    assert {*measured} == {*expected}
    for name, (a, b, pairs, mean) in expected.items():
        contrast = measured[name].contrast
        assert (contrast.a, contrast.b, measured[name].compared) == (a, b, pairs), name
        assert measured[name].differences == pytest.approx([mean] * 3), name


def test_the_interval_is_students_over_the_seeds_means_over_pairs() -> None:
    gathered = gathered_of(table_1(), lambda config, seed: 5.0 + drawn(config, seed), seeds=4)
    effect = by_name(effects(gathered))["World", "FedAvg"]
    settings = {(config.world, config.round_size): config for config in table_1() if is_federated(config)}
    means = [
        np.mean([drawn(settings["iid", k], seed) - drawn(settings["non-iid", k], seed) for k in (4, 8, 16)])
        for seed in range(4)
    ]
    interval = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    assert effect.differences == pytest.approx(means)
    assert (effect.low, effect.high) == pytest.approx((interval.low, interval.high))
    (text,) = sentences([effect])
    mean, low, high = (f"{value:+.2f}".replace("-", "−") for value in (np.mean(means), *interval))
    told = (
        f"is {mean} bits (95% interval {low} to {high} over 4 seeds; 3 pairs of settings), at perplexity 60 against 60"
        f"; where both first predict equally well {mean} ({low} to {high})."
    )
    assert text == f"<b>World, with FedAvg:</b> IID less non-IID {told}"


def test_a_difference_of_utility_is_told_from_one_at_equal_perplexity() -> None:
    """IID data ends 4 bits above at perplexity 30, but has 1 bit more where it passes 60, in the middle of its way.

    There it is halfway between its evaluations at 120 and 30, along the logarithm: 5 bits, between 2 and 8.
    """

    def trained(config: Config) -> RunView:
        end = (8.0, 30.0) if config.world == "iid" else (4.0, 60.0)
        earlier, last = run_of(config, 2.0, perplexity=120.0), run_of(config, end[0], perplexity=end[1])
        rows = pd.concat([earlier.results.rows.assign(round=5), last.results.rows], ignore_index=True)
        return replace(last, results=replace(last.results, rows=rows))

    gathered = gathered_of(table_1(), lambda *_: 0.0)
    for line in gathered.lines:
        for setting in line.settings:
            setting.runs[:] = [trained(run.config) for run in setting.runs if run.config]
    effect = by_name(effects(gathered))["World", "FedAvg"]
    assert effect.differences == pytest.approx([4.0] * 3)
    assert effect.alike == pytest.approx([1.0] * 3)


def test_without_any_effect_most_intervals_hold_zero() -> None:
    """Fewer than five of eight sweeps' 95% intervals hold zero once in 2,000."""
    configs = [config for config in table_1() if is_federated(config) and config.round_size == 4]
    held = 0
    for sweep in range(8):
        gathered = gathered_of(configs, lambda config, seed: 5 + drawn(config, 100 * sweep + seed))  # noqa: B023
        (effect,) = effects(gathered)
        held += effect.low < 0 < effect.high
    assert held >= stats.binom.ppf(5e-4, 8, 0.95)


def test_one_seed_has_no_interval() -> None:
    (text,) = sentences([by_name(effects(gathered_of(table_1(), lambda *_: 5.0, seeds=1)))["World", "SGD"]])
    assert "is +0.00 bits (one seed, so no interval over seeds; 2 pairs of settings)" in text
    assert "95%" not in text


@pytest.mark.parametrize("momentums_rate", [0.1, 1.0])
def test_optimizers_may_have_rates_of_their_own_and_techniques_are_compared_at_like_ones(momentums_rate: float) -> None:
    """Table 3: SGD, Momentum and Adam over records, FedAvg and FedAvg with Adam. SGD and Momentum may share a rate."""
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
    measured = effects(gathered_of([*central, *federated], lambda config, _: levels[config.label.partition(",")[0]]))
    told = {(effect.contrast.within, effect.contrast.a, effect.contrast.b): effect.mean for effect in measured}
    assert told == {
        ("", "FedAvg", "central training"): pytest.approx(((4.0 - 5.0) + (4.5 - 7.5)) / 2),
        ("central training", "Momentum", "SGD"): pytest.approx(1.0),
        ("central training", "Adam", "SGD"): pytest.approx(2.5),
        ("FedAvg", "FedAvg+Adam", "FedAvg"): pytest.approx(0.5),
    }
    factors = {(effect.contrast.a, effect.contrast.factor) for effect in measured}
    own = "Optimizer (each with its learning rate)"
    assert factors == {
        ("FedAvg", "Technique"),
        ("Momentum", "Optimizer" if momentums_rate == 1.0 else own),
        ("Adam", own),
        ("FedAvg+Adam", own),
    }


def test_sizes_that_follow_from_an_architecture_are_no_factor_of_their_own() -> None:
    """Table 1 of The Secret Sharer: two architectures of one and two layers each, with units that keep the size."""
    sizes = {("gru", 1): 370, ("gru", 2): 235, ("lstm", 1): 320, ("lstm", 2): 200}
    configs = [
        CentralConfig(DataHParams(Path("corpus")), model=ModelHParams(architecture=name, layers=layers, units=units))
        for (name, layers), units in sizes.items()
    ]
    measured = effects(gathered_of(configs, lambda config, _: 5.0 + (config.model.architecture == "lstm")))
    told = [(effect.contrast.factor, effect.contrast.a, effect.compared, effect.mean) for effect in measured]
    assert told == [
        ("model.architecture (each with its model.units)", "model.architecture lstm", 2, 1.0),
        ("model.layers (each with its model.units)", "model.layers 2", 2, 0.0),
    ]


def test_a_rate_that_is_an_axis_is_a_factor() -> None:
    configs = [
        CentralConfig(DataHParams(Path("corpus")), training=CentralTrainingHParams(optimizer=name, learning_rate=rate))
        for name, rate in product(("sgd", "momentum"), (0.1, 0.2, 0.4))
    ]
    measured = effects(gathered_of(configs, lambda config, _: 5.0 + config.training.learning_rate))  # type: ignore[attr-defined]
    told = [(effect.contrast.factor, effect.contrast.a, effect.contrast.b, effect.compared) for effect in measured]
    assert told == [
        ("Optimizer", "Momentum", "SGD", 3),
        ("Learning rate", "training.learning_rate 0.4", "training.learning_rate 0.1", 2),
    ]
    assert measured[1].mean == pytest.approx(0.3)


def test_clip_and_noise_are_two_factors_and_lengths_of_8000_and_7840_rounds_are_alike() -> None:
    """Table 2 of the paper: clipping against none, noise beside the same clip, after 100 and 10 epochs."""
    data = DataHParams(Path("corpus"))
    mechanisms = {"none": PrivacyHParams(), "clip": PrivacyHParams("clip", 0.2), "dp": PrivacyHParams("dp", 0.2, 1.0)}
    rows = (("none", 8_000), ("clip", 8_000), ("dp", 7_840), ("clip", 784), ("dp", 784))
    configs = [
        FederatedConfig(data, training=TrainingHParams(rounds=rounds, cohort=5_000), privacy=mechanisms[name])
        for name, rounds in rows
    ]

    def level(config: Config, _seed: int) -> float:
        assert isinstance(config, FederatedConfig)
        mechanism = {"none": 6.0, "clip": 5.0, "dp": 2.0}[config.privacy.mechanism]
        return mechanism + (config.training.rounds > 1_000)

    measured = effects(gathered_of(configs, level))
    names = [(effect.contrast.factor, effect.contrast.a, effect.contrast.b, effect.compared) for effect in measured]
    assert names == [
        ("Clip", "clip 0.2", "no clip", 1),
        ("Noise multiplier", "z=1", "no noise", 2),
        ("Length of training", "8,000 rounds", "784 rounds", 2),
    ]
    assert [effect.mean for effect in measured] == pytest.approx([-1.0, -3.0, 1.0])


def test_settings_that_a_search_chose_are_no_factor() -> None:
    """Both worlds have rates of their own: chosen by a search, or as part of what differs."""
    configs = [
        FederatedConfig(
            DataHParams(Path("corpus"), world),  # type: ignore[arg-type]
            training=TrainingHParams(rounds=50),
            local=LocalHParams(learning_rate=rate),
        )
        for world, rate in (("iid", 0.4), ("non-iid", 3.2))
    ]
    by_hand = gathered_of(configs, lambda *_: 5.0)
    assert [effect.contrast.factor for effect in effects(by_hand)] == ["World (each with its learning rate)"]
    for chosen in (["local.learning_rate"], []):  # an older sweep does not say which
        sweep = Sweep(Path(), "", "", "", "", "", None, "", {}, [], [], tuned="By a search.", chosen=chosen)
        lines = [
            Line(
                line.label,
                [
                    replace(setting, runs=[planned(run) for run in setting.runs])
                    for setting in line.settings
                ],
            )
            for line in by_hand.lines
        ]  # fmt: skip
        assert [effect.contrast.factor for effect in effects(Gathered([sweep], lines, []))] == ["World"]


def planned(run: RunView) -> RunView:
    """Return a run as one of the sweep in the working directory."""
    entry = SweepRun(run.results.name, "fedavg", run.results.seed or 0, {}, None, run.results)
    return replace(run, path=Path("runs") / run.results.name, planned=entry)


def test_a_seed_that_diverged_is_dropped_from_all_pairs_and_running_ones_do_not_count() -> None:
    def level(config: Config, seed: int) -> float:
        return 5.0 + (config.data.world == "iid") * (1 + seed)

    gathered = gathered_of([config for config in table_1() if is_federated(config)], level)
    diverged, running = gathered.settings[0], gathered.settings[2]
    for setting, seed, status in ((diverged, 1, "diverged"), (running, 2, "running")):
        run = setting.runs[seed]
        setting.runs[seed] = replace(run, results=replace(run.results, status=status))
    effect = by_name(effects(gathered))["World", ""]
    assert effect.compared == 3
    assert effect.differences == pytest.approx([1.0])
    (text,) = sentences([effect])
    assert "; 3 pairs of settings; seed 1 diverged, so dropped from all pairs), at" in text


def test_a_sentence_says_why_nothing_is_compared_at_equal_perplexity() -> None:
    """The IID model predicts better at its first evaluation than the other at its last."""
    configs = [config for config in table_1() if config.label == "FedAvg, b_u=4"]
    gathered = gathered_of(configs, lambda *_: 5.0)
    for setting in gathered.settings:
        perplexity = 40.0 if setting.world == "iid" else 60.0
        setting.runs[:] = [run_of(run.config, 5.0, perplexity=perplexity) for run in setting.runs if run.config]
    (text,) = sentences([by_name(effects(gathered))["World", ""]])
    assert "not compared where both first predict equally well (run" in text
    assert "its first evaluation is below perplexity 60 already" in text


def test_a_seed_that_begins_below_is_left_out_of_the_comparison_at_equal_perplexity() -> None:
    """Seed 3 of one setting of two predicts better at its first evaluation than the other world at its last."""
    configs = [config for config in table_1() if is_federated(config) and config.round_size < 16]
    gathered = gathered_of(configs, lambda config, seed: 4.0 + (config.data.world == "iid") * seed, seeds=5)
    runs = gathered.settings[0].runs
    assert runs[3].config
    runs[3] = run_of(runs[3].config, 7.0, perplexity=40.0)
    effect = by_name(effects(gathered))["World", ""]
    assert effect.differences == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0])
    assert effect.alike == pytest.approx([0.0, 1.0, 2.0, 4.0])
    (text,) = sentences([effect])
    why = "run FedAvg, b_u=4-3: its first evaluation is below perplexity 60 already, at 40"
    assert f"equally well +1.75 (−0.97 to +4.47) over 4 seeds (seed 3 left out: {why}" in text


def test_a_pair_that_leaves_no_seed_is_left_out_and_the_sentence_says_so() -> None:
    """All but seed 0 of one setting diverged, and seed 0 of another: seeds 1 and 2 of two pairs of three are left."""
    gathered = gathered_of(
        [config for config in table_1() if is_federated(config)],
        lambda config, seed: 5.0 + (config.data.world == "iid") * (1 + seed),
    )
    for setting, seeds in ((gathered.settings[0], (1, 2)), (gathered.settings[2], (0,))):
        for seed in seeds:
            run = setting.runs[seed]
            setting.runs[seed] = replace(run, results=replace(run.results, status="diverged"))
    effect = by_name(effects(gathered))["World", ""]
    assert effect.compared == 2
    assert effect.differences == pytest.approx([2.0, 3.0])
    (text,) = sentences([effect])
    assert "2 pairs of settings of 3, as others have too few seeds that are completed on both sides" in text


def test_canaries_at_the_ceiling_are_counted_on_each_side() -> None:
    """At a level of the ceiling, less 0.5 or 3 bits, 2 and none of the 8 canaries are ranked first."""
    configs = [config for config in table_1() if is_federated(config)]
    gathered = gathered_of(configs, lambda config, _: CEILING - (0.5 if config.data.world == "iid" else 3.0))
    (text,) = sentences([by_name(effects(gathered))["World", ""]])
    assert "25% and 0% of the canaries are at the ceiling." in text
