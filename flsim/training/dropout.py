"""Dropout factors as a function of (seed, step), record and time, so that every engine drops the same values."""

import numpy as np
from numpy.typing import NDArray

from flsim.base.rng import stream


def factors(probability: float, seed: int, step: int, rows: int, times: int, width: int) -> NDArray[np.float32]:
    """Return dropout factors, float32 [2, rows, times, width]: 0 for dropped values, else 1 / (1 - probability).

    This is the "inverted" form of Srivastava et al. (2014), section 10: a model needs no scaling when it is evaluated.

    Args:
        probability: probability of dropping a value.
        seed, step: the experiment's seed, and the step, counted from 0.
        rows: number of records in the batch. Row 0 belongs to the longest record; records of equal length keep the
            order of the batch.
        times: the most positions that a record can have.
        width: number of values at each position.

    Returns:
        Index 0 has the factors of what the cell reads, index 1 those of what words are predicted from.
    """
    drawn = stream(seed, "dropout", step).random((2, rows, times, width), np.float32)
    return (drawn >= probability).astype(np.float32) / np.float32(1 - probability)
