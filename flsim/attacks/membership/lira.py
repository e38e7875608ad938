"""LiRA, the likelihood-ratio attack with shadow models.

Carlini et al., "Membership Inference Attacks From First Principles" (2022), sections 4 and 5 and Algorithm 1. Shadow
models are trained like the target, each on a random half of the data, with a point x (IN) or without it (OUT). The
scores phi(x) of both kinds, for a sequence the mean log-likelihood, are assumed to be normal:

    online     log N(phi; m_in, s_in^2) - log N(phi; m_out, s_out^2)
    offline    Phi((phi - m_out) / s_out): the probability that a model without x scores below the target

Shapes: S shadow models, N points. Larger scores mean membership.
"""

import numpy as np
import scipy

from flsim.base.arrays import Flags, Floats, Ints

FEW = 64  # shadow models, below which the paper uses one variance for all points
SMALLEST = 1e-30  # added to a standard deviation, which avoids a division by zero for equal scores


def lira_online(phi: Floats, shadows: Floats, is_in: Flags, fixed_variance: bool | None = None) -> Floats:
    """Return the log of the ratio of the two likelihoods, float64 [N], for scores `phi` [N] by the target model.

    `shadows` [S, N] are scores by the shadow models, which were trained on the points `is_in` [S, N]. All points share
    their variances if `fixed_variance`; None to share them below 64 shadow models.
    """
    (m_in, s_in), (m_out, s_out) = (_normal(shadows, side, fixed_variance) for side in (is_in, ~is_in))
    return _log_density(phi, m_in, s_in) - _log_density(phi, m_out, s_out)


def lira_offline(phi: Floats, shadows: Floats, is_in: Flags, fixed_variance: bool | None = None) -> Floats:
    """Return the probability that a model without the point scores below the target, float64 [N]; see `lira_online`."""
    mean, deviation = _normal(shadows, ~is_in, fixed_variance)
    return np.asarray(scipy.special.ndtr((phi - mean) / deviation))


def _normal(shadows: Floats, side: Flags, fixed_variance: bool | None) -> tuple[Floats, Floats]:
    """Return mean [N], NaN without a model, and deviation [N] of each point's scores by the models of a side."""
    counts, mean, squares = moments_of_side(shadows, side)
    if len(shadows) < FEW if fixed_variance is None else fixed_variance:
        variance = np.full(shadows.shape[1], squares.sum() / max(1, counts.sum()))
    else:
        variance = squares.sum(axis=0) / counts.clip(1)
    return mean, np.sqrt(variance) + SMALLEST


def moments_of_side(values: Floats, side: Flags) -> tuple[Ints, Floats, Floats]:
    """Return number [N] and mean [N] of each column's values of one side, and squared deviations [S, N], else 0."""
    counts = side.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(side, values, 0.0).sum(axis=0) / counts
    return counts, mean, np.where(side, (values - mean) ** 2, 0.0)


def _log_density(values: Floats, mean: Floats, deviation: Floats) -> Floats:
    return np.asarray(-(((values - mean) / deviation) ** 2) / 2 - np.log(deviation) - np.log(2 * np.pi) / 2)
