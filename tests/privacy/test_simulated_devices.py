"""Availability of users from the time of day or from a file, and the cohorts of available users."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import Experiment
from scipy import stats

import flsim
from flsim.base.errors import InputError
from flsim.base.extensions import with_options
from flsim.base.files import file_digest
from flsim.privacy.devices import Days, Trace, cohorts_of_available
from flsim.privacy.ledger import Entry, Ledger, spent
from flsim.privacy.sampling import draw_cohort
from flsim.runs.folder import Run
from server.launch import verify

ROWS = pd.DataFrame({"user": [2, 0, 2, 3], "from": [0, 1, 4.5, 2], "to": [2, 3, 6, 9]})
AVAILABLE = [[2], [0, 2], [0, 3], [3], [3], [2, 3], [3]]  # by round: from <= round < to


def written(folder: Path, name: str = "trace.csv", table: pd.DataFrame = ROWS) -> Trace:
    file = folder / name
    (table.to_parquet if name.endswith("parquet") else table.to_csv)(file, index=False)
    return Trace(str(file), file_digest(file))


def users_of(flags: np.ndarray) -> list[int]:
    return np.flatnonzero(flags).tolist()


def test_users_are_available_as_often_as_the_curve_states() -> None:
    """500 seeds, 9 of 12 rounds a day; phases are 0 or uniform. The largest of 18 deviations fails once in 10,000."""
    for zones, chances in ((0.0, 0.3 * (1 + np.cos(2 * np.pi * np.arange(9) / 12))), (1.0, np.full(9, 0.3))):
        days = Days(0.3, 12, zones)
        counts = np.array([sum(days.available(seed, round_, 5).sum() for seed in range(500)) for round_ in range(9)])
        deviation = np.sqrt(np.maximum(2_500 * chances * (1 - chances), 1))
        assert np.abs((counts - 2_500 * chances) / deviation).max() < stats.norm.isf(0.5e-4 / 18)
        assert np.array_equal(days.available(3, 4, 50), days.available(3, 4, 50))


def test_a_user_is_available_at_the_same_time_of_every_day() -> None:
    """Over 400 days of 8 rounds, p = 0.5 (1 + cos) is near 1 at one time, and near 0 half a day later."""
    present = np.stack([Days(0.5, 8, 1).available(1, round_, 30) for round_ in range(3_200)]).reshape(400, 8, 30)
    frequency = present.mean(0)
    best = frequency.argmax(0)
    assert frequency.max(0).min() > 0.9
    assert frequency[(best + 4) % 8, np.arange(30)].max() < 0.1
    assert len(set(best.tolist())) == 8


@pytest.mark.parametrize("name", ["trace.csv", "trace.parquet"])
def test_a_trace_states_who_is_available_in_which_rounds(name: str, tmp_path: Path) -> None:
    trace = written(tmp_path, name)
    assert [users_of(trace.available(0, round_, 4)) for round_ in range(7)] == AVAILABLE
    options = {"separation": 2, "trace": trace.file, "trace_digest": trace.digest}
    sampler = with_options("available", options)
    assert [draw_cohort(5, round_, 4, 2, sampler).tolist() for round_ in range(7)] == [
        [2], [0], [3], [], [3], [2], [3]
    ]  # fmt: skip


def test_cohorts_are_uniform_among_available_users_who_have_rested() -> None:
    """3,000 rounds of 3 of 24 users, 4 rounds apart, follow the definition. Users are equally likely (p > 1e-4)."""
    days = Days(0.4, 6, 1)
    cohorts = cohorts_of_available(7, 24, 3, 4, days)
    times = np.zeros(24)
    for round_ in range(3_000):
        recent = {user for before in range(max(0, round_ - 3), round_) for user in cohorts[before].tolist()}
        ready = set(users_of(days.available(7, round_, 24))) - recent
        cohort = cohorts[round_].tolist()
        assert set(cohort) <= ready
        assert len(cohort) == min(3, len(ready))
        times[cohort] += 1
    # rounds of a user are negatively correlated, so the statistic is below chi-squared
    assert stats.chi2(23).sf(((times - times.mean()) ** 2 / times.mean()).sum()) > 1e-4
    assert not np.array_equal(cohorts[0], cohorts_of_available(8, 24, 3, 4, days)[0])


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (ROWS.drop(columns="to"), "not a trace with numbers in columns user, from, to"),
        (ROWS.assign(user=["a", "b", "c", "d"]), "not a trace with numbers"),
        (ROWS.assign(user=[0, 1, -1, 2]), "user must be an integer of at least 0, and from below to"),
        (ROWS.assign(to=0), "user must be an integer of at least 0, and from below to"),
        (ROWS.assign(user=[0, 1, 2.5, 3]), "user must be an integer of at least 0"),
        (ROWS.head(0), "has no rows, so no user is ever available"),
        (ROWS.assign(user=[0, 1, 2, 24]), "user 24 is not one of the 24 users"),
    ],
)
def test_a_wrong_trace_is_refused_before_training(table: pd.DataFrame, reason: str, experiment: Experiment) -> None:
    trace = written(experiment.folder, table=table)
    refused_run(experiment, trace.file, trace.digest, reason)


def test_a_missing_or_changed_trace_is_refused_before_training(experiment: Experiment) -> None:
    trace = written(experiment.folder)
    refused_run(experiment, "absent.csv", "", "absent.csv: not a trace")
    refused_run(experiment, trace.file, "", f"trace_digest must be the sha256 of this file, which is {trace.digest}")


def refused_run(experiment: Experiment, file: str, digest: str, reason: str) -> None:
    options = f'{{separation=1, trace="{file}", trace_digest="{digest}"}}'
    settings = ("--set", "training.sampler=available", "--set", f"training.sampler_options={options}")
    refused = experiment.call("run", experiment.config, *settings, "--out", "refused", check=False)
    assert refused.returncode == 2
    assert reason in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (experiment.folder / "refused").exists()


@pytest.mark.parametrize(
    "options", [{"availability": 0.6}, {"availability": 0}, {"day": 0.5}, {"zones": -1}, {"zones": "all"}]
)
def test_impossible_days_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(options))} must be (at|above|a number)"):
        flsim.FedAvg(3, sampler="available", sampler_options={"separation": 1, **options})


def test_availability_costs_what_the_separation_states_and_has_no_amplification() -> None:
    """In 100 rounds, 10 apart, a user takes part 10 times, so independent noise is 10 Gaussian mechanisms."""
    sampler = 'available{"separation": 10}'
    ledger = Ledger((Entry(sampler, 1_000, 20, 3.0, 100),))
    alone = Ledger((Entry('min-separation{"separation": 10}', 1_000, 20, 3.0, 100),))
    assert [*spent(ledger, sampler, 1e-5).values()] == [*spent(alone, alone.entries[0].sampler, 1e-5).values()]
    with pytest.raises(InputError, match=r"'poisson-pld' is not for available.* sampling"):
        spent(ledger, sampler, 1e-5, ["poisson-pld"])


def test_a_private_run_with_stragglers_and_availability_is_verified(experiment: Experiment) -> None:
    options = "{separation=3, availability=0.5, day=4, zones=0.5, deadline=1.5, spread=0.5}"
    settings = (
        "training.sampler=available", f"training.sampler_options={options}", "privacy.mechanism=dp",
        "privacy.clip=0.5", "privacy.noise_multiplier=2", "privacy.noise=blt", "privacy.noise_options={buffers=2}",
    )  # fmt: skip
    experiment.call(
        "run", experiment.config, "--in-process", "--out", "run", *(x for one in settings for x in ("--set", one))
    )
    assert verify(Run.open(experiment.folder / "run")).differs is None
    assert "available(availability=0.5" in experiment.call("table", "run").stdout
    assert "available  zero-out" in experiment.call("privacy", "run").stdout
