"""Factorizations of the matrix of prefix sums, whose factor C correlates noise between rounds: coefficients and costs.

Models are prefix sums A (G + C^-1 Z) of noisy updates, with A the lower triangular matrix of ones, G the sums of
clipped updates by round, and Z independent noise. C is lower triangular with ones on its diagonal. The sensitivity is
the largest distance by which one user moves C G, in units of the clip; the error is the variance of the noise in the
last prefix sum, in units of the variance of Z.

[KMRST] Kairouz et al., "Practical and Private (Deep) Learning without Sampling or Shuffling" (2021).
[CKMRT] Choquette-Choo et al., "(Amplified) Banded Matrix Factorization" (2023).
[MMHMT] McMahan et al., "A Hassle-free Algorithm for Private Learning in Practice" (2024): buffered linear Toeplitz.
[KL] Kalinin, Lampert, "Banded Square Root Matrix Factorization for Differentially Private Model Training" (2024).
"""

from functools import lru_cache, reduce

import numpy as np

from flsim.base.arrays import Floats
from flsim.privacy.sampling import Participation

DIGITS = 6  # of optimized numbers; further digits differ between versions of scipy


def square_root_coefficients(rounds: int) -> Floats:
    """Return the coefficients 1, 1/2, 3/8, 5/16, ... of (1 - x)^(-1/2), float64 [rounds]: the square root of A.

    For one participation no Toeplitz factor has a smaller largest error times sensitivity (Fichtenberger et al., 2023).
    """
    steps = np.arange(1.0, rounds)
    return np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))


def inverse_square_root_coefficients(bands: int) -> Floats:
    """Return the coefficients 1, -1/2, -1/8, -1/16, -5/128, ... of (1 - x)^(1/2), float64 [bands] ([KL])."""
    steps = np.arange(1.0, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * steps - 3) / (2 * steps)]))


def series(numerator: Floats, denominator: Floats, rounds: int) -> Floats:
    """Return the first coefficients of the power series numerator(x) / denominator(x), float64 [rounds]."""
    import scipy  # not at the top, because training needs only torch and numpy

    impulse = np.zeros(rounds)
    impulse[0] = 1.0
    return np.asarray(scipy.signal.lfilter(numerator, denominator, impulse))


def toeplitz(coefficients: Floats, rounds: int) -> Floats:
    """Return the lower triangular Toeplitz matrix of coefficients, zero beyond them, float64 [rounds, rounds]."""
    import scipy  # not at the top, because training needs only torch and numpy

    column = np.zeros(rounds)
    column[: len(coefficients)] = coefficients[:rounds]
    return np.asarray(scipy.linalg.toeplitz(column, np.zeros(rounds)))


def error_of(inverse: Floats) -> float:
    """Return the error of a Toeplitz C, from the coefficients of C^-1 of all rounds."""
    return float(np.square(np.cumsum(inverse)).sum())


def sensitivity_of_toeplitz(coefficients: Floats, participation: Participation) -> float:
    """Return the sensitivity of a Toeplitz C with coefficients of at least 0, float64 [rounds].

    It is the norm of the sum of the columns that start at rounds 0, b, 2 b, ... ([KL], Theorem 2, for coefficients that
    do not increase). Other coefficients are replaced with the smallest such sequence above them.
    """
    above = np.maximum.accumulate(coefficients[::-1])[::-1]
    total = np.zeros(len(above))
    for start in range(0, len(above), participation.separation)[: participation.times]:
        total[start:] += above[: len(above) - start]
    return float(np.linalg.norm(total))


def sensitivity_of_tree(rounds: int, participation: Participation) -> float:
    """Return an upper bound of the sensitivity of binary trees; exact for one participation ([KMRST], section 4).

    A node of level l sums 2^l rounds, in which a user takes part at most m = ceil(2^l / b) times. The nodes of a level
    contain at most k participations. A sum of squares of numbers up to m is largest if as many as possible are m.
    """
    squares, level = 0, 0
    while (size := 1 << level) <= rounds:
        nodes = (rounds // size + 1) // 2  # every second node is in a prefix sum
        most = min(participation.times, -(-size // participation.separation))
        full = min(nodes, participation.times // most)
        rest = participation.times - full * most if full < nodes else 0
        squares += full * most**2 + rest**2
        level += 1
    return float(np.sqrt(squares))


@lru_cache(maxsize=32)
def optimal_bands(rounds: int, bands: int) -> tuple[float, ...]:
    """Return the coefficients of a banded Toeplitz C of least final error times squared sensitivity; the first is 1.

    If rounds of a user are at least `bands` apart, it is k times the squared norm of coefficients ([CKMRT], Theorem 2).
    """
    import scipy  # not at the top, because training needs only torch and numpy

    bands = min(bands, rounds)
    start = square_root_coefficients(bands)[1:]
    if bands == 1:
        return (1.0,)

    def log_loss(free: Floats) -> tuple[float, Floats]:
        coefficients = np.concatenate([[1.0], free])
        prefix = np.cumsum(series(np.ones(1), coefficients, rounds))
        error, norm = prefix @ prefix, coefficients @ coefficients
        # The error is the squared norm of the last row of A C^-1. The derivative of C^-1 with respect to c_m is
        # -C^-2 x^m.
        twice = scipy.signal.lfilter(np.ones(1), coefficients, prefix)
        slopes = np.array([-2 * prefix[m:] @ twice[: rounds - m] for m in range(1, bands)])
        return float(np.log(error) + np.log(norm)), slopes / error + 2 * free / norm

    optimum = scipy.optimize.minimize(log_loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 1_000})
    return (1.0, *(float(np.format_float_positional(value, DIGITS)) for value in optimum.x))


@lru_cache(maxsize=32)
def optimal_blt(rounds: int, buffers: int, times: int, separation: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the scales s and the decays d of a buffered linear Toeplitz C of least error times squared sensitivity.

    C has the coefficients 1, s_1 + s_2 + ..., s_1 d_1 + s_2 d_2 + ..., and so on ([MMHMT], section 3).
    """
    import scipy  # not at the top, because training needs only torch and numpy

    participation = Participation(times, separation)

    def log_loss(free: Floats) -> float:
        scales, decays = np.exp(free[:buffers]), scipy.special.expit(free[buffers:])
        coefficients, inverse = blt_coefficients(scales, decays, rounds)
        error, sensitivity = error_of(inverse), sensitivity_of_toeplitz(coefficients, participation)
        return float(np.log(error) + 2 * np.log(sensitivity))

    # Lives are spread evenly on a logarithmic scale, and beyond the number of rounds, because the best decay can be
    # 1. The scales add up to the 1/2 of the optimal coefficients.
    lives = rounds ** np.linspace(0.1, 1.6, buffers)
    decays = np.exp(-1 / lives)
    scales = 0.5 * np.sqrt(1 - decays) / np.sqrt(1 - decays).sum()
    start = np.concatenate([np.log(scales), scipy.special.logit(decays)])
    optimum = scipy.optimize.minimize(log_loss, start, method="L-BFGS-B", jac="3-point", options={"maxiter": 500})
    scales, complements = np.exp(optimum.x[:buffers]), scipy.special.expit(-optimum.x[buffers:])
    rounded = [[float(f"{value:.{DIGITS}g}") for value in values] for values in (scales, complements)]
    return tuple(rounded[0]), tuple(1 - value for value in rounded[1])


def blt_coefficients(scales: Floats, decays: Floats, rounds: int) -> tuple[Floats, Floats]:
    """Return the coefficients of C(x) = 1 + sum_j s_j x / (1 - d_j x) and of C^-1, float64 [rounds] each."""
    factors = [np.array([1.0, -decay]) for decay in decays]
    denominator = reduce(np.convolve, factors, np.ones(1))
    numerator = denominator.copy()
    for index, scale in enumerate(scales):
        numerator[1:] += scale * reduce(np.convolve, factors[:index] + factors[index + 1 :], np.ones(1))
    return series(numerator, denominator, rounds), series(denominator, numerator, rounds)
