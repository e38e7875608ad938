"""The log-perplexity of continuations, the one score of every attack.

P(s|p) = sum over i of -log Pr(s_i | p, s_1, ..., s_{i-1}), in nats: Thakkar et al. (2020), section 4.1, "Evaluation
Methods". Carlini et al. (2018), definition 1, take the logarithm to base 2.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from flsim.base.errors import Diverged
from flsim.data.vocabulary import Layout
from flsim.models.language_model import LanguageModel, State

# The format of a secret that an attacker knows: the allowed tokens at each position.
#
# Carlini et al. (2018), "The Secret Sharer", section 5: a format s with holes, and sigma(s_k), the tokens that fit the
# k-th position, which is one token if the format fixes it.


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
