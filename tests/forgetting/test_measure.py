"""Measures of simulated observations: against their truth, against a recomputation, and in text, JSON and figures."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from flsim.attacks.forgetting.measure import TYPES, Forgetting, measure
from flsim.attacks.forgetting.success import canary_times, p_after_window
from flsim.attacks.forgetting.tables import draw, plot, to_text
from flsim.base.errors import InputError
from flsim.base.statistics import log_rank_p, t_interval
from flsim.report.tables import forgetting_figures

REFERENCES = 20_000
START = 6.0  # standard deviations between the arms' scores at k = 0
DECAY = {1: 5.0, 4: 15.0, 10: 40.0}  # by copies: rounds after which 1/e remains


def simulated(
    canaries: int = 48,
    seeds: int = 3,
    decay: Mapping[int, float] = DECAY,
    window: tuple[int | None, int | None] = (None, 50),
    rounds: int = 150,
    every: int = 10,
    has_twin: bool = True,
    seed: int = 0,
) -> pd.DataFrame:
    """Return observations of canaries that were last used in rounds 30 to 50, whose arms approach each other."""
    rng = np.random.default_rng(seed)
    rows = []
    for run in range(seeds):
        for copies, rate in decay.items():
            for index in range(canaries):
                last, clean = int(rng.integers(30, 51)), float(rng.normal(40, 3))
                for at in range(every, rounds + 1, every):
                    since = at - last if at >= last else math.nan
                    distance = START * math.exp(-max(at - last, 0) / rate)
                    members, others = clean + rng.normal(0, 1) - distance, clean + rng.normal(0, 1)
                    p = max(1 / (REFERENCES + 1), math.exp(-rng.exponential() - distance))
                    row = {"run": f"run-{run}", "seed": run, "series": "s", "setting": "Non-IID, FedAvg, b_u=20"}
                    row |= {"canary": f"c{copies}-{index:02d}", "copies": copies}
                    row |= {"first_round": window[0], "last_round": window[1], "round": at, "since": since}
                    row |= {"last_use": last, "uses": 3, "nats_in": members}
                    row |= {"p_in": p, "bits_in": -math.log2(p)}
                    if has_twin:
                        q = rng.uniform(1 / (REFERENCES + 1), 1)
                        row |= {"clean": clean, "clean_round": window[1], "nats_out": others, "p_out": q}
                        row |= {"bits_out": -math.log2(q)}
                        row |= {"score_in": clean - members, "score_out": clean - others}
                    rows.append(row)
    return pd.DataFrame(rows).reindex(columns=list(TYPES)).astype(TYPES)


@pytest.fixture(scope="module")
def measured() -> Forgetting:
    return measure(simulated())


def test_copies_that_decay_slower_are_forgotten_later(measured: Forgetting) -> None:
    """The accuracy Phi(d/2) reaches 0.6 after 12, 37 and 99 rounds, and 144 trials show 0.6 below 0.53."""
    true = {copies: rate * math.log(START / (2 * norm.ppf(0.6))) for copies, rate in DECAY.items()}
    times = measured.times.set_index("copies")
    assert times["least_alpha"].tolist() == pytest.approx([0.5715] * 3, abs=1e-4)
    for copies, about in times.iterrows():
        assert pd.isna(about["time"]) == about["is_censored"]
        assert about["is_censored"] or about["time"] >= true[int(str(copies))]
    assert times["is_censored"].tolist() == [False, False, True]
    assert times["median_time"].is_monotonic_increasing
    assert times["canaries"].tolist() == [144] * 3


def test_rows_are_those_of_a_recomputation(measured: Forgetting) -> None:
    """At k = 20 of ten copies, with each canary's last evaluation 11 to 20 rounds after its last use."""
    observed = measured.observations
    of_ten = observed[(observed["copies"] == 10) & (observed["since"] > 10) & (observed["since"] <= 20)]
    of_ten = of_ten.sort_values("since").groupby(["run", "canary"], sort=True).tail(1)
    success = measured.success
    (row,) = success[(success["copies"] == 10) & (success["k"] == 20)].to_dict("records")
    assert (row["canaries"], row["seeds"]) == (len(of_ten), 3)
    assert row["bits_in"] == of_ten["bits_in"].median()
    over_seeds = of_ten.groupby("run")["bits_in"].median().to_numpy("float64")
    assert (row["bits_in_seeds_low"], row["bits_in_seeds_high"]) == pytest.approx(t_interval(over_seeds))
    others, members = of_ten["score_out"].sort_values(), of_ten["score_in"]
    threshold = others.iloc[-int(0.1 * len(others))]
    assert row["tpr"] == (members >= threshold).mean()
    assert row["fpr"] == int(0.1 * len(others)) / len(others)
    assert row["precision"] == row["tpr"] / (row["tpr"] + row["fpr"])
    assert row["heuristic_epsilon"] == pytest.approx(math.log(row["tpr"] / row["fpr"]))


def test_log_rank_tests_are_of_groups_that_differ_in_one_thing() -> None:
    """Two windows by two numbers of copies: four pairs, of which none crosses."""
    rates = {1: 5.0, 10: 40.0}
    late = simulated(decay=rates, window=(20, 50), canaries=24)
    tests = measure(pd.concat([simulated(decay=rates, canaries=24), late])).tests
    assert tests["differs"].value_counts().to_dict() == {"copies": 2, "window": 2}
    assert (tests.loc[tests["differs"] == "copies", "p_holm"] < 0.05).all()
    assert (tests["p_holm"] >= tests["p"]).all()


def test_groups_are_compared_at_equal_distances_from_their_windows() -> None:
    """Evaluations every 10 and every 20 rounds from the end of two windows are compared at multiples of 20."""
    rates, often = {1: 0.001}, simulated(decay={1: 0.001}, seeds=1)
    seldom = simulated(decay=rates, seeds=1, window=(None, 60), seed=1).query("round % 20 == 0")
    (test,) = measure(pd.concat([often, seldom])).tests.to_dict("records")
    assert (test["differs"], test["n_a"], test["n_b"]) == ("window", 48, 48)
    p = [p_after_window(table)[[0, 20, 40, 60, 80]] for table in (often, seldom)]
    assert test["p"] == log_rank_p(*map(canary_times, p))
    apart = measure(pd.concat([often, simulated(decay=rates, seeds=1, window=(None, 53))]))
    assert apart.tests[["p", "p_holm"]].isna().all().all()
    assert "1 pairs have no ranks at equal numbers of rounds" in " ".join(to_text(apart).split())


def test_windows_until_the_end_have_no_times_by_rank() -> None:
    times = measure(simulated(seeds=1, window=(20, None))).times
    assert times[["median_time", "median_is_censored"]].isna().all().all()
    assert (times["forgotten"] == 0).all()


def test_hardness_is_a_third_of_canaries_by_arm_out() -> None:
    """Whatever arm IN remembers: all rows of a canary are in one third, and thirds are as large as they can be."""
    measured = measure(simulated(canaries=10, seeds=2), by_hardness=True)
    observed = measured.observations
    of_canaries = observed.groupby(["seed", "canary"])[["clean", "hardness"]].agg(["first", "nunique"])
    assert (of_canaries["hardness"]["nunique"] == 1).all()
    for _, of_seed in of_canaries.groupby("seed"):
        ordered = of_seed.sort_values(("clean", "first"))["hardness"]["first"].tolist()
        assert ordered == ["easy"] * 10 + ["medium"] * 10 + ["hard"] * 10
    assert measured.times["hardness"].tolist()[::3] == ["easy", "medium", "hard"]


def test_without_arm_out_there_is_exposure_alone() -> None:
    measured = measure(simulated(has_twin=False), notes=["There is no arm OUT."])
    assert measured.success["success"].isna().all()
    assert measured.times[["time", "is_censored", "least_alpha"]].isna().all().all()
    assert measured.times["median_time"].notna().all()
    assert measure(simulated(has_twin=False, seeds=1), by_hardness=True).times["hardness"].isna().all()
    assert "There is no arm OUT." in to_text(measured)


def test_canaries_that_were_never_used_are_counted_and_in_no_row(measured: Forgetting) -> None:
    observed = simulated()
    unused = observed["canary"] == "c4-07"
    observed.loc[unused, ["since", "last_use"]] = math.nan
    without = measure(observed)
    assert without.times["never_used"].tolist() == [0, 3, 0]
    assert (without.success.groupby("group")["canaries"].max() == [144, 141, 144]).all()
    assert "No sharer took part for 3 of 432 canaries" in " ".join(to_text(without).split())
    assert "No sharer took part" not in to_text(measured)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(InputError, match="no canary was planted"):
        measure(simulated(seeds=0))
    observed = simulated(seeds=1, canaries=4)
    observed["since"] = math.nan
    unused = measure(observed)
    assert unused.success.empty
    assert "No canary was used." in to_text(unused)
    with pytest.raises(InputError, match="the plot is empty"):
        plot(unused, Path("never.png"))


def test_the_figure_has_the_medians_of_both_arms(measured: Forgetting) -> None:
    """A line for each group, the mean over seeds of their medians, and one of arm OUT."""
    axes, below = draw(measured).axes
    of_one, observed = below.get_lines()[0], measured.observations.query("copies == 1 and round == 150")
    differences = (observed["nats_out"] - observed["nats_in"]).groupby(observed["seed"]).mean()
    assert np.asarray(of_one.get_ydata())[-1] == pytest.approx(differences.mean())
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(lines) == ["arm OUT", "1 copy", "4 copies", "10 copies"]
    of_four = measured.success[measured.success["copies"] == 4]
    middles = (of_four["bits_in_seeds_low"] + of_four["bits_in_seeds_high"]) / 2
    assert np.asarray(lines["4 copies"].get_xdata()).tolist() == of_four["k"].tolist()
    assert np.asarray(lines["4 copies"].get_ydata()).tolist() == pytest.approx(middles.tolist())
    assert max(np.asarray(lines["arm OUT"].get_ydata())[-3:]) < 1.6  # -log2 of a uniform has the median 1


NATS = {  # of arm IN by seed, canary and round, where arm OUT has 40; the window ends with round 50
    0: {"a": {40: 30.0, 60: 38.0, 150: 39.0}, "b": {40: 30.0, 60: 34.0, 150: 39.0}},
    1: {"a": {40: 30.0, 60: 36.0, 150: 38.0}, "b": {40: 30.0, 60: 36.0, 150: 39.0}},
}


def of_nats(series: str, left: float) -> pd.DataFrame:
    """Observations with the log-perplexities of `NATS`, whose advantage at the end is multiplied by `left`."""
    rows = [
        {"run": f"{series}-{seed}", "seed": seed, "series": series, "setting": series, "canary": name, "round": at}
        | {"copies": 1, "last_round": 50, "last_use": 50, "uses": 1, "since": at - 50 if at >= 50 else math.nan}
        | {"nats_out": 40.0, "nats_in": 40 - (40 - nats) * (left if at == 150 else 1), "p_in": 0.5, "bits_in": 1.0}
        for seed, canaries in NATS.items()
        for name, rounds in canaries.items()
        for at, nats in rounds.items()
    ]
    never = {**rows[0], "canary": "never", "last_use": None, "uses": 0, "nats_in": 0.0, "since": math.nan}
    table = pd.DataFrame([*rows, *({**never, "round": at} for at in (40, 60, 150))])
    return table.reindex(columns=list(TYPES)).astype(TYPES)


def test_what_is_left_of_the_advantage_by_seed_from_the_windows_end_to_the_last_round() -> None:
    """Seed 0: (2 + 6) / 2 nats at round 60, (1 + 1) / 2 in the end. Seed 1: 4 and 1.5."""
    measured = measure(pd.concat([of_nats("one", 1), of_nats("other", 0.5)], ignore_index=True))
    one, other = measured.times.to_dict("records")
    assert (one["advantage"], one["left"]) == pytest.approx((4, (1 / 4 + 1.5 / 4) / 2))
    assert (one["left_low"], one["left_high"]) == pytest.approx(t_interval(np.array([1 / 4, 1.5 / 4])))
    assert other["left"] == pytest.approx(one["left"] / 2)
    (test,) = measured.tests.to_dict("records")
    assert test["left_difference"] == pytest.approx(one["left"] / 2)
    low, high = t_interval(np.array([1 / 8, 1.5 / 8]))
    assert (test["left_difference_low"], test["left_difference_high"]) == pytest.approx((low, high))
    assert f"{100 * test['left_difference']:+.0f}" in to_text(measured)
    alone = measure(of_nats("one", 1).query("seed == 0")).times.iloc[0]
    assert (alone["left"], pd.isna(alone["left_low"])) == (0.25, True)


def test_measures_without_ranks_have_neither_a_plot_nor_panels_of_exposure() -> None:
    """Runs with evaluation.decide have no exposure, and therefore no figure of exposure."""
    observed = simulated(seeds=1, canaries=4)
    measured = measure(observed.assign(**dict.fromkeys(("p_in", "p_out", "bits_in", "bits_out"), math.nan)))
    assert len(measured.success)
    assert forgetting_figures(measured) == []
    with pytest.raises(InputError, match="the plot is empty"):
        plot(measured, Path("never.png"))
