"""The state of training, for any algorithm; a checkpoint contains only the state."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from flsim.base.errors import Diverged
from flsim.models.language_model import Params
from flsim.privacy.ledger import Ledger

Moments = dict[str, Params]


@dataclass(frozen=True)
class State:
    """Everything that the next round of training needs; central training counts steps as rounds.

    Checkpoints, messages and digests contain nothing else of an algorithm.

    Attributes:
        round: number of completed rounds.
        params: the model's parameters by name.
        moments: other named tensors, such as an optimizer's: slot -> parameter -> tensor.
        values: numbers by name, such as the "clip" of the next round.
        ledger: the ledger of the completed rounds.

    Examples:
        >>> state = flsim.open_run("runs/iid").latest_state()                  # doctest: +SKIP
        >>> state.round, sorted(state.params)                                  # doctest: +SKIP
    """

    round: int
    params: Params = field(repr=False)  # a notebook would print every value
    moments: Moments = field(default_factory=dict, repr=False)
    values: Mapping[str, float] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger.zero)

    @property
    def clip(self) -> float | None:
        """Return the bound on the norm of users' updates in the next round; None if there is no clip."""
        return self.values.get("clip")


def flat(slots: Mapping[str, Params]) -> Params:
    """Return named tensors in the form of messages and sums: "slot/parameter" -> tensor."""
    return {f"{slot}/{name}": value for slot, tensors in slots.items() for name, value in tensors.items()}


def by_slot(tensors: Params) -> Moments:
    """Return tensors by slot and parameter, from keys of `flat`."""
    slots: Moments = {}
    for key, value in tensors.items():
        slot, _, name = key.rpartition("/")
        slots.setdefault(slot, {})[name] = value
    return slots


def transposed(by_name: Mapping[str, Params]) -> Moments:
    """Return tensors by slot and parameter, from tensors by parameter and slot."""
    return by_slot({f"{slot}/{name}": value for name, slots in by_name.items() for slot, value in slots.items()})


# The check of the training loss that finds diverged models whose values are all finite.
#  Such a model memorizes nothing, and would look private.

ABSURD = 10  # multiple of the loss of uniform guessing


def refuse_absurd_loss(when: str, loss: float, tokens: int, vocabulary_size: int, culprit: str) -> None:
    """Raise Diverged if the mean of a summed loss (nats) exceeds `ABSURD` times that of uniform guessing.

    `when` and `culprit`, the setting that is most likely too high, are for the message. No positions never diverge.
    """
    guessing = math.log(vocabulary_size)
    if tokens and loss > ABSURD * guessing * tokens:
        raise Diverged(
            f"{when}: the training loss is {loss / tokens:.3g} nats per word, and guessing gives "
            f"{guessing:.3g}; most likely {culprit} is too high"
        )


# The interface of training for callers, for all algorithms.


class Training(Protocol):
    """The settings of training and its users, without a state."""

    def first_state(self) -> State:
        """Return the state before the first round."""

    def states(self, state: State, until: int, is_wanted: Callable[[int], bool] = ...) -> Iterator[State]:
        """Train in this process to a round or step, and yield the last state and wanted ones; raises Diverged."""
