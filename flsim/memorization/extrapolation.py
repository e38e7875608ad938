"""Exposures of named canaries from the scores of references, by interpolation and by extrapolation beyond them.

Carlini et al. (2018), "The Secret Sharer", section 4.3. The numbers are those of tensorflow-privacy 0.9
(privacy_tests/secret_sharer/exposures.py), whose functions lose track of which canary is which.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, log2

import numpy as np
from torch import Tensor

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.memorization.exposure import CONFIDENCE, Exposure, exposure_interval
from flsim.memorization.skew_normal import Floats, SkewNormal, fit

FEWEST = 20
POOR = 0.01
BINS, WIDEST = 1024, 6
FINE = 8_192  # bins of a larger sample, whose counts are fitted: of two million scores in 1.5 s in place of 29


@dataclass(frozen=True)
class ExtrapolationHParams:
    """Settings of the bootstrap of a fit.

    Attributes:
        resamples: number of refits of the parametric bootstrap, from which the intervals and the p-value come.
        confidence: coverage of an interval, for scores that are skew-normal.
    """

    resamples: int = 200
    confidence: float = CONFIDENCE

    def __post_init__(self) -> None:
        if self.resamples < 100:
            raise InputError(f"resamples must be at least 100, found {self.resamples}")
        if not 0 < self.confidence < 1:
            raise InputError(f"confidence must be between 0 and 1, found {self.confidence}")


@dataclass(frozen=True)
class Extrapolation:
    """Exposures under the assumption that scores of the whole space are skew-normal, and the fit to the scores of R.

    Attributes:
        fitted: the distribution.
        statistic: Kolmogorov and Smirnov's, the largest distance between the two distribution functions.
        p_value: the share of samples of the fitted distribution that are as far from their own fit. (Tables of the
            statistic suppose parameters that were not fitted, and would hardly ever reject.)
        exposures: the exposure of every canary. Intervals cover the fit's sampling error, not the error of a poor fit.
    """

    fitted: SkewNormal
    statistic: float
    p_value: float
    exposures: dict[str, Exposure]

    @property
    def poor(self) -> bool:
        """Return whether scores are not skew-normal (p < 0.01), so that exposures beyond log2 |R| cannot be trusted.

        A good fit proves nothing beyond log2 |R| either, as none of R is in that tail.
        """
        return self.p_value < POOR


def interpolate(
    scores: Mapping[str, float], references: Tensor, space: int | None = None, confidence: float = CONFIDENCE
) -> dict[str, Exposure]:
    """Return log2 |R| - log2 rank of every canary, where ties put references first.

    The rank is 1 + the number of r' in R with P(r'|p) <= P(s|p). The result is `exposure` minus log2(1 + 1/|R|), since
    R alone is the space here; the worst rank is thus below 0 bits.

    Args:
        scores: log-perplexity of each canary by its name, in any unit.
        references: log-perplexities of R, float [|R|], in the same unit.
        space: see `exposure_interval`.
        confidence: see `exposure_interval`.

    Raises:
        InputError: there are no references, or a score is not finite.
    """
    ordered = np.sort(_numbers(references, fewest=1))
    count, exposures = len(ordered), {}
    for name, score in _finite(scores).items():
        rank = 1 + int(np.searchsorted(ordered, score, side="right"))
        exposures[name] = Exposure(log2(count) - log2(rank), *exposure_interval(rank, count, space, confidence))
    return exposures


def extrapolate(
    scores: Mapping[str, float], references: Tensor, hparams: ExtrapolationHParams, seed: int
) -> Extrapolation:
    """Return -log2 F(P(s|p)), where F is the skew-normal distribution function of maximum likelihood for R's scores.

    Args:
        scores: log-perplexity of each canary by its name, in any unit.
        references: log-perplexities of R, float [|R|], in the same unit.
        hparams: settings of the bootstrap, whose cost does not depend on |R|.
        seed: the experiment's seed.

    Raises:
        InputError: there are fewer than 20 references, all score the same, or a score is not finite.
    """
    import scipy  # not at the top: ranks need torch and numpy only

    sample, names = _numbers(references, FEWEST), list(_finite(scores))
    if np.ptp(sample) <= 1e-9 * np.abs(sample).max():
        raise InputError(
            "all references score the same, so that no distribution can be fitted to them; look at the model"
        )
    at = np.array([scores[name] for name in names], dtype=np.float64)
    fitted = fit(*_binned(sample)) if len(sample) > FINE else fit(sample)
    p_value, resampled = _bootstrap(fitted, sample, at, hparams.resamples, seed)
    tails = (1 - hparams.confidence) / 2
    low, high = np.quantile(resampled, [tails, 1 - tails], axis=0)
    exposures = map(Exposure, _bits(fitted, at).tolist(), low.tolist(), high.tolist())
    statistic = float(scipy.stats.kstest(sample, fitted.cdf).statistic)
    return Extrapolation(fitted, statistic, p_value, dict(zip(names, exposures, strict=True)))


def _binned(sample: Floats) -> tuple[Floats, Floats]:
    """Return the centers of bins over the whole sample, and the number of values in each."""
    counts, edges = np.histogram(sample, FINE)
    return (edges[1:] + edges[:-1]) / 2, counts.astype(np.float64)


def _bootstrap(fitted: SkewNormal, sample: Floats, at: Floats, resamples: int, seed: int) -> tuple[float, Floats]:
    """Return the p-value of the fit, and the bits at each score by every refit, [resamples, canaries].

    Samples are drawn as counts in 1,024 bins, 1/50 to 1/85 of a standard deviation wide. The sample's own distance is
    computed on the same bins, so that like is compared with like.
    """
    edges = np.linspace(fitted.location - WIDEST * fitted.scale, fitted.location + WIDEST * fitted.scale, BINS - 1)
    width = edges[1] - edges[0]
    centers = np.concatenate([edges[:1] - width / 2, edges + width / 2])
    expected = np.diff(fitted.cdf(edges), prepend=0, append=1).clip(0)

    def refit(counts: Floats) -> tuple[SkewNormal, float]:
        again = fit(centers, counts, start=fitted)
        return again, float(np.abs(np.cumsum(counts)[:-1] / counts.sum() - again.cdf(edges)).max())

    own = np.bincount(np.searchsorted(edges, sample), minlength=BINS).astype(np.float64)
    _, distance = refit(own)
    rng, bits, as_far = stream(seed, "extrapolation"), [], 0
    for _ in range(resamples):
        again, its_distance = refit(rng.multinomial(len(sample), expected / expected.sum()).astype(np.float64))
        bits.append(_bits(again, at))
        as_far += its_distance >= distance
    return (1 + as_far) / (1 + resamples), np.array(bits)


def _bits(distribution: SkewNormal, at: Floats) -> Floats:
    return -distribution.log_cdf(at) / log(2)


def _numbers(references: Tensor, fewest: int) -> Floats:
    values: Floats = references.double().cpu().numpy()
    if len(values) < fewest:
        raise InputError(f"at least {fewest} references are needed, found {len(values)}; draw more")
    if not np.isfinite(values).all():
        raise InputError("the score of a reference is not finite; the model has diverged")
    return values


def _finite(scores: Mapping[str, float]) -> Mapping[str, float]:
    for name, score in scores.items():
        if not np.isfinite(score):
            raise InputError(f"the score of canary {name} is not finite; the model has diverged")
    return scores
