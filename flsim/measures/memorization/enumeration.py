"""Exact exposure over the complete space, by a visit to every sequence that is at least as likely as the canary.

Carlini et al. (2018), "The Secret Sharer", definitions 2 and 3.
"""

from dataclasses import dataclass, field
from math import log2

import torch
from torch import Tensor

from flsim.measures.memorization.random_sampling import TIE
from flsim.measures.memorization.score import log_perplexity, nats, rows_at_once
from flsim.measures.memorization.template import Template
from flsim.models.language_model import LanguageModel, State

MOST_READ = 2**20


@dataclass(frozen=True)
class Enumeration:
    """The rank of a canary in its space: the number of r with P(r|p) <= P(s|p), including the canary.

    `nodes` is the number of beginnings of sequences, the empty one included, that cost no more than the canary: as many
    as Dijkstra's algorithm (section 5.4) reads before it comes to the canary. It has no part in equality.
    """

    rank: int
    space: int
    nodes: int = field(default=0, compare=False)

    @property
    def exposure(self) -> float:
        """Return the exposure in bits, from 0 to log2 of the space."""
        return log2(self.space) - log2(self.rank)


def enumerate_space(
    model: LanguageModel, prefix: Tensor, continuation: Tensor, template: Template, most_read: int = MOST_READ
) -> Enumeration | None:
    """Rank a canary's continuation s among all of a template's space, exactly; None if `most_read` did not suffice.

    Beginnings that cost more than the canary's complete score are not continued, because no word costs less than 0. At
    most exp(P(s|p)) sequences of each length remain, because their probabilities sum to at most 1. Therefore a
    memorized canary is ranked quickly even in a very large space. Ties are as in `RandomSampler`: the canary counts by
    identity, and scores within the model's rounding of its own count. Raises Diverged if a required score is not
    finite.
    """
    state, log_probs = model.start(prefix[None])
    limit = float(log_perplexity(model, prefix, continuation[None])) * (1 + TIE * torch.finfo(log_probs.dtype).eps)
    allowed, nodes = template.on(prefix.device), 1

    def count(state: State, log_probs: Tensor, spent: Tensor, is_canary: Tensor, read: int) -> int:
        """Return the number of continuations within the limit, except the canary, of N sequences of `read` words.

        The sequences have these states, log-probs, scores [N], and equality with the canary's beginning [N].
        """
        nonlocal nodes
        words = allowed[read]
        spent = (spent[:, None] + nats(log_probs[:, words])).flatten()
        is_canary = (is_canary[:, None] & (words == continuation[read])).flatten()
        if read + 1 == len(continuation):
            return int(((spent <= limit) & ~is_canary).sum())
        open_ = (spent <= limit).nonzero().flatten()
        nodes += len(open_)
        counted = 0
        for part in torch.split(open_, rows_at_once(log_probs, state)):
            if nodes > most_read + 1:
                break
            row, word = part // len(words), words[part % len(words)]
            stepped = model.step(tuple(piece[row] for piece in state), word)
            counted += count(*stepped, spent[part], is_canary[part], read + 1)
        return counted

    nothing = log_probs.new_zeros(1, dtype=torch.float64)
    rank = 1 + count(state, log_probs, nothing, nothing == 0, 0)
    return Enumeration(rank, template.space, nodes) if nodes <= most_read + 1 else None
