"""Tests compare measures of simulated observations with the truth and a recomputation, and cover all outputs."""

import html
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from documents import ROOT
from helpers import Flsim, Trained
from scipy.stats import binom, norm

import flsim as api
from flsim.attacks.forgetting.measure import TYPES, Forgetting, measure, observations
from flsim.attacks.forgetting.success import canary_times, p_after_window
from flsim.attacks.forgetting.tables import draw, time_text, to_text
from flsim.base.errors import InputError
from flsim.base.statistics import log_rank_p, t_interval
from flsim.data.synthetic import make_synthetic
from flsim.report.tables import forgetting_figures
from flsim.results.rows import Row, frame, read_run
from flsim.runs.folder import Run, participation
from flsim.runs.sweeps.definition import load, planned_runs, tier_of

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


def test_canaries_that_decay_more_slowly_are_forgotten_later(measured: Forgetting) -> None:
    """The accuracy Phi(d/2) falls to 0.6 after 12, 37 and 99 rounds. 144 trials show this below an estimate of 0.53."""
    true = {copies: rate * math.log(START / (2 * norm.ppf(0.6))) for copies, rate in DECAY.items()}
    times = measured.times.set_index("copies")
    assert times["least_alpha"].tolist() == pytest.approx([0.5715] * 3, abs=1e-4)
    for copies, about in times.iterrows():
        assert pd.isna(about["time"]) == about["is_censored"]
        assert about["is_censored"] or about["time"] >= true[int(str(copies))]
    assert times["is_censored"].tolist() == [False, False, True]
    assert times["median_time"].is_monotonic_increasing
    assert times["canaries"].tolist() == [144] * 3


def test_rows_equal_a_recomputation(measured: Forgetting) -> None:
    """The row of ten copies at k = 20 uses each canary's last evaluation 11 to 20 rounds after its last use."""
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
    assert row["tpr"] == (members >= others.iloc[-int(0.1 * len(others))]).mean()
    assert row["fpr"] == int(0.1 * len(others)) / len(others)
    assert row["precision"] == row["tpr"] / (row["tpr"] + row["fpr"])
    assert row["heuristic_epsilon"] == pytest.approx(math.log(row["tpr"] / row["fpr"]))


def test_log_rank_tests_compare_groups_that_differ_in_one_property() -> None:
    """Two windows and two numbers of copies have four tests; pairs that differ in both are not tested."""
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
    assert "Differences between groups are not tested: no two groups have ranks" in " ".join(to_text(apart).split())


def test_windows_until_the_end_of_training_have_no_times_by_rank() -> None:
    times = measure(simulated(seeds=1, window=(20, None))).times
    assert times[["median_time", "median_is_censored"]].isna().all().all()
    assert (times["forgotten"] == 0).all()


def test_hardness_divides_canaries_into_thirds_by_arm_out() -> None:
    """All rows of a canary have the same hardness, independent of arm IN, and each seed has three equal thirds."""
    measured = measure(simulated(canaries=10, seeds=2), by_hardness=True)
    observed = measured.observations
    of_canaries = observed.groupby(["seed", "canary"])[["clean", "hardness"]].agg(["first", "nunique"])
    assert (of_canaries["hardness"]["nunique"] == 1).all()
    for _, of_seed in of_canaries.groupby("seed"):
        ordered = of_seed.sort_values(("clean", "first"))["hardness"]["first"].tolist()
        assert ordered == ["easy"] * 10 + ["medium"] * 10 + ["hard"] * 10
    assert measured.times["hardness"].tolist()[::3] == ["easy", "medium", "hard"]


def test_without_arm_out_only_times_by_exposure_are_measured() -> None:
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


def test_observations_without_planted_or_used_canaries() -> None:
    with pytest.raises(InputError, match="no canary was planted"):
        measure(simulated(seeds=0))
    observed = simulated(seeds=1, canaries=4)
    observed["since"] = math.nan
    unused = measure(observed)
    assert unused.success.empty
    assert "No canary was used." in to_text(unused)
    with pytest.raises(InputError, match="the plot is empty"):
        draw(unused)


def test_the_figure_has_the_medians_of_both_arms(measured: Forgetting) -> None:
    """Each group has a line with the mean over seeds of the medians, and arm OUT has one line."""
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


NATS = {  # of arm IN by seed, canary and round; arm OUT has 40, and the window ends with round 50
    0: {"a": {40: 30.0, 60: 38.0, 150: 39.0}, "b": {40: 30.0, 60: 34.0, 150: 39.0}},
    1: {"a": {40: 30.0, 60: 36.0, 150: 38.0}, "b": {40: 30.0, 60: 36.0, 150: 39.0}},
}


def of_nats(series: str, left: float) -> pd.DataFrame:
    """Return observations with the log-perplexities of `NATS`, whose final advantage is multiplied by `left`."""
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


def test_the_remaining_share_of_the_advantage_is_a_mean_over_seeds() -> None:
    """Seed 0 has (2 + 6) / 2 nats at round 60, after the window, and (1 + 1) / 2 in the last. Seed 1 has 4 and 1.5."""
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


def test_measures_without_ranks_have_no_figures_of_exposure() -> None:
    """Runs with evaluation.decide have no exposure, and therefore no figure of exposure."""
    observed = simulated(seeds=1, canaries=4)
    measured = measure(observed.assign(**dict.fromkeys(("p_in", "p_out", "bits_in", "bits_out"), math.nan)))
    assert len(measured.success)
    assert forgetting_figures(measured) == []
    with pytest.raises(InputError, match="the plot is empty"):
        draw(measured)


LEVEL, SURE = 0.05, 0.999
SWEEPS = ("forgetting", "sharers", "recency", "decay", "order", "dp-forgetting")
DESIGNS = [
    *(pytest.param(name, "smoke", marks=pytest.mark.nightly) for name in SWEEPS),
    *(pytest.param(name, "small", marks=pytest.mark.nightly) for name in SWEEPS if name != "sharers"),
]
TEXT = (250, 1_000)  # words per user and vocabulary: the users that have copies do not depend on the text
SMALL_MODEL = ("model.embedding=4", "model.units=4")  # no model is trained


def design(name: str, tier: str, folder: Path, skipped: str = "") -> pd.DataFrame:
    """Return observations of a sweep's runs of arm IN, except one partition, in which all canaries have rank 1."""
    source = ROOT / "experiments" / f"{name}.toml"
    definition = load(source)
    chosen = tier_of(definition, tier, str(source))
    assert chosen.corpus.synthetic is not None
    words, vocabulary = TEXT
    small = replace(chosen.corpus.synthetic, words_per_user=words, vocabulary_size=vocabulary)
    make_synthetic(folder / "corpus", small, 0)
    tables = []
    for planned in planned_runs(definition, chosen, folder / "corpus", str(source), overrides=SMALL_MODEL):
        if planned.config.canaries.arm == "out" or planned.config.canaries.source == "heldout":
            continue  # natural text has no p-values by rank
        if planned.config.data.partition == skipped:
            continue
        run = Run.create(planned.config, folder / planned.name)
        evaluated = [round_ for round_ in range(1, run.rounds + 1) if run.is_evaluated_at(round_)]
        rows = [Row("", round_, "references", "", planned.config.evaluation.references) for round_ in evaluated]
        rows += [Row("", round_, "rank", canary.id, 1.0) for round_ in evaluated for canary in run.canaries]
        results = replace(read_run(run.path), rows=frame(rows))
        tables.append(observations(results, None, participation(run, run.rounds)))
    return pd.concat(tables, ignore_index=True)


def drawn_tests(observed: pd.DataFrame, draws: int) -> list[pd.DataFrame]:
    """Return the tests of a number of draws in which each rank is uniform, independent of copies."""
    rng, possible = np.random.default_rng(0), round(1 / observed["p_in"].min())
    tables = []
    for _ in range(draws):
        p = rng.integers(1, possible, len(observed), endpoint=True) / possible
        tables.append(measure(observed.assign(p_in=p, bits_in=-np.log2(p))).tests)
    return tables


def most(trials: int, families: int = 1) -> float:
    """Return a number of false findings in `trials` tests at 5% that any of the families exceeds once in 1,000."""
    return float(binom.ppf(1 - (1 - SURE) / families, trials, LEVEL))


def test_copies_do_not_differ_if_nothing_is_memorized(tmp_path: Path) -> None:
    """Tests of 1 and 10 copies keep their level, although a single copy's last use is some rounds earlier."""
    observed = design("forgetting", "smoke", tmp_path, skipped="iid")
    drawn = drawn_tests(observed[observed["copies"] != 4], 10)
    of_copies = [table.loc[table["differs"] == "copies", "p"] for table in drawn]
    assert {len(p) for p in of_copies} == {1}
    assert sum((p <= LEVEL).sum() for p in of_copies) <= most(len(drawn))


@pytest.mark.parametrize(("name", "tier"), DESIGNS)
def test_the_level_holds_in_every_shipped_design(name: str, tier: str, tmp_path: Path) -> None:
    """It holds for each pair of groups, and for all pairs after Holm's correction. All draws test the same pairs."""
    drawn = drawn_tests(design(name, tier, tmp_path), 60 if tier == "smoke" else 30)
    p = np.array([table["p"].to_numpy("float64", na_value=np.nan) for table in drawn])
    is_tested = np.isfinite(p).any(axis=0)
    assert is_tested.any()
    assert np.isfinite(p[:, is_tested]).all()
    assert (p[:, is_tested] <= LEVEL).sum(axis=0).max() <= most(len(drawn), is_tested.sum())
    assert sum((table["p_holm"] <= LEVEL).any() for table in drawn) <= most(len(drawn))


WINDOWED = (
    "training.rounds=8",
    "canaries.windows=[[0, 4]]",
    "canaries.p_u=[0.1]",
    "canaries.p_e=[0.5]",
    "canaries.count=12",
)


@pytest.fixture
def arms(trained_here: Trained) -> tuple[Path, Path]:
    """Return both arms of one seed: 12 canaries in rounds 1 to 4 of 8, evaluated every second round."""
    return trained_here(*WINDOWED), trained_here(*WINDOWED, "canaries.arm='out'")


def test_json_output_equals_a_computation_from_rows(arms: tuple[Path, Path], flsim: Flsim) -> None:
    """The median exposure and the scores of the last k follow from the stored rows and rounds of participation."""
    code, out, _ = flsim("forgetting", *arms, "--json", "--pool")
    assert code == 0
    printed = json.loads(out)
    (group,) = printed["times"]
    run, results, twin = Run.open(arms[0]), read_run(arms[0]), read_run(arms[1])
    last = participation(run, 8).groupby("canary")["round"].max()
    assert last.max() <= 4
    used = [canary for canary in results.planted["canary"] if canary in last.index]
    assert group["canaries"] - group["never_used"] == len(used)
    *_, before, of_last = printed["success"]
    assert of_last["k"] == group["k_max"] == int(np.sort(8 - last[used])[(len(used) - 1) // 2])
    at_k = {
        canary: at
        for at in (2, 4, 6, 8)  # the last evaluation in the interval counts
        for canary in used
        if before["k"] < at - last[canary] <= of_last["k"]
    }
    exposures = {at: results.of_canaries("exposure", at) for at in (2, 4, 6, 8)}
    values = [of_round[canary] for canary, at in at_k.items() if (of_round := exposures[at]) is not None]
    assert of_last["canaries"] == len(values) > 0
    assert of_last["bits_in"] == pytest.approx(np.median(values))
    measured = api.measure_forgetting(*arms, pool=True)
    at_8 = measured.observations[measured.observations["round"] == 8].set_index("canary")
    clean, end = (twin.of_canaries("log_perplexity", at) for at in (4, 8))
    assert clean is not None
    assert end is not None
    assert at_8["score_out"].to_dict() == pytest.approx((clean - end)[at_8.index].to_dict())


def test_the_command_writes_text_csv_and_a_figure(arms: tuple[Path, Path], flsim: Flsim, tmp_path: Path) -> None:
    figure = tmp_path / "forgetting.png"
    code, out, _ = flsim("forgetting", *arms, "--out", figure)
    assert code == 0
    assert figure.stat().st_size > 10_000
    assert "rounds 1-4, 1/10, 50%" in out
    code, out, _ = flsim("forgetting", *arms, "--csv")
    assert len(pd.read_csv(io.StringIO(out))) == len(api.measure_forgetting(*arms).success)


def test_a_report_of_windowed_runs_has_a_section(arms: tuple[Path, Path], flsim: Flsim, tmp_path: Path) -> None:
    """The section has the same times as the command, and two figures."""
    page = tmp_path / "report.html"
    assert flsim("report", *arms, "--out", page)[0] == 0
    (section,) = re.findall(r'<section aria-labelledby="forgetting".*?</section>', page.read_text(), re.DOTALL)
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", section.split("</thead>")[1].split("</table>")[0])
    (about,) = api.measure_forgetting(*arms).times.to_dict("records")
    assert cells[:3] == ["1-4", "1/10, 50%", str(about["canaries"] - about["never_used"])]
    assert cells[4] == str(about["k_max"])
    assert pd.isna(about["left"]) or f"{100 * about['left']:.0f}" in cells[8:]
    assert html.unescape(cells[7]) == time_text(about["median_time"], about["median_is_censored"])
    assert "rounds since last use" in section
    assert section.count("<figure") == 2  # exposure, and the advantage of training


@pytest.mark.parametrize("alpha", [0.5, 1.0, float("nan")])
def test_impossible_alphas_are_refused(alpha: float) -> None:
    with pytest.raises(InputError, match="alpha must be above"):
        api.measure_forgetting("nowhere", alpha=alpha)
