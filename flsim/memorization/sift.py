"""The sorting of references by bounds on their scores, exact, so that few references have to be scored in full.

References are a tree of shared first words, walked in pieces that bound memory. A reference is dropped as soon as a
lower bound on its cost so far exceeds the canary's score. It counts where an upper bound on its score does not. The
others are open, for the plain scorer; they are few, as the bounds are hundredths of a nat apart. The bounds allow for
rounding, so that no decision differs from the plain scorer's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flsim.base.errors import Diverged
from flsim.memorization.bounds import OutputBounds
from flsim.memorization.score import nats, rows_at_once
from flsim.models.language_model import LogitModel, State, Stepper

SUMMED = 256  # number of words whose exponentials a bound on log Z sums one by one
WIDE = 0.5  # nats between the bounds on a log Z beyond which it is computed


class Clear(NamedTuple):
    """The result for a piece of the references.

    Attributes:
        counted: number of references that surely score at most the bound.
        open: int64 [k, n], the references that the bounds do not decide.
    """

    counted: int
    open: Tensor


@dataclass(frozen=True)
class Sifter:
    """Everything about one canary that the walk over references needs.

    Attributes:
        step: the model's stepper.
        bounds: bounds on the costs of words after the prefix and 1, 2, ..., n - 1 words of a reference.
        bound: nats; references that score at most this count.
    """

    step: Stepper
    bounds: Sequence[OutputBounds]
    bound: float

    def sift(self, state: State, log_probs: Tensor, references: Tensor) -> Iterator[Clear]:
        """Yield the results for references [M, n], after a prefix with this one-row state and log-probs [1, V].

        Raises:
            Diverged: a required value is not finite.
        """
        spent = nats(log_probs[0])[references[:, 0]]
        nodes = torch.zeros_like(references[:, 0])
        yield from self._descend(state, _Open(references, nodes, spent, spent), 1)

    def _descend(self, state: State, open_: "_Open", column: int) -> Iterator[Clear]:
        """Yield the results for references whose first `column` words are paid; `state` is after one word less."""
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
        """Add the cost of the word at `column` after outputs [N, D], its nodes; drop references that are too dear."""
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


def output_bounds(model: LogitModel, visits: Sequence[tuple[State, Tensor]]) -> list[OutputBounds]:
    """Return bounds around the outputs of typical states, from (state, log-probs) after each number of words."""
    weight, bias = model.output_layer()
    return [OutputBounds(weight, bias, state[0], log_probs.exp().mean(0), SUMMED) for state, log_probs in visits]


def _refuse_non_finite(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise Diverged("an output of the model is not finite; its values overflow")
