"""The state of training, whatever the algorithm; a checkpoint holds the state and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flsim.models.language_model import Params
from flsim.privacy.ledger import Ledger

Moments = dict[str, Params]


@dataclass(frozen=True)
class State:
    """Everything that training carries from one round to the next; central training counts its steps as rounds.

    Checkpoints, messages and digests know no more of an algorithm than this.

    Attributes:
        round: number of completed rounds.
        params: the model's parameters by name.
        moments: other named tensors, such as an optimizer's: slot -> parameter -> tensor.
        values: numbers by name, such as the "clip" of the next round.
        ledger: what the completed rounds released.

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
        """Return the bound on the norm of users' updates in the next round; None where nothing is clipped."""
        return self.values.get("clip")


def flat(slots: Mapping[str, Params]) -> Params:
    """Return named tensors in the form of messages and sums: "slot/parameter" -> tensor."""
    return {f"{slot}/{name}": value for slot, tensors in slots.items() for name, value in tensors.items()}


def by_slot(tensors: Params) -> Moments:
    """Return tensors by slot and parameter, from the keys that `flat` made."""
    slots: Moments = {}
    for key, value in tensors.items():
        slot, _, name = key.partition("/")
        slots.setdefault(slot, {})[name] = value
    return slots
