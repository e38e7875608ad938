"""Tests of rounds: participation and noise, compared with the ledger, and canary users with random updates."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy
from scipy import stats

from flsim.base.arrays import Flags, Floats, Ints
from flsim.base.errors import InputError
from flsim.base.extensions import is_custom, made
from flsim.models.language_model import Params
from flsim.privacy import noise
from flsim.privacy.ledger import AuditHParams, Entry, Ledger, cosines
from flsim.privacy.sampling import Sampling, draw_cohort

DRAWS = 10**8  # users times rounds that an audit recomputes, in about a second
NOISE_ROUNDS = 20  # rounds whose noise is recomputed
CORRELATED_VALUES = 10**6  # values of correlated noise per round; the values of all rounds are in memory


@dataclass(frozen=True)
class RoundTest:
    """A test of the first `rounds` rounds against the ledger, whose claim is `stated` in words."""

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


# Canary users of a training, whose updates are random: the cosines after training, and the epsilon that they estimate.
#
# Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning" (2023). The cosine of the change of the
# model and a vector that took no part has, for d parameters, a density proportional to (1 - t^2)^((d - 3) / 2). Cosines
# of vectors that took part are assumed to be normal. The epsilon of distinguishing the two distributions is an
# estimate, which can exceed the true epsilon. There is none if the normal distribution extends beyond 1, as in small
# models.

BEYOND = 1e-3  # largest probability of a normal cosine beyond 1, per delta


@dataclass(frozen=True)
class CanaryUsers:
    """The canary users of a training after a round.

    `cosines` [K] are of each canary user's vector and the change of the model, and `present` [K] marks those who took
    part. `unseen` [K] are cosines of random vectors that were not sent, and empty if coins exclude users.
    """

    cosines: Floats
    present: Flags
    unseen: Floats
    has_coins: bool
    dimension: int
    delta: float

    @property
    def members(self) -> Floats:
        return self.cosines[self.present]

    @property
    def others(self) -> Floats:
        """Return the cosines of canary users that did not take part: excluded by coins, or unseen."""
        return np.concatenate([self.cosines[~self.present], self.unseen])

    def estimate(self, values: Floats) -> float | None:
        """Return the epsilon of members, or of others, at `delta`; None if all are equal, or if `is_too_small`."""
        if len(np.unique(values)) < 2 or self.is_too_small(values):
            return None
        return epsilon_of_cosines(float(values.mean()), float(values.std(ddof=1)), self.dimension, self.delta)

    def is_too_small(self, values: Floats) -> bool:
        """Return whether the model has too few parameters for an estimate: the normal distribution extends beyond 1."""
        spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        return spread > 0 and _beyond(float(values.mean()), spread) > BEYOND * self.delta


def canary_users_of(settings: AuditHParams, seed: int, first: Params, last: Params, delta: float) -> CanaryUsers | None:
    """Return the canary users of a training from the parameters before and after it; None if there are none."""
    if not (number := settings.update_canaries):
        return None
    change = {name: value.double() - first[name].double() for name, value in last.items()}
    has_coins = settings.canary_coins
    every = cosines(change, seed, range(number if has_coins else 2 * number))
    dimension = sum(value.numel() for value in change.values())
    return CanaryUsers(every[:number], settings.present(seed), every[number:], has_coins, dimension, delta)


def epsilon_of_cosines(mean: float, deviation: float, dimension: int, delta: float) -> float:
    """Return the epsilon, at a delta, of distinguishing normal cosines from those of a uniform direction.

    It is the smallest epsilon with P[S] <= e^epsilon Q[S] + delta for all sets S and both orders of the distributions.
    Raises InputError if the normal distribution has too much probability beyond 1 for this delta: the uniform direction
    has none, so the smallest epsilon would belong to impossible cosines, or be infinite.

    >>> round(epsilon_of_cosines(2000**-0.5, 2000**-0.5, 2000, 0.01), 3)
    2.318
    """
    if (beyond := _beyond(mean, deviation)) > BEYOND * delta:
        raise InputError(
            f"cosines of mean {mean:.3g} and deviation {deviation:.3g} are not normal: the normal distribution "
            f"has probability {beyond:.2g} beyond 1, and at most {BEYOND * delta:.2g} is allowed at delta "
            f"{delta:.3g}; use more than {dimension:,} parameters or a larger delta"
        )
    laws = _laws(mean, deviation, dimension)
    if _delta(laws, 0.0) <= delta:
        return 0.0
    high = 1.0
    while _delta(laws, high) > delta:
        high *= 2
    return float(scipy.optimize.brentq(lambda epsilon: _delta(laws, epsilon) - delta, 0.0, high, xtol=1e-9))


def delta_of_cosines(mean: float, deviation: float, dimension: int, epsilon: float) -> float:
    """Return delta at an epsilon of distinguishing the distributions of `epsilon_of_cosines`."""
    return _delta(_laws(mean, deviation, dimension), epsilon)


def _beyond(mean: float, deviation: float) -> float:
    return float(scipy.special.ndtr((-1 - mean) / deviation) + scipy.special.ndtr((mean - 1) / deviation))


def _laws(mean: float, deviation: float, dimension: int) -> tuple[Floats, Floats, Floats]:
    """Return points of a grid, with the log-densities of participants and of chance."""
    half, spread = (dimension - 1) / 2, dimension**-0.5
    # From 1,000 parameters on, the distribution of chance is treated as normal, as in the authors' code (one_shot_epe).
    # In the tail delta is coarse: 41% off at 1,500 parameters and epsilon 22.
    chance = scipy.stats.norm(0, spread) if dimension >= 1_000 else scipy.stats.beta(half, half, loc=-1, scale=2)
    taking_part = scipy.stats.norm(mean, deviation)
    steps = np.linspace(-12, 12, 20_001)
    places = np.union1d(steps * spread, mean + steps * deviation)
    with np.errstate(divide="ignore"):
        return places, taking_part.logpdf(places), chance.logpdf(places)


def _delta(laws: tuple[Floats, Floats, Floats], epsilon: float) -> float:
    places, first, second = laws
    return max(_excess(places, first, second, epsilon), _excess(places, second, first, epsilon))


def _excess(places: Floats, log_p: Floats, log_q: Floats, epsilon: float) -> float:
    """Return the integral of max(0, p - e^epsilon q)."""
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.where(np.isneginf(log_p), np.inf, np.exp(epsilon + log_q - log_p))
        return float(np.trapezoid(np.maximum(0.0, 1 - ratio) * np.exp(log_p), places))
