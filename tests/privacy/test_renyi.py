"""RDP of sampled Gaussian noise against integrals in 20 or more digits; epsilon against its properties and PLD."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta, compute_epsilon

from flsim.base.arrays import Floats
from flsim.privacy import accounting
from flsim.privacy.accounting import rdp_of
from flsim.privacy.conventions import CONVENTIONS, Convention
from flsim.privacy.ledger import Entry, Ledger, epsilon

BY_NAME = {convention.name: convention for convention in CONVENTIONS}
POISSON = BY_NAME["poisson-rdp"]
FEW = np.array([1.02, 1.7, 2.0, 5.3, 10.9, 32.0])
SIGMAS = (0.03, 0.05, 0.3, 1.0, 3.0, 1000.0)
RATES = (1e-6, 0.1, 0.5, 0.999)
NOISES = (0.3, 1.0, 4.0, 200.0)
DELTA = 1e-5


def poisson_by_integral(order: float, sigma: float, rate: float) -> float:
    """Return log E[((1 - q) + q L)^a] / (a - 1) (Mironov, Talwar and Zhang, 2019, section 3) in 20 or 40 digits."""
    with mpmath.workdps(40 if sigma >= 1 else 20):  # if noise is large, the moment is nearly 1
        a, s, q = mpmath.mpf(order), mpmath.mpf(sigma), mpmath.mpf(rate)
        kink = s**2 * mpmath.log(1 / q - 1) + mpmath.mpf(1) / 2
        bumps = (0, a, kink - s**2, kink, kink + s**2, 1 - s, 1, 1 + s, a / 2)
        pieces = {-14 * s, a + 14 * s, -6 * s, 6 * s, a - 6 * s, a + 6 * s, *bumps}
        moment = mpmath.quad(
            lambda x: ((1 - q) + q * mpmath.exp((2 * x - 1) / (2 * s**2))) ** a * mpmath.npdf(x, 0, s),
            sorted(piece for piece in pieces if -14 * s <= piece <= a + 14 * s),
        )
        return float(mpmath.log(moment) / (a - 1))


def theorem_27(order: int, sigma: float, rate: float) -> float:
    """Return Theorem 27 of Wang et al. (2019), with forward differences as alternating sums in 400 digits."""
    with mpmath.workdps(400):
        s, q = mpmath.mpf(sigma), mpmath.mpf(rate)

        def moment(k: int) -> mpmath.mpf:
            return mpmath.exp(k * (k - 1) / (2 * s**2))

        def difference(k: int) -> mpmath.mpf:
            return mpmath.fsum((-1) ** (k - i) * mpmath.binomial(k, i) * moment(i) for i in range(k + 1))

        total = 1 + mpmath.binomial(order, 2) * q**2 * min(4 * difference(2), 2 * moment(2))
        for j in range(3, order + 1):
            pair = 4 * mpmath.sqrt(difference(2 * (j // 2)) * difference(2 * -(-j // 2)))
            total += mpmath.binomial(order, j) * q**j * min(pair, 2 * moment(j))
        return float(mpmath.log(total) / (order - 1))


@pytest.mark.parametrize(
    ("sigma", "rates", "orders"),
    [(0.3, (0.1,), FEW[[1, 4]]), *(pytest.param(sigma, RATES, FEW, marks=pytest.mark.nightly) for sigma in SIGMAS)],
)
def test_poisson_sampling_equals_its_integral(sigma: float, rates: tuple[float, ...], orders: Floats) -> None:
    """RDP equals its integral. Each value takes seconds, so tests that are not nightly compute only two values."""
    for rate in rates:
        expected = [poisson_by_integral(order, sigma, rate) for order in orders.tolist()]
        np.testing.assert_allclose(accounting.poisson(orders, sigma, rate), expected, rtol=1e-9)


@pytest.mark.parametrize(
    "sigma", [0.5, 4.0, *(pytest.param(sigma, marks=pytest.mark.nightly) for sigma in (0.3, 1.0, 25.0, 1000.0))]
)
def test_sampling_without_replacement_equals_the_theorem(sigma: float) -> None:
    for rate in (0.001, 0.1, 0.5):
        for order in (2, 3, 4, 17, 40):
            expected = min(theorem_27(order, sigma, rate), order / (2 * sigma**2))
            assert accounting.without_replacement(np.array([order]), sigma, rate)[0] == pytest.approx(
                expected, rel=1e-9
            )


@pytest.mark.parametrize("of", [accounting.poisson, accounting.without_replacement])
def test_rate_1_equals_no_sampling_and_rate_0_has_no_divergence(of) -> None:  # type: ignore[no-untyped-def]
    np.testing.assert_allclose(of(accounting.ORDERS, 1.5, 1.0), accounting.ORDERS / (2 * 1.5**2), rtol=1e-12)
    assert not of(accounting.ORDERS, 1.5, 0.0).any()
    assert (of(accounting.ORDERS, 1.5, 1 - 1e-9) <= (1 + 1e-12) * accounting.ORDERS / (2 * 1.5**2)).all()


@pytest.mark.parametrize("of", [accounting.poisson, accounting.without_replacement])
def test_extreme_noise_has_the_divergence_of_the_leading_term(of) -> None:  # type: ignore[no-untyped-def]
    """For large sigma, the first term of the series in 1 / sigma is q^2 a / (2 sigma^2). For small sigma, the largest
    term is a / (2 sigma^2)."""
    assert (of(accounting.ORDERS, 1e-300, 0.1) == math.inf).all()
    assert not of(accounting.ORDERS, 1e300, 0.1).any()
    tiny, order = of(np.array([3.0]), 1e-9, 0.1)[0], 3.0
    assert tiny == pytest.approx(order / 2 * 1e18, rel=1e-6)
    huge = accounting.poisson(np.array([1.1, 3.0, 1024.0]), 1e9, 0.1)
    np.testing.assert_allclose(huge, np.array([1.1, 3.0, 1024.0]) * 0.1**2 / 2 * 1e-18, rtol=1e-6)


def spent(convention: Convention, rate: float, noise: float, rounds: int) -> float:
    entry = Entry(convention.sampler, 100_000, round(rate * 100_000), noise, rounds)
    return epsilon(Ledger((entry,)), DELTA, convention)


@pytest.mark.parametrize("of", [accounting.poisson, accounting.without_replacement])
def test_epsilon_is_monotone_in_noise_rate_and_rounds(of) -> None:  # type: ignore[no-untyped-def]
    rates, rounds = (0.01, 0.3, 1.0), (1, 10, 100, 1_000)
    grid = np.array([[_epsilons(of(accounting.ORDERS, z, q), rounds) for z in NOISES] for q in rates])
    rounding = 1 + 1e-9
    assert (grid[1:] * rounding >= grid[:-1]).all()  # more users of a round
    assert (grid[:, :-1] * rounding >= grid[:, 1:]).all()  # less noise
    assert (grid[:, :, 1:] * rounding >= grid[:, :, :-1]).all()  # more rounds
    assert np.isfinite(grid).all()


def _epsilons(rdp: Floats, rounds: tuple[int, ...]) -> list[list[float]]:
    """Return epsilon after each number of rounds, with both conversions of RDP to epsilon."""
    all_rounds = [rdp * number for number in rounds]
    return [
        [compute_epsilon(accounting.ORDERS, one, DELTA)[0], accounting.epsilon_of_mironov(one, DELTA)]
        for one in all_rounds
    ]


@pytest.mark.parametrize(
    ("rate", "noise"),
    [
        (0.1, 2.0),
        *(pytest.param(rate, noise, marks=pytest.mark.nightly) for rate in (0.01, 0.3, 0.9) for noise in (1.0, 6.0)),
    ],
)
def test_epsilon_of_rdp_is_between_pld_and_the_best_order(rate: float, noise: float) -> None:
    """PLD is the lower bound. The upper bound is the least bound of Canonne et al. over all orders, from integrals.

    `ORDERS` is a grid, and near the best order, `order - 1` grows by a factor g of at most 1.2, so the grid misses the
    best order by at most sqrt(g). A sum a x + b / x is then at most (sqrt(g) + 1 / sqrt(g)) / 2 = 1.0042 times its
    least value. The limit of 1% allows as much for the curvature of the divergence."""
    rounds = 100
    rdp, pld = (spent(BY_NAME[name], rate, noise, rounds) for name in ("poisson-rdp", "poisson-pld"))
    orders = np.geomspace(0.1, 200, 120) + 1
    bounds = [
        rounds * poisson_by_quadrature(order, noise, rate)
        + math.log1p(-1 / order)
        - math.log(DELTA * order) / (order - 1)
        for order in orders.tolist()
    ]
    assert pld <= rdp <= 1.01 * min(bounds)


def poisson_by_quadrature(order: float, sigma: float, rate: float) -> float:
    """Return the same integral with Simpson's rule at 20,001 points, in double precision and with logarithms."""
    low, high = -12 * sigma, order + 12 * sigma
    x, step = np.linspace(low, high, 20_001, retstep=True)
    weights = np.full(len(x), step / 3)
    weights[1:-1:2] *= 4
    weights[2:-1:2] *= 2
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * sigma**2))
    log_terms = order * log_ratio - x**2 / (2 * sigma**2) + np.log(weights)
    return float(np.logaddexp.reduce(log_terms) - math.log(sigma * math.sqrt(2 * math.pi))) / (order - 1)


@pytest.mark.parametrize(("order", "sigma", "rate"), [(200.5, 30.0, 0.3), (900.5, 200.0, 0.5), (10.5, 30.0, 0.3)])
def test_large_orders_between_integers_equal_their_integral(order: float, sigma: float, rate: float) -> None:
    """RDP equals its integral at large orders, where log(1 + u) is small but its product with the order need not be."""
    expected = poisson_by_quadrature(order, sigma, rate)
    assert accounting.poisson(np.array([order]), sigma, rate)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("sigma", [0.03, 0.049, 0.0999])
@pytest.mark.parametrize("rate", [1e-6, 1e-3, 0.3])
def test_little_noise_equals_its_integral_at_low_orders(sigma: float, rate: float) -> None:
    """At little noise, the two normal laws hardly overlap; the moment of the law with the user need not be large."""
    expected = [poisson_by_quadrature(order, sigma, rate) for order in (1.01, 1.02, 1.2)]
    assert accounting.poisson(np.array([1.01, 1.02, 1.2]), sigma, rate).tolist() == pytest.approx(expected, rel=1e-7)


def test_deltas_are_those_of_dp_accounting() -> None:
    epsilons = np.array([0.0, 1.0, 20.0])
    for scale in (1e-12, 1e-6, 0.01, 1.0, 50.0):
        rdp = scale * accounting.ORDERS
        expected = [compute_delta(accounting.ORDERS, rdp, epsilon)[0] for epsilon in epsilons.tolist()]
        assert accounting.delta_of_rdp(rdp, epsilons).tolist() == pytest.approx(expected, rel=1e-4)


def test_gaussian_releases_on_one_cohort_equal_one_release_with_less_noise() -> None:
    """Two releases of multipliers 3 and 4 on one cohort are one of multiplier (1/9 + 1/16)^(-1/2) = 2.4."""
    two = PoissonSampledDpEvent(0.2, ComposedDpEvent([GaussianDpEvent(3.0), GaussianDpEvent(4.0)]))
    four = PoissonSampledDpEvent(0.2, SelfComposedDpEvent(GaussianDpEvent(4.8), 4))
    one = rdp_of(PoissonSampledDpEvent(0.2, GaussianDpEvent(2.4)), POISSON)
    np.testing.assert_allclose(rdp_of(two, POISSON), one, rtol=1e-12)
    np.testing.assert_allclose(rdp_of(four, POISSON), one, rtol=1e-12)


def test_only_gaussian_noise_has_a_noise_multiplier() -> None:
    """An event that also has another mechanism, or a release without noise, has no noise multiplier."""
    noise, other, none = GaussianDpEvent(3.0), LaplaceDpEvent(3.0), GaussianDpEvent(0.0)
    two = ComposedDpEvent([noise, GaussianDpEvent(4.0)])
    found = [accounting._noise_multiplier(event) for event in (two, SelfComposedDpEvent(two, 4), noise)]
    assert found == pytest.approx([2.4, 1.2, 3.0], rel=1e-12)
    mixed = [ComposedDpEvent(events) for one in (other, none) for events in ([noise, one], [one, noise])]
    for event in (*mixed, ComposedDpEvent([]), SelfComposedDpEvent(noise, 0), SelfComposedDpEvent(other, 2), other):
        assert accounting._noise_multiplier(event) is None
