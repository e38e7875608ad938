"""Exposure, the number of bits by which a model reduces the work of guessing a secret.

Carlini et al. (2018), "The Secret Sharer", section 4.2 and appendix C: log2 |space| - log2 rank, which is
-log2 Pr[P(r|p) <= P(s|p)] over r uniform in the space.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, floor, isfinite, log, log2, pi, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flsim.base.arrays import Floats
from flsim.base.errors import InputError, at_least_one
from flsim.base.machine import refuse_beyond_memory
from flsim.base.rng import stream
from flsim.measures.memorization.score import TIE, Template, count_at_most, log_perplexity, nats, rows_at_once
from flsim.models.language_model import LanguageModel, State

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


# Exposures from the scores of references, by extrapolation beyond them.
#
# Carlini et al. (2018), "The Secret Sharer", section 4.3. The numbers are those of tensorflow-privacy 0.9
# (privacy_tests/secret_sharer/exposures.py), whose functions do not return which canary has which exposure.

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
# Jagielski et al. (2022), "Measuring Forgetting of Memorized Training Examples", section 2.2, after Tramèr et al.,
# "Truth Serum" (2022): the mean score over models trained without the canaries is subtracted from every score before
# ranking.


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


# Samples of a complete space of continuations from several proposals, and their weights relative to uniform samples.
#
# Proposal b draws each word with probability proportional to Pr(word | p, words so far)^b over the allowed words
# only: b = 0 is uniform, b = 1 the model. A fixed number of samples comes from each, and they are weighted by the
# balance heuristic: Veach and Guibas, "Optimally Combining Sampling Techniques for Monte Carlo Rendering" (1995).

Shares = dict[float, float]  # shares of the samples, by the power b of their proposal
STEPS = 100
KEPT, LEAST = 0.2, 0.01  # kept part of the default shares; smallest share of a proposal


@dataclass(frozen=True)
class Draws:
    """N samples of the space, grouped by proposal; q is the mixture of all proposals."""

    words: Tensor
    scores: Tensor  # P(r|p), float64 [N], nats
    log_densities: Tensor  # log-density of every sample under every proposal, float64 [N, K]
    counts: tuple[int, ...]  # number of samples of every proposal, [K]
    powers: tuple[float, ...]  # the power of every proposal, [K]
    log_space: float  # log of the number of sequences in the space, nats

    @property
    def shares(self) -> Floats:
        """Return the share of each proposal in q, [K]."""
        return np.array(self.counts) / sum(self.counts)

    def ratios(self) -> Floats:
        """Return the density of each proposal over q, [N, K]."""
        densities = self.log_densities.cpu().numpy()
        return np.asarray(np.exp(densities - _logsumexp(densities, axis=1, b=self.shares, keepdims=True)))

    def weights(self) -> Floats:
        """Return the uniform density over q [N], whose mean, with 0 outside an event, estimates its probability."""
        mixture = _logsumexp(self.log_densities.cpu().numpy(), axis=1, b=self.shares)
        return np.asarray(np.exp(-self.log_space - mixture))

    def heaviest(self, bound: float) -> float:
        """Return the largest weight of a sequence that scores at most `bound` nats.

        Proposal b draws it with probability exp(-b P(r|p)) / Z_b(r), where Z_b(r) is the product of its words'
        normalizers. This is smallest for a score of `bound` and the largest Z_b, estimated by the largest among the
        samples.
        """
        powers = np.array(self.powers)
        log_normalizers = -powers * self.scores.cpu().numpy()[:, None] - self.log_densities.cpu().numpy()
        rarest = -powers * bound - log_normalizers.max(0)
        return exp(-self.log_space - float(_logsumexp(rarest, b=self.shares)))


def refuse_too_many_samples(count: int, length: int) -> None:
    """Raise InputError if sequences of this many words, with their uniform numbers, exceed this machine's memory."""
    refuse_beyond_memory(8 * count * (2 * length + 2), f"evaluation.samples = {count:,}", "set fewer samples")


def draw(
    model: LanguageModel, prefix: Tensor, template: Template, shares: Shares, samples: int, rng: np.random.Generator
) -> Draws:
    """Draw about `samples` sequences from proposals in these shares, at least two from each, or raise Diverged."""
    refuse_too_many_samples(samples, template.length)
    counts = tuple(max(2, round(share * samples)) for share in shares.values())
    powers, device = tuple(shares), prefix.device
    proposal = torch.repeat_interleave(torch.arange(len(powers)), torch.tensor(counts)).to(device)
    uniforms = torch.from_numpy(rng.random((len(proposal), template.length))).to(device)
    start, log_probs = model.start(prefix[None])
    allowed = template.on(device)
    pieces = []
    for part in torch.split(torch.arange(len(proposal), device=device), rows_at_once(log_probs, start)):
        pieces.append(_draw(model, start, log_probs, allowed, powers, proposal[part], uniforms[part]))
    words, scores, densities = (torch.cat(column) for column in zip(*pieces, strict=True))
    return Draws(words, scores, densities, counts, powers, sum(log(len(ids)) for ids in allowed))


def _draw(
    model: LanguageModel,
    state: State,
    log_probs: Tensor,
    allowed: Sequence[Tensor],
    powers: Sequence[float],
    proposal: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return words [N, n], scores [N] and log-densities [N, K], after a prefix with this one-row state."""
    words: list[Tensor] = []
    score, densities = uniforms.new_zeros(len(uniforms)), uniforms.new_zeros(len(uniforms), len(powers))
    members = [(proposal == k).nonzero().flatten() for k in range(len(powers))]
    rows = torch.zeros_like(proposal)  # the row of log_probs that each sample continues
    state = tuple(part[rows] for part in state)
    for uniform, ids in zip(uniforms.T, allowed, strict=True):
        if words:
            state, log_probs = model.step(state, words[-1])
            rows = torch.arange(len(proposal), device=proposal.device)
        among_words = log_probs[:, ids]
        most = among_words.max(1, keepdim=True).values
        word, normalizers = torch.empty_like(proposal), []
        for power, mine in zip(powers, members, strict=True):
            odds = (power * (among_words - most)).exp()
            ladder = odds[rows[mine]].cumsum(1, dtype=torch.float64)
            target = uniform[mine, None] * ladder[:, -1:]
            word[mine] = torch.searchsorted(ladder, target, right=True)[:, 0].clamp(max=len(ids) - 1)
            normalizers.append(odds.sum(1, dtype=torch.float64).log() + power * most[:, 0])
        cost = nats(among_words[rows, word])
        score = score + cost
        densities -= cost[:, None] * uniforms.new_tensor(powers) + torch.stack(normalizers, 1)[rows]
        words.append(ids[word])
    return torch.stack(words, 1), score, densities


def _logsumexp(values: Floats, **options: Any) -> Floats:
    import scipy  # not at the top, because ranks need only torch and numpy

    return np.asarray(scipy.special.logsumexp(values, **options))


def best_shares(pilot: Draws, events: Floats, default: Shares) -> Shares:
    """Return shares of proposals that minimize the estimates' relative variances, estimated with a pilot.

    The second moment of an estimate, E[1{event} u / q] with u uniform and q the mixture, is convex in the shares. The
    multiplicative step of optimal design, share * sqrt(-slope), decreases it (Fellman, "On the Allocation of Linear
    Observations", 1974). The pilot has no other use, so that estimates remain unbiased; `events` [C, N] is 1 for a
    sample in the event of a canary. A fifth of the default shares is always kept.
    """
    weights, ratios = pilot.weights(), pilot.ratios()
    weights = weights / 2.0 ** floor(log2(weights.max()))  # exact; the squares of a large space would underflow
    means = events @ weights / len(weights)
    met = means > 0
    if not met.any():
        return default
    moments = ((events[met] / means[met, None] ** 2) * weights**2).sum(0)
    best = np.full(len(pilot.powers), 1 / len(pilot.powers))
    for _ in range(STEPS):
        best = best * np.sqrt((moments / (ratios @ best) ** 2) @ ratios)
        best /= best.sum()
    large = {power: share for power, share in zip(pilot.powers, (1 - KEPT) * best, strict=True) if share > LEAST}
    every = {power: large.get(power, 0.0) + KEPT * default.get(power, 0.0) for power in {**default, **large}}
    total = sum(every.values())
    return {power: every[power] / total for power in sorted(every)}


# The share of a complete space that is at least as likely as a canary, by importance sampling from the model.
#
# Exposure is -log2 Pr[P(r|p) <= P(s|p)] over r uniform in the space: Carlini et al. (2018), "The Secret Sharer",
# definition 3. If a canary is more likely than all uniform references, they contain no sample of this event. Samples
# from the model contain it, and each is weighted by its density ratio to uniform samples.


# The powers of the proposals, with the share of each if there is no pilot sample of an event; power 0 has a share,
# which bounds the weight of a sample.
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
SHARES = {0.0: 0.1, 1.0: 0.9}


def space_exposure(
    model: LanguageModel,
    prefix: Tensor,
    continuation: Tensor,
    template: Template,
    samples: int,
    seed: int,
    *keys: int | str,
) -> Exposure:
    """Estimate the exposure of a canary over the complete space.

    The canary's own share is known, so only the rest is estimated. The interval is that of Fay and Feuer, "Confidence
    intervals for directly standardized rates" (1997), for weighted counts. It includes one more sample of the largest
    weight (`Draws.heaviest`), so that it also has the right coverage with few or no samples of the event. Ties are as
    in `RandomSampler`.

    The continuation is in the space of the template. A tenth of `samples`, in equal shares of all powers, determines
    the shares. The keys, such as the canary id, distinguish the random stream. Raises Diverged if a score is not
    finite.
    """
    score, (_, log_probs) = float(log_perplexity(model, prefix, continuation[None])), model.start(prefix[None])
    bound, shares = score * (1 + TIE * torch.finfo(log_probs.dtype).eps), SHARES
    if pilot := samples // 10:
        rng = stream(seed, "importance sampling pilot", *keys)
        trial = draw(model, prefix, template, dict.fromkeys(POWERS, 1 / len(POWERS)), pilot, rng)
        shares = best_shares(trial, _event(trial, continuation, bound)[None], SHARES)
    rng = stream(seed, "importance sampling", *keys)
    draws = draw(model, prefix, template, shares, samples, rng)
    count = sum(draws.counts)
    weighted = _event(draws, continuation, bound) * draws.weights() / count
    return _estimate(draws, weighted, draws.heaviest(bound) / count)


def _event(draws: Draws, continuation: Tensor, bound: float) -> Floats:
    """Return 1 for each sample that is as likely as the canary, up to ties, and not equal to the canary, else 0 [N]."""
    is_event = (draws.scores <= bound) & ~(draws.words == continuation).all(1)
    return np.asarray(is_event.double().cpu().numpy())


def _estimate(draws: Draws, weighted: Floats, heaviest: float) -> Exposure:
    """Return the estimate from the terms of samples [N], 0 outside the event, and the largest possible term."""
    import scipy  # not at the top, because ranks need only torch and numpy

    unit = 2.0 ** floor(log2(heaviest))  # exact; the squares of a large space would underflow
    weighted, heaviest = weighted / unit, heaviest / unit
    others, squares = float(weighted.sum()), float((weighted**2).sum())
    tail = (1 - CONFIDENCE) / 2
    low = float(scipy.stats.gamma.ppf(tail, others**2 / squares, scale=squares / others)) if others else 0.0
    most, spread = others + heaviest, squares + heaviest**2
    high = float(scipy.stats.gamma.ppf(1 - tail, most**2 / spread, scale=spread / most))
    canary_share = exp(-draws.log_space)
    return Exposure(*(-log2(min(1.0, canary_share + unit * part)) for part in (others, high, low)))
