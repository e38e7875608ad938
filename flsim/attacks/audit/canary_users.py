"""Canary users of a training, whose updates are random: the cosines after training, and the epsilon that they estimate.

Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning" (2023). The cosine of the change of the
model and a vector that took no part has, for d parameters, a density proportional to (1 - t^2)^((d - 3) / 2). Cosines
of vectors that took part are assumed to be normal. The epsilon of distinguishing the two distributions is an estimate,
which can exceed the true epsilon. There is none if the normal distribution extends beyond 1, as in small models.
"""

from dataclasses import dataclass

import numpy as np
import scipy

from flsim.attacks.audit.trade_off import root
from flsim.base.arrays import Flags, Floats
from flsim.base.errors import InputError
from flsim.models.language_model import Params
from flsim.privacy.update_canaries import AuditHParams, cosines

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
        """Return the epsilon of members, or of others, at `delta`; None for fewer than two, or if `is_too_small`."""
        if len(values) < 2 or self.is_too_small(values):
            return None
        return epsilon_of_cosines(float(values.mean()), float(values.std(ddof=1)), self.dimension, self.delta)

    def is_too_small(self, values: Floats) -> bool:
        """Return whether the model has too few parameters for an estimate: the normal distribution extends beyond 1."""
        return len(values) > 1 and _beyond(float(values.mean()), float(values.std(ddof=1))) > BEYOND * self.delta


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
    return root(lambda epsilon: _delta(laws, epsilon) - delta, 1e-9)


def delta_of_cosines(mean: float, deviation: float, dimension: int, epsilon: float) -> float:
    """Return delta at an epsilon of distinguishing the distributions of `epsilon_of_cosines`."""
    return _delta(_laws(mean, deviation, dimension), epsilon)


def _beyond(mean: float, deviation: float) -> float:
    """Return the probability of a normal value below -1 or above 1."""
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
