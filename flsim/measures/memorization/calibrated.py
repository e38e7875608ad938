"""Calibrated exposure, the exposure relative to models that were not trained on the canary.

Jagielski et al. (2022), "Measuring Forgetting of Memorized Training Examples", section 2.2, after Watson et al. (2021):
the mean score over models trained without the canaries is subtracted from every score before ranking.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flsim.base.errors import at_least_one
from flsim.measures.memorization.random_sampling import TIE
from flsim.measures.memorization.score import count_at_most, log_perplexity, rows_at_once
from flsim.models.language_model import LanguageModel


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
