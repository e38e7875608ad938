"""The check of the training loss that finds diverged models whose values are all finite.

Such a model memorizes nothing, and would pass for a private one.
"""

import math

from flsim.base.errors import Diverged

ABSURD = 10  # times the loss of uniform guessing


def refuse_absurd_loss(when: str, loss: float, tokens: int, vocabulary_size: int, culprit: str) -> None:
    """Refuse a training loss that is far above the loss of uniform guessing.

    Args:
        when: the round or step, for the message.
        loss: summed cross-entropy in nats.
        tokens: number of positions in the sum; a sum over no positions is never refused.
        vocabulary_size: number of token ids.
        culprit: the setting that is most likely too high, for the message.

    Raises:
        Diverged: the mean loss exceeds `ABSURD` times the loss of uniform guessing.
    """
    guessing = math.log(vocabulary_size)
    if tokens and loss > ABSURD * guessing * tokens:
        raise Diverged(
            f"{when}: the training loss is {loss / tokens:.3g} nats a word, where guessing gives {guessing:.3g}; "
            f"most likely {culprit} is too high"
        )
