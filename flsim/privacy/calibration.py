"""The search for the noise that keeps a planned run within an epsilon."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import scipy

from flsim.base.errors import InputError
from flsim.privacy.conventions import Convention
from flsim.privacy.ledger import Entry, Ledger, epsilon

TOLERANCE = 1e-3  # largest excess of the result over the least sufficient noise multiplier, as a share of the latter
LEAST_EPSILON = 1e-6  # of a target
RANGE = 2.0**20  # the search for a noise multiplier ends beyond this, and below its inverse


def check_target(target: float) -> None:
    """Raise InputError unless the target epsilon is finite, and large enough for accountants to compute with."""
    if not LEAST_EPSILON <= target < math.inf:
        raise InputError(f"epsilon must be finite and at least {LEAST_EPSILON:g}, found {target:g}")


def calibrate(planned: Entry, target: float, delta: float, convention: Convention, guess: float = 1.0) -> float:
    """Return a noise multiplier whose epsilon is at most `target`, and at most 0.1% above the least such multiplier.

    Args:
        planned: the planned rounds; their own noise multiplier is ignored.
        target: the largest epsilon.
        delta: delta of (epsilon, delta)-DP.
        convention: the convention by which epsilon is accounted.
        guess: the noise multiplier where the search begins; a close one saves time.

    Raises:
        InputError: the target is not above 0, no noise multiplier reaches it, or the convention cannot account for the
            planned rounds.
    """
    check_target(target)

    @cache
    def excess(log_noise: float) -> float:
        """Return log epsilon - log target, which is nearly linear in the logarithm of the noise multiplier."""
        noisy = replace(planned, noise_multiplier=math.exp(log_noise))
        spent = epsilon(Ledger((noisy,)), delta, convention)
        return math.log(max(spent, math.ulp(0.0))) - math.log(target)

    low, high = _bracket(excess, math.log(guess), f"{convention}: no noise multiplier gives epsilon {target:g}")
    log_noise = scipy.optimize.brentq(excess, low, high, xtol=TOLERANCE / 8) + TOLERANCE / 4
    while excess(log_noise) > 0:  # brentq may end above 0 where epsilon does not fall smoothly
        log_noise += TOLERANCE / 4
    return math.exp(log_noise)


def _bracket(excess: Callable[[float], float], start: float, failure: str) -> tuple[float, float]:
    """Return (low, high) with excess(low) >= 0 >= excess(high); steps grow from a small first one."""
    step = math.copysign(math.log(1.2), excess(start))
    at = start
    while excess(at + step) * step > 0:
        at += step
        step *= 2
        if abs(at) > math.log(RANGE):
            raise InputError(f"{failure} at this delta (tried up to {math.exp(at):.1g}); raise epsilon or delta")
    return min(at, at + step), max(at, at + step)
