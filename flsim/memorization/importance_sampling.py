"""The share of a whole space that is at least as likely as a canary, by importance sampling from the model.

Exposure is -log2 Pr[P(r|p) <= P(s|p)] over r uniform in the space: Carlini et al. (2018), "The Secret Sharer",
definition 3. Uniform references never meet this event for a canary that is likelier than all of them. Samples of the
model meet it, and each is weighted by how much rarer it is among uniform ones.
"""

from dataclasses import dataclass
from math import exp, log2

import numpy as np
import torch
from torch import Tensor

from flsim.base.errors import InputError, at_least_one
from flsim.base.rng import stream
from flsim.memorization.exposure import CONFIDENCE, Exposure
from flsim.memorization.proposals import Draws, Floats, best_shares, draw
from flsim.memorization.random_sampling import TIE
from flsim.memorization.score import log_perplexity
from flsim.memorization.template import Template
from flsim.models.language_model import LanguageModel


@dataclass(frozen=True)
class ImportanceHParams:
    """Settings of sampling the space.

    Attributes:
        samples: total number of samples of the estimate.
        pilot: number of pilot samples, in equal shares of all powers, which only choose the shares; 0 leaves them at
            `shares`.
        powers: the powers that the pilot chooses among.
        shares: the share of each power without a pilot, or where the pilot met no event. A fifth of it is kept in any
            case, since it bounds the weight of a sample.
        confidence: coverage of an interval, such as 0.95.
    """

    samples: int = 20_000
    pilot: int = 2_000
    powers: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
    shares: tuple[tuple[float, float], ...] = ((0.0, 0.1), (1.0, 0.9))
    confidence: float = CONFIDENCE

    def __post_init__(self) -> None:
        at_least_one(samples=self.samples, powers=len(self.powers))
        if self.pilot < 0 or min(self.powers) < 0:
            raise InputError("pilot and powers of importance sampling must not be negative")
        if not 0 < self.confidence < 1:
            raise InputError(f"confidence must be between 0 and 1, found {self.confidence}")
        if dict(self.shares).get(0.0, 0.0) <= 0 or min(share for _, share in self.shares) < 0:
            raise InputError(
                "shares of importance sampling must give power 0 some, so that no sequence is out of reach"
            )


@dataclass(frozen=True)
class SpaceExposure:
    """The estimate of one canary's rank in the whole space.

    Attributes:
        probability: unbiased estimate of Pr[P(r|p) <= P(s|p)], r uniform; at least 1 / |space|, which is the canary's.
        standard_error: standard error of the probability; 0 where no other sequence in the samples is as likely.
        exposure: the exposure in bits, with its interval.
        effective_samples: (sum of weights)^2 / sum of squares, over samples other than the canary that are as likely;
            that many uniform ones would be as precise. Below about 10, only the interval is reliable.
    """

    probability: float
    standard_error: float
    exposure: Exposure
    effective_samples: float


def space_exposures(
    model: LanguageModel,
    prefix: Tensor,
    continuations: Tensor,
    template: Template,
    hparams: ImportanceHParams,
    seed: int,
    *keys: int | str,
) -> list[SpaceExposure]:
    """Estimate the exposure over the whole space of every canary with this prefix, from one draw of samples.

    The canary's own share is known, so only others are estimated. The interval is that of Fay and Feuer, "Confidence
    intervals for directly standardized rates" (1997), for weighted counts. It allows for one more sample of the
    greatest weight (`Draws.heaviest`), so that it covers also where few or no samples met the event.
    Ties are as in `random_sampling`.

    Args:
        model: the model.
        prefix: p, int64 [L], BOS first.
        continuations: s of each canary, int64 [C, n], in the space.
        template: the space, such as words^n.
        hparams: settings of sampling.
        seed: the experiment's seed.
        keys: keys of this draw, such as the canary's id, which make its random stream differ from others.

    Returns:
        One estimate for each canary.

    Raises:
        Diverged: a score is not finite.
    """
    scores, (_, log_probs) = log_perplexity(model, prefix, continuations), model.start(prefix[None])
    bounds = scores * (1 + TIE * torch.finfo(log_probs.dtype).eps)
    shares = dict(hparams.shares)
    if hparams.pilot:
        equal = dict.fromkeys(hparams.powers, 1 / len(hparams.powers))
        rng = stream(seed, "importance sampling pilot", *keys)
        pilot = draw(model, prefix, template, equal, hparams.pilot, rng)
        shares = best_shares(pilot, _events(pilot, continuations, bounds), shares)
    rng = stream(seed, "importance sampling", *keys)
    draws = draw(model, prefix, template, shares, hparams.samples, rng)
    weighted = _events(draws, continuations, bounds) * draws.weights() / sum(draws.counts)
    heaviest = [draws.heaviest(bound) / sum(draws.counts) for bound in bounds.tolist()]
    return [_estimate(draws, own, most, hparams.confidence) for own, most in zip(weighted, heaviest, strict=True)]


def _events(draws: Draws, continuations: Tensor, bounds: Tensor) -> Floats:
    """Return [C, N], 1 where a sample is as likely as a canary, up to ties, and not the canary itself."""
    same = [(draws.words == continuation).all(1) for continuation in continuations]
    events = (draws.scores <= bounds[:, None]) & ~torch.stack(same)
    return np.asarray(events.double().cpu().numpy())


def _estimate(draws: Draws, weighted: Floats, heaviest: float, confidence: float) -> SpaceExposure:
    """Return the estimate from every sample's part of it [N], 0 outside the event, and the most that one could add."""
    import scipy  # not at the top: ranks need torch and numpy only

    others, squares = float(weighted.sum()), float((weighted**2).sum())
    proposals = np.split(weighted, np.cumsum(draws.counts)[:-1])
    variance = sum(len(part) * float(part.var(ddof=1)) for part in proposals)
    effective = others**2 / squares if others else 0.0

    tail = (1 - confidence) / 2
    low = float(scipy.stats.gamma.ppf(tail, effective, scale=squares / others)) if others else 0.0
    most, spread = others + heaviest, squares + heaviest**2
    high = float(scipy.stats.gamma.ppf(1 - tail, most**2 / spread, scale=spread / most))
    own = exp(-draws.log_space)
    bits = Exposure(*(-log2(min(1.0, own + part)) for part in (others, high, low)))
    return SpaceExposure(own + others, variance**0.5, bits, effective)
