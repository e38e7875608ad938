"""Extraction by generative sampling, which tells how often the model generates the canary.

Carlini et al. (2018), "The Secret Sharer", section 5.2: a template is filled from left to right, each token drawn from
the model's distribution over those that fit.
"""

from dataclasses import dataclass
from math import exp, inf

import numpy as np
import torch
from torch import Tensor

from flsim.base.settings import Count, Positive, settings
from flsim.measures.memorization.score import nats, rows_at_once
from flsim.measures.memorization.template import Template, cheapest
from flsim.models.language_model import LanguageModel

PIECE = 2**13  # continuations that are sampled at once: shared beginnings are read once


@settings
class GenerationHParams:
    """Settings of sampling from the model.

    Attributes:
        samples: number of continuations.
        temperature: divisor of log-probs; 1 is the model itself, less is greedier.
        top_k: number of the likeliest allowed tokens to draw from; None for all.
    """

    samples: Count = 10_000
    temperature: Positive = 1.0
    top_k: Count | None = None


@dataclass(frozen=True)
class GenerativeSampling:
    """The result of sampling for one canary.

    Attributes:
        samples: number of continuations that were drawn.
        hits: number of continuations that equal the canary's.
        first: number of samples until the first hit, including it; None without hits.
        nats: -log of the probability that one sample is the canary's; infinity where `top_k` or the template excludes
            it. At temperature 1, without `top_k` and where all tokens are allowed, it is the log-perplexity.
    """

    samples: int
    hits: int
    first: int | None
    nats: float

    @property
    def expected(self) -> float:
        """Return the expected number of samples until the first hit, 1 / probability; `first` is geometric."""
        return exp(self.nats) if self.nats < 700 else inf


def generative_sampling(
    model: LanguageModel,
    prefix: Tensor,
    continuation: Tensor,
    template: Template,
    hparams: GenerationHParams,
    rng: np.random.Generator,
) -> GenerativeSampling:
    """Sample continuations of a prefix, and count the canary's among them.

    Args:
        model: the model.
        prefix: p, int64 [L], BOS first.
        continuation: s, int64 [n].
        template: the allowed tokens at each of the n positions.
        hparams: settings of sampling.
        rng: random stream of the canary, so that other canaries do not change the samples.

    Raises:
        Diverged: a log-probability is not finite.
    """
    same = (generate(model, prefix, template, hparams, rng) == continuation).all(1)
    first = int(same.nonzero()[0]) + 1 if bool(same.any()) else None
    spent = sampling_nats(model, prefix, continuation, template, hparams)
    return GenerativeSampling(hparams.samples, int(same.sum()), first, spent)


def generate(
    model: LanguageModel, prefix: Tensor, template: Template, hparams: GenerationHParams, rng: np.random.Generator
) -> Tensor:
    """Return continuations of a prefix, int64 [samples, n], in the order drawn; see `generative_sampling`."""
    parts = []
    for first in range(0, hparams.samples, PIECE):
        uniform = rng.random((min(PIECE, hparams.samples - first), template.length))
        parts.append(_generate(model, prefix, template, hparams, torch.from_numpy(uniform).to(prefix.device)))
    return torch.cat(parts)


def sampling_nats(
    model: LanguageModel, prefix: Tensor, continuation: Tensor, template: Template, hparams: GenerationHParams
) -> float:
    """Return -log of the probability that one sample is this continuation, int64 [n]; infinity where it is excluded."""
    state, log_probs = model.start(prefix[None])
    spent = 0.0
    for position, (word, ids) in enumerate(zip(continuation, template.on(prefix.device), strict=True)):
        if position:
            state, log_probs = model.step(state, continuation[position - 1 : position])
        if not bool((ids == word).any()):
            return inf
        spent -= float(_log_weights(log_probs, ids, hparams).log_softmax(1)[0, ids == word])
    return spent


def _generate(
    model: LanguageModel, prefix: Tensor, template: Template, hparams: GenerationHParams, uniform: Tensor
) -> Tensor:
    """Return one continuation for each row of numbers from [0, 1), float64 [M, n], by inverse distribution functions.

    Each beginning is read once, however many samples share it.
    """
    state, log_probs = model.start(prefix[None])
    step = rows_at_once(log_probs)
    sampled = prefix.new_zeros(len(uniform), 0)
    column, row = prefix.new_zeros(len(uniform)), prefix.new_zeros(len(uniform))  # each sample's token, and beginning
    read = prefix.new_zeros(1)
    for position, ids in enumerate(template.on(prefix.device)):
        states = []
        for first in range(0, len(read), step):
            piece = tuple(part[first : first + step] for part in state)
            if position:
                piece, log_probs = model.step(piece, read[first : first + step])
            states.append(piece)
            mine = ((row >= first) & (row < first + step)).nonzero()[:, 0]
            weights = _log_weights(log_probs, ids, hparams).softmax(1)
            column[mine] = _invert(weights.cumsum(1), row[mine] - first, uniform[mine, position])
        sampled = torch.cat([sampled, ids[column][:, None]], dim=1)
        distinct, row = torch.unique(row * len(ids) + column, return_inverse=True)
        state = tuple(torch.cat(parts)[distinct // len(ids)] for parts in zip(*states, strict=True))
        read = ids[distinct % len(ids)]
    return sampled


def _log_weights(log_probs: Tensor, ids: Tensor, hparams: GenerationHParams) -> Tensor:
    """Return unnormalized log-probabilities of ids, float64 [N, A]; -inf beyond `top_k`, ties go to the lower id."""
    costs = nats(log_probs[:, ids])
    if hparams.top_k is not None:
        best, index = cheapest(costs, hparams.top_k)
        costs = torch.full_like(costs, inf).scatter(1, index, best)
    return -costs / hparams.temperature


def _invert(summed: Tensor, rows: Tensor, uniform: Tensor) -> Tensor:
    """Return, for each of `uniform` [M], the first column of its row of `summed` [N, A] above that share of the total.

    The result is never a column that adds nothing: the total times a number below 1 does not round up to the total.
    """
    order = rows.sort(stable=True).indices
    sizes = rows.bincount(minlength=len(summed))
    place = torch.arange(len(rows), device=rows.device) - (sizes.cumsum(0) - sizes)[rows[order]]
    shares = summed.new_zeros(len(summed), int(sizes.max()))
    shares[rows[order], place] = uniform[order]
    first_above = torch.searchsorted(summed, shares * summed[:, -1:], right=True)
    columns = torch.empty_like(rows)
    columns[order] = first_above[rows[order], place]
    return columns
