"""RMIA, the robust attack by pairwise likelihood ratios.

Zarifzadeh, Liu and Shokri, "Low-Cost High-Power Membership Inference Attacks" (2024), section 3, as in its authors'
ml_privacy_meter (modules/mia/attacks/rmia.py, commit e384af8), except that OUT models are chosen by their masks.

    ratio(x) = p(x | theta) / p(x),        p(x): the mean of p(x | theta') over reference models theta'
    score(x) = share of the population z with  ratio(x) / ratio(z) > gamma

Offline, p(x) is approximated by (1 + a) / 2 p_out(x) + (1 - a) / 2, which assumes probabilities near 1 for members. For
a sequence, p is therefore e to the mean log-likelihood per token.

Shapes: S reference models, N points, Z points of a population that the target was not trained on.
"""

import numpy as np

from flsim.base.arrays import Flags, Floats

GAMMA = 1.0
OFFLINE_A = 0.3  # to be tuned on a pair of reference models, never on the target


def online_ratios(target: Floats, references: Floats) -> Floats:
    """Return p(x | theta) over its mean by the reference models [S, N], of which half read x: float64 [N]."""
    return np.asarray(target / references.mean(axis=0))


def offline_ratios(target: Floats, references: Floats, is_in: Flags, a: float = OFFLINE_A) -> Floats:
    """Return p(x | theta) over p(x) by the models without x, as near as `a` (1: their mean), float64 [N]."""
    out = np.where(is_in, 0.0, references).sum(axis=0) / (~is_in).sum(axis=0)
    return np.asarray(target / ((1 + a) / 2 * out + (1 - a) / 2))


def rmia_scores(ratios: Floats, population: Floats, gamma: float = GAMMA) -> Floats:
    """Return the share of the population [Z] whose ratio is exceeded gamma times by that of each point [N]."""
    below = np.searchsorted(np.sort(gamma * population), ratios, side="left")
    return np.asarray(below / len(population), np.float64)
