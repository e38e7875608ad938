"""Tests of rounds: participation and noise, compared with the ledger.

Cohorts and noise are functions of (seed, round), so an audit recomputes them. This detects faults that models do not
show: repeated cohorts, a user who counts several times, or repeated noise. The p-value of a sum of squared deviations
is that of the gamma distribution with the exact mean and variance. Correlated noise, multiplied by the matrix C of the
ledger, is independent.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from flsim.base.arrays import Floats, Ints
from flsim.base.extensions import is_custom, made
from flsim.models.language_model import Params
from flsim.privacy import noise
from flsim.privacy.ledger import Entry, Ledger
from flsim.privacy.sampling import Sampling, draw_cohort

DRAWS = 10**8  # users times rounds that an audit recomputes, in about a second
NOISE_ROUNDS = 20  # rounds whose noise is recomputed
CORRELATED_VALUES = 10**6  # values of correlated noise per round; the values of all rounds are in memory


@dataclass(frozen=True)
class RoundTest:
    """A test of rounds, from the first one, against the claim of the ledger, which `stated` has as text."""

    rounds: int
    p_value: float
    stated: str


def participation(ledger: Ledger, seed: int, executes_code: bool) -> RoundTest | None:
    """Test who took part in each round against the distribution of the sampler in the ledger.

    Sums of squared deviations of users' numbers of rounds, and of sizes of cohorts, are tested with Bonferroni's
    correction. None if settings changed, custom code must not be executed, or the sampler's event is not sampling.
    """
    first = ledger.entries[0] if len(ledger.entries) == 1 else None
    if first is None or (is_custom(first.sampler) and not executes_code):
        return None
    sampling = Sampling(first.sampler, first.population, first.cohort)
    rate = _stated_rate(sampling)
    if rate is None and sampling.participation(ledger.rounds) is None:
        return None
    rounds = min(ledger.rounds, max(2, DRAWS // first.population))
    limit = sampling.participation(rounds)
    times, sizes, most = np.zeros(first.population, np.int64), np.zeros(rounds, np.int64), 0
    last, least_gap = np.full(first.population, -rounds), rounds
    for round_ in range(rounds):
        occurrences = np.bincount(
            draw_cohort(seed, round_, first.population, first.cohort, first.sampler), minlength=first.population
        )
        times, sizes[round_], most = times + occurrences, occurrences.sum(), max(most, int(occurrences.max()))
        if limit is not None:
            least_gap = min(least_gap, int((round_ - last[occurrences > 0]).min(initial=rounds)))
            last[occurrences > 0] = round_
    if limit is not None:
        is_kept = most <= 1 and int(times.max()) <= limit.times and least_gap >= min(limit.separation, rounds)
        apart = f", at least {limit.separation:,} rounds apart" if limit.separation > 1 else ""
        return RoundTest(rounds, float(is_kept), f"at most {limit.times:,} rounds of a user{apart}")
    is_fixed = rate == "fixed-size"
    stated = "sampling without replacement" if is_fixed else "Poisson sampling"
    if most > 1 or (is_fixed and (sizes != first.cohort).any()):
        return RoundTest(rounds, 0.0, stated)
    if isinstance(rate, float):
        p_values = [
            _of_squares(times, rounds, rate, first.population),
            _of_squares(sizes, first.population, rate, rounds),
        ]
    else:
        # The squares of one round sum to a constant, and products of two rounds are overlaps, which are hypergeometric.
        users, share = first.population, first.cohort / first.population
        mean = rounds * first.cohort * (1 - share)
        overlap = first.cohort * share * (1 - share) * (users - first.cohort) / max(1, users - 1)
        squares = float(((times - rounds * first.cohort / users) ** 2).sum())
        p_values = [_gamma(squares, mean, 2 * rounds * (rounds - 1) * overlap)]
    return RoundTest(rounds, min(1.0, len(p_values) * min(p_values)), stated)


def independence(ledger: Ledger, seed: int, like: Params, executes_code: bool) -> RoundTest | None:
    """Test the size of the noise of rounds, and its independence of the noise of the previous round.

    Squares of standard normal noise have a chi-squared sum (of Skellam noise nearly a gamma sum), and its product with
    an independent vector is normal. None without noise, or if the ledger does not have independent noise with one
    multiplier.
    """
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent

    first = ledger.entries[0] if len(ledger.entries) == 1 else None
    if first is None or not first.noise_multiplier or (is_custom(first.noise) and not executes_code):
        return None
    rounds = min(ledger.rounds, NOISE_ROUNDS)
    if skellam := noise.skellam_of(first.noise, seed, like):
        z, deviation = first.noise_multiplier, skellam.deviation(first.noise_multiplier)
        standard = (_flat(skellam.integers(z, round_)) / deviation for round_ in range(rounds))
        return RoundTest(rounds, _of_noise(standard, deviation**-2), "independent Skellam noise")
    kind = noise.noise_class(first.noise)
    if issubclass(kind, noise.Correlated):
        values = [flat[:CORRELATED_VALUES] for flat in _rounds(first, seed, like, rounds)]
        whitened = made(first.noise, kind, seed, {}).matrix(rounds) @ np.stack(values)
        return RoundTest(rounds, _of_noise(iter(whitened)), "correlated standard normal noise")
    if is_custom(first.noise):
        sampling = Sampling(first.sampler, first.population, first.cohort)
        limit, mechanism = sampling.participation(ledger.rounds), sampling(GaussianDpEvent(first.noise_multiplier))
        event = noise.noise_event(first.noise, sampling, first.noise_multiplier, ledger.rounds)
        if event != SelfComposedDpEvent(mechanism, limit.times if limit else ledger.rounds):
            return None
    return RoundTest(rounds, _of_noise(_rounds(first, seed, like, rounds)), "independent standard normal noise")


def _rounds(entry: Entry, seed: int, like: Params, rounds: int) -> Iterator[Floats]:
    """Yield the noise of each round as a vector."""
    slots = noise.init(entry.noise, seed, like)
    for round_ in range(rounds):
        values, slots = noise.step(entry.noise, seed, like, slots, round_)
        yield _flat(values)


def _flat(values: Params) -> Floats:
    return np.concatenate([values[name].numpy().ravel() for name in sorted(values)])


def _of_noise(rounds: Iterator[Floats], excess: float = 0.0) -> float:
    """Return the p-value of rounds of independent standard values with this excess kurtosis; 0 is normal."""
    before: Floats | None = None
    squares, product, variance, values = 0.0, 0.0, 0.0, 0
    for flat in rounds:
        if before is not None:
            product, variance = product + float(before @ flat), variance + float(before @ before)
        squares, values, before = squares + float(flat @ flat), values + len(flat), flat
    of_size = _gamma(squares, values, (2 + excess) * values)  # chi-squared for normal values
    of_pairs = 2 * float(stats.norm.sf(abs(product) / math.sqrt(variance))) if variance else 1.0
    return min(1.0, 2 * min(of_size, of_pairs))


def _stated_rate(sampling: Sampling) -> float | str | None:
    """Return the rate of Poisson sampling in a sampler's event, or "fixed-size"; None if it is another event."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent

    mechanism = GaussianDpEvent(1.0)
    event = sampling(mechanism)
    if event == SampledWithoutReplacementDpEvent(sampling.population, sampling.cohort, mechanism):
        return "fixed-size"
    match event:
        case PoissonSampledDpEvent(sampling_probability=rate, event=part) if part == mechanism:
            return float(rate)
    return None


def _of_squares(counts: Ints, trials: int, rate: float, number: int) -> float:
    """Return the p-value of the squared deviations of independent binomial counts."""
    variance = trials * rate * (1 - rate)
    fourth = variance + 3 * variance**2 - 6 * variance**2 / trials
    squares = float(((counts - trials * rate) ** 2).sum())
    return _gamma(squares, number * variance, number * (fourth - variance**2))


def _gamma(value: float, mean: float, variance: float) -> float:
    """Return the two-sided p-value under the gamma distribution with this mean and variance; 1 if the variance is 0."""
    if variance <= 0:
        return 1.0
    law = stats.gamma(mean**2 / variance, scale=variance / mean)
    return min(1.0, 2 * min(float(law.cdf(value)), float(law.sf(value))))
