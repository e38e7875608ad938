"""LiRA, the likelihood-ratio attack with shadow models.

Carlini et al., "Membership Inference Attacks From First Principles" (2022), sections 4 and 5 and Algorithm 1. Shadow
models are trained like the target, each on a random half of the data. So each point x was in the training data of some
models (IN) and not of others (OUT). The scores phi(x) of both kinds are assumed to be normal:

    online     log N(phi; m_in, s_in^2) - log N(phi; m_out, s_out^2)
    offline    Phi((phi - m_out) / s_out): the probability that a model without x scores below the target

A classifier's phi is log(p / (1 - p)). For a sequence phi is its mean log-likelihood, which is already unbounded.

Shapes: S shadow models, N points. Larger scores mean membership.
"""

import numpy as np
import scipy

from flsim.base.arrays import Flags, Floats

FEW = 64  # shadow models, below which the paper uses one variance for all points
SMALLEST = 1e-30  # added to a standard deviation, which avoids a division by zero for equal scores


def online(phi: Floats, shadows: Floats, is_in: Flags, fixed_variance: bool | None = None) -> Floats:
    """Return the log of the ratio of the two likelihoods, float64 [N], for scores `phi` [N] by the target model.

    `shadows` [S, N] are scores by the shadow models, which were trained on the points `is_in` [S, N]. All points share
    their variances if `fixed_variance`; None to share them below 64 shadow models.
    """
    (m_in, s_in), (m_out, s_out) = (_normal(shadows, side, fixed_variance) for side in (is_in, ~is_in))
    return _log_density(phi, m_in, s_in) - _log_density(phi, m_out, s_out)


def offline(phi: Floats, shadows: Floats, is_in: Flags, fixed_variance: bool | None = None) -> Floats:
    """Return the probability that a model without the point scores below the target, float64 [N]; see `online`.

    It is one-sided: unusually low scores do not mean membership. Scores of models with the point are not used.
    """
    mean, deviation = _normal(shadows, ~is_in, fixed_variance)
    return np.asarray(scipy.special.ndtr((phi - mean) / deviation))


def _normal(shadows: Floats, side: Flags, fixed_variance: bool | None) -> tuple[Floats, Floats]:
    """Return the mean [N] and the standard deviation [N] of each point's scores by the models of one side.

    A shared deviation is that from the means of points. The mean is NaN without a model of this side.
    """
    counts = side.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(side, shadows, 0.0).sum(axis=0) / counts
    squares = np.where(side, (shadows - mean) ** 2, 0.0)
    if len(shadows) < FEW if fixed_variance is None else fixed_variance:
        variance = np.full(shadows.shape[1], squares.sum() / max(1, counts.sum()))
    else:
        variance = squares.sum(axis=0) / counts.clip(1)
    return mean, np.sqrt(variance) + SMALLEST


def _log_density(values: Floats, mean: Floats, deviation: Floats) -> Floats:
    return np.asarray(-(((values - mean) / deviation) ** 2) / 2 - np.log(deviation) - np.log(2 * np.pi) / 2)
