"""The log-perplexity of continuations, the one score of every attack.

P(s|p) = sum over i of -log Pr(s_i | p, s_1, ..., s_{i-1}), in nats: Thakkar et al. (2020), section 4.1, "Evaluation
Methods". Carlini et al. (2018), definition 1, take the logarithm to base 2: `bits`.
"""

from collections.abc import Sequence
from itertools import groupby
from math import log

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flsim.base.errors import Diverged
from flsim.models.language_model import LanguageModel, State

CPU_FLOATS = 2**22  # log-probs in one piece; a step holds up to three: 50 MB in float32
GPU_FLOATS = 2**28  # on a GPU at most: few large steps, as each step has about a hundred launches of kernels
OTHER_FLOATS = 2**25  # on other devices
BYTES = 48  # of a GPU's memory for each float of a piece; ranks take 20 with the paper's model, others' cells more


def rows_at_once(log_probs: Tensor) -> int:
    """Return how many sequences one step may read, to bound memory and, on a CPU, to stay near its caches.

    Args:
        log_probs: [N, V] of any step of the model.
    """
    return max(1, floats_at_once(log_probs.device) // log_probs.shape[1])


def floats_at_once(device: torch.device) -> int:
    """Return how many values of a piece one step may hold.

    On an NVIDIA GPU this is the largest power of two that fits the share of the whole memory that this process may
    take. The memory that is free at this moment does not count: other pieces may round scores otherwise.
    """
    if device.type == "cpu":
        return CPU_FLOATS
    if device.type != "cuda":
        return OTHER_FLOATS
    share = torch.cuda.get_per_process_memory_fraction(device)
    fitting = int(torch.cuda.get_device_properties(device).total_memory * share) // BYTES
    return min(GPU_FLOATS, 1 << max(fitting.bit_length() - 1, 0))


def nats(log_probs: Tensor) -> Tensor:
    """Return -log Pr in nats, float64, of the same shape; never below 0, so that sums of them never decrease.

    Raises:
        Diverged: a value is not finite.
    """
    if not bool(log_probs.isfinite().all()):
        raise Diverged("a log-probability is not finite; the model's values overflow")
    return log_probs.double().clamp(max=0).abs()


def bits(scores: Tensor) -> Tensor:
    """Return log-perplexities in bits, from nats."""
    return scores / log(2)


def log_perplexity(model: LanguageModel, prefix: Tensor, continuations: Tensor) -> Tensor:
    """Return P(s|p) of every continuation s of one prefix p.

    Args:
        model: the model.
        prefix: int64 [L], BOS first.
        continuations: int64 [N, n].

    Returns:
        float64 [N], nats. Each word's log-probability has the model's own precision; sums are in float64.

    Raises:
        Diverged: a score is not finite.
    """
    state, log_probs = model.start(prefix[None])
    scores = []
    for part in torch.split(continuations, rows_at_once(log_probs)):
        rows = part.new_zeros(len(part))
        own = tuple(values[rows] for values in state)
        scores.append(_score(model, own, log_probs.expand(len(part), -1), part, [len(part)] * part.shape[1]))
    return torch.cat(scores)


def log_perplexities(model: LanguageModel, prefixes: Sequence[Tensor], continuations: Sequence[Tensor]) -> Tensor:
    """Return P(s|p) of every pair of a prefix p and a continuation s, of any lengths.

    Pairs whose prefixes have equal length are read in one batch, in pieces that bound memory. A sequence that has ended
    is computed no further, and words of prefixes are never scored. `log_perplexity` is faster where all share a prefix.

    Args:
        model: the model.
        prefixes: N of int64 [L >= 1], BOS first.
        continuations: N of int64 [n >= 0], on the same device; an empty one scores 0.

    Returns:
        float64 [N], nats, in the order of the arguments; equal to `log_perplexity` up to the model's rounding.

    Raises:
        Diverged: a score is not finite.
        ValueError: prefixes and continuations differ in number.
    """
    pairs = list(zip(prefixes, continuations, strict=True))
    if not pairs:
        return torch.zeros(0, dtype=torch.float64)
    rows = rows_at_once(model.start(pairs[0][0][None])[1])
    scores = pairs[0][0].new_zeros(len(pairs), dtype=torch.float64)
    order = sorted(range(len(pairs)), key=lambda index: (len(pairs[index][0]), -len(pairs[index][1])))
    for _, alike in groupby(order, key=lambda index: len(pairs[index][0])):
        group = list(alike)
        for piece in (group[first : first + rows] for first in range(0, len(group), rows)):
            state, log_probs = model.start(torch.stack([pairs[index][0] for index in piece]))
            padded = pad_sequence([pairs[index][1] for index in piece], batch_first=True)
            lengths = [len(pairs[index][1]) for index in piece]
            alive = [sum(length > column for length in lengths) for column in range(lengths[0])]
            scores[piece] = _score(model, state, log_probs, padded, alive)
    return scores


def _score(model: LanguageModel, state: State, log_probs: Tensor, continuations: Tensor, alive: list[int]) -> Tensor:
    """Return scores [N] of continuations [N, n], longest first, after sequences with these states and log-probs [N, V].

    `alive` has the number of rows that reach each of the n columns; other rows are padded.
    """
    own = torch.arange(len(continuations), device=continuations.device)
    score = log_probs.new_zeros(len(continuations), dtype=torch.float64)
    for column, rows in enumerate(alive):
        if column:
            state, log_probs = model.step(tuple(part[:rows] for part in state), continuations[:rows, column - 1])
        score[:rows] += nats(log_probs[own[:rows], continuations[:rows, column]])
    return score


def count_at_most(model: LanguageModel, state: State, log_probs: Tensor, references: Tensor, bounds: Tensor) -> int:
    """Return how many of references [M, n] score at most their own bound [M], after a prefix with this one-row state.

    A reference whose cost so far exceeds its bound is not read on. The state after shared first words is computed once
    for neighboring references.
    """
    rows = references.new_zeros(len(references))  # the row of the state that each reference continues
    spent = nats(log_probs[rows, references[:, 0]])
    for column in range(1, references.shape[1]):
        kept = spent <= bounds
        rows, spent, references, bounds = rows[kept], spent[kept], references[kept], bounds[kept]
        if not len(references):
            return 0
        size = log_probs.shape[1]
        pairs, rows = torch.unique_consecutive(rows * size + references[:, column - 1], return_inverse=True)
        state, log_probs = model.step(tuple(part[pairs // size] for part in state), pairs % size)
        spent = spent + nats(log_probs[rows, references[:, column]])
    return int((spent <= bounds).sum())
