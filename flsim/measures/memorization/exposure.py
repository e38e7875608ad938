"""Exposure, the number of bits by which a model reduces the work of guessing a secret.

Carlini et al. (2018), "The Secret Sharer", section 4.2 and appendix C: log2 |space| - log2 rank, which is
-log2 Pr[P(r|p) <= P(s|p)] over r uniform in the space.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, isfinite, log, log2, pi, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flsim.base.arrays import Floats
from flsim.base.errors import InputError, at_least_one
from flsim.base.rng import stream
from flsim.measures.memorization.random_sampling import TIE
from flsim.measures.memorization.score import count_at_most, log_perplexity, rows_at_once
from flsim.models.language_model import LanguageModel

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Exposure:
    """An estimate of the exposure over a complete space, in bits, with its confidence interval, up to infinity."""

    bits: float
    low: float
    high: float


def exposure(rank: int, references: int) -> float:
    """Return the exposure, in bits, of a canary ranked among references; ValueError for a rank outside [1, |R| + 1].

    The space is the |R| + 1 sequences R and s, so exposure is between 0 (all are at least as likely as the canary) and
    log2(|R| + 1) (none is). Repetitions in R count each time.
    """
    if not 1 <= rank <= references + 1:
        raise ValueError(f"rank among {references:,} references must be from 1 to {references + 1:,}, found {rank:,}")
    return log2(references + 1) - log2(rank)


# Exposures from the scores of references, by extrapolation beyond them.
#
# Carlini et al. (2018), "The Secret Sharer", section 4.3. The numbers are those of tensorflow-privacy 0.9
# (privacy_tests/secret_sharer/exposures.py), whose functions do not return which canary has which exposure.


# The skew-normal distribution, by maximum likelihood, and its distribution function in the far lower tail.
#  Density 2/w phi(u) Phi(alpha u) with u = (x - xi) / w: Azzalini (1985), "A class of distributions which includes the
# normal ones". scipy has both, but its fit uses a simplex search, and its tail is an integral with absolute precision
# 1e-8. The exposures of memorized canaries need relative precision.

STEEPEST = 1000.0  # |alpha|; the likelihood of a sample without a lower tail increases without bound
MOST_SKEW = 0.99  # no skew-normal distribution has a skewness beyond 0.9953
TAIL = 1e-5


@dataclass(frozen=True)
class SkewNormal:
    """A skew-normal distribution of shape alpha (0 is the normal distribution), location xi and scale w > 0."""

    alpha: float
    location: float
    scale: float

    def log_density(self, x: Floats) -> Floats:
        u = (x - self.location) / self.scale
        return np.asarray(log(2 / self.scale) - u**2 / 2 - log(2 * pi) / 2 + _special().log_ndtr(self.alpha * u))

    def cdf(self, x: Floats) -> Floats:
        """Return the distribution function [...], to an absolute 1e-15."""
        u = (x - self.location) / self.scale
        return np.asarray(np.clip(_special().ndtr(u) - 2 * _special().owens_t(u, self.alpha), 0, 1))

    def log_cdf(self, x: Floats) -> Floats:
        """Return the natural log of the distribution function [...], to a relative 1e-6, for any x.

        Below the 1e-5 quantile it is the integral of f(x - t) over t > 0. As log f is concave, f(x - t) falls at least
        as fast as f(x) exp(-r t), where r is the slope of log f at x; so f(x - t) / (f(x) exp(-r t)) is between 0 and 1
        and smooth, and Gauss-Laguerre quadrature applies.
        """
        x = np.asarray(x, dtype=np.float64)
        p = self.cdf(x)
        result = np.log(np.maximum(p, TAIL))
        far = p < TAIL
        if far.any():
            at = x[far][:, None]
            u = (at - self.location) / self.scale
            nodes, weights = _laguerre()
            slope = (-u + self.alpha * _mills(self.alpha * u)) / self.scale
            falls = self.log_density(at - nodes / slope) - self.log_density(at) + nodes
            result[far] = self.log_density(at)[:, 0] - np.log(slope[:, 0]) + np.log(np.exp(falls) @ weights)
        return result


def fit(x: Floats, counts: Floats | None = None, start: SkewNormal | None = None) -> SkewNormal:
    """Return the skew-normal distribution of maximum likelihood, with |alpha| at most 1,000, of values [N] with counts.

    The normal distribution is a stationary point of the likelihood. Therefore the search starts on both sides of it, at
    the sample moments and at their mirror image, and the better result is used, unless there is a `start`.
    """
    shares = np.full(len(x), 1 / len(x)) if counts is None else counts / counts.sum()
    mean = float(shares @ x)
    deviation = sqrt(float(shares @ (x - mean) ** 2))
    z = (x - mean) / deviation
    if start is None:
        skew = float(shares @ z**3)
        magnitude = min(MOST_SKEW, max(abs(skew), 0.05))
        starts = [_of_moments(magnitude if skew > 0 else -magnitude), _of_moments(-0.05 if skew > 0 else 0.05)]
    else:
        starts = [SkewNormal(start.alpha, (start.location - mean) / deviation, start.scale / deviation)]
    ends = [_climb(z, shares, begin) for begin in starts]
    _, best = min(ends, key=lambda end: end[0])
    return SkewNormal(best.alpha, mean + deviation * best.location, deviation * best.scale)


def _climb(z: Floats, shares: Floats, start: SkewNormal) -> tuple[float, SkewNormal]:
    """Return the mean negative log-likelihood and the result of a search from `start`."""

    def loss(at: Floats) -> tuple[float, Floats]:
        alpha, location, log_scale = at
        scale = exp(log_scale)
        u = (z - location) / scale
        ratio = _mills(alpha * u)
        value = log_scale + shares @ (u**2 / 2 - _special().log_ndtr(alpha * u)) + log(pi / 2) / 2
        gradient = [
            -shares @ (u * ratio),
            shares @ (alpha * ratio - u) / scale,
            1 + shares @ (alpha * u * ratio - u**2),
        ]
        return float(value), np.array(gradient)

    begin = np.array([start.alpha, start.location, log(start.scale)])
    bounds = [(-STEEPEST, STEEPEST), (-20, 20), (-10, 5)]
    begin = np.clip(begin, *np.transpose(bounds))
    precision = {"ftol": 1e-13, "gtol": 1e-8}
    import scipy

    end = scipy.optimize.minimize(loss, begin, jac=True, method="L-BFGS-B", bounds=bounds, options=precision)
    alpha, location, log_scale = map(float, end.x)
    return float(end.fun), SkewNormal(alpha, location, exp(log_scale))


def _of_moments(skew: float) -> SkewNormal:
    """Return the distribution of mean 0, variance 1 and this skewness, which is not 0: Azzalini (1985)."""
    ratio = abs(2 * skew / (4 - pi)) ** (2 / 3)
    delta = float(np.sign(skew)) * sqrt(pi / 2 * ratio / (1 + ratio))
    scale = 1 / sqrt(1 - 2 * delta**2 / pi)
    return SkewNormal(delta / sqrt(1 - delta**2), -scale * delta * sqrt(2 / pi), scale)


def _special() -> Any:
    import scipy  # not at the top, because ranks need only torch and numpy

    return scipy.special


@cache
def _laguerre() -> tuple[Floats, Floats]:
    """Return nodes and weights of the integral of exp(-t) f(t) over t > 0."""
    nodes, weights = _special().roots_laguerre(64)
    return nodes, weights


def _mills(x: Floats) -> Floats:
    """Return phi(x) / Phi(x)."""
    return np.asarray(np.exp(-(x**2) / 2 - log(2 * pi) / 2 - _special().log_ndtr(x)))


FEWEST = 20
BINS, WIDEST = 1024, 6
RESAMPLES = 100  # refits of the parametric bootstrap, from which the intervals and the p-value come
FINE = 8_192  # bins of a larger sample, whose counts are fitted: for two million scores in 1.5 s instead of 29 s


@dataclass(frozen=True)
class Extrapolation:
    """The exposure of a canary if scores of the complete space are skew-normal, and the fit to the scores of R."""

    fitted: SkewNormal  # the distribution
    # the share of samples of the fitted distribution that are as far from their own fit, by the largest distance
    # of the two distribution functions. (Tables of this statistic assume fixed parameters, and would almost never
    # reject.) Below 0.01, scores are not skew-normal, and exposures beyond log2 |R| are unreliable. A good fit
    # does not prove them either, because R has no scores in this tail
    p_value: float
    # the interval covers the fit's sampling error, not the error of a poor fit
    exposure: Exposure


def extrapolate(score: float, references: Tensor, seed: int) -> Extrapolation:
    """Return -log2 F(P(s|p)), where F is the skew-normal distribution function of maximum likelihood for R's scores."""
    sample = _numbers(references)
    if not isfinite(score):
        raise InputError("the score of the canary is not finite; the model has diverged")
    if np.ptp(sample) <= 1e-9 * np.abs(sample).max():
        raise InputError("all references score the same, so no distribution can be fitted; check the model")
    at, fitted = np.array([score]), fit(*_binned(sample)) if len(sample) > FINE else fit(sample)
    p_value, resampled = _bootstrap(fitted, sample, at, RESAMPLES, seed)
    tails = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tails, 1 - tails], axis=0)
    return Extrapolation(fitted, p_value, Exposure(*(float(bits[0]) for bits in (_bits(fitted, at), low, high))))


def _binned(sample: Floats) -> tuple[Floats, Floats]:
    """Return the centers of bins over the complete sample, and the number of values in each."""
    counts, edges = np.histogram(sample, FINE)
    return (edges[1:] + edges[:-1]) / 2, counts.astype(np.float64)


def _bootstrap(fitted: SkewNormal, sample: Floats, at: Floats, resamples: int, seed: int) -> tuple[float, Floats]:
    """Return the p-value of the fit, and the bits at each score by every refit, [resamples, canaries].

    Samples are counts in 1,024 bins, 1/50 to 1/85 of a standard deviation wide, and so is the sample's own distance.
    """
    edges = np.linspace(fitted.location - WIDEST * fitted.scale, fitted.location + WIDEST * fitted.scale, BINS - 1)
    width = edges[1] - edges[0]
    centers = np.concatenate([edges[:1] - width / 2, edges + width / 2])
    expected = np.diff(fitted.cdf(edges), prepend=0, append=1).clip(0)

    def refit(counts: Floats) -> tuple[SkewNormal, float]:
        again = fit(centers, counts, start=fitted)
        return again, float(np.abs(np.cumsum(counts)[:-1] / counts.sum() - again.cdf(edges)).max())

    counts_of_sample = np.bincount(np.searchsorted(edges, sample), minlength=BINS).astype(np.float64)
    _, distance = refit(counts_of_sample)
    rng, bits, as_far = stream(seed, "extrapolation"), [], 0
    for _ in range(resamples):
        again, its_distance = refit(rng.multinomial(len(sample), expected / expected.sum()).astype(np.float64))
        bits.append(_bits(again, at))
        as_far += its_distance >= distance
    return (1 + as_far) / (1 + resamples), np.array(bits)


def _bits(distribution: SkewNormal, at: Floats) -> Floats:
    return -distribution.log_cdf(at) / log(2)


def _numbers(references: Tensor) -> Floats:
    values: Floats = references.double().cpu().numpy()
    if len(values) < FEWEST:
        raise InputError(f"at least {FEWEST} references are needed, found {len(values)}; draw more")
    if not np.isfinite(values).all():
        raise InputError("the score of a reference is not finite; the model has diverged")
    return values


# Calibrated exposure, the exposure relative to models that were not trained on the canary.
#
# Jagielski et al. (2022), "Measuring Forgetting of Memorized Training Examples", section 2.2, after Watson et al.
# (2021): the mean score over models trained without the canaries is subtracted from every score before ranking.


def mean_scores(models: Sequence[LanguageModel], prefix: Tensor, continuations: Tensor) -> Tensor:
    """Return the mean log-perplexity of continuations over models, float64 [N], nats; it depends on the prefix."""
    at_least_one(models=len(models))
    return torch.stack([log_perplexity(model, prefix, continuations) for model in models]).mean(0)


def calibrated_rank(
    model: LanguageModel,
    prefix: Tensor,
    continuation: Tensor,
    references: Tensor,
    canary_mean: float,
    reference_means: Tensor,
) -> tuple[float, int]:
    """Return the score P(s|p) of a continuation minus the mean of models without it, nats, and its rank by such scores.

    The rank among references is exact; `canary_mean` and `reference_means` are `mean_scores`. A reference with mean m
    counts if P(r'|p) <= d + m, where d is the canary's calibrated score. Therefore it is dropped as soon as its cost so
    far exceeds this value; for a memorized canary, d is far below 0. Ties are as in `RandomSampler`, by identity and
    within 8 units of rounding of the four compared scores.
    """
    state, log_probs = model.start(prefix[None])
    eps = TIE * torch.finfo(log_probs.dtype).eps
    nats_of_canary = float(log_perplexity(model, prefix, continuation[None]))
    score = nats_of_canary - canary_mean
    # P(r') - m <= d + eps (P(r') + m + P(s) + mean), solved for P(r').
    bounds = (score + reference_means * (1 + eps) + eps * (nats_of_canary + canary_mean)).div(1 - eps)
    same = (references == continuation).all(1)
    others, bounds = references[~same], bounds[~same]
    size = rows_at_once(log_probs, state)
    pairs = zip(torch.split(others, size), torch.split(bounds, size), strict=True)
    at_most = sum(count_at_most(model, state, log_probs, part, bound) for part, bound in pairs)
    return score, 1 + int(same.sum()) + at_most
