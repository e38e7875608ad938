"""The computation of epsilon from what was released, under a stated convention.

Renyi DP of Gaussian noise is computed in `flsim.privacy.renyi`. The conversions to epsilon, the privacy loss
distributions and the RDP of other events are those of dp_accounting. Opacus is a cross-check.

[WBK] Wang, Balle, Kasiviswanathan, "Subsampled Renyi Differential Privacy and Analytical Moments Accountant" (2019).
[M] Mironov, "Renyi Differential Privacy" (2017).
[CKS] Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy" (2020), Proposition 12; and, the same
formula, Balle et al., "Hypothesis Testing Interpretations and Renyi Differential Privacy" (2020), Theorem 21.
[BH] Bretagnolle, Huber, "Estimation des densites: risque minimax" (1979): the bound of the total variation distance.
"""

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

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
    UnsupportedEventError,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from flsim.base.errors import InputError, first_line
from flsim.privacy import renyi
from flsim.privacy.conventions import Convention

TABULATED = 100.0  # epsilon above which losses are not tabulated: tables take gigabytes, and protection is nil
PRV_POINTS = 1e7  # number of points in Opacus's table, which then takes 1.6 GB
PRV_ERROR = 0.01  # error of epsilon that Opacus may make; it returns an upper bound


@dataclass(frozen=True)
class RenyiDP:
    """The Renyi DP of an event.

    Attributes:
        orders: float64 [orders], each above 1.
        rdp: float64 [orders], the Renyi divergence at each order in nats; maybe infinite.
    """

    orders: renyi.Floats
    rdp: renyi.Floats

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon at a delta, with [CKS]; 0 where [BH] needs none."""
        if (self.log_delta_without_epsilon <= math.log(delta)).any():
            return 0.0
        overhead = np.log1p(-1 / self.orders) - (math.log(delta) + np.log(self.orders)) / (self.orders - 1)
        return max(0.0, float((self.rdp + overhead).min()))

    def epsilon_of_mironov(self, delta: float) -> float:
        """Return the least epsilon at a delta, with [M], Proposition 3; 0 where nothing was released."""
        return float((self.rdp - math.log(delta) / (self.orders - 1)).min()) if self.rdp.any() else 0.0

    def delta(self, epsilon: float) -> float:
        """Return the least delta at an epsilon, with [CKS] or [BH]."""
        log_delta = (self.orders - 1) * (self.rdp - epsilon + np.log1p(-1 / self.orders)) - np.log(self.orders)
        return math.exp(min(float(log_delta.min()), float(self.log_delta_without_epsilon.min())))

    @property
    def log_delta_without_epsilon(self) -> renyi.Floats:
        """Return the logarithm of the delta of epsilon 0, with [BH]: delta <= sqrt(1 - e^-RDP)."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(-np.expm1(-self.rdp)) / 2)


def check_delta(delta: float) -> None:
    """Raise InputError unless 0 < delta < 1."""
    if not 0 < delta < 1:
        raise InputError(f"delta must be above 0 and below 1, found {delta:g}")


def epsilon_of(event: DpEvent, delta: float, convention: Convention) -> float:
    """Return the epsilon of an event under a convention's relation, accountant and conversion; it may be infinite.

    Raises:
        InputError: delta is out of range, or the event cannot be accounted in this way; the message says why.
    """
    check_delta(delta)
    with np.errstate(all="ignore"):  # extreme noise overflows on the way; the result is checked instead
        match convention.accountant:
            case "rdp":
                result = _rdp(event, delta, convention)
            case "pld":
                result = _pld(event, delta, convention)
            case "rdp-opacus" | "prv-opacus":
                result = _opacus(event, delta, convention)
    if math.isnan(result):
        raise InputError(f"{convention}: the arithmetic of its accountant breaks down here; more noise or fewer rounds")
    return max(0.0, result)


def rdp_of(event: DpEvent, convention: Convention) -> RenyiDP:
    """Return the Renyi DP of an event, at the orders of `flsim.privacy.renyi`.

    Raises:
        InputError: dp_accounting does not support the event under this relation.
    """
    return RenyiDP(renyi.ORDERS, _rdp_of(event, convention))


def _rdp_of(event: DpEvent, convention: Convention) -> renyi.Floats:
    orders, relation = renyi.ORDERS, convention.relation
    match event:
        case ComposedDpEvent(events=events):
            return sum((_rdp_of(part, convention) for part in events), np.zeros_like(orders))
        case SelfComposedDpEvent(event=part, count=count):
            return _rdp_of(part, convention) * count if count else np.zeros_like(orders)
        case GaussianDpEvent(noise_multiplier=noise):
            return renyi.gaussian(orders, noise)
        case PoissonSampledDpEvent(sampling_probability=rate, event=part) if relation == "add-or-remove-one":
            if noise := _noise_multiplier(part):
                return renyi.poisson(orders, noise, rate)
        case SampledWithoutReplacementDpEvent(source_dataset_size=users, sample_size=cohort, event=part):
            if relation == "replace-one" and (noise := _noise_multiplier(part)):
                return renyi.without_replacement(orders, noise, cohort / users)
    accountant = _compose(RdpAccountant(orders.tolist(), _relation(convention)), event, convention)
    return np.asarray(accountant.rdp, dtype=np.float64)


def _noise_multiplier(event: DpEvent) -> float | None:
    """Return the noise multiplier of Gaussian noise, alone or composed; None for other events."""
    match event:
        case GaussianDpEvent(noise_multiplier=noise):
            return float(noise)
        case SelfComposedDpEvent(event=part, count=count) if count and (noise := _noise_multiplier(part)):
            return float(noise / math.sqrt(count))
        case ComposedDpEvent(events=events) if events and all(noises := [_noise_multiplier(part) for part in events]):
            return 1 / math.hypot(*(1 / noise for noise in noises if noise))
    return None


def _rdp(event: DpEvent, delta: float, convention: Convention) -> float:
    spent = rdp_of(event, convention)
    return spent.epsilon(delta) if convention.conversion == "tight" else spent.epsilon_of_mironov(delta)


def _pld(event: DpEvent, delta: float, convention: Convention) -> float:
    accountant = PLDAccountant(_relation(convention))
    if not accountant.supports(event):
        _compose(accountant, event, convention)  # raises the reason
    if _check_size(event, delta, convention) == math.inf:
        return math.inf
    try:
        return float(_compose(accountant, event, convention).get_epsilon(delta))
    except (ArithmeticError, ValueError) as error:
        raise InputError(f"{convention}: dp_accounting fails here ({first_line(error)}); take less noise") from error


def _opacus(event: DpEvent, delta: float, convention: Convention) -> float:
    """Return epsilon by Opacus, which knows Poisson-sampled Gaussian noise, and adding or removing one user.

    Its PRV accountant gives an upper bound, at most `2 PRV_ERROR` too high, or an error where epsilon is large.
    """
    from opacus.accountants import PRVAccountant, RDPAccountant  # two seconds

    if convention.relation != "add-or-remove-one":
        raise InputError(f"{convention}: Opacus accounts for adding or removing one, not for {convention.relation}")
    history = list(_poisson_rounds(event, convention))
    if not history or not all(noise for noise, _, _ in history):
        return math.inf if history else 0.0
    accountant = RDPAccountant() if convention.accountant == "rdp-opacus" else PRVAccountant()
    accountant.history = history
    if convention.accountant == "prv-opacus":
        if (bound := _check_size(event, delta, convention)) == math.inf:
            return math.inf
        points = 2 * bound / PRV_ERROR * math.sqrt(sum(rounds for *_, rounds in history) * math.log(12e3 / delta) / 2)
        if points > PRV_POINTS:
            raise InputError(f"{convention}: Opacus would tabulate {points:.1e} losses; the limit is {PRV_POINTS:g}")
    try:
        with warnings.catch_warnings():
            # A range of orders that is too narrow makes RDP loose. Of PRV it decides the size of the table only.
            action: Literal["error", "ignore"] = "error" if convention.accountant == "rdp-opacus" else "ignore"
            warnings.filterwarnings(action, message="Optimal order is", category=UserWarning)
            return float(accountant.get_epsilon(delta, eps_error=PRV_ERROR))
    except UserWarning as error:
        raise InputError(
            f"{convention}: the best order is outside Opacus's range, so that its bound is loose"
        ) from error
    except (ArithmeticError, IndexError, RuntimeError, ValueError) as error:
        raise InputError(f"{convention}: Opacus fails here ({str(error) or type(error).__name__})") from error


def _poisson_rounds(event: DpEvent, convention: Convention) -> Iterator[tuple[float, float, int]]:
    """Yield the event in the form of Opacus's history: (noise multiplier, sampling probability, rounds)."""
    match event:
        case ComposedDpEvent(events=events):
            for part in events:
                yield from _poisson_rounds(part, convention)
        case SelfComposedDpEvent(
            event=PoissonSampledDpEvent(sampling_probability=q, event=GaussianDpEvent(noise_multiplier=noise)),
            count=rounds,
        ):
            yield noise, q, rounds
        case NonPrivateDpEvent():
            yield 0.0, 1.0, 1
        case _:
            raise InputError(f"{convention}: Opacus accounts for Poisson-sampled Gaussian noise, not for {event}")


def _check_size(event: DpEvent, delta: float, convention: Convention) -> float:
    """Return the epsilon of Renyi DP; raise InputError where it is so large that too many losses would be tabulated."""
    bound = rdp_of(event, convention).epsilon(delta)
    if TABULATED < bound < math.inf:
        raise InputError(f"{convention}: losses are tabulated up to epsilon {TABULATED:g}, RDP says {bound:.4g} here")
    return bound


def _compose(accountant: Any, event: DpEvent, convention: Convention) -> Any:
    try:
        return accountant.compose(event)
    except UnsupportedEventError as error:
        details = re.search(r"Error: \[(.*)\] caused by subevent (\w+)", str(error), re.DOTALL)
        what, why = (details[2], details[1]) if details else ("this", str(error))
        raise InputError(f"{convention}: dp_accounting's {convention.accountant} refuses {what}: {why}") from error


def _relation(convention: Convention) -> NeighboringRelation:
    return NeighboringRelation[convention.relation.upper().replace("-", "_")]
