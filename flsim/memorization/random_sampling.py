"""Random Sampling (RS), which tells whether the model favors the canary over every one of many random continuations.

Thakkar et al. (2020), section 4.1, "Evaluation Methods", after Carlini et al. (2018).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flsim.base.machine import refuse_beyond_memory
from flsim.base.rng import stream
from flsim.data.vocabulary import Layout
from flsim.memorization.score import count_at_most, log_perplexity, nats, rows_at_once
from flsim.memorization.sift import Clear, Sifter, output_bounds
from flsim.models.language_model import LanguageModel, LogitModel, State

TIE = 8  # in units of the model's rounding (its dtype's eps), relative to the score
TYPICAL = 64  # references that are read in full to learn the usual costs of words
LIKELY = (2**9, 2**14)  # numbers of the likeliest references that `decide` checks first


@dataclass(frozen=True)
class RandomSampling:
    """The result of RS for one canary c = (p|s).

    Attributes:
        log_perplexity: P(s|p), nats.
        rank: 1 + the number of r' in R with P(r'|p) <= P(s|p); from 1 to |R| + 1.
        references: |R|.
    """

    log_perplexity: float
    rank: int
    references: int

    @property
    def memorized(self) -> bool:
        """Return whether the canary's continuation is likelier than every random one."""
        return self.rank == 1


def references(seed: int, count: int, length: int, layout: Layout) -> Tensor:
    """Draw R: `count` continuations, each word uniform over the vocabulary's words, as int64 [count, length].

    Rows are in lexicographic order: rows that share their first words are neighbors, which makes `rank` faster.

    Raises:
        InputError: R does not fit the memory of this machine.
    """
    refuse_too_many(count, length)
    rng = stream(seed, "references")
    drawn = rng.integers(layout.first_word, layout.last_word, (count, length), endpoint=True)
    return torch.from_numpy(drawn[np.lexsort(drawn.T[::-1])])


def refuse_too_many(count: int, length: int) -> None:
    """Raise InputError where R, `count` continuations of `length` words, does not fit the memory of this machine."""
    drawn_and_sorted = 2 * 8 * count * length
    refuse_beyond_memory(drawn_and_sorted, f"evaluation.references = {count:,}", "set fewer references")


class RandomSampler:
    """The RS of one model over one R, for any number of canaries, with shared work done once.

    Args:
        model: the model, which must not change. A `LogitModel` is ranked faster.
        references: R, int64 [|R|, n], in any order and with repetitions; fastest in lexicographic order.
    """

    def __init__(self, model: LanguageModel, references: Tensor) -> None:
        self.model, self.references = model, references
        self.step = model.stepper() if isinstance(model, LogitModel) else None

    def rank(self, prefix: Tensor, continuation: Tensor) -> RandomSampling:
        """Rank a canary; see `random_sampling`."""
        canary = _Canary(self, prefix, continuation)
        open_, counted = [], 0
        for clear in canary.sift(canary.within(self.references)):
            counted += clear.counted
            open_.append(clear.open)
        beaten_by = counted + canary.score_open(open_)
        return RandomSampling(canary.score, 1 + beaten_by, len(self.references))

    def decide(self, prefix: Tensor, continuation: Tensor) -> bool:
        """Return whether a canary is memorized; see the function `decide`."""
        canary = _Canary(self, prefix, continuation)
        references = canary.within(self.references)
        expected = canary.expected(references)
        for likely in (*LIKELY, len(references)):
            chosen = references
            if likely < len(references):
                chosen = references[expected.topk(likely, largest=False, sorted=False).indices.sort().values]
            open_ = []
            for clear in canary.sift(chosen):
                if clear.counted:
                    return False
                open_.append(clear.open)
            if canary.score_open(open_):
                return False
            if chosen is references:
                break
        return True


def random_sampling(model: LanguageModel, prefix: Tensor, continuation: Tensor, references: Tensor) -> RandomSampling:
    """Rank a canary's continuation s among references, exactly, as if each r' were scored in full.

    A reference is dropped as soon as its cost so far exceeds the canary's score: as no word costs less than 0, the cost
    cannot fall again, whatever the rounding. A reference that equals s is a tie by identity and counts, without being
    scored. Others whose score is within 8 units of rounding of the canary's (relative; 1e-6 in float32, 2e-15 in
    float64) count as ties too, since the order of batched sums could not tell them apart: rounding can make a canary
    look less memorized, never more. With a `LogitModel`, references are scored in full only where bounds leave their
    side open; see `flsim.memorization.sift`.

    Args:
        model: the model.
        prefix: p, int64 [L], BOS first.
        continuation: s, int64 [n].
        references: R, int64 [|R|, n], in any order and with repetitions; fastest in lexicographic order.

    Raises:
        Diverged: a required score is not finite.
    """
    return RandomSampler(model, references).rank(prefix, continuation)


def rank(model: LanguageModel, prefix: Tensor, continuation: Tensor, references: Tensor) -> int:
    """Return the rank of a canary; see `random_sampling`."""
    return random_sampling(model, prefix, continuation, references).rank


def decide(model: LanguageModel, prefix: Tensor, continuation: Tensor, references: Tensor) -> bool:
    """Return whether a canary is memorized, which is `rank` == 1 at a fraction of the cost.

    The likeliest references, by the usual costs of their words, are checked first, and the search stops at the first
    one that scores at most the canary's score. Arguments and errors are those of `random_sampling`.
    """
    return RandomSampler(model, references).decide(prefix, continuation)


class _Canary:
    """A canary while it is ranked: its score, and the model's states and costs after its prefix."""

    def __init__(self, sampler: RandomSampler, prefix: Tensor, continuation: Tensor) -> None:
        self.model, self.prefix, self.continuation = sampler.model, prefix, continuation
        self.step, self.references = sampler.step, sampler.references
        self.score = float(log_perplexity(self.model, prefix, continuation[None]))
        self.state, self.log_probs = self.model.start(prefix[None])
        self.bound = self.score * (1 + TIE * torch.finfo(self.log_probs.dtype).eps)

    def within(self, references: Tensor) -> Tensor:
        """Return the references whose first word alone does not cost more than the bound."""
        return references[(nats(self.log_probs[0]) <= self.bound)[references[:, 0]]]

    @cached_property
    def visits(self) -> list[tuple[State, Tensor]]:
        """Return (state, log-probs) after 1, 2, ..., n - 1 words of a few references, evenly spread over R."""
        typical = self.references[:: max(1, len(self.references) // TYPICAL)][:TYPICAL]
        state = tuple(part.expand(len(typical), *part.shape[1:]) for part in self.state)
        visits = []
        for words in typical.T[:-1]:
            state, log_probs = self.model.step(state, words)
            visits.append((state, log_probs))
        return visits

    def expected(self, references: Tensor) -> Tensor:
        """Return rough costs of references [M], from words without their contexts, to choose an order of checks."""
        expected = torch.zeros(len(references), dtype=self.log_probs.dtype, device=references.device)
        columns = [self.log_probs[0], *(log_probs.mean(0) for _, log_probs in self.visits)]
        for column, words in zip(columns, references.T, strict=True):
            expected -= column[words]
        return expected

    @cached_property
    def sifter(self) -> Sifter | None:
        if self.step is None or not isinstance(self.model, LogitModel) or not len(self.references):
            return None
        return Sifter(self.step, output_bounds(self.model, self.visits), self.bound)

    def sift(self, references: Tensor) -> Iterator[Clear]:
        """Yield the result of the bounds for references, piece by piece."""
        if self.sifter is not None:
            yield from self.sifter.sift(self.state, self.log_probs, references)
            return
        same = (references == self.continuation).all(1)
        yield Clear(int(same.sum()), references[:0])
        for part in torch.split(references[~same], rows_at_once(self.log_probs)):
            bounds = torch.full((len(part),), self.bound, dtype=torch.float64, device=part.device)
            yield Clear(count_at_most(self.model, self.state, self.log_probs, part, bounds), part[:0])

    def score_open(self, pieces: list[Tensor]) -> int:
        """Return how many of the references that bounds left open score at most the canary's score."""
        open_ = torch.cat(pieces) if pieces else self.references[:0]
        same = (open_ == self.continuation).all(1)
        others = open_[~same]
        if not len(others):
            return int(same.sum())
        return int(same.sum() + (log_perplexity(self.model, self.prefix, others) <= self.bound).sum())
