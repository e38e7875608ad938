"""User-level epsilon of DP-SGD, which samples records, for users with a limited number of records."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting.dp_event import ComposedDpEvent, MixtureOfGaussiansDpEvent, SelfComposedDpEvent
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from helpers import Experiment, Flsim
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import binom, norm

from flsim.base.errors import InputError
from flsim.data.corpus import PartialSplit, held_out
from flsim.privacy.accounting import ORDERS, epsilon_of, rdp_of
from flsim.privacy.conventions import CONVENTIONS
from flsim.privacy.conventions import of_users as user_level
from flsim.privacy.ledger import Entry, Ledger, epsilon
from flsim.privacy.table import calibrated
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.training.update import State

CAP = ("--records-per-user", "3")
CENTRAL = """
[data]
corpus = "corpus"
[canaries]
p_u = [0.2]
p_e = [0.5]
count = 2
[model]
embedding = 8
units = 12
[training]
kind = "central"
steps = 5
batch_size = 6
"""
(RECORD_LEVEL,) = (one for one in CONVENTIONS if one.name == "poisson-pld")


def ledger(rate: float, noise_multiplier: float, rounds: int) -> Ledger:
    return Ledger((Entry("poisson", 1_000, round(1_000 * rate), noise_multiplier, rounds),))


def of_one_round(rate: float, noise_multiplier: float, records: int, delta: float) -> float:
    """Return epsilon from the hockey-stick divergences of both directions, integrated over a grid."""
    sampled = np.arange(records + 1)[:, None]
    places = np.linspace(-8 * noise_multiplier, 8 * noise_multiplier + records, 20_001)
    log_one = norm.logpdf(places, 0, noise_multiplier)
    parts = binom.logpmf(sampled, records, rate) + norm.logpdf(places, sampled, noise_multiplier)
    log_mixed = logsumexp(parts, axis=0)

    def excess(value: float) -> float:
        pairs = ((log_one, log_mixed), (log_mixed, log_one))
        deltas = [np.maximum(np.exp(a) - np.exp(value + b), 0).sum() * (places[1] - places[0]) for a, b in pairs]
        return float(max(deltas)) - delta

    return float(brentq(excess, 1e-3, 50, xtol=1e-6))


def test_one_round_is_the_integrated_divergence_of_the_mixture() -> None:
    """Tabulated losses are rounded up, by at most their step of 0.001."""
    exact = of_one_round(0.2, 2.0, 4, 1e-5)
    tabulated = epsilon(ledger(0.2, 2.0, 1), 1e-5, user_level(4))
    assert exact - 1e-6 <= tabulated <= exact + 2e-3


def test_without_sampling_a_user_is_a_gaussian_mechanism_of_the_complete_distance() -> None:
    """With 3 records in each of 5 rounds, mu is 3 sqrt(5) / z; delta is that of Balle and Wang (2018), Theorem 8."""
    mu = 3 * math.sqrt(5) / 8

    def excess(value: float) -> float:
        return float(norm.cdf(mu / 2 - value / mu) - math.exp(value) * norm.cdf(-mu / 2 - value / mu)) - 1e-5

    exact = brentq(excess, 0.1, 20)
    assert epsilon(ledger(1.0, 8.0, 5), 1e-5, user_level(3)) == pytest.approx(exact, abs=5e-3)


def test_a_published_mixture() -> None:
    """Epsilon is that of dp_accounting 0.6.0 with its default step, for rate 0.01, z = 1, 1,000 rounds, delta 1e-6."""
    assert epsilon(ledger(0.01, 1.0, 1_000), 1e-6, user_level(2)) == pytest.approx(4.554096, rel=3e-4)


def test_rdp_of_mixtures_of_different_rounds_is_above_the_published_epsilon() -> None:
    """test_mixture_of_gaussians_basic of dp_accounting has 17.193115 at delta 1e-6, computed from losses."""
    first = MixtureOfGaussiansDpEvent(1.0, [0.0, 1.0, 2.0], [0.2, 0.6, 0.2])
    second = MixtureOfGaussiansDpEvent(2.0, [0.0, 2.0, 3.0], [0.33, 0.34, 0.33])
    event = ComposedDpEvent([SelfComposedDpEvent(first, 3), SelfComposedDpEvent(second, 2)])
    assert compute_epsilon(ORDERS, rdp_of(event, user_level(3)), 1e-6)[0] >= 17.193115


def test_a_user_of_one_record_has_the_epsilon_of_a_record() -> None:
    spent = ledger(0.02, 1.2, 100)
    assert epsilon(spent, 1e-5, user_level(1)) == epsilon(spent, 1e-5, RECORD_LEVEL)


def test_large_epsilons_and_other_samplers_are_refused() -> None:
    with pytest.raises(InputError, match="up to epsilon 100, and RDP computes"):
        epsilon(ledger(0.01, 1.0, 1_000), 1e-6, user_level(32))
    fixed = Entry("fixed-size", 100, 10, 1.0, 1).event("S")
    with pytest.raises(InputError, match="needs Poisson-sampled records"):
        epsilon_of(fixed, 1e-5, user_level(2))
    assert epsilon(ledger(0.01, 0.0, 1), 1e-6, user_level(2)) == math.inf


def capped(experiment: Experiment, *overrides: str) -> Run:
    path = experiment.folder / f"run{len(list(experiment.folder.iterdir()))}"
    return Run.create(load(experiment.config, ["data.max_records=3", *overrides]), path)


def positions_of(run: Run) -> NDArray[np.integer[Any]]:
    assert isinstance(run.train, PartialSplit)
    return run.train.positions


def test_no_user_of_a_run_has_more_records_than_the_cap(experiment: Experiment) -> None:
    """Of 24 users with 8 records, each keeps 3, the same for all seeds, and none of them is a held-out record."""
    runs = [capped(experiment), capped(experiment, "seed=1"), capped(experiment, "data.partition='iid'")]
    for run in runs:
        assert np.diff(run.train.user_offsets).tolist() == [3] * 24
        assert positions_of(run).tolist() == positions_of(runs[0]).tolist()
    both = capped(experiment, "data.user_holdout=0.25")
    held = np.concatenate([8 * user + held_out(8, user, 0.25) for user in range(24)])
    assert not np.isin(positions_of(both), held).any()
    assert both.train.records == 72
    with pytest.raises(InputError, match=r"data\.max_records excludes records"):
        capped(experiment, "data.shadow='record'")


def test_flsim_privacy_shows_users_next_to_records(
    experiment: Experiment, flsim: Flsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last row of a DP-SGD run with a cap is the epsilon of its mixture; a plan with the same rate agrees."""
    private = ["privacy.mechanism='dp'", "privacy.clip=1", "privacy.noise_multiplier=2", "privacy.delta=1e-3"]
    experiment.config.write_text(CENTRAL)
    run = capped(experiment, *private)
    spent = Ledger((Entry("poisson", 72, 6, 2.0, 5),))
    run.save(State(5, run.latest_state().params, ledger=spent))
    monkeypatch.setattr("flsim.privacy.table.conventions_of", lambda _: ())  # only the row of users
    code, out, _ = flsim("privacy", run.path, "--json")
    (user,) = json.loads(out)
    assert (code, user["unit"], user["records"], user["sensitivity"]) == (0, "user", 3, "3 x S")
    plan = ("--users", "24", "--cohort", "2", "--rounds", "5", "--noise-multiplier", "2", "--delta", "1e-3", *CAP)
    text = " ".join(flsim("privacy", *plan)[1].split())
    assert f"users of 3 records, poisson, add-or-remove-one, pld: {user['epsilon']:.3f}." in text
    code, out, err = flsim("privacy", *plan, "--sampler", "fixed-size")
    assert (code, out, "--records-per-user needs --sampler poisson" in err) == (2, "", True)


@pytest.mark.parametrize(("rate", "records", "target"), [(1.0, 32, 5.0), (1.0, 32, 90.0), (0.0026, 50, 8.0)])
def test_noise_is_calibrated_for_users_of_many_records(
    rate: float, records: int, target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epsilon 90 is close to 100, above which it is refused; so the search has to take short steps."""
    monkeypatch.setattr("flsim.privacy.table.conventions_of", lambda _: ())
    planned = Entry("poisson", 10_000, round(10_000 * rate), 0.0, 2_000)
    (line,) = calibrated(planned, target, 1e-6, records)
    assert line.noise_multiplier is not None
    spent = Ledger((replace(planned, noise_multiplier=line.noise_multiplier),))
    assert epsilon(spent, 1e-6, user_level(records)) == pytest.approx(target, rel=2e-3)
