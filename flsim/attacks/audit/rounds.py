"""Tests of rounds: participation and noise, compared with the ledger.

Cohorts and noise are functions of (seed, round), so an audit recomputes them. This detects faults that models do not
show: repeated cohorts, a user who counts several times, or repeated noise.

The distribution of participation counts follows from the sampler in the ledger. The p-value of a sum of squared
deviations is that of the gamma distribution with the exact mean and variance.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from flsim.base.extensions import is_custom
from flsim.models.language_model import Params
from flsim.privacy import noise
from flsim.privacy.ledger import Entry, Ledger
from flsim.privacy.sampling import cohort_event, draw_cohort

DRAWS = 10**8  # users times rounds that an audit recomputes, in about a second
NOISE_ROUNDS = 20  # rounds whose noise is recomputed


@dataclass(frozen=True)
class RoundTest:
    """A test of rounds against the ledger.

    Attributes:
        rounds: number of rounds that were recomputed, from the first round.
        p_value: probability of such rounds, or less likely rounds, if the ledger is right.
        stated: the claim of the ledger, as text.
    """

    rounds: int
    p_value: float
    stated: str


def participation(ledger: Ledger, seed: int, executes_code: bool) -> RoundTest | None:
    """Test who took part in each round against the distribution of the sampler in the ledger.

    Two sums of squared deviations are tested: of the users' numbers of rounds, and of the sizes of cohorts, with
    Bonferroni's correction. A user who is drawn twice in one round refutes the claim immediately, and so does a cohort
    whose size differs from a fixed size.

    Args:
        ledger: the ledger of the rounds.
        seed: the experiment's seed.
        executes_code: whether a custom sampler can be executed.

    Returns:
        The test; None if settings changed between rounds, the sampler must not be executed, or its event is not
        sampling.
    """
    first = _only(ledger)
    if first is None or (is_custom(first.sampler) and not executes_code) or (rate := _stated(first)) is None:
        return None
    is_fixed = rate == "fixed-size"
    rounds = min(ledger.rounds, max(2, DRAWS // first.population))
    times, sizes, most = np.zeros(first.population, np.int64), np.zeros(rounds, np.int64), 0
    for round_ in range(rounds):
        drawn = np.bincount(
            draw_cohort(seed, round_, first.population, first.cohort, first.sampler), minlength=first.population
        )
        times, sizes[round_], most = times + drawn, drawn.sum(), max(most, int(drawn.max()))
    stated = "sampling without replacement" if is_fixed else "Poisson sampling"
    if most > 1 or (is_fixed and (sizes != first.cohort).any()):
        return RoundTest(rounds, 0.0, stated)
    p_values = [_of_users(times, first, rounds, is_fixed)]
    if not is_fixed:
        p_values.append(_of_squares(sizes, first.population, first.cohort / first.population, rounds))
    return RoundTest(rounds, min(1.0, len(p_values) * min(p_values)), stated)


def independence(ledger: Ledger, seed: int, like: Params, executes_code: bool) -> RoundTest | None:
    """Test the size of the noise of rounds, and its independence of the noise of the previous round.

    The squares of standard normal noise have a chi-squared sum. Given a vector, its product with an independent vector
    of such noise is normal, with the length of the given vector as its deviation.

    Args:
        ledger, seed, executes_code: see `participation`.
        like: tensors of the parameters' names and shapes.

    Returns:
        The test; None without noise, or if the ledger does not have independent noise with one multiplier.
    """
    first = _only(ledger)
    if first is None or not first.noise_multiplier or (is_custom(first.noise) and not executes_code):
        return None
    if not _is_stated_independent(first, ledger.rounds):
        return None
    rounds, slots = min(ledger.rounds, NOISE_ROUNDS), noise.init(first.noise, seed, like)
    before: NDArray[np.float64] | None = None
    squares, product, variance, values = 0.0, 0.0, 0.0, 0
    for round_ in range(rounds):
        drawn, slots = noise.step(first.noise, seed, like, slots, round_)
        flat = np.concatenate([drawn[name].numpy().ravel() for name in sorted(drawn)])
        if before is not None:
            product, variance = product + float(before @ flat), variance + float(before @ before)
        squares, values, before = squares + float(flat @ flat), values + len(flat), flat
    of_size = 2 * min(float(stats.chi2.cdf(squares, values)), float(stats.chi2.sf(squares, values)))
    of_pairs = 2 * float(stats.norm.sf(abs(product) / math.sqrt(variance))) if variance else 1.0
    return RoundTest(rounds, min(1.0, 2 * min(of_size, of_pairs)), "independent standard normal noise")


def _only(ledger: Ledger) -> Entry | None:
    """Return the entry of all rounds; None if settings changed between rounds."""
    return ledger.entries[0] if len(ledger.entries) == 1 else None


def _stated(entry: Entry) -> str | None:
    """Return the name of the distribution of a sampler's event; None if it is another event."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent

    population, cohort, mechanism = entry.population, entry.cohort, GaussianDpEvent(1.0)
    event = cohort_event(entry.sampler, population, cohort, mechanism)
    if event == SampledWithoutReplacementDpEvent(population, cohort, mechanism):
        return "fixed-size"
    return "poisson" if event == PoissonSampledDpEvent(cohort / population, mechanism) else None


def _is_stated_independent(entry: Entry, rounds: int) -> bool:
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent

    event = noise.noise_event(entry.noise, lambda mechanism: mechanism, entry.noise_multiplier, rounds)
    return bool(event == SelfComposedDpEvent(GaussianDpEvent(entry.noise_multiplier), rounds))


def _of_users(times: NDArray[np.int64], entry: Entry, rounds: int, is_fixed: bool) -> float:
    """Return the p value of the users' numbers of rounds."""
    users, cohort = entry.population, entry.cohort
    if not is_fixed:
        return _of_squares(times, rounds, cohort / users, users)
    # The squares of one round sum to a constant, and products of two rounds are overlaps, which are hypergeometric.
    mean = rounds * cohort * (1 - cohort / users)
    overlap = cohort * (cohort / users) * (1 - cohort / users) * (users - cohort) / max(1, users - 1)
    return _gamma(float(((times - rounds * cohort / users) ** 2).sum()), mean, 2 * rounds * (rounds - 1) * overlap)


def _of_squares(counts: NDArray[np.int64], trials: int, rate: float, number: int) -> float:
    """Return the p value of the squared deviations of independent binomial counts."""
    variance = trials * rate * (1 - rate)
    fourth = variance + 3 * variance**2 - 6 * variance**2 / trials
    squares = float(((counts - trials * rate) ** 2).sum())
    return _gamma(squares, number * variance, number * (fourth - variance**2))


def _gamma(value: float, mean: float, variance: float) -> float:
    """Return the two-sided p value under the gamma distribution with this mean and variance; 1 if the variance is 0."""
    if variance <= 0:
        return 1.0
    law = stats.gamma(mean**2 / variance, scale=variance / mean)
    return min(1.0, 2 * min(float(law.cdf(value)), float(law.sf(value))))
