"""Cohorts are a pure function of (seed, round, population), and each sampler has the distribution that it states."""

import math
from collections import Counter
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_names import with_valid_options
from scipy import stats

import flsim
from flsim.base.errors import InputError
from flsim.base.extensions import made, options_of, with_options, without_options
from flsim.base.rng import stream
from flsim.privacy.conventions import CONVENTIONS, Convention, sound_convention
from flsim.privacy.ledger import Entry, Ledger, epsilon, reported
from flsim.privacy.sampling import (
    SAMPLERS,
    MinSeparation,
    Poisson,
    Sampling,
    draw_cohort,
    refuse_unaccounted,
    shard_ranges,
)
from flsim.privacy.table import report

REPLAYED = ("available", "fedbuff")  # samplers that also draw all earlier rounds


def test_every_user_is_equally_likely() -> None:
    """In 4,000 draws of 5 of 20 users, a chi-squared test rejects falsely once in 10,000 (fixed seed). Counts within a
    round are negatively correlated, so the statistic is smaller: its mean is 20 (1 - 1/4) = 15, not 19."""
    counts = np.zeros(20)
    for round_ in range(4_000):
        counts[draw_cohort(0, round_, 20, 5, "fixed-size")] += 1
    statistic = ((counts - 1_000) ** 2 / 1_000).sum() * 19 / 15
    assert stats.chi2(19).sf(statistic) > 1e-4


@pytest.mark.parametrize(("population", "size"), [(12, 4), (12, 12), (10, 4), (7, 1)])
def test_round_robin_takes_all_users_in_one_order(population: int, size: int) -> None:
    """Users take part equally often in rounds whose cohorts together are a multiple of the population."""
    period = population // math.gcd(population, size)
    drawn = [draw_cohort(3, round_, population, size, "round-robin") for round_ in range(2 * period)]
    counts = np.bincount(np.concatenate(drawn[:period]), minlength=population)
    assert set(counts.tolist()) == {period * size // population}
    assert all(np.array_equal(first, again) for first, again in zip(drawn[:period], drawn[period:], strict=True))
    other = [draw_cohort(4, round_, population, size, "round-robin").tolist() for round_ in range(period)]
    assert size == population or other != [cohort.tolist() for cohort in drawn[:period]]


@pytest.mark.parametrize(
    ("name", "population", "cohort"),
    [
        ("round-robin", 23, 5),
        ("round-robin", 7, 7),
        ('min-separation{"separation": 6}', 31, 5),
        ('min-separation{"separation": 1}', 9, 3),
        ('cyclic-poisson{"separation": 5}', 31, 4),
        ('min-separation{"deadline": 1.0, "separation": 6, "spread": 1.0}', 31, 5),
        ("balls-in-bins", 23, 6),
        ('available{"availability": 0.5, "separation": 4}', 23, 5),
    ],
)
def test_no_user_takes_part_more_often_than_is_stated(name: str, population: int, cohort: int) -> None:
    """The limits of `participation` hold after every round up to 1,000, and the smallest separation is reached."""
    rounds, sampling = 1_000, Sampling(name, population, cohort)
    times, last, least = np.zeros(population, int), np.full(population, -rounds), rounds
    reached = 0
    for round_ in range(rounds):
        drawn = draw_cohort(3, round_, population, cohort, name)
        times[drawn] += 1
        least, last[drawn] = min(least, int((round_ - last[drawn]).min(initial=rounds))), round_
        limit = sampling.participation(round_ + 1)
        assert limit is not None
        assert times.max() <= limit.times
        reached += times.max() == limit.times
    assert limit is not None
    assert least == limit.separation
    if name == "round-robin":
        assert reached == rounds


def test_groups_are_disjoint_hold_everybody_and_differ_by_one_user_at_most() -> None:
    sampler = MinSeparation(2, 4)
    groups = [set(sampler.group(8, round_, 23).tolist()) for round_ in range(4)]
    assert sorted(user for group in groups for user in group) == list(range(23))
    assert sorted(map(len, groups)) == [5, 6, 6, 6]
    assert groups[1] == set(sampler.group(8, 5, 23).tolist())
    assert groups[1] != set(sampler.group(9, 1, 23).tolist())


def test_balls_in_bins_assigns_each_user_to_one_uniform_bin() -> None:
    """23 users and cohorts of 6 give 4 bins (3.83, rounded), which repeat. Chi-squared over 1,000 seeds (p > 1e-4)."""
    counts = np.zeros((23, 4))
    for seed in range(1_000):
        bins = [draw_cohort(seed, round_, 23, 6, "balls-in-bins") for round_ in range(4)]
        assert sorted(np.concatenate(bins).tolist()) == list(range(23))
        for number, users in enumerate(bins):
            counts[users, number] += 1
    assert np.array_equal(draw_cohort(8, 1, 23, 6, "balls-in-bins"), draw_cohort(8, 9, 23, 6, "balls-in-bins"))
    assert stats.chi2(23 * 3).sf(((counts - 250) ** 2 / 250).sum()) > 1e-4


def test_cyclic_poisson_takes_every_user_equally_often() -> None:
    """In 4,000 rounds with 5 of 20 users in 2 groups, each user is in half of the rounds of its group (p > 1e-4)."""
    counts = np.zeros(20)
    for round_ in range(4_000):
        counts[draw_cohort(2, round_, 20, 5, 'cyclic-poisson{"separation": 2}')] += 1
    assert stats.chi2(20).sf(((counts - 1_000) ** 2 / 500).sum()) > 1e-4


@pytest.mark.parametrize(
    ("name", "loss", "answering"),
    [
        ("poisson", {}, 1.0),
        ("poisson", {"deadline": 0.8, "durations": "exponential"}, 1 - math.exp(-0.8)),
        (
            'cyclic-poisson{"separation": 1}',
            {"deadline": 1.5, "dropout": 0.2},
            0.8 * math.erf(1.5 / math.sqrt(math.pi)),
        ),
    ],
)
def test_poisson_sampling_with_lost_users_is_poisson_sampling_at_a_lower_rate(
    name: str, loss: dict[str, object], answering: float
) -> None:
    """In rounds of 5 of 20 users, some drop out or are late. Cohort sizes are binomial; users and pairs are equally
    likely. Each test rejects falsely once in 10,000. A half-normal duration of mean 1 is within d with probability
    erf(d / sqrt(pi))."""
    rounds, thinned = 2_000, 0.25 * answering
    sampler = with_options(without_options(name), options_of(name) | loss)
    present = np.zeros((rounds, 20))
    for round_ in range(rounds):
        drawn = draw_cohort(1, round_, 20, 5, sampler)
        assert set(drawn.tolist()) <= set(draw_cohort(1, round_, 20, 5, name).tolist())
        present[round_, drawn] = 1
    law = stats.binom(20, thinned)
    sizes = np.bincount(present.sum(1).astype(int), minlength=9)
    expected = rounds * np.append(law.pmf(range(7)), law.sf(6))
    observed = np.append(sizes[:7], sizes[7:].sum())
    assert stats.chi2(7).sf(((observed - expected) ** 2 / expected).sum()) > 1e-4
    variance = rounds * thinned * (1 - thinned)
    assert stats.chi2(20).sf(((present.sum(0) - rounds * thinned) ** 2 / variance).sum()) > 1e-4
    together = (present.T @ present)[np.triu_indices(20, 1)]
    deviations = np.abs(together - rounds * thinned**2) / math.sqrt(rounds * thinned**2 * (1 - thinned**2))
    assert deviations.max() < stats.norm.isf(0.5e-4 / 190)
    event = Sampling(sampler, 20, 5)(GaussianDpEvent(2.0))
    assert event == PoissonSampledDpEvent(pytest.approx(thinned, rel=1e-14), GaussianDpEvent(2.0))


@pytest.mark.parametrize(
    "name",
    [
        'fixed-size{"dropout": 0.1}',
        'fixed-size{"deadline": 2}',
        'truncated-poisson{"dropout": 0.1, "limit": 9}',
        'poisson{"deadline": 2, "spread": 0.5}',
        'cyclic-poisson{"deadline": 2, "separation": 1, "spread": 0.5}',
    ],
)
def test_other_losses_of_users_have_no_epsilon(name: str) -> None:
    reason = "less often.*remove the spread" if "spread" in name else 'distribution of its cohorts.*use "poisson"'
    for refuse in (lambda: refuse_unaccounted(name), lambda: Sampling(name, 20, 5)(GaussianDpEvent(1))):
        with pytest.raises(InputError, match=reason):
            refuse()
    assert 0 < sum(len(draw_cohort(0, round_, 20, 5, name)) for round_ in range(50)) < 250
    refuse_unaccounted("fixed-size")


@pytest.mark.parametrize("dropout", [-0.1, 1, 1.5, "0.5"])
def test_an_impossible_dropout_is_refused(dropout: object) -> None:
    with pytest.raises(InputError, match="dropout must be at least 0 and below 1, found"):
        Poisson(5, dropout=dropout)  # type: ignore[arg-type]


@settings(max_examples=30)
@given(population=st.integers(1, 500), data=st.data(), seed=st.integers(0, 2**40), round_=st.integers(0, 10**6))
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_draws_users_in_order_and_repeatably(
    sampler: str, population: int, data: st.DataObject, seed: int, round_: int
) -> None:
    size = data.draw(st.integers(1, population))
    name = with_valid_options(sampler, size)
    round_ = round_ % 9 if sampler in REPLAYED else round_
    cohort = draw_cohort(seed, round_, population, size, name)
    assert cohort.dtype == np.int64
    assert set(cohort.tolist()) <= set(range(population))
    has_repeats = SAMPLERS[sampler].has_repeats
    assert cohort.tolist() == sorted(cohort.tolist() if has_repeats else set(cohort.tolist()))
    np.testing.assert_array_equal(cohort, draw_cohort(seed, round_, population, size, name))
    fewest, most = made(name, SAMPLERS[sampler], size).sizes(population)
    assert fewest <= len(cohort) <= most


def test_poisson_cohorts_may_be_empty_or_hold_everybody() -> None:
    sizes = {len(draw_cohort(0, round_, 2, 1, "poisson")) for round_ in range(50)}
    assert sizes == {0, 1, 2}
    empty = next(cohort for round_ in range(50) if not len(cohort := draw_cohort(0, round_, 2, 1, "poisson")))
    assert empty.dtype == np.int64
    assert empty.shape == (0,)
    assert draw_cohort(0, 0, 30, 30, "poisson").tolist() == list(range(30))


def test_draws_with_replacement_are_multinomial() -> None:
    """In 3,000 rounds of 5 draws of 20 users, users are equally likely. All five draws differ with probability 20 x 19
    x 18 x 17 x 16 / 20^5. Each check rejects falsely once in 10,000."""
    rounds = 3_000
    drawn = np.stack([draw_cohort(1, round_, 20, 5, "with-replacement") for round_ in range(rounds)])
    times = np.bincount(drawn.ravel(), minlength=20)
    assert stats.chi2(19).sf(((times - rounds / 4) ** 2 / (rounds / 4)).sum()) > 1e-4
    differ = stats.binom(rounds, 20 * 19 * 18 * 17 * 16 / 20**5)
    assert differ.ppf(0.5e-4) <= (np.diff(drawn) > 0).all(1).sum() <= differ.isf(0.5e-4)


def test_sampling_with_replacement_is_refused_by_every_accountant() -> None:
    """dp_accounting has the event but no bound for it; see docs/decisions.md."""
    ledger = Ledger((Entry("with-replacement", 1_000, 10, 1.0, 5),))
    for line in report(ledger, 1e-5):
        assert line.epsilon is None
        assert "does not support SampledWithReplacementDpEvent" in str(line.note)
    assert [line.convention.accountant for line in report(ledger, 1e-5)] == ["rdp", "pld"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_impossible_cohorts_are_neither_drawn_nor_accounted(sampler: str) -> None:
    for size in (0, 11, -1):
        with pytest.raises(InputError, match=r"cohort must be between 1 and the 10 users"):
            draw_cohort(0, 0, 10, size, sampler)
        with pytest.raises(InputError, match=r"cohort must be between 1 and the 10 users"):
            Sampling(sampler, 10, size)(GaussianDpEvent(1))


@given(population=st.integers(1, 300), data=st.data())
def test_shards_cover_every_user_once(population: int, data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, population))
    ranges = shard_ranges(population, shards)
    assert [user for first, last in ranges for user in range(first, last)] == list(range(population))
    assert {last - first for first, last in ranges} <= {population // shards, population // shards + 1}


def test_more_shards_than_users_are_refused() -> None:
    with pytest.raises(InputError, match=r"system\.shards must be between 1 and the 3 training users, found 4"):
        shard_ranges(3, 4)


def test_streams_differ_by_seed_purpose_and_every_key() -> None:
    keys: list[tuple[int, str, tuple[int | str, ...]]] = [
        (0, "a", ()),
        (1, "a", ()),
        (0, "b", ()),
        (0, "a", (1,)),
        (0, "a", (2,)),
        (0, "a", ("1",)),
        (0, "a", (1, 2)),
        (0, "a", (12,)),
        (0, "a/1", ()),
    ]
    draws = {int(stream(seed, purpose, *rest).integers(2**62)) for seed, purpose, rest in keys}
    assert len(draws) == len(keys)
    assert stream(3, "a", np.int64(4)).random() == stream(3, "a", 4).random()  # type: ignore[arg-type]


def test_poisson_sampling_with_dropout_has_the_exact_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 users, q = 1/3, p = 1/2: uniform numbers on grids of 3 and 2 give each of 216 outcomes equally often.

    A set of s users has probability (1/6)^s (5/6)^(3 - s), which is 5^(3 - s) of the 216 outcomes."""
    outcomes: Counter[tuple[int, ...]] = Counter()
    for users in product((0, 1 / 3, 2 / 3), repeat=3):
        for answers in product((0, 1 / 2), repeat=3):
            numbers = {"poisson-cohort": users, "dropout": answers}

            def fake(seed: int, purpose: str, round_: int, numbers: dict[str, Any] = numbers) -> Any:
                return SimpleNamespace(random=lambda size: np.array(numbers[purpose][:size]))

            monkeypatch.setattr("flsim.privacy.sampling.stream", fake)
            outcomes[tuple(draw_cohort(0, 0, 3, 1, 'poisson{"dropout": 0.5}').tolist())] += 1
    assert outcomes == {users: 5 ** (3 - size) for size in range(4) for users in combinations(range(3), size)}


NAME = 'truncated-poisson{"limit": 6}'
PLD = sound_convention(NAME)


def test_a_truncated_cohort_is_a_poisson_cohort_or_a_subset_of_it() -> None:
    """In 5,000 rounds with 5 of 20 users, at most 6, sizes are min(6, Binomial(20, 1/4)). Users are equally likely (p >
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


def test_the_ledger_composes_the_event_of_truncation_and_only_pld_supports_it() -> None:
    entry = Entry(NAME, 20, 5, 1.5, 3)
    assert entry.event("S") == SelfComposedDpEvent(TruncatedSubsampledGaussianDpEvent(20, 0.25, 6, 1.5), 3)
    assert [one.name for one in reported(NAME)] == ["truncated-poisson-pld"]


def test_truncation_costs_epsilon_only_if_its_limit_is_reached() -> None:
    """A limit that is often reached costs more, because a user then also decides whether another user is excluded."""

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
