"""A plan as text: numbers with units, in lines that fit a terminal; power as a table corrects it."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy

from flsim.base.statistics import holm
from flsim.evaluation.evaluate import EvaluationHParams
from flsim.planning.measure import Cost, Machine, Measurement, cost_key
from flsim.planning.plan import Plan, Request, against, page, plan_of, power_of
from flsim.planning.scale import Users, duration, number, share, size
from flsim.results.power import SD_CANARIES, SD_SEEDS
from flsim.runs.sweeps.definition import load as load_sweep
from flsim.runs.sweeps.definition import planned_runs, tier_of

USERS = Users(400, 12_000, 100_000, 600)
MACHINE = Machine(cores=2, gpus=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[(duration(0.0421), "0.042 s"), (duration(7.4), "7.4 s"), (duration(89), "89 s"), (duration(90), "2 min")],
        *[(duration(5_400), "1.5 h"), (duration(36_000), "10 h"), (duration(2e5), "2.3 days")],
        *[(size(12), "12 B"), (size(4.1e9), "4.1 GB"), (size(999_999), "1.0 MB"), (size(2e12), "2.0 TB")],
        *[(number(11_896), "11,896"), (number(392_000), "392,000"), (number(92_904_000), "92.9 M")],
        *[(share(0.1), "10%"), (share(0.00128), "0.13%"), (share(1.0), "100%")],
    ],
)
def test_numbers(text: str, expected: str) -> None:
    assert text == expected


def measured(sweep_file: Path, seeds: int = 1) -> tuple[Request, tuple[dict[str, Cost], Measurement], Plan]:
    """Plan table 1: start 10 s, a round 0.5 s, an evaluation 3 s, and 5 s of overhead."""
    definition = load_sweep(sweep_file)
    tier = tier_of(definition, "smoke", "here")
    planned = planned_runs(definition, tier, Path("corpus"), "here", range(seeds), ["sgd", "fedavg"])
    request = Request("table1", "smoke", planned, USERS.split(), whole_cluster=False)
    costs = {cost_key(run.config): Cost(10, 0.5, 3) for run in planned}
    measurement = Measurement(memory=41 * 10**8, at_once=2, overhead=5.0, seconds=70.0, load=0.4)
    sessions = [{"trained": sorted(run.name for run in planned), "failed": {}, "seconds": 4_000.0, "at_once": None}]
    return (
        request,
        (costs, measurement),
        plan_of(request, MACHINE, 1.0, measured=(costs, measurement), sessions=sessions),
    )


def test_a_page_fits_and_answers_with_units(sweep_file: Path) -> None:
    _, _, plan = measured(sweep_file)
    text = page(plan)
    assert max(map(len, text.splitlines())) <= 80
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        *["Time, memory and disk", "Time of a run", "Scale and amount of training", "Largest provable epsilon"],
        *["Statistical power", "Predicted and recorded"],
    ]
    assert plan.time is not None
    assert plan.time.seconds == 5 + 8 * (766 + 222) / 2
    assert re.search(r"Time of all runs, as many at once as fit *\| *66 \| min", text)
    assert re.search(r"Peak memory of all processes, measured *\| *4.1 \| GB", text)
    assert re.search(r"fedavg cohort 40 *\| *2 *\| *2 *\| *10 s *\| *400 *\| *0.5 s *\| *4 *\| *3 s *\| *4 min", text)
    (session,) = plan.against
    assert (session.runs, session.seconds, session.predicted_seconds) == (16, 4_000.0, plan.time.seconds)
    assert json.loads(json.dumps(plan.to_json(), allow_nan=False))["disk"]["kept"] == 64


def test_sessions_are_compared_by_the_values_that_they_have(sweep_file: Path) -> None:
    """A sweep.json need not have any value of a session. Runs that failed count as runs of the session too."""
    request, measurement, _ = measured(sweep_file)
    name = request.planned[0].name
    sessions: list[dict[str, object]] = [
        {"trained": ["other"], "failed": {}, "seconds": 1, "at_once": 1},
        {"began": "2026-01-02T03:04:05Z"},
        {"failed": {name: "lost"}, "trained": None},
        {"trained": [name], "peak_memory": 4 * 10**9},
    ]
    compared = against(sessions, request.planned, *measurement, request.train, MACHINE)
    assert [(session.runs, session.seconds, session.memory) for session in compared] == [
        (1, None, None),
        (1, None, 4 * 10**9),
    ]


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
    assert stated.power / 100 - margin <= found <= stated.power / 100 + margin + 0.05 * (tests > 1)
