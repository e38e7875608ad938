"""The computation of epsilon from the released sums, under a stated convention.

Renyi DP of Gaussian noise is computed here. The conversions to epsilon, the privacy loss distributions and the RDP of
other events come from dp_accounting.

[WBK] Wang, Balle, Kasiviswanathan, "Subsampled Renyi Differential Privacy and Analytical Moments Accountant" (2019).
[M] Mironov, "Renyi Differential Privacy" (2017).
[MTZ] Mironov, Talwar, Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism" (2019).
[CKS] Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy" (2020), Proposition 12; and, the same
formula, Balle et al., "Hypothesis Testing Interpretations and Renyi Differential Privacy" (2020), Theorem 21.
[G] Ganesh, "Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians Mechanisms" (2024).
[AKL] Agarwal, Kairouz, Liu, "The Skellam Mechanism for Differentially Private Federated Learning" (2021).
[BH] Bretagnolle, Huber, "Estimation des densites: risque minimax" (1979): the bound of the total variation distance.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    UnsupportedEventError,
)
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_epsilon
from scipy.special import gammaln, logsumexp
from scipy.stats import binom

from flsim.base.arrays import Floats
from flsim.base.errors import InputError, first_line
from flsim.privacy.conventions import Convention

# Renyi differential privacy (RDP) of Gaussian noise on the sum over a sampled cohort, for one round.
#  Each function returns the RDP at every order: float64 [orders], in nats, possibly infinite. The noise multiplier
# sigma is the standard deviation of the noise divided by the distance by which one user moves the sum.
#  dp_accounting computes the same quantities. At fractional orders it adds the absolute values of a series of mixed
# signs, or drops the order if the series does not converge, and its forward differences cancel if noise is large. Both
# give valid but unnecessarily large values, mostly at sampling rates of 0.1 and more.


# The orders of dp_accounting; lower orders, for large epsilons; and some orders above 63 that it omits.
ORDERS: Floats = np.unique([1.02, 1.05, *DEFAULT_RDP_ORDERS, *np.geomspace(64, 1024, 25).round()])
SEPARATE = 0.05  # sigma below which the two normal distributions of a round overlap by less than e^-22
DIFFERENCES = 0.5  # sigma from which the forward differences of [WBK] can give less than the moments
# Low orders suffice to estimate large epsilons.
ORDERS_OF_MIXTURE = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
TAIL = 12.0  # standard deviations beyond which the normal distribution has mass e^-72


def gaussian(orders: Floats, sigma: float) -> Floats:
    """Return the RDP of Gaussian noise on a sum over all users: order / (2 sigma^2) ([M], Corollary 3)."""
    with np.errstate(over="ignore", divide="ignore"):
        return orders / 2 / np.float64(sigma) / sigma


def poisson(orders: Floats, sigma: float, rate: float) -> Floats:
    """Return the RDP if users are drawn independently, for adding or removing one user ([MTZ], section 3).

    The moment A is E[(1 + u)^order] with u = rate (e^((2 x - 1) / (2 sigma^2)) - 1) and x ~ N(0, sigma^2). A - 1 is the
    mean of (1 + u)^order - 1 - order u, which is never negative, so sums lose no digits. Relative errors are below
    1e-9.
    """
    if rate == 0:
        return np.zeros_like(orders)
    if rate == 1:
        return gaussian(orders, sigma)
    log_excesses = [_excess_of_poisson(order, sigma, rate) for order in orders.tolist()]
    return np.array([float(np.logaddexp(0.0, excess)) for excess in log_excesses]) / (orders - 1)


def without_replacement(orders: Floats, sigma: float, rate: float) -> Floats:
    """Return the RDP of drawing a cohort of a fixed size, rate cohort / population, for replacing one user's data.

    It is the smaller of two upper bounds: [WBK], Theorem 27, between integer orders with Corollary 10; and the RDP
    without sampling, because Renyi divergence is jointly quasi-convex (van Erven and Harremoes, "Renyi Divergence and
    Kullback-Leibler Divergence", 2014, Theorem 13).
    """
    if rate == 0:
        return np.zeros_like(orders)
    whole = np.union1d(np.floor(orders), np.ceil(orders))
    log_moments = _log_moments_without_replacement(whole, sigma, rate)
    bound = np.interp(orders, whole, log_moments) / (orders - 1)
    return np.minimum(bound, gaussian(orders, sigma))


@dataclass(frozen=True)
class SkellamDpEvent(DpEvent):  # type: ignore[misc]
    """Skellam noise on a sum of integers; the multiplier is relative to `steps`, the L2 norm of a user's part."""

    noise_multiplier: float
    steps: int


def skellam(orders: Floats, sigma: float, steps: int) -> Floats:
    """Return the RDP of Skellam noise at integer orders, and infinity at others (bound of [AKL], section 3).

    It is a D2^2 / (2 mu) + min(((2 a - 1) D2^2 + 6 D1) / (4 mu^2), 3 D1 / (2 mu)) at order a, with the variance mu =
    (sigma D2)^2. Of integers, the L1 distance D1 is at most the square of the L2 distance D2.
    """
    few = np.minimum((2 * orders + 5) / (4 * sigma**4 * steps**2), 3 / (2 * sigma**2))
    return np.where(orders % 1 == 0, gaussian(orders, sigma) + few, math.inf)


def mixture(orders: Floats, sigma: float, distances: Floats, probabilities: Floats) -> Floats:
    """Return the RDP of removing data that move the sum by a random distance, at `ORDERS_OF_MIXTURE`; else infinity.

    The moment is E[L^order] at x ~ N(0, 1), for the likelihood ratio L of a mixture of normal distributions.
    """
    means = distances[:, None] / sigma
    log_weights = np.log(probabilities)[:, None]

    def log_moment(order: float) -> float:
        places = np.arange(-TAIL, order * float(means.max()) + TAIL, min(1.0, sigma) / 4)
        log_ratio = logsumexp(log_weights + means * (places - means / 2), axis=0)
        return float(logsumexp(order * log_ratio + _log_normal(places))) + math.log(min(1.0, sigma) / 4)

    return np.array([log_moment(a) / (a - 1) if a in ORDERS_OF_MIXTURE else math.inf for a in orders.tolist()])


def _excess_of_poisson(order: float, sigma: float, rate: float) -> float:
    """Return log(A - 1) of `poisson`: at integer orders by the binomial sum, otherwise by an integral."""
    if order.is_integer():
        numbers = np.arange(2.0, order + 1)
        log_weights = _log_binomial(order, numbers) + numbers * math.log(rate) + (order - numbers) * math.log1p(-rate)
        return float(logsumexp(log_weights + _log_abs_expm1(_log_moment(numbers, sigma))))
    if sigma < SEPARATE:
        log_drawn = order * math.log(rate) + float(_log_moment(np.array(order), sigma))
        if log_drawn > 40:
            return log_drawn
        excess = math.exp(log_drawn) + math.expm1(order * math.log1p(-rate))
        return math.log(excess) if excess > 0 else log_drawn
    # The trapezoidal rule converges exponentially: the integrand is analytic up to a distance of pi min(1, sigma).
    step = min(1.0, sigma) / 4
    places = np.arange(-TAIL, order / sigma + TAIL, step)
    return float(logsumexp(_log_bernoulli(order, _log_ratio(places, sigma), rate) + _log_normal(places))) + math.log(
        step
    )


def _log_moments_without_replacement(orders: Floats, sigma: float, rate: float) -> Floats:
    """Return the logarithm of the bound of [WBK], Theorem 27, on A at integer orders from 1 on."""
    numbers = np.arange(2.0, orders.max() + 1)
    log_terms = math.log(2) + _log_moment(numbers, sigma)
    pair = math.log(4) + float(_log_abs_expm1(_log_moment(np.array(2.0), sigma)))
    log_terms[0] = min(log_terms[0], pair)
    if sigma >= DIFFERENCES:  # below, differences are nearly the moments, and 4 times these is more than twice
        differences = _log_differences(numbers, sigma)
        log_terms = np.minimum(log_terms, math.log(4) + differences)
    log_terms += numbers * math.log(rate)
    moments = []
    for order in orders.tolist():
        few = numbers[numbers <= order]
        log_excess = logsumexp(_log_binomial(order, few) + log_terms[: len(few)]) if len(few) else -math.inf
        moments.append(np.logaddexp(0.0, log_excess))
    return np.array(moments)


def _log_differences(drawn: Floats, sigma: float) -> Floats:
    """Return the logarithm of sqrt(B(2 floor(j / 2)) B(2 ceil(j / 2))) for each j, in [WBK]'s notation.

    The forward difference B(l) of E[L^k] at 0, of even order l, is E[(L - 1)^l], for the likelihood ratio L.
    """
    even = np.arange(2.0, drawn[-1] + 2, 2)
    reach = TAIL + math.sqrt(even[-1])
    places = np.arange(-reach, even[-1] / sigma + reach, 1 / 4)
    log_distance, log_normal = _log_abs_expm1(_log_ratio(places, sigma)), _log_normal(places)
    log_b = np.array([logsumexp(order * log_distance + log_normal) for order in even.tolist()]) + math.log(1 / 4)
    lower, upper = (drawn // 2).astype(int) - 1, np.ceil(drawn / 2).astype(int) - 1
    return np.asarray((log_b[lower] + log_b[upper]) / 2)


def _log_moment(order: Floats, sigma: float) -> Floats:
    """Return log E[L^order] = order (order - 1) / (2 sigma^2)."""
    with np.errstate(over="ignore", divide="ignore"):
        return np.asarray(order * (order - 1) / 2 / np.float64(sigma) / sigma)


def _log_ratio(places: Floats, sigma: float) -> Floats:
    """Return log L = (2 x - 1) / (2 sigma^2), for x in units of sigma."""
    return np.asarray((places - 0.5 / sigma) / sigma)


def _log_normal(places: Floats) -> Floats:
    return np.asarray(-np.square(places) / 2 - math.log(2 * math.pi) / 2)


def _log_binomial(order: float, drawn: Floats) -> Floats:
    return np.asarray(gammaln(order + 1) - gammaln(drawn + 1) - gammaln(order - drawn + 1))


def _log_abs_expm1(values: Floats) -> Floats:
    """Return log |e^v - 1|, for large values without overflow."""
    is_large = values > 1
    with np.errstate(divide="ignore"):
        small = np.log(np.abs(np.expm1(np.where(is_large, 0.0, values))))
    return np.where(is_large, values + np.log1p(-np.exp(-np.where(is_large, values, 1.0))), small)


def _log_bernoulli(order: float, log_ratio: Floats, rate: float) -> Floats:
    """Return log((1 + u)^order - 1 - order u) for u = rate (e^log_ratio - 1), for u of any size."""
    log_one = np.where(  # w = log(1 + u); the second form does not overflow
        log_ratio < 1,
        np.log1p(rate * np.expm1(np.minimum(log_ratio, 1.0))),
        np.logaddexp(math.log1p(-rate), math.log(rate) + log_ratio),
    )
    above, below = np.maximum(log_one, 0.0), np.minimum(log_one, 0.0)
    scaled = np.where(  # by e^(-order w) if w > 0
        log_one > 0,
        (order - 1) * np.expm1(-order * above) - order * np.expm1((1 - order) * above),
        np.expm1(order * below) - order * np.expm1(below),
    )
    # Near 0 the difference would cancel, so it is computed as the sum of (order^k - order) w^k / k! from k = 2 on.
    limit = min(0.01, 0.1 / order)
    series = np.polyval([(order**k - order) / math.factorial(k) for k in range(12, 1, -1)], log_one.clip(-limit, limit))
    with np.errstate(divide="ignore", invalid="ignore"):
        near, far = 2 * np.log(np.abs(log_one)) + np.log(series), order * above + np.log(scaled)
    return np.where(np.abs(log_one) < limit, near, far)


TABULATED = 100.0  # epsilon above which losses are not tabulated: tables need gigabytes, and there is no protection
OF_USERS = 1e-3  # step of tabulated losses of users with many records; inversion of a mixture is slow


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InputError(f"delta must be above 0 and below 1, found {delta:g}")


def epsilon_of(event: DpEvent, delta: float, convention: Convention) -> float:
    """Return the epsilon of an event under a convention, possibly infinite; InputError if it is not supported."""
    check_delta(delta)
    if convention.records is not None:
        event = of_users(event, convention.records)
    with np.errstate(all="ignore"):  # extreme noise overflows in between; the result is checked instead
        if convention.accountant == "pld":
            result = _pld(event, delta, convention)
        elif convention.conversion == "tight":
            result = compute_epsilon(ORDERS, rdp_of(event, convention), delta)[0]
        else:
            result = epsilon_of_mironov(rdp_of(event, convention), delta)
    if math.isnan(result):
        raise InputError(
            f"{convention}: the accountant fails numerically for this plan; use more noise or fewer rounds"
        )
    return max(0.0, float(result))


def epsilon_of_mironov(rdp: Floats, delta: float) -> float:
    """Return the least epsilon of Renyi DP at `ORDERS`, with [M], Proposition 3; 0 if nothing was released."""
    return float((rdp - math.log(delta) / (ORDERS - 1)).min()) if rdp.any() else 0.0


def of_users(event: DpEvent, records: int) -> DpEvent:
    """Return Poisson-sampled rounds over records as rounds over users of `records` records each ([G]).

    Without a user, the sum moves by at most the number of sampled records, which is binomial, times the clip norm. The
    pair of N(0, sigma^2) and the mixture of N(k, sigma^2) over this number k dominates the pairs of sums
    (Choquette-Choo et al., "Privacy Amplification for Matrix Mechanisms", 2023, Corollary 4.7).
    """
    match event:
        case ComposedDpEvent(events=events):
            return ComposedDpEvent([of_users(part, records) for part in events])
        case SelfComposedDpEvent(event=part, count=count):
            return SelfComposedDpEvent(of_users(part, records), count)
        case PoissonSampledDpEvent(sampling_probability=rate, event=GaussianDpEvent(noise_multiplier=noise)):
            if rate == 1:
                return GaussianDpEvent(noise / records)
            if records == 1:
                return event
            sampled = np.arange(records + 1)
            probabilities = binom.pmf(sampled, records, rate)
            likely = probabilities > 0  # others underflow
            return MixtureOfGaussiansDpEvent(noise, sampled[likely].tolist(), probabilities[likely].tolist())
        case NonPrivateDpEvent():
            return event
    raise InputError(f"user-level epsilon needs Poisson-sampled records and Gaussian noise, found {event}")


def delta_of(event: DpEvent, epsilons: Floats, convention: Convention) -> Floats:
    """Return delta of an event at each epsilon, from Renyi DP or privacy loss distributions."""
    if convention.accountant == "pld":
        spent = _compose(_of_losses(event, convention), event, convention).get_delta(epsilons)
        return np.broadcast_to(np.asarray(spent, np.float64), epsilons.shape)
    return delta_of_rdp(rdp_of(event, convention), epsilons)


def delta_of_rdp(rdp: Floats, epsilons: Floats) -> Floats:
    """Return the least delta at each epsilon of Renyi DP at `ORDERS`, with [CKS] or, for small RDP, [BH]."""
    with np.errstate(divide="ignore"):
        without_epsilon = np.log(-np.expm1(-rdp)) / 2  # [BH]: delta <= sqrt(1 - e^-RDP)
    log_delta = (ORDERS - 1) * (rdp - epsilons[:, None] + np.log1p(-1 / ORDERS)) - np.log(ORDERS)
    return np.asarray(np.exp(np.minimum(log_delta.min(axis=1), without_epsilon.min())))


def rdp_of(event: DpEvent, convention: Convention) -> Floats:
    """Return the Renyi DP of an event at `ORDERS`; raise InputError if dp_accounting does not support it."""
    match event:
        case ComposedDpEvent(events=events):
            return sum((rdp_of(part, convention) for part in events), np.zeros_like(ORDERS))
        case SelfComposedDpEvent(event=part, count=count):
            return rdp_of(part, convention) * count if count else np.zeros_like(ORDERS)
    return _rdp_of_round(event, convention)


@lru_cache(maxsize=64)  # evaluations, and searches for a number of rounds, repeat the same round
def _poisson_round(sigma: float, rate: float) -> Floats:
    rdp = poisson(ORDERS, sigma, rate)
    rdp.setflags(write=False)
    return rdp


def _rdp_of_round(event: DpEvent, convention: Convention) -> Floats:
    orders, relation = ORDERS, convention.relation
    match event:
        case GaussianDpEvent(noise_multiplier=noise):
            return gaussian(orders, noise)
        case SkellamDpEvent(noise_multiplier=noise, steps=steps):
            return skellam(orders, noise, steps)
        case PoissonSampledDpEvent(sampling_probability=rate, event=part) if relation == "add-or-remove-one":
            if noise := _noise_multiplier(part):
                return _poisson_round(noise, rate)
        case MixtureOfGaussiansDpEvent() if convention.records is not None:
            distances, probabilities = np.array(event.sensitivities), np.array(event.sampling_probs)
            return mixture(orders, event.standard_deviation, distances, probabilities)
        case SampledWithoutReplacementDpEvent(source_dataset_size=users, sample_size=cohort, event=part):
            if relation == "replace-one" and (noise := _noise_multiplier(part)):
                return without_replacement(orders, noise, cohort / users)
    accountant = _compose(RdpAccountant(orders.tolist(), _relation(convention)), event, convention)
    return np.asarray(accountant.rdp, dtype=np.float64)


def _noise_multiplier(event: DpEvent) -> float | None:
    """Return the noise multiplier of Gaussian noise, single or composed; None for other events."""
    match event:
        case GaussianDpEvent(noise_multiplier=noise):
            return float(noise)
        case SelfComposedDpEvent(event=part, count=count) if count and (noise := _noise_multiplier(part)):
            return float(noise / math.sqrt(count))
        case ComposedDpEvent(events=events) if events and all(noises := [_noise_multiplier(part) for part in events]):
            return 1 / math.hypot(*(1 / noise for noise in noises if noise))
    return None


def _pld(event: DpEvent, delta: float, convention: Convention) -> float:
    accountant = _of_losses(event, convention)
    if not accountant.supports(event):
        _compose(accountant, event, convention)  # raises the reason
    if _check_size(event, delta, convention) == math.inf:
        return math.inf
    try:
        return float(_compose(accountant, event, convention).get_epsilon(delta))
    except (ArithmeticError, ValueError) as error:
        raise InputError(
            f"{convention}: dp_accounting cannot compute this value ({first_line(error)}); use less noise"
        ) from error


def _of_losses(event: DpEvent, convention: Convention) -> PLDAccountant:
    """Return dp_accounting's accountant of privacy loss distributions, before any round.

    Noise multipliers of events are relative to the distance of neighbours, 2S for replace-one, which dp_accounting's
    pair for replace-one doubles again. Without sampling, its pair for a special value does not.
    """
    interval = OF_USERS if (convention.records or 1) > 1 else 1e-4  # the latter is dp_accounting's
    relation = _relation(convention)
    if relation is NeighboringRelation.REPLACE_ONE and _noise_multiplier(event) is not None:
        relation = NeighboringRelation.REPLACE_SPECIAL
    return PLDAccountant(relation, interval)


def _check_size(event: DpEvent, delta: float, convention: Convention) -> float:
    """Return the epsilon of Renyi DP; raise InputError if it is so large that too many losses would be tabulated."""
    bound = float(compute_epsilon(ORDERS, rdp_of(_without_truncation(event), convention), delta)[0])
    if TABULATED < bound < math.inf:
        raise InputError(
            f"{convention}: losses are tabulated up to epsilon {TABULATED:g}, and RDP computes {bound:.4g} here"
        )
    return bound


def _without_truncation(event: DpEvent) -> DpEvent:
    """Replace truncated Poisson sampling, which has no RDP, with Poisson sampling and half of the noise."""
    match event:
        case ComposedDpEvent(events=events):
            return ComposedDpEvent([_without_truncation(part) for part in events])
        case SelfComposedDpEvent(event=part, count=count):
            return SelfComposedDpEvent(_without_truncation(part), count)
        case TruncatedSubsampledGaussianDpEvent(sampling_probability=rate, noise_multiplier=noise):
            return PoissonSampledDpEvent(rate, GaussianDpEvent(noise / 2))
    return event


def _compose(accountant: Any, event: DpEvent, convention: Convention) -> Any:
    try:
        return accountant.compose(event)
    except UnsupportedEventError as error:
        details = re.search(r"Error: \[(.*)\] caused by subevent (\w+)", str(error), re.DOTALL)
        what, why = (details[2], details[1]) if details else ("this", str(error))
        why = "" if why.startswith("Unsupported event") else f" ({why})"
        raise InputError(
            f"{convention}: the {convention.accountant} of dp_accounting does not support {what}{why}"
        ) from error


def _relation(convention: Convention) -> NeighboringRelation:
    if convention.relation == "zero-out":
        return NeighboringRelation.REPLACE_SPECIAL
    return NeighboringRelation[convention.relation.upper().replace("-", "_")]
