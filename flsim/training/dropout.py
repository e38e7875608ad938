"""Dropout's factors, the same for every engine: a function of (seed, step), the record's place and the time."""

import numpy as np
from numpy.typing import NDArray

from flsim.base.rng import stream


def factors(probability: float, seed: int, step: int, rows: int, times: int, width: int) -> NDArray[np.float32]:
    """Float32 [2, rows, times, width]: 0 with that probability, else 1 / (1 - probability).

    Srivastava et al. (2014), section 10 ("inverted"): the model that is evaluated needs no scaling.

    Args:
        probability: of dropping.
        seed, step: the experiment's, and the step from 0.
        rows: records of the batch; the first row is the longest record's, records of equal length in batch order.
        times: the most that a record can have.
        width: values of each position.

    Returns:
        Factors of what is read, and of what is predicted from.
    """
    drawn = stream(seed, "dropout", step).random((2, rows, times, width), np.float32)
    return (drawn >= probability).astype(np.float32) / np.float32(1 - probability)
