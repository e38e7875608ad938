"""The score of a secret, and Random Sampling (RS): whether a canary is more likely than all random continuations.

Thakkar et al. (2020), section 4.1, "Evaluation Methods", after Carlini et al. (2018).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flsim.base.errors import Diverged
from flsim.base.machine import refuse_beyond_memory
from flsim.base.rng import stream
from flsim.data.records import Layout
from flsim.models.language_model import LanguageModel, LogitModel, State, Stepper

# The format of a secret that an attacker knows: the allowed tokens at each position.
#
# Carlini et al. (2018), "The Secret Sharer", section 5.3: a format s with holes, and sigma(s_k), the tokens that fit
# the k-th position, which is one token if the format fixes it.


@dataclass(frozen=True)
class Template:
    """The space of sequences of an attack: every choice of one of the allowed ids, ascending, for each position."""

    allowed: tuple[tuple[int, ...], ...]

    @classmethod
    def words(cls, layout: Layout, length: int) -> "Template":
        """Return the space of `length` words, as in a canary: no PAD, OOV, BOS or EOS."""
        return cls((tuple(range(layout.first_word, layout.last_word + 1)),) * length)

    @classmethod
    def text(cls, layout: Layout, length: int) -> "Template":
        """Return the space of `length` tokens of text, which are words, and pieces of words if there are any."""
        return cls((tuple(layout.text_ids),) * length)

    @property
    def length(self) -> int:
        return len(self.allowed)

    @property
    def space(self) -> int:
        return prod(map(len, self.allowed))

    def on(self, device: torch.device) -> list[Tensor]:
        """Return the ids of each position, int64; positions that allow the same tokens share one tensor."""
        made = {ids: torch.tensor(ids, device=device) for ids in set(self.allowed)}
        return [made[ids] for ids in self.allowed]


def cheapest(costs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` lowest costs of each row, ascending, and their columns; ties go to the lower column.

    `torch.topk` does not define the order and choice of ties; sorting complete rows takes much longer.
    """
    count = min(count, costs.shape[1])
    highest = costs.topk(count, largest=False).values.amax(dim=1, keepdim=True)
    row, column = (costs <= highest).nonzero(as_tuple=True)  # row after row; ties can make a row longer than `count`
    order = costs[row, column].sort(stable=True).indices
    order = order[row[order].sort(stable=True).indices]
    sizes = row.bincount(minlength=len(costs))
    chosen = order[(sizes.cumsum(0) - sizes)[:, None] + torch.arange(count, device=costs.device)]
    return costs[row[chosen], column[chosen]], column[chosen]


# The log-perplexity of continuations, the one score of every attack.
#
# P(s|p) = sum over i of -log Pr(s_i | p, s_1, ..., s_{i-1}), in nats: Thakkar et al. (2020), section 4.1, "Evaluation
# Methods". Carlini et al. (2018), definition 1, take the logarithm to base 2.

CPU_FLOATS = 2**22  # log-probs in one piece; a step has up to three pieces: 50 MB in float32
GPU_FLOATS = 2**28  # largest number on a GPU: few large steps, because each step launches about a hundred kernels
OTHER_FLOATS = 2**25  # on other devices
# bytes of GPU memory for each float of a piece; ranks need 20 with the paper's model, and more with other cells
BYTES = 48


def rows_at_once(log_probs: Tensor, state: State = ()) -> int:
    """Return the number of sequences that one step can read, to bound memory and, on a CPU, to stay near its caches.

    Keys and values of attention in the state, [N, heads, T, size], count as far as they are more than the
    log-probabilities [N, V]; other states are small.
    """
    of_attention = sum(part[0].numel() for part in state if part.dim() > 2)
    return max(1, floats_at_once(log_probs.device) // max(log_probs.shape[1], of_attention))


def floats_at_once(device: torch.device) -> int:
    """Return the number of values of a piece that one step can have.

    On an NVIDIA GPU this is the largest power of two that fits this process' share of the complete memory. Free memory
    is not used, because other sizes of pieces can change the rounding of scores.
    """
    if device.type == "cpu":
        return CPU_FLOATS
    if device.type != "cuda":
        return OTHER_FLOATS
    share = torch.cuda.get_per_process_memory_fraction(device)
    fitting = int(torch.cuda.get_device_properties(device).total_memory * share) // BYTES
    return min(GPU_FLOATS, 1 << fitting.bit_length() >> 1)


def nats(log_probs: Tensor) -> Tensor:
    """Return -log Pr, float64, never below 0, so sums never decrease; raise Diverged if a value is not finite."""
    if not bool(log_probs.isfinite().all()):
        raise Diverged("a log-probability is not finite; the model's values overflow")
    return log_probs.double().clamp(max=0).abs()


def log_perplexity(model: LanguageModel, prefix: Tensor, continuations: Tensor) -> Tensor:
    """Return P(s|p) of every continuation s of one prefix p, summed in float64 [N], nats; or raise Diverged."""
    state, log_probs = model.start(prefix[None])
    scores = []
    for part in torch.split(continuations, rows_at_once(log_probs, state)):
        rows = part.new_zeros(len(part))
        repeated = tuple(values[rows] for values in state)
        scores.append(_score(model, repeated, log_probs.expand(len(part), -1), part))
    return torch.cat(scores)


def _score(model: LanguageModel, state: State, log_probs: Tensor, continuations: Tensor) -> Tensor:
    """Return scores [N] of continuations [N, n], after sequences with these states and log-probs [N, V]."""
    row = torch.arange(len(continuations), device=continuations.device)
    score = log_probs.new_zeros(len(continuations), dtype=torch.float64)
    for column in range(continuations.shape[1]):
        if column:
            state, log_probs = model.step(state, continuations[:, column - 1])
        score += nats(log_probs[row, continuations[:, column]])
    return score


def count_at_most(model: LanguageModel, state: State, log_probs: Tensor, references: Tensor, bounds: Tensor) -> int:
    """Return the number of references [M, n] that score at most their bounds [M], after a one-row state."""
    rows = references.new_zeros(len(references))  # the row of the state that each reference continues
    spent = nats(log_probs[rows, references[:, 0]])
    for column in range(1, references.shape[1]):
        is_open = spent <= bounds
        rows, spent, references, bounds = rows[is_open], spent[is_open], references[is_open], bounds[is_open]
        if not len(references):
            return 0
        size = log_probs.shape[1]
        pairs, rows = torch.unique_consecutive(rows * size + references[:, column - 1], return_inverse=True)
        state, log_probs = model.step(tuple(part[pairs // size] for part in state), pairs % size)
        spent = spent + nats(log_probs[rows, references[:, column]])
    return int((spent <= bounds).sum())


# Bounds on the cost of a next word: -log Pr(w) = log Z(r) - (e_w.r + b_w), Z(r) the sum over v of exp(e_v.r + b_v).
#  Important words are summed. The other words are treated as one cloud with its first two moments, weighted as at a
# center c near the expected outputs. With d = r - c, mu the cloud's mean, S its covariance, X = (e_v - mu).d and m >=
# |X|,
#
#     sum over the rest = exp(mu.d) E[exp X] times its value at c,   1 + d'Sd phi(-m) <= E[exp X] <= 1 + d'Sd phi(m),
#
# as E X = 0 and phi(x) = (exp x - 1 - x) / x^2 increases: Bennett's inequality (1962) and its mirror image. The
# bounds hold for every r, and are tighter for r near c. A single logit is bounded by Cauchy and Schwarz.

LARGEST = 50.0  # beyond this m the bound is E exp(X) <= exp(m), which avoids overflow
# Allowance in a logit, in units of rounding, relative to |e| |r| + |b|; a dot product of 96 needs 48 at worst.
ROUNDING = 64
REDUCED = 2.0**-7  # unit of rounding if torch may multiply float32 in less than float32
LOOSE = 1e-4  # relative allowance in the moments, which have the precision of the model


class Interval(NamedTuple):
    """Bounds low <= the true value <= high; float64."""

    low: Tensor
    high: Tensor


class OutputBounds:
    """Bounds that are tight around a few outputs of a model. Shapes: S sampled outputs, D their size, V vocabulary.

    Args:
        weight: E [V, D].
        bias: b [V].
        outputs: [S, D], typical outputs; their mean is the center.
        probabilities: [V], mean probability of each word at these outputs.
        summed: number of words that are summed one by one.
    """

    def __init__(self, weight: Tensor, bias: Tensor, outputs: Tensor, probabilities: Tensor, summed: int) -> None:
        self.weight, self.bias = weight, bias
        self.center = outputs.mean(0)
        vectors = weight.double()
        at_center = vectors @ self.center.double() + bias
        mean = probabilities.double() @ vectors
        self.summed = _most_telling(probabilities, (vectors - mean).norm(dim=1), summed)
        rest = torch.ones_like(bias, dtype=torch.bool)
        rest[self.summed] = False
        self.any_rest = bool(rest.any())
        if self.any_rest:
            share = at_center[rest].softmax(0)
            mean = share @ vectors[rest]
            around = vectors[rest] - mean
            self.rest_at_center = at_center[rest].logsumexp(0)
            self.covariance = ((around.T * share) @ around).to(weight.dtype)
            self.rest_radius = around.norm(dim=1).max()
        self.mean, self.at_center = mean.to(weight.dtype), at_center
        self.radius = (vectors - mean).norm(dim=1) * (1 + LOOSE)  # [V]
        self.length, self.offset = weight.norm(dim=1).max().double(), bias.abs().max().double()

    def rounding(self, outputs: Tensor) -> Tensor:
        """Return the largest difference of two computations of a word's cost, float64 [M], for outputs [M, D]."""
        unit = torch.finfo(outputs.dtype).eps
        if outputs.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            unit = REDUCED
        size: Tensor = outputs.norm(dim=1).double() * self.length + self.offset
        return unit * (ROUNDING * size + 2 * len(self.bias).bit_length())  # and a logarithm of V terms, twice

    def log_sum_exp(self, outputs: Tensor) -> Interval:
        """Return bounds on log Z, [M] each, for outputs [M, D]; without allowance for rounding."""
        summed = torch.addmm(self.bias[self.summed], outputs, self.weight[self.summed].T).logsumexp(1).double()
        if not self.any_rest:
            return Interval(summed, summed)
        away = outputs - self.center
        variance = ((away @ self.covariance) * away).sum(1).double().clamp(min=0)
        most = (self.rest_radius * away.norm(dim=1)).double() * (1 + LOOSE)
        center = self.rest_at_center + (away @ self.mean).double()
        capped = most.clamp(max=LARGEST)
        low = torch.log1p(variance * (1 - LOOSE) * _phi(-most))
        high = torch.log1p(variance * (1 + LOOSE) * _phi(capped))
        high = torch.where(most > LARGEST, most, high)
        return Interval(torch.logaddexp(summed, center + low), torch.logaddexp(summed, center + high))

    def exact_log_sum_exp(self, outputs: Tensor) -> Tensor:
        """Return log Z itself, float64 [M], computed in pieces."""
        parts = torch.split(outputs, rows_at_once(self.weight.T))
        return torch.cat([torch.addmm(self.bias, part, self.weight.T).logsumexp(1).double() for part in parts])

    def logits(self, outputs: Tensor, rows: Tensor, words: Tensor) -> Tensor:
        """Return the logits of words [N] after outputs[rows], float64 [N], computed in pieces."""
        parts = zip(*(torch.split(ids, rows_at_once(outputs)) for ids in (rows, words)), strict=True)
        logits = [torch.linalg.vecdot(outputs[row], self.weight[word]) + self.bias[word] for row, word in parts]
        return torch.cat(logits).double()

    def logits_at_most(self, outputs: Tensor, rows: Tensor, words: Tensor) -> Tensor:
        """Return upper bounds on the logits of words [N] after outputs[rows], float64 [N]; O(1) each, not O(D)."""
        away = outputs - self.center
        distance, shift = away.norm(dim=1).double(), (away @ self.mean).double()
        most: Tensor = self.at_center[words] + self.radius[words] * distance[rows] + shift[rows]
        return most


def _most_telling(probabilities: Tensor, distances: Tensor, count: int) -> Tensor:
    """Return ids [<= count] of the most likely words, and of words that would make the cloud of the rest wide."""
    far = distances.topk(min(count // 4, len(distances))).indices
    likely = probabilities.topk(min(count - count // 4, len(distances))).indices
    return torch.from_numpy(np.union1d(likely.cpu(), far.cpu())).to(likely.device)


def _phi(x: Tensor) -> Tensor:
    """Return (exp x - 1 - x) / x^2, and 1/2 at 0; float64."""
    small = x.abs() < 1e-3
    safe = torch.where(small, torch.ones_like(x), x)
    return torch.where(small, 0.5 + x / 6 + x * x / 24, (safe.expm1() - safe) / (safe * safe))


# The sorting of references by bounds on their scores, exactly, so that only few references need a full score.
#  References are a tree of shared first words, walked in pieces that bound memory. A reference is dropped as soon as a
# lower bound on its cost so far exceeds the canary's score. A reference counts if an upper bound on its score does not
# exceed it. The rest is undecided, and is scored in full; these are few, because the bounds differ by hundredths of a
# nat. The bounds include rounding errors, so decisions are equal to those of full scores.

SUMMED = 256  # number of words whose exponentials a bound on log Z sums one by one
WIDE = 0.5  # nats between the bounds on a log Z above which it is computed exactly


class Clear(NamedTuple):
    """The result for a piece of the references: the number certainly at most the bound, and undecided ones [k, n]."""

    counted: int
    open: Tensor


@dataclass(frozen=True)
class Sifter:
    """A traversal of references: `bounds` on costs after 1, 2, ..., n - 1 words; scores up to `bound` are counted."""

    step: Stepper
    bounds: Sequence[OutputBounds]
    bound: float

    def sift(self, state: State, log_probs: Tensor, references: Tensor) -> Iterator[Clear]:
        """Yield the results for references [M, n], after a prefix with this one-row state and log-probs [1, V]."""
        spent = nats(log_probs[0])[references[:, 0]]
        nodes = torch.zeros_like(references[:, 0])
        yield from self._descend(state, _Open(references, nodes, spent, spent), 1)

    def _descend(self, state: State, open_: "_Open", column: int) -> Iterator[Clear]:
        """Yield the results for references whose first `column` words are included; `state` is after one word fewer."""
        open_ = open_.where(open_.low <= self.bound)
        if column == open_.words.shape[1]:
            sure = open_.high <= self.bound
            yield Clear(int(sure.sum()), open_.words[~sure])
            return
        size = len(self.bounds[0].bias)
        edges, edge, shared = torch.unique_consecutive(
            open_.node * size + open_.words[:, column - 1], return_inverse=True, return_counts=True
        )
        ends = shared.cumsum(0)
        at_once = rows_at_once(state[-1])
        for first in range(0, len(edges), at_once):
            taken = edges[first : first + at_once]
            part = slice(int(ends[first] - shared[first]), int(ends[first + len(taken) - 1]))
            below = _Open(open_.words[part], edge[part] - first, open_.low[part], open_.high[part])
            stepped = self.step(state, taken // size, taken % size)
            yield from self._descend(stepped, self._pay(stepped[0], below, column), column + 1)

    def _pay(self, outputs: Tensor, open_: "_Open", column: int) -> "_Open":
        """Add the cost of the word at `column` after outputs [N, D], its nodes; drop references that cost too much."""
        bounds = self.bounds[column - 1]
        rounding, (low, high) = bounds.rounding(outputs), bounds.log_sum_exp(outputs)
        _refuse_non_finite(rounding + low)
        low, high = low - rounding, high + rounding
        cheapest = low[open_.node] - bounds.logits_at_most(outputs, open_.node, open_.words[:, column])
        open_ = open_.where(open_.low + cheapest <= self.bound)
        logits = bounds.logits(outputs, open_.node, open_.words[:, column])
        alive = open_.low + low[open_.node] - logits <= self.bound
        wide = torch.zeros_like(low, dtype=torch.bool)
        wide[open_.node[alive]] = True
        wide &= ~(high - low <= WIDE + 2 * rounding)
        if bool(wide.any()):
            known = bounds.exact_log_sum_exp(outputs[wide])
            _refuse_non_finite(known)
            low[wide], high[wide] = known - rounding[wide], known + rounding[wide]
        return _Open(
            open_.words,
            open_.node,
            open_.low + (low[open_.node] - logits).clamp(min=0),
            open_.high + (high[open_.node] - logits).clamp(min=0),
        )


@dataclass(frozen=True)
class _Open:
    """References [M, n], the tree node that each continues (ascending), and bounds on the cost of each so far."""

    words: Tensor
    node: Tensor
    low: Tensor
    high: Tensor

    def where(self, kept: Tensor) -> "_Open":
        return self if bool(kept.all()) else _Open(self.words[kept], self.node[kept], self.low[kept], self.high[kept])


def _refuse_non_finite(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise Diverged("an output of the model is not finite; its values overflow")


# Random Sampling (RS), which tests whether the canary is more likely than all random continuations.

TIE = 8  # in units of the model's rounding (its dtype's eps), relative to the score
TYPICAL = 64  # references that are read in full to estimate typical costs of words
LIKELY = (2**9, 2**14)  # numbers of the most likely references that `decide` checks first


@dataclass(frozen=True)
class RandomSampling:
    """The result of RS for one canary c = (p|s)."""

    log_perplexity: float  # P(s|p), nats
    rank: int  # 1 + the number of r' in R with P(r'|p) <= P(s|p); from 1 to |R| + 1
    references: int  # |R|

    @property
    def memorized(self) -> bool:
        """Return whether the canary's continuation is more likely than every random continuation."""
        return self.rank == 1


def references(seed: int, count: int, length: int, layout: Layout) -> Tensor:
    """Draw R: `count` continuations of words, uniform over the vocabulary's words, int64 [count, length], sorted.

    Rows that share their first words are neighbors, which makes `rank` faster. Raises InputError if R does not fit the
    memory of this machine.
    """
    refuse_too_many(count, length)
    rng = stream(seed, "references")
    words = rng.integers(layout.first_word, layout.last_word, (count, length), endpoint=True)
    return torch.from_numpy(words[np.lexsort(words.T[::-1])])


def refuse_too_many(count: int, length: int) -> None:
    """Raise InputError if R, `count` continuations of `length` words, exceeds the memory of this machine."""
    drawn_and_sorted = 2 * 8 * count * length
    refuse_beyond_memory(drawn_and_sorted, f"evaluation.references = {count:,}", "set fewer references")


class RandomSampler:
    """The RS of one model, which must not change, over one R [|R|, n], fastest if sorted, for many canaries."""

    def __init__(self, model: LanguageModel, references: Tensor) -> None:
        self.model, self.references = model, references
        self.step = model.stepper() if isinstance(model, LogitModel) else None

    def rank(self, prefix: Tensor, continuation: Tensor) -> RandomSampling:
        """Rank a canary's continuation s among references, exactly, as if each r' were scored in full.

        A reference is dropped as soon as its cost so far exceeds the canary's score: because no word costs less than 0,
        the cost cannot decrease, for any rounding. A reference that equals s is a tie by identity and counts, without a
        score. References whose score is within 8 units of rounding of the canary's (relative; 1e-6 in float32, 2e-15 in
        float64) also count as ties, because the order of batched sums cannot distinguish them. Rounding can therefore
        make a canary look less memorized, but never more. With a `LogitModel`, references are scored in full only if
        the bounds do not decide. Raises Diverged if a required score is not finite.
        """
        canary = _Canary(self, prefix, continuation)
        open_, counted = [], 0
        for clear in canary.sift(canary.within(self.references)):
            counted += clear.counted
            open_.append(clear.open)
        beaten_by = counted + canary.score_open(open_)
        return RandomSampling(canary.score, 1 + beaten_by, len(self.references))

    def decide(self, prefix: Tensor, continuation: Tensor) -> bool:
        """Return whether a canary is memorized, which is a rank of 1, at a fraction of the cost; see `rank`.

        The most likely references, by the typical costs of their words, are checked first, and the search stops at the
        first one that scores at most the canary's score.
        """
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


class _Canary:
    """A canary while it is ranked: its score, and the model's states and costs after its prefix."""

    def __init__(self, sampler: RandomSampler, prefix: Tensor, continuation: Tensor) -> None:
        self.model, self.prefix, self.continuation = sampler.model, prefix, continuation
        self.step, self.references = sampler.step, sampler.references
        self.score = float(log_perplexity(self.model, prefix, continuation[None]))
        self.state, self.log_probs = self.model.start(prefix[None])
        self.bound = self.score * (1 + TIE * torch.finfo(self.log_probs.dtype).eps)

    def within(self, references: Tensor) -> Tensor:
        """Return the references whose first word does not cost more than the bound."""
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
        weight, bias = self.model.output_layer()
        typical = ((state[0], log_probs.exp().mean(0)) for state, log_probs in self.visits)
        bounds = [OutputBounds(weight, bias, outputs, likely, SUMMED) for outputs, likely in typical]
        return Sifter(self.step, bounds, self.bound)

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
        """Return the number of undecided references that score at most the canary's score."""
        open_ = torch.cat(pieces) if pieces else self.references[:0]
        same = (open_ == self.continuation).all(1)
        others = open_[~same]
        if not len(others):
            return int(same.sum())
        return int(same.sum() + (log_perplexity(self.model, self.prefix, others) <= self.bound).sum())


# Exposure by context: the exposure to adversaries who know the text around the secret.
#
# Carlini et al. (2018), "The Secret Sharer", section 6.4 and table 3: one model and one secret, scored by adversaries
# who know the text before the secret, the text after it, both, or neither. All of them know the text between a secret's
# words.

Context = tuple[int, int]  # numbers of tokens that an adversary knows, directly before the secret and directly after it


def context_sampling(
    model: LanguageModel, tokens: Sequence[int], positions: Sequence[int], references: Tensor, bos: int
) -> dict[Context, RandomSampling]:
    """Rank a secret among the same references [|R|, k] in its place, for each context.

    The secret has these k positions of a canary's tokens, without BOS, but with EOS if the context has the record's
    end. Contexts are 0, 1, ... all tokens before the secret; each without the text after it, then each with all of it.
    A known suffix is also scored: it is the same for all, but its score depends on the words before it. Most references
    are dropped before the suffix is read, by their cost so far.
    """
    first, last = positions[0], positions[-1]
    measured = {}
    for suffix in sorted({0, len(tokens) - 1 - last}):
        scored = references.new_tensor(tokens[first : last + 1 + suffix])
        placed = scored.repeat(len(references), 1)
        placed[:, references.new_tensor(positions) - first] = references
        sampler = RandomSampler(model, placed)
        for prefix in range(first + 1):
            known = references.new_tensor((bos, *tokens[first - prefix : first]))
            measured[prefix, suffix] = sampler.rank(known, scored)
    return measured
