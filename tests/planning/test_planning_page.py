"""A plan in words: numbers as people say them, lines that fit a terminal."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy

from flsim.base.statistics import holm
from flsim.evaluation.evaluate import EvaluationHParams
from flsim.planning.amounts import Amount
from flsim.planning.calibration import Calibration
from flsim.planning.cost import Need, Observed
from flsim.planning.kinds import kind_of
from flsim.planning.monitor import Watch
from flsim.planning.plan import Plan, against, disk_of, memory_of, power_of
from flsim.planning.predicting import Machine, Predictor
from flsim.planning.scale import Users, scale_of
from flsim.planning.text import duration, number, page, share, size
from flsim.results.power import SD_CANARIES, SD_SEEDS, canaries_for, seeds_for
from flsim.sweeps.definition import load as load_sweep
from flsim.sweeps.definition import planned_runs, tier_of

USERS = Users(400, 12_000, 100_000, 600)
MACHINE = Machine(cores=2, gpus=0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7.4, "7 s"), (89, "89 s"), (90, "2 min"), (720, "12 min"), (5_400, "1.5 h"), (36_000, "10 h"), (2e5, "2.3 days")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("amount", "text"), [(12, "12 B"), (4.1e9, "4.1 GB"), (999_999, "1.0 MB"), (553_000, "553 kB"), (2e12, "2.0 TB")]
)
def test_sizes(amount: float, text: str) -> None:
    assert size(amount) == text


def test_numbers_and_shares() -> None:
    assert [number(11_896), number(392_000), number(92_904_000)] == ["11,896", "392,000", "92.9 M"]
    assert [share(0.1), share(0.00128), share(1.0)] == ["10%", "0.13%", "100%"]


def measured(sweep_file: Path) -> tuple[Plan, Predictor]:
    """All of table 1 where start and end take 10 s and 2 s, a user 0.01 s, a record 0.0001 s, an evaluation 3 s."""
    definition = load_sweep(sweep_file)
    planned = planned_runs(
        definition, tier_of(definition, "smoke", "here"), Path("corpus"), "here", only=["sgd", "fedavg"]
    )
    train, watch, observed = USERS.split(), Watch(), dict[str, list[Observed]]()
    watch.peak, watch.run, watch.rest = 4_100_000_000, 1_400_000_000, 1_300_000_000
    for each in planned:
        one = 0.01 if each.grid == "fedavg" else 0.0001
        cost = Observed(each.config.round_size, 10, (one * each.config.round_size,), 0, 5, 3, 2)
        observed.setdefault(kind_of(each.config), []).append(cost)
    calibration = Calibration(observed, 4.0, 1.0, 70.0, watch)
    predictor = Predictor(calibration, train, MACHINE, lambda _: Need(1))
    scale = scale_of(planned, USERS, train)
    session = {
        "trained": sorted(each.name for each in planned),
        "failed": {},
        "seconds": 400.0,
        "peak_memory": 4 * 10**9,
    }
    memory = memory_of(watch)
    plan = Plan(
        "table1",
        "smoke",
        MACHINE,
        scale,
        None,
        None,
        disk_of(planned, train, 2, 0),
        (),
        power_of(36, 1, planned[0].config.evaluation, 1.0),
        predictor.time(planned),
        memory,
        tuple(against([session | {"at_once": None}], planned, predictor, memory)),
    )
    return plan, predictor


def test_the_time_of_a_sweep_by_hand(sweep_file: Path) -> None:
    """Two runs at once, pairs of twins: 12 s, 4 evaluations of 5 + 3 x 3 s, and 400 x 0.01 s a user or 1,488 x 0.0001 s
    a record, as all cores are taken; 4 s before and 1 s after.
    """
    plan, _ = measured(sweep_file)
    assert plan.time is not None
    fedavg = [400 * 0.01 * cohort for cohort in (4, 8, 16, 40)]
    sgd = [1_488 * 0.0001 * batch for batch in (32, 64, 128, 256)]
    assert plan.time.seconds == pytest.approx(5 + sum(26 + each for each in [*fedavg, *sgd]), rel=1e-6)
    assert plan.time.at_once == 2
    assert plan.time.quickest < plan.time.seconds < plan.time.slowest
    (beside,) = plan.against
    assert beside.runs == 16
    assert beside.predicted_seconds == pytest.approx(plan.time.seconds)


def test_a_page_fits_and_says_all(sweep_file: Path) -> None:
    plan, _ = measured(sweep_file)
    text = page(plan)
    assert max(map(len, text.splitlines())) <= 80
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert titles == ["Scale", "Time", "Memory", "Disk", "Statistical power", "Predicted and recorded"]
    assert "About 4.1 GB at the peak" in text
    assert "an idle one" not in text
    busy = page(replace(plan, machine=replace(plan.machine, busy=0.6)))
    assert "60% of the cores" in " ".join(busy.split())


def test_unlike_amounts_of_training_are_named(sweep_file: Path) -> None:
    """A row of 1% of its published amount beside one of 10%; rows of 12% and 10% are alike."""
    plan, _ = measured(sweep_file)
    published = (Amount("sgd", 1_000.0, 13, {"iid": 62.2, "non-iid": 64.3}), Amount("fedavg", 500.0, 10))
    texts = [
        page(replace(plan, amounts=(Amount("sgd", sgd, 2), Amount("fedavg", 50.0, 4)), published_amounts=published))
        for sgd in (10.0, 120.0)
    ]
    unlike, alike = (" ".join(text.split()) for text in texts)
    warning = "fedavg is trained for 10% of its published amount and sgd for 1%, 10 times less: a difference between"
    assert warning in unlike
    assert "is trained for" not in alike
    assert "62.2/64.3" in alike
    assert max(map(len, texts[0].splitlines())) <= 80
    of_worlds = (Amount("sgd", 100.0, 2, world="iid"), Amount("sgd", 25.0, 2, world="non-iid"))
    amounts = (*of_worlds, Amount("fedavg", 50.0, 4))
    apart = " ".join(page(replace(plan, amounts=amounts, published_amounts=published)).split())
    assert "In 1 of 2 rows one world is trained for 4 times as much as the other" in apart
    assert re.search(r"sgd, Non-IID *\| *25 *\| *2 *\| *1,000 *\| *13 *\| *64.3 *\| *2.5%", apart)
    unknown = page(replace(plan, amounts=(Amount("own", None, 2),), published_amounts=None))
    assert "## Amount of training" in unknown
    assert "Publ." not in unknown


def test_a_session_of_other_runs_is_held_against_nothing(sweep_file: Path) -> None:
    _, predictor = measured(sweep_file)
    assert against([{"trained": ["other"], "failed": {}, "seconds": 1, "at_once": 1}], [], predictor, None) == []  # type: ignore[arg-type]


def test_sessions_that_lack_values_are_compared_by_the_others(sweep_file: Path) -> None:
    """A sweep.json need not have any value of a session. Runs that failed count as runs of the session too."""
    plan, predictor = measured(sweep_file)
    definition = load_sweep(sweep_file)
    planned = planned_runs(definition, tier_of(definition, "smoke", "here"), Path("corpus"), "here", only=["sgd"])
    assert plan.memory is not None
    name = planned[0].name
    sessions: list[dict[str, object]] = [
        {"began": "2026-01-02T03:04:05Z"},
        {"failed": {name: "lost"}, "trained": None},
        {"trained": [name]},
    ]
    compared = against(sessions, planned, predictor, plan.memory)
    assert [(session.runs, session.seconds, session.memory) for session in compared] == [(1, None, None)] * 2
    text = page(replace(plan, against=tuple(compared)))
    assert text.count(f"1 run: no time recorded, predicted {duration(compared[0].predicted_seconds)}") == 2


@pytest.mark.parametrize(("effect", "tests"), [(1.3, 1), (1.3, 8), (2.5, 8)])
def test_power_is_that_of_a_table_which_corrects_for_its_rows(effect: float, tests: int) -> None:
    """Drawn: one row of the table differs by the effect and the others by nothing; its corrected p is below 0.05."""
    stated = power_of(48, 5, EvaluationHParams(), effect, tests)
    assert stated is not None
    rng, draws = np.random.default_rng(7), 4_000
    spread = math.hypot(SD_SEEDS, SD_CANARIES / math.sqrt(48))
    means = rng.normal(0, spread, (draws, tests, 5))
    means[:, 0] += effect
    p = scipy.stats.ttest_1samp(means, 0, axis=2).pvalue
    found = np.mean([holm(row.tolist())[0] < 0.05 for row in p])
    margin = 4 * math.sqrt(0.25 / draws)
    # Holm finds a little more where another row is found first, which has a probability below 5% here.
    assert stated.found - margin <= found <= stated.found + margin + 0.05 * (tests > 1)


def test_the_page_says_that_a_table_corrects(sweep_file: Path) -> None:
    plan, _ = measured(sweep_file)
    alone, one_of_8 = (
        " ".join(page(replace(plan, power=power_of(36, 5, EvaluationHParams(), 1.0, tests))).split())
        for tests in (1, 8)
    )
    assert "one of the 8 comparisons of this plan's table, which corrects for their number (Holm)" in one_of_8
    assert "Holm" not in alone


def test_power_over_canaries_of_one_pair_and_power_over_seeds_are_told_apart(sweep_file: Path) -> None:
    """One seed's canaries and several seeds answer two questions, so neither is an alternative to the other."""
    plan, _ = measured(sweep_file)
    evaluation = EvaluationHParams()
    one, many = (" ".join(page(replace(plan, power=power_of(36, seeds, evaluation, 1.0))).split()) for seeds in (1, 5))
    assert "about one pair of models, and not about other seeds" in one
    other = "Other seeds are another question: over seeds, the same difference between two settings takes"
    assert f"takes {canaries_for(1.0, 1)} canaries. {other} {seeds_for(1.0, 36)} seeds of 36 canaries." in one
    assert "about the settings, and not about one pair of models" in many
    assert canaries_for(1.0, 5) is None  # differences between seeds do not shrink with more canaries
    assert f"More canaries in each seed do not raise that to 80%; {seeds_for(1.0, 36)} seeds of 36 canaries do." in many
    nine = " ".join(page(replace(plan, power=power_of(36, 9, evaluation, 1.0))).split())
    assert f"takes {canaries_for(1.0, 9)} canaries in each seed, or {seeds_for(1.0, 36)} seeds of 36 canaries." in nine
    assert "Of one pair of models, McNemar's test over canaries finds a difference in RS of" in many
