"""The curve of delta against epsilon that a ledger proves."""

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.privacy.conventions import Convention, conventions_of
from flsim.privacy.ledger import Ledger

EPSILONS = np.concatenate([np.linspace(0, 10, 201), np.linspace(10, 60, 101)[1:]])


def sound_convention(sampler: str) -> Convention:
    """Return the convention of a sampler whose sensitivity covers its relation, with Renyi DP.

    Raises:
        InputError: no convention of the sampler is sound.
    """
    sound = [one for one in conventions_of(sampler) if one.is_sound and one.accountant == "rdp"]
    if not sound:
        raise InputError(f"{sampler}: no sound convention, so that no epsilon of it can be audited")
    return sound[0]


def delta_curve(ledger: Ledger, convention: Convention) -> NDArray[np.float64]:
    """Return delta at each of `EPSILONS` that a ledger proves under a convention; 1 where it proves nothing.

    Raises:
        InputError: the convention cannot account for the ledger's rounds.
    """
    from flsim.privacy.accounting import rdp_of  # loads dp_accounting and scipy.stats, which take a second

    spent = rdp_of(ledger.event(convention.sensitivity), convention)
    return np.array([spent.delta(epsilon) for epsilon in EPSILONS.tolist()])
