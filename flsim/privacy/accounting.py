"""The computation of epsilon from what was released, under a stated convention.

All arithmetic is dp_accounting's and, as a cross-check, Opacus's.

[WBK] Wang, Balle, Kasiviswanathan, "Subsampled Renyi Differential Privacy and Analytical Moments Accountant" (2019).
[M] Mironov, "Renyi Differential Privacy" (2017).
[CKS] Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy" (2020), Proposition 12; and, the same
formula, Balle et al., "Hypothesis Testing Interpretations and Renyi Differential Privacy" (2020), Theorem 21.
"""

import logging
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    UnsupportedEventError,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

from flsim.base.errors import InputError
from flsim.privacy.conventions import Convention

# [WBK] Theorem 27 holds at integer orders, and between them only by interpolation.
INTEGER_ORDERS = tuple(int(order) for order in DEFAULT_RDP_ORDERS if float(order).is_integer())
TABULATED = 100.0  # epsilon above which losses are not tabulated: tables take gigabytes, and protection is nil
PRV_POINTS = 1e7  # number of points in Opacus's table, which then takes 1.6 GB
PRV_ERROR = 0.01  # error of epsilon that Opacus may make; it returns an upper bound

logging.getLogger("absl").setLevel(logging.ERROR)  # dp_accounting's remarks on its own numerics


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


def rdp_of(event: DpEvent, convention: Convention) -> RdpAccountant:
    """Return the Renyi DP of an event.

    Orders are integers for the relation "replace-one", which is that of sampling without replacement; for others they
    are dp_accounting's own.

    Raises:
        InputError: dp_accounting does not support the event under this relation.
    """
    orders = INTEGER_ORDERS if convention.relation == "replace-one" else None
    return _compose(RdpAccountant(orders, _relation(convention)), event, convention)


def _rdp(event: DpEvent, delta: float, convention: Convention) -> float:
    accountant = rdp_of(event, convention)
    if convention.conversion == "tight" or not accountant.rdp.any():
        return float(accountant.get_epsilon(delta))
    return float(np.min(accountant.rdp + math.log(1 / delta) / (accountant.orders - 1)))


def _pld(event: DpEvent, delta: float, convention: Convention) -> float:
    accountant = PLDAccountant(_relation(convention))
    if not accountant.supports(event):
        _compose(accountant, event, convention)  # raises the reason
    _check_size(event, delta, convention)
    return float(_compose(accountant, event, convention).get_epsilon(delta))


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
        bound = _check_size(event, delta, convention)
        points = 2 * bound / PRV_ERROR * math.sqrt(sum(rounds for *_, rounds in history) * math.log(12e3 / delta) / 2)
        if points > PRV_POINTS:
            raise InputError(f"{convention}: Opacus would tabulate {points:.1e} losses; the limit is {PRV_POINTS:g}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that a wider range of orders might give a lower bound
            return float(accountant.get_epsilon(delta, eps_error=PRV_ERROR))
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
    bound = float(rdp_of(event, convention).get_epsilon(delta))
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
