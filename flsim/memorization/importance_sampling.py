"""The share of a whole space that is at least as likely as a canary, by importance sampling from the model.

Exposure is -log2 Pr[P(r|p) <= P(s|p)] over r uniform in words^n: Carlini et al. (2018), "The Secret Sharer", definition
3. Uniform references never meet the event of a canary that is likelier than all of them. Samples of the model do, and
each counts by how much rarer it is among uniform ones.
"""

from dataclasses import dataclass
from math import exp, log2

import numpy as np
import scipy
import torch
from torch import Tensor

from flsim.base.errors import InputError, at_least_one
from flsim.base.rng import stream
from flsim.data.vocabulary import Layout
from flsim.memorization.exposure import CONFIDENCE, Exposure
from flsim.memorization.proposals import Draws, Floats, best_shares, draw
from flsim.memorization.random_sampling import TIE
from flsim.memorization.score import log_perplexity
from flsim.models.language_model import LanguageModel


@dataclass(frozen=True)
class ImportanceHParams:
    """How the space is sampled.

    Attributes:
        samples: that the estimate is made of, in all.
        pilot: samples of equal shares of all powers, that only choose the shares; 0 leaves them at `shares`.
        powers: what the pilot chooses among.
        shares: of powers where there is no pilot, or where it met no event; a fifth of them is kept whatever the
            pilot says, since they bound what one sample can weigh.
        confidence: how often an interval is to cover.
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
    """What samples say of one canary's place in the whole space.

    Attributes:
        probability: unbiased estimate of Pr[P(r|p) <= P(s|p)], r uniform; at least 1 / words^n, which is the canary's.
        standard_error: of the probability; 0 where no other sequence was met that is as likely.
        exposure: bits.
        effective_samples: (sum of weights)^2 / sum of squares, of samples that are as likely as the canary and are not
            it; so many uniform ones would be as precise. Where it is below about 10 go by the interval.
    """

    probability: float
    standard_error: float
    exposure: Exposure
    effective_samples: float


def space_exposures(
    model: LanguageModel,
    prefix: Tensor,
    continuations: Tensor,
    layout: Layout,
    hparams: ImportanceHParams,
    seed: int,
    *keys: int | str,
) -> list[SpaceExposure]:
    """Estimate the exposure over the whole space of every canary with this prefix, from one draw of samples.

    The canary's own share is known, so only others are estimated. The interval is that of Fay and Feuer, "Confidence
    intervals for directly standardized rates" (1997), for weighted counts. It allows for one more sample of the
    greatest weight (`Draws.heaviest`), so that it covers also where few or no samples met the event.
    Ties as in `random_sampling`.

    Args:
        model: the model.
        prefix: p, int64 [L], BOS first.
        continuations: s of each canary, int64 [C, n], words only.
        layout: where the words are.
        hparams: how to sample.
        seed: the experiment's.
        keys: what tells this draw from others, e.g. the canary's id.

    Returns:
        One for each canary.

    Raises:
        Diverged: a score is not finite.
    """
    scores, (_, log_probs) = log_perplexity(model, prefix, continuations), model.start(prefix[None])
    bounds = scores * (1 + TIE * torch.finfo(log_probs.dtype).eps)
    length, shares = continuations.shape[1], dict(hparams.shares)
    if hparams.pilot:
        equal = dict.fromkeys(hparams.powers, 1 / len(hparams.powers))
        rng = stream(seed, "importance sampling pilot", *keys)
        pilot = draw(model, prefix, length, layout, equal, hparams.pilot, rng)
        shares = best_shares(pilot, _events(pilot, continuations, bounds), shares)
    rng = stream(seed, "importance sampling", *keys)
    draws = draw(model, prefix, length, layout, shares, hparams.samples, rng)
    weighted = _events(draws, continuations, bounds) * draws.weights() / sum(draws.counts)
    heaviest = [draws.heaviest(bound) / sum(draws.counts) for bound in bounds.tolist()]
    return [_estimate(draws, each, most, hparams.confidence) for each, most in zip(weighted, heaviest, strict=True)]


def _events(draws: Draws, continuations: Tensor, bounds: Tensor) -> Floats:
    """[C, N]: 1 where a sample is as likely as a canary, up to ties, and not the canary itself."""
    same = [(draws.words == continuation).all(1) for continuation in continuations]
    events = (draws.scores <= bounds[:, None]) & ~torch.stack(same)
    return np.asarray(events.double().cpu().numpy())


def _estimate(draws: Draws, weighted: Floats, heaviest: float, confidence: float) -> SpaceExposure:
    """From what every sample adds to the estimate [N], 0 outside the event, and the most that one could add."""
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
