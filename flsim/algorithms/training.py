"""The contract of training for its callers, whichever algorithm trains."""

from collections.abc import Callable, Iterator
from typing import Protocol

from flsim.training.state import State


class Training(Protocol):
    """The settings of training and its users, without a state."""

    def first_state(self) -> State:
        """Return the state before the first round."""
        ...

    def states(self, state: State, until: int, is_wanted: Callable[[int], bool] = ...) -> Iterator[State]:
        """Train in this process from a state to round `until`, and yield states.

        Args:
            state: the state to continue from; it is not changed.
            until: the last round; in central training, the last step.
            is_wanted: whether to yield the state after that many rounds; the last state is always yielded.

        Raises:
            Diverged: values are not finite, or a loss is absurd; the message names the round.
        """
        ...
