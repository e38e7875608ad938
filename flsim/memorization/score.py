"""How surprised a model is by a continuation: the one scorer of every attack.

P(s|p) = sum over i of -log Pr(s_i | p, s_1, ..., s_{i-1}), in nats: Thakkar et al. (2020), section 4.1, "Evaluation
Methods".
"""

import torch
from torch import Tensor

from flsim.errors import Diverged
from flsim.model.cifg import LanguageModel, State

CPU_FLOATS, GPU_FLOATS = 2**22, 2**25  # log-probs in one piece; a step holds up to three: 50 MB and 400 MB in float32


def rows_at_once(log_probs: Tensor) -> int:
    """How many sequences one step may read: few enough to bound memory and, on a CPU, to stay near its caches.

    Args:
        log_probs: [N, V] of any step of the model.
    """
    return max(1, (CPU_FLOATS if log_probs.device.type == "cpu" else GPU_FLOATS) // log_probs.shape[1])


def nats(log_probs: Tensor) -> Tensor:
    """-log Pr in nats, float64, of the same shape; never below 0, so that a sum of them never falls as it grows.

    Raises:
        Diverged: one is not finite.
    """
    if not bool(log_probs.isfinite().all()):
        raise Diverged("a log-probability is not finite; the model's values overflow")
    return log_probs.double().clamp(max=0).abs()


def log_perplexity(model: LanguageModel, prefix: Tensor, continuations: Tensor) -> Tensor:
    """P(s|p) of every continuation s of one prefix p.

    Args:
        model: the model.
        prefix: int64 [L], BOS first.
        continuations: int64 [N, n >= 1].

    Returns:
        float64 [N], nats. The model's own precision is kept up to each word's log-probability; sums are in float64.

    Raises:
        Diverged: a score is not finite.
    """
    start, log_probs = model.start(prefix[None])
    parts = torch.split(continuations, rows_at_once(log_probs))
    return torch.cat([_score(model, start, log_probs, part) for part in parts])


def _score(model: LanguageModel, state: State, log_probs: Tensor, continuations: Tensor) -> Tensor:
    """Scores [N] of continuations [N, n] of the one sequence whose state (one row) and log-probs [1, V] these are."""
    first = continuations.new_zeros(len(continuations))
    own = torch.arange(len(continuations), device=continuations.device)
    score = nats(log_probs[first, continuations[:, 0]])
    state = tuple(part[first] for part in state)
    for read, word in zip(continuations.T[:-1], continuations.T[1:], strict=True):
        state, log_probs = model.step(state, read)
        score = score + nats(log_probs[own, word])
    return score
