"""Renyi differential privacy (RDP) of Gaussian noise on the sum over a sampled cohort, for one round.

Each function returns the RDP at every order: float64 [orders], in nats, maybe infinite. The noise multiplier sigma is
the standard deviation of the noise divided by the distance by which one user moves the sum.

dp_accounting has the same quantities. At fractional orders it adds the absolute values of a series of mixed signs, or
drops the order if the series does not converge, and its forward differences cancel where noise is large. Both give
valid, but needlessly large values, mostly at sampling rates of 0.1 and more.

[M] Mironov, "Renyi Differential Privacy" (2017).
[MTZ] Mironov, Talwar, Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism" (2019).
[WBK] Wang, Balle, Kasiviswanathan, "Subsampled Renyi Differential Privacy and Analytical Moments Accountant" (2019).
"""

import math

import numpy as np
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp

Floats = NDArray[np.float64]

# dp_accounting's orders; lower ones, where epsilon is large; and some of those that it leaves out above 63.
ORDERS: Floats = np.unique([1.02, 1.05, *DEFAULT_RDP_ORDERS, *np.geomspace(64, 1024, 25).round()])
SEPARATE = 0.05  # sigma below which the two normal laws of a round overlap by less than e^-22
DIFFERENCES = 0.5  # sigma from which the forward differences of [WBK] can give less than the moments
TAIL = 12.0  # standard deviations beyond which the normal law weighs e^-72


def gaussian(orders: Floats, sigma: float) -> Floats:
    """Return the RDP of Gaussian noise on a sum over all users: order / (2 sigma^2) ([M], Corollary 3)."""
    with np.errstate(over="ignore", divide="ignore"):
        return orders / 2 / np.float64(sigma) / sigma


def poisson(orders: Floats, sigma: float, rate: float) -> Floats:
    """Return the RDP if users are drawn independently, for adding or removing one user ([MTZ], section 3).

    The moment A is E[(1 + u)^order] with u = rate (e^((2 x - 1) / (2 sigma^2)) - 1) and x ~ N(0, sigma^2). As the mean
    of u is 0, A - 1 is the mean of (1 + u)^order - 1 - order u, which is nowhere negative. Sums and integrals of it
    lose no digits, however small A - 1 is. Relative errors are below 1e-9.

    Args:
        orders: above 1.
        sigma: noise multiplier, above 0.
        rate: probability by which a user takes part, from 0 to 1.
    """
    if rate == 0:
        return np.zeros_like(orders)
    if rate == 1:
        return gaussian(orders, sigma)
    return np.array([_per_order(order, _excess_of_poisson(order, sigma, rate)) for order in orders.tolist()])


def without_replacement(orders: Floats, sigma: float, rate: float) -> Floats:
    """Return the RDP if a cohort of a fixed size is drawn, for replacing the data of one user.

    It is the smaller of two upper bounds. The first is [WBK], Theorem 27, between integer orders with Corollary 10. The
    second is the RDP without sampling, because outputs are mixtures over cohorts, and Renyi divergence is jointly
    quasi-convex (van Erven and Harremoes, "Renyi Divergence and Kullback-Leibler Divergence", 2014, Theorem 13).

    Args:
        orders: above 1.
        sigma: noise multiplier, above 0.
        rate: cohort / population, from 0 to 1.
    """
    if rate == 0:
        return np.zeros_like(orders)
    whole = np.union1d(np.floor(orders), np.ceil(orders))
    log_moments = _log_moments_without_replacement(whole, sigma, rate)
    bound = np.interp(orders, whole, log_moments) / (orders - 1)
    return np.minimum(bound, gaussian(orders, sigma))


def _per_order(order: float, log_excess: float) -> float:
    """Return log A / (order - 1) from log(A - 1)."""
    return float(np.logaddexp(0.0, log_excess)) / (order - 1)


def _excess_of_poisson(order: float, sigma: float, rate: float) -> float:
    """Return log(A - 1) of `poisson`: at integer orders by the binomial sum, otherwise by an integral."""
    if order.is_integer():
        drawn = np.arange(2.0, order + 1)
        log_weights = _log_binomial(order, drawn) + drawn * math.log(rate) + (order - drawn) * math.log1p(-rate)
        return float(logsumexp(log_weights + _log_abs_expm1(_log_moment(drawn, sigma))))
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
    drawn = np.arange(2.0, orders.max() + 1)
    log_terms = math.log(2) + _log_moment(drawn, sigma)
    pair = math.log(4) + float(_log_abs_expm1(_log_moment(np.array(2.0), sigma)))
    log_terms[0] = min(log_terms[0], pair)
    if sigma >= DIFFERENCES:  # below, differences are nearly the moments, and 4 times these is more than twice
        differences = _log_differences(drawn, sigma)
        log_terms = np.minimum(log_terms, math.log(4) + differences)
    log_terms += drawn * math.log(rate)
    moments = []
    for order in orders.tolist():
        few = drawn[drawn <= order]
        log_excess = logsumexp(_log_binomial(order, few) + log_terms[: len(few)]) if len(few) else -math.inf
        moments.append(np.logaddexp(0.0, log_excess))
    return np.array(moments)


def _log_differences(drawn: Floats, sigma: float) -> Floats:
    """Return the logarithm of sqrt(B(2 floor(j / 2)) B(2 ceil(j / 2))) for each j, in [WBK]'s notation.

    B(l) is the forward difference at 0 of the moments E[L^k], of even order l. It equals E[(L - 1)^l], the mean of
    something that is not negative, for the likelihood ratio L at x ~ N(0, sigma^2).
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
    """Return log((1 + u)^order - 1 - order u) for u = rate (e^log_ratio - 1), whatever the size of u."""
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
    # Near 0 the difference would cancel. It is the sum of (order^k - order) w^k / k! from k = 2 on.
    series = np.polyval([(order**k - order) / math.factorial(k) for k in range(12, 1, -1)], log_one.clip(-0.01, 0.01))
    with np.errstate(divide="ignore", invalid="ignore"):
        near, far = 2 * np.log(np.abs(log_one)) + np.log(series), order * above + np.log(scaled)
    return np.where(np.abs(log_one) < 0.01, near, far)
