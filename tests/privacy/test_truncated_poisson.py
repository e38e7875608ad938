"""Truncated Poisson sampling: its law, and the epsilon of its own event."""

import numpy as np
import pytest
from dp_accounting import (
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from scipy import stats

import flsim
from flsim.base.errors import InputError
from flsim.privacy.conventions import CONVENTIONS, Convention, sound_convention
from flsim.privacy.ledger import Entry, Ledger, epsilon, reported
from flsim.privacy.sampling import draw_cohort
from flsim.privacy.table import report

NAME = 'truncated-poisson{"limit": 6}'
PLD = sound_convention(NAME)


def test_a_cohort_is_a_poisson_cohort_or_a_subset_of_the_limit() -> None:
    """5,000 rounds, 5 of 20 users, at most 6: sizes are min(6, Binomial(20, 1/4)), and users are equally likely (p >
    1e-4)."""
    rounds, law = 5_000, stats.binom(20, 1 / 4)
    sizes, counts = np.zeros(7), np.zeros(20)
    for round_ in range(rounds):
        drawn, plain = draw_cohort(4, round_, 20, 5, NAME), draw_cohort(4, round_, 20, 5, "poisson")
        assert set(drawn.tolist()) <= set(plain.tolist())
        assert len(drawn) == min(6, len(plain))
        sizes[len(drawn)] += 1
        counts[drawn] += 1
    expected = rounds * np.append(law.pmf(range(6)), law.sf(5))
    assert stats.chi2(6).sf(((sizes - expected) ** 2 / expected).sum()) > 1e-4
    rate = counts.sum() / rounds / 20
    assert rate == pytest.approx(float(np.minimum(6, np.arange(21)) @ law.pmf(range(21))) / 20, rel=0.01)
    assert stats.chi2(19).sf(((counts - rounds * rate) ** 2 / (rounds * rate * (1 - rate))).sum()) > 1e-4


def test_the_ledger_composes_the_event_of_truncation_and_only_pld_knows_it() -> None:
    entry = Entry(NAME, 20, 5, 1.5, 3)
    assert entry.event("S") == SelfComposedDpEvent(TruncatedSubsampledGaussianDpEvent(20, 0.25, 6, 1.5), 3)
    assert [one.name for one in reported(NAME)] == ["truncated-poisson-pld"]


def test_a_limit_that_is_never_reached_costs_what_poisson_sampling_does() -> None:
    """And one that is reached often costs more, because a user then also decides whether another one is left out."""

    (of_poisson,) = (one for one in CONVENTIONS if one.name == "poisson-pld")

    def spent(sampler: str, convention: Convention = PLD) -> float:
        return epsilon(Ledger((Entry(sampler, 1_000, 20, 1.0, 20),)), 1e-5, convention)

    plain = spent("poisson", of_poisson)
    assert spent('truncated-poisson{"limit": 1000}') == pytest.approx(plain, abs=1e-3)
    assert spent('truncated-poisson{"limit": 20}') > 1.05 * plain


def test_extreme_noise_is_refused_before_losses_are_tabulated() -> None:
    (line,) = report(Ledger((Entry(NAME, 20, 5, 0.01, 100),)), 1e-3)
    assert line.epsilon is None
    assert "losses are tabulated up to epsilon 100" in str(line.note)


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        ("truncated-poisson", {}, "truncated-poisson: missing a required argument: 'limit'; correct its options"),
        ("truncated-poisson", {"limit": 4}, "limit must be at least the cohort of 5 users, found 4"),
        ("truncated-poisson", {"limit": 6.5}, "limit must be an integer, found 6.5"),
        ("poisson", {"limit": 6}, "poisson: got an unexpected keyword argument 'limit'; correct its options"),
    ],
)
def test_wrong_options_are_refused(sampler: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        flsim.FedAvg(5, sampler=sampler, sampler_options=options)
