"""Random Sampling (RS): whether the model favors the canary over every one of many random continuations.

Thakkar et al. (2020), section 4.1, "Evaluation Methods", after Carlini et al. (2018).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flsim.data.vocabulary import Layout
from flsim.memorization.score import log_perplexity, nats, rows_at_once
from flsim.model.cifg import LanguageModel, State
from flsim.rng import stream

TIE = 8  # in units of the model's rounding (its dtype's eps), relative to the score


@dataclass(frozen=True)
class RandomSampling:
    """What RS says of one canary c = (p|s).

    Attributes:
        log_perplexity: P(s|p), nats.
        rank: 1 + #{r' in R : P(r'|p) <= P(s|p)}; from 1 to |R| + 1.
        references: |R|.
    """

    log_perplexity: float
    rank: int
    references: int

    @property
    def memorized(self) -> bool:
        """No random continuation is as likely as the canary's."""
        return self.rank == 1


def references(seed: int, count: int, length: int, layout: Layout) -> Tensor:
    """R: `count` continuations, each word uniform over the vocabulary's words, as int64 [count, length].

    Rows are in lexicographic order: those that share their first words are neighbors, which `rank` is faster on.
    """
    rng = stream(seed, "references")
    drawn = rng.integers(layout.first_word, layout.last_word, (count, length), endpoint=True)
    return torch.from_numpy(drawn[np.lexsort(drawn.T[::-1])])


def rank(model: LanguageModel, prefix: Tensor, continuation: Tensor, references: Tensor) -> int:
    """The rank of a canary; see `random_sampling`."""
    return random_sampling(model, prefix, continuation, references).rank


def random_sampling(model: LanguageModel, prefix: Tensor, continuation: Tensor, references: Tensor) -> RandomSampling:
    """Rank a canary's continuation s among references, exactly: as if each r' were scored in full.

    A reference is dropped as soon as what it has spent exceeds the canary's score. As no word costs less than 0, it
    could not have come back, whatever the rounding. One that equals s is a tie by identity and counts, without being
    scored. Others whose score is within 8 units of rounding of the canary's (relative; 1e-6 in float32, 2e-15 in
    float64) count as ties too, since the order of batched sums could not tell them apart: rounding can make a canary
    look less memorized, never more.

    Args:
        model: the model.
        prefix: p, int64 [L], BOS first.
        continuation: s, int64 [n].
        references: R, int64 [|R|, n], in any order and with repetitions; fastest in lexicographic order.

    Raises:
        Diverged: a score that was needed is not finite.
    """
    score = float(log_perplexity(model, prefix, continuation[None]))
    state, log_probs = model.start(prefix[None])
    bound = score * (1 + TIE * torch.finfo(log_probs.dtype).eps)
    same = (references == continuation).all(1)
    others = references[~same]
    others = others[nats(log_probs[0, others[:, 0]]) <= bound]
    parts = torch.split(others, rows_at_once(log_probs))
    beaten_by = sum(_at_most(model, state, log_probs, part, bound) for part in parts)
    return RandomSampling(score, 1 + int(same.sum()) + beaten_by, len(references))


def _at_most(model: LanguageModel, state: State, log_probs: Tensor, references: Tensor, bound: float) -> int:
    """How many of references [M, n] score at most `bound`, after the prefix whose state (one row) this is.

    The state after shared first words is computed once, for references that are neighbors.
    """
    size = log_probs.shape[1]
    rows = references.new_zeros(len(references))  # [M], the row of the state that each reference continues
    spent = nats(log_probs[rows, references[:, 0]])
    for column in range(1, references.shape[1]):
        kept = spent <= bound
        rows, spent, references = rows[kept], spent[kept], references[kept]
        if not len(references):
            return 0
        pairs, rows = torch.unique_consecutive(rows * size + references[:, column - 1], return_inverse=True)
        state, log_probs = model.step(tuple(part[pairs // size] for part in state), pairs % size)
        spent = spent + nats(log_probs[rows, references[:, column]])
    return int((spent <= bound).sum())
