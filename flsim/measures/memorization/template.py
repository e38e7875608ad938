"""The format of a secret that an attacker knows: the allowed tokens at each position.

Carlini et al. (2018), "The Secret Sharer", section 5: a format s with holes, and sigma(s_k), the tokens that fit the
k-th position, which is one token if the format fixes it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from flsim.base.errors import InputError
from flsim.data.vocabulary import Layout


@dataclass(frozen=True)
class Template:
    """The space of sequences of an attack: every choice of one of the allowed ids, ascending, for each position."""

    allowed: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.allowed:
            raise InputError("a template needs at least one position, found none")
        for position, ids in enumerate(self.allowed):
            if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
                raise InputError(f"position {position} of a template must list different ids, ascending, found {ids}")

    @classmethod
    def from_positions(cls, positions: Iterable[int | Sequence[int]]) -> "Template":
        """Return a template from one id for each fixed position, and the allowed ids, in any order, for the others."""
        return cls(tuple((ids,) if isinstance(ids, int) else tuple(sorted(set(ids))) for ids in positions))

    @classmethod
    def words(cls, layout: Layout, length: int) -> "Template":
        """Return the space of `length` words, as in a canary: no PAD, OOV, BOS or EOS."""
        return cls((tuple(range(layout.first_word, layout.last_word + 1)),) * length)

    @classmethod
    def text(cls, layout: Layout, length: int) -> "Template":
        """Return the space of `length` tokens of text, which are words, and pieces of words if there are any."""
        return cls((tuple(layout.text_ids),) * length)

    @classmethod
    def tokens(cls, layout: Layout, length: int) -> "Template":
        """Return the space of `length` tokens of any kind."""
        return cls((tuple(range(layout.vocabulary_size)),) * length)

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
