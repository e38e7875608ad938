"""A model that blew up without overflowing memorizes nothing, and would pass for a private one: its loss tells."""

import math

from flsim.base.errors import Diverged

ABSURD = 10  # times the loss of uniform guessing


def refuse_absurd_loss(when: str, loss: float, tokens: int, vocabulary_size: int, culprit: str) -> None:
    """Refuse a training loss that is far above that of guessing.

    Args:
        when: the round or step, for the message.
        loss: summed cross-entropy in nats.
        tokens: number of positions that it is over; nothing is refused over none.
        vocabulary_size: number of token ids.
        culprit: the setting that most likely is too high.

    Raises:
        Diverged: the mean exceeds `ABSURD` times the loss of uniform guessing.
    """
    guessing = math.log(vocabulary_size)
    if tokens and loss > ABSURD * guessing * tokens:
        raise Diverged(
            f"{when}: the training loss is {loss / tokens:.3g} nats a word, where guessing gives {guessing:.3g}; "
            f"most likely {culprit} is too high"
        )
