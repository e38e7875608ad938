"""Exact tests from ranks: a canary among R references from the same distribution, independent of training.

For a canary that was not trained on, all ranks from 1 to R + 1 are equally likely. Therefore rank <= t is a test of
whether the canary was trained on. Its false-positive rate is t / (R + 1) exactly, without a shadow model and without
text that was not trained on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from flsim.base.arrays import Floats
from flsim.base.statistics import share_interval

LEVELS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # false-positive rates


def ranks_among(scores: Floats, references: Floats) -> Floats:
    """Return 1 + the number of references that score at least as high: float64 [n], from 1 to R + 1."""
    below = np.searchsorted(np.sort(references), scores, side="left")
    return (1 + len(references) - below).astype(np.float64)


def p_values(ranks: Floats, references: int) -> Floats:
    """Return the p-value rank / (R + 1) of each canary [n], conservative because ties count for the reference."""
    return np.asarray(ranks, dtype=np.float64) / (references + 1)


@dataclass(frozen=True)
class Detection:
    """The canaries that a test finds at ranks up to `threshold`.

    `fpr` is the mean false-positive rate over references, with its 95% interval for the references that were drawn; the
    interval of `tpr`, the share of canaries found, treats them as independent.
    """

    threshold: int
    fpr: float
    fpr_low: float
    fpr_high: float
    detected: int
    canaries: int
    tpr: float
    tpr_low: float
    tpr_high: float


def detection_at(ranks: Floats, references: int, threshold: int) -> Detection:
    """Return the canaries that the test rank <= t finds."""
    detected, canaries = int((ranks <= threshold).sum()), len(ranks)
    low, high = scipy.special.betaincinv(threshold, references - threshold + 1, [0.025, 0.975])
    return Detection(
        threshold,
        threshold / (references + 1),
        float(low),
        float(high),
        detected,
        canaries,
        detected / canaries if canaries else math.nan,
        *share_interval(detected, canaries),
    )


def curve(ranks: Floats, references: int) -> tuple[Floats, Floats]:
    """Return the false-positive rate and the share of canaries found, at each rank that occurs, both ascending."""
    distinct, counts = np.unique(ranks, return_counts=True)
    return distinct / (references + 1), counts.cumsum() / len(ranks)


def detections_by_level(ranks: Floats, references: int, levels: Sequence[float] = LEVELS) -> dict[float, Detection]:
    """Return the detections at each false-positive rate; rates below 1 / (R + 1) are omitted."""
    thresholds = {level: math.floor(level * (references + 1)) for level in levels}
    return {level: detection_at(ranks, references, threshold) for level, threshold in thresholds.items() if threshold}
