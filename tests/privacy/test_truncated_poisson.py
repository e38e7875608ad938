"""Truncated Poisson sampling: its law, and the epsilon of its own event."""

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from scipy import stats

import flsim
from flsim.attacks.audit.claim import Claim
from flsim.base.errors import InputError
from flsim.privacy.accounting import epsilon_of
from flsim.privacy.conventions import sound_convention
from flsim.privacy.ledger import EPSILONS, Entry, Ledger, epsilon, reported
from flsim.privacy.sampling import draw_cohort
from flsim.privacy.table import report

NAME = 'truncated-poisson{"limit": 6}'
PLD = sound_convention(NAME)


def test_a_cohort_is_a_poisson_cohort_or_a_subset_of_the_limit() -> None:
    """5,000 rounds, 5 of 20 users, at most 6: sizes are min(6, Binomial(20, 1/4)), and users are as likely.

    Each chi-squared test rejects falsely once in 10,000 (fixed seed).
    """
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
    (line,) = report(Ledger((entry,)), 1e-3)
    assert line.epsilon == epsilon(Ledger((entry,)), 1e-3, PLD)


def test_an_epsilon_of_dp_accounting() -> None:
    """dp_accounting 0.6.0, pld/pld_privacy_accountant_test.py, test_truncated_subsampled_gaussian_basic."""
    event = ComposedDpEvent(
        [
            SelfComposedDpEvent(TruncatedSubsampledGaussianDpEvent(4, 0.5, 2, 1.0), 3),
            SelfComposedDpEvent(TruncatedSubsampledGaussianDpEvent(3, 0.5, 2, 1.0), 2),
        ]
    )
    assert epsilon_of(event, 1e-6, PLD) == pytest.approx(17.904330, abs=1e-6)


def test_a_limit_that_is_never_reached_costs_what_poisson_sampling_does() -> None:
    """And one that is reached often costs more, because a user then also decides whether another one is left out."""

    def spent(sampler: str, name: str) -> float:
        (convention,) = (
            line for line in report(Ledger((Entry(sampler, 1_000, 20, 1.0, 50),)), 1e-5) if line.convention.name == name
        )
        assert convention.epsilon is not None
        return convention.epsilon

    plain = spent("poisson", "poisson-pld")
    assert spent('truncated-poisson{"limit": 1000}', "truncated-poisson-pld") == pytest.approx(plain, abs=1e-3)
    assert spent('truncated-poisson{"limit": 20}', "truncated-poisson-pld") > 1.05 * plain


def test_an_audit_has_the_whole_curve() -> None:
    claim = Claim.of_ledger(Ledger((Entry(NAME, 20, 5, 1.5, 3),)), NAME, 1e-3)
    assert claim.convention is PLD
    deltas = claim.curve.deltas
    assert len(deltas) == len(EPSILONS)
    assert (np.diff(deltas) <= 0).all()
    assert np.interp(claim.epsilon, EPSILONS, deltas) == pytest.approx(1e-3, rel=0.05)


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
        ("truncated-poisson", {"limit": "all"}, "limit must be an integer, found 'all'"),
        ("poisson", {"limit": 6}, "poisson: got an unexpected keyword argument 'limit'; correct its options"),
        ('poisson{"limit": 6}', {}, "must be one of fixed-size, poisson, truncated-poisson"),
    ],
)
def test_wrong_options_are_refused(sampler: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        flsim.FedAvg(5, sampler=sampler, sampler_options=options)
