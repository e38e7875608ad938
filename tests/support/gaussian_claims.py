"""What a ledger that is exactly mu-GDP allows, for tests of audits."""

import numpy as np
from scipy.stats import norm

from flsim.attacks.audit.bounds import Allowed
from flsim.privacy.ledger import EPSILONS


def curve_of_gaussian(mu: float) -> Allowed:
    """Return delta of N(mu, 1) and N(0, 1): the integral of max(0, p - e^epsilon q), over x > epsilon / mu + mu / 2."""
    start = EPSILONS / mu + mu / 2
    return Allowed(EPSILONS, norm.sf(start - mu) - np.exp(EPSILONS + norm.logsf(start)))
