"""Canaries at the ceiling of exposure: ranked before all |R| references, so that their differences cannot show."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flsim.measures.built_in import PRIMARY
from flsim.results.store import RunResults

TOLERANCE = 1e-6  # bits below the ceiling that still count as there: rounding
WHAT_TO_DO = "`flsim evaluate RUN --also space` measures beyond it."
MANY = 0.1  # share of canaries at the ceiling from which on texts speak of them


@dataclass(frozen=True)
class AtCeiling:
    """The number of planted canaries at the ceiling, of all whose exposure and |R| are known."""

    reached: int
    canaries: int

    @property
    def share(self) -> float:
        """Return the share of canaries at the ceiling; 0 if there are no canaries."""
        return self.reached / self.canaries if self.canaries else 0.0


def ceiling(references: float) -> float:
    """Return the largest exposure that ranking among |R| references can show, log2(|R| + 1) bits."""
    return math.log2(references + 1)


def is_at_ceiling(exposures: ArrayLike, references: float | None) -> NDArray[np.bool_]:
    """Return bool [n], whether each of float64 [n] exposures is the largest possible one; all False without |R|."""
    values: NDArray[Any] = np.asarray(exposures, dtype="float64")
    return values > (math.inf if references is None else ceiling(references) - TOLERANCE)


def at_ceiling(runs: Iterable[tuple[RunResults, int]]) -> AtCeiling:
    """Return how many planted canaries of all runs are at the ceiling, each run at an evaluated round."""
    reached, canaries = 0, 0
    for run, round_ in runs:
        exposures, references = run.of_planted(PRIMARY.name, round_), run.references(round_)
        if exposures is not None and references is not None:
            reached, canaries = reached + int(is_at_ceiling(exposures, references).sum()), canaries + len(exposures)
    return AtCeiling(reached, canaries)
