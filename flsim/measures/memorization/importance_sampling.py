"""The share of a complete space that is at least as likely as a canary, by importance sampling from the model.

Exposure is -log2 Pr[P(r|p) <= P(s|p)] over r uniform in the space: Carlini et al. (2018), "The Secret Sharer",
definition 3. If a canary is more likely than all uniform references, they contain no sample of this event. Samples from
the model contain it, and each is weighted by its density ratio to uniform samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, log2
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flsim.base.arrays import Floats
from flsim.base.machine import refuse_beyond_memory
from flsim.base.rng import stream
from flsim.measures.memorization.exposure import CONFIDENCE, Exposure
from flsim.measures.memorization.random_sampling import TIE
from flsim.measures.memorization.score import Template, log_perplexity, nats, rows_at_once
from flsim.models.language_model import LanguageModel, State

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
    model: LanguageModel,
    prefix: Tensor,
    template: Template,
    shares: Shares,
    samples: int,
    rng: np.random.Generator,
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

    others, squares = float(weighted.sum()), float((weighted**2).sum())
    tail = (1 - CONFIDENCE) / 2
    low = float(scipy.stats.gamma.ppf(tail, others**2 / squares, scale=squares / others)) if others else 0.0
    most, spread = others + heaviest, squares + heaviest**2
    high = float(scipy.stats.gamma.ppf(1 - tail, most**2 / spread, scale=spread / most))
    canary_share = exp(-draws.log_space)
    return Exposure(*(-log2(min(1.0, canary_share + part)) for part in (others, high, low)))
