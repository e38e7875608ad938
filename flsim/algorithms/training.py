"""What training is to those who run it, whatever its kind."""

from collections.abc import Callable, Iterator
from typing import Protocol

from flsim.training.state import State


class Training(Protocol):
    """Settings of training and the users that it is about, without a state."""

    def first_state(self) -> State:
        """The state before the first round."""
        ...

    def states(self, state: State, until: int, is_wanted: Callable[[int], bool] = ...) -> Iterator[State]:
        """Train in this process from a state to round `until`.

        Args:
            state: where to go on from; it stays as it is.
            until: the last round; of central training, the last step.
            is_wanted: whether to hand out the state after so many rounds; the last one always is.

        Raises:
            Diverged: values are not finite, or a loss is absurd; names the round.
        """
        ...
