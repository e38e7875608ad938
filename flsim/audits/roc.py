"""Success of an attacker that tells members from others by a score: ROC, TPR at low FPR, area under the curve."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.results.agreement import share_interval

Floats = NDArray[np.float64]
RESAMPLES = 1_000


@dataclass(frozen=True)
class AtLevel:
    """The true-positive rate at a false-positive rate.

    The threshold is the lowest that k = level * others false positives allow. A guess has a rate of
    (k + 1) / (others + 1) there on average, a little above the level.

    Attributes:
        level: the largest false-positive rate that is allowed.
        alarms: number of others at or above the threshold.
        detected: number of members at or above it.
        tpr: share of members at or above it.
        low, high: interval of the rate at a false-positive rate of `level` in the population, not in these others
            alone: see `Roc.interval`.
    """

    level: float
    alarms: int
    detected: int
    tpr: float
    low: float
    high: float


@dataclass(frozen=True)
class Roc:
    """A curve with a point for each threshold, from above all scores to below all.

    Attributes:
        fpr, tpr: float64 [points], ascending, from (0, 0) to (1, 1).
        members, others: their numbers.
    """

    fpr: Floats
    tpr: Floats
    members: int
    others: int

    def at(self, level: float) -> AtLevel:
        """Return the last point whose false-positive rate is at most the level, without interpolation.

        Raises:
            InputError: the level is below 1 / others, where no number of false positives but 0 can be seen.
        """
        if level * (1 + 1e-12) * self.others < 1:  # 1 / 98 times 98 is below 1 in float64
            raise InputError(f"a false-positive rate of {level:g} needs {1 / level:,.0f} others, found {self.others:,}")
        place = int(np.searchsorted(self.fpr, level * (1 + 1e-12), side="right")) - 1
        alarms, detected = round(self.fpr[place] * self.others), round(self.tpr[place] * self.members)
        return AtLevel(level, alarms, detected, detected / self.members, *self.interval(level))

    def interval(self, level: float, confidence: float = 0.95) -> tuple[float, float]:
        """Return an interval of the true-positive rate at a false-positive rate in the population, whatever the scores.

        The population's rate at the k-th highest score of n others is Beta(k, n - k + 1), or is on the safe side of it
        where scores are equal. So some score is a threshold whose false-positive rate is at most `level`, and another
        one whose rate is at least that, each but for a quarter of what `confidence` leaves; members above them have
        the interval of Clopper and Pearson, each with another quarter. Members and others count as independent. The
        interval is conservative: it holds at least as often as `confidence` says.
        """
        tail = (1 - confidence) / 4
        k = np.arange(1, self.others + 1)
        is_below = scipy.special.betainc(k, self.others - k + 1, level)  # probability that the k-th has at most `level`
        strict, lax = int((is_below >= 1 - tail).sum()), int((is_below > tail).sum()) + 1
        alarms = np.rint(self.fpr * self.others)
        detected = np.rint(self.tpr * self.members).astype(np.int64)
        low, high = 0.0, 1.0
        if strict:  # above the score of this place: the last point with fewer alarms
            above = int(detected[np.searchsorted(alarms, strict, side="left") - 1])
            low = share_interval(above, self.members, 1 - 2 * tail)[0]
        if lax <= self.others:  # that score or above
            upto = int(detected[np.searchsorted(alarms, lax, side="left")])
            high = share_interval(upto, self.members, 1 - 2 * tail)[1]
        return low, high


def roc(members: Floats, others: Floats) -> Roc:
    """Return the curve of scores of members [n_in] and of others [n_out].

    Raises:
        InputError: there are no members or no others, or a score is not finite.
    """
    _check(members, others)
    scores = np.concatenate([members, others])
    order = np.argsort(-scores, kind="stable")
    is_member = (np.arange(len(scores)) < len(members))[order]
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # the last of equal scores
    tpr, fpr = is_member.cumsum()[ends] / len(members), (~is_member).cumsum()[ends] / len(others)
    return Roc(np.append(0.0, fpr), np.append(0.0, tpr), len(members), len(others))


def auroc(members: Floats, others: Floats) -> float:
    """Return the probability that a member scores above another one, where equal scores count half (Mann and Whitney).

    Raises:
        InputError: as for `roc`.

    >>> auroc(np.array([0.0, 4, 6, 7]), np.array([1.0, 2, 3, 5])) * 16
    11.0
    """
    _check(members, others)
    ordered = np.sort(others)
    below, upto = (np.searchsorted(ordered, members, side=side) for side in ("left", "right"))
    return float((below + upto).mean() / 2 / len(others))


def auroc_interval(
    members: Floats,
    others: Floats,
    units: tuple[Sequence[object], Sequence[object]],
    rng: np.random.Generator,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Return the bootstrap interval (percentiles) of the area, where whole units are drawn with replacement.

    Args:
        members: float64 [n_in].
        others: float64 [n_out].
        units: the unit, such as the user, of each member and of each other one.
        rng: source of the resamples.
        confidence: coverage of the interval.
    """
    sides = [_by_unit(scores, names) for scores, names in zip((members, others), units, strict=True)]
    areas = []
    for _ in range(RESAMPLES):
        drawn = [np.concatenate([side[i] for i in rng.integers(len(side), size=len(side))]) for side in sides]
        areas.append(auroc(*drawn))
    low, high = np.quantile(areas, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _by_unit(scores: Floats, units: Sequence[object]) -> list[Floats]:
    names = {name: place for place, name in enumerate(dict.fromkeys(units))}
    places = np.array([names[name] for name in units])
    return [scores[places == place] for place in range(len(names))]


def _check(members: Floats, others: Floats) -> None:
    for scores, name in ((members, "members"), (others, "others")):
        if not len(scores):
            raise InputError(f"no {name}, so nothing tells members from others; give at least one of each")
        if not np.isfinite(scores).all():
            raise InputError(f"scores of {name}: some are not finite; leave them out")
