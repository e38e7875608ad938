"""Calibration inverts epsilon, on the safe side, and says so where nothing helps."""

import math
from dataclasses import replace

import pytest
from helpers import Flsim
from hypothesis import given, settings
from hypothesis import strategies as st

from flsim.base.errors import InputError
from flsim.privacy.conventions import CONVENTIONS, PAPER
from flsim.privacy.ledger import Entry, Ledger, epsilon
from flsim.privacy.table import TOLERANCE, calibrate

BY_NAME = {convention.name: convention for convention in CONVENTIONS}
CHECKED = (
    *("paper", "replace-one-rdp", "poisson-rdp"),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("poisson-pld", "poisson-prv-opacus")),
)


@pytest.mark.parametrize("name", CHECKED)
def test_the_noise_is_enough_and_hardly_more(name: str) -> None:
    convention, target = BY_NAME[name], 3.0
    planned = Entry(convention.sampler, 10_000, 100, 0.0, 300)
    noise = calibrate(planned, target, 1e-6, convention)

    def spent(multiplier: float) -> float:
        return epsilon(Ledger((replace(planned, noise_multiplier=multiplier),)), 1e-6, convention)

    assert spent(noise) <= target < spent(noise / (1 + TOLERANCE))


@settings(max_examples=4)
@given(noise=st.floats(0.6, 20), rounds=st.integers(1, 10_000), guess=st.floats(0.05, 50))
def test_calibration_inverts_epsilon_from_any_guess(noise: float, rounds: int, guess: float) -> None:
    convention = BY_NAME["poisson-rdp"]
    planned = Entry("poisson", 10_000, 100, noise, rounds)
    target = epsilon(Ledger((planned,)), 1e-6, convention)
    assert calibrate(planned, target, 1e-6, convention, guess) == pytest.approx(noise, rel=2 * TOLERANCE)


def test_an_epsilon_below_what_the_conversion_can_say_is_refused() -> None:
    """Mironov's Proposition 3 adds log(1 / delta) / (order - 1): at orders to 1,024 and delta 1e-7 at least 0.0157."""
    with pytest.raises(InputError, match=r'"paper": no noise multiplier gives epsilon 0\.01'):
        calibrate(Entry("fixed-size", 100, 100, 0.0, 1), 0.01, 1e-7, PAPER)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_the_target_is_positive_and_finite(target: float) -> None:
    with pytest.raises(InputError, match="epsilon must be finite and at least 1e-06"):
        calibrate(Entry("fixed-size", 100, 10, 0.0, 1), target, 1e-7, PAPER)


def test_what_cannot_be_accounted_cannot_be_calibrated() -> None:
    with pytest.raises(InputError, match="refuses SampledWithoutReplacementDpEvent"):
        calibrate(Entry("fixed-size", 100, 10, 0.0, 1), 1.0, 1e-7, BY_NAME["replace-one-pld"])


def test_an_epsilon_that_no_noise_reaches_is_one_line(flsim: Flsim) -> None:
    """At delta 1e-15 epsilon 1e-5 needs more noise than any that is tried."""
    plan = ("--users", 1000, "--cohort", 100, "--rounds", 50, "--delta", 1e-15)
    code, out, err = flsim("privacy", *plan, "--epsilon", 1e-5)
    assert (code, out) == (2, "")
    assert "--epsilon 1e-05: convention" in err.splitlines()[-1]
    assert "no noise multiplier gives epsilon 1e-05 at this delta" in err.splitlines()[-1]
