"""The contract of an attack: a score for each record before a model, and what is learned to make it, if anything."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from flsim.attacks.membership.candidates import Candidates

Floats = NDArray[np.float64]
Learned = Callable[[Floats], Floats]
"""Function from statistics, float64 [n, F], to scores, float64 [n]."""


@dataclass(frozen=True)
class Attack:
    """An attack on the membership of records.

    Attributes:
        name: the name by which a built-in attack is asked for, and that tables show.
        score: function of `Candidates` that returns a score of each record, float64 [N], larger for what it takes for
            a member. It does not know which records are members. Of an attack with `fit` it returns statistics [N, F].
        description: a phrase about the score.
        source: the paper that describes it.
        fit: function of statistics [n, F] and membership bool [n] of one half of the records; it returns the function
            by which the other half is scored. The attack is then measured on that other half alone.
    """

    name: str
    score: Callable[["Candidates"], Any]
    description: str = ""
    source: str = ""
    fit: Callable[[Floats, NDArray[np.bool_]], Learned] | None = None
