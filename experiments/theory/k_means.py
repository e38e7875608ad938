"""Two-means of three clusters, which never forgets an outlier.

Jagielski et al. (2022), section 5.1 and appendix D.1. Clusters are around -1, mu and 1 on a line, and two centres are
learned. A first data set D0 has points of the outer clusters only, and in the runs IN one outlier of the middle one.
Later data sets D1 have points of all three. The middle cluster must join a neighbour. Without the outlier it joins the
right one, which is nearer. With the outlier the left centre begins nearer to the middle, and mostly takes that cluster
over. That is another local optimum, so no number of later points undoes it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flsim.base.errors import InputError, at_least_one
from flsim.base.rng import stream

Floats = NDArray[np.float64]
MOST_STEPS = 1_000  # far more than Lloyd's algorithm needs on a line


@dataclass(frozen=True)
class KMeansExperiment:
    """The experiment of appendix D.1, with the paper's values as defaults.

    Attributes:
        middle: mu, the centre of the middle cluster.
        spread: sigma, the standard deviation of each cluster.
        outlier: the point that D0 has in the runs IN.
        first: m, the number of points of each outer cluster in D0.
        later: n, the number of points of each of the three clusters in a D1.
        has_first: whether later training reads D0 again, in addition to each D1.

    Raises:
        InputError: a number of points is below 1.
    """

    middle: float = 0.03
    spread: float = 0.03
    outlier: float = -0.01
    first: int = 10
    later: int = 100
    has_first: bool = False

    def __post_init__(self) -> None:
        at_least_one(first=self.first, later=self.later)

    def centres(self, trials: int, is_in: bool, stages: int = 1, seed: int = 0) -> Floats:
        """Return the centres after each stage, float64 [stages + 1, trials, 2], the left one first.

        Stage 0 is the best clustering of D0. Each further stage is Lloyd's algorithm on a new D1, from the centres of
        the stage before, until nothing changes.

        Args:
            trials: number of independent repetitions.
            is_in: whether D0 has the outlier; runs OUT with the same seed have all other points in common.
            stages: number of later data sets.
            seed: the experiment's seed.
        """
        points = self._drawn(stream(seed, "k-means first"), trials, (-1.0, 1.0), self.first)
        if is_in:
            points = np.concatenate([points, np.full((trials, 1), self.outlier)], axis=1)
        centres = [two_means(points)]
        for stage in range(stages):
            later = self._drawn(stream(seed, "k-means later", stage), trials, (-1.0, self.middle, 1.0), self.later)
            read = np.concatenate([later, points], axis=1) if self.has_first else later
            centres.append(lloyd(read, centres[-1]))
        return np.stack(centres)

    def guesses(self, centres: Floats) -> NDArray[np.bool_]:
        """Return the attack's guesses "IN", bool [...], of centres [..., 2]: the middle joined the left cluster."""
        is_joined: NDArray[np.bool_] = centres.mean(axis=-1) > self.middle
        return is_joined

    def rates(self, trials: int, stages: int = 1, seed: int = 0) -> Floats:
        """Return the attack's true-positive and false-positive rates after each stage, float64 [stages + 1, 2]."""
        return np.stack(
            [self.guesses(self.centres(trials, is_in, stages, seed)).mean(-1) for is_in in (True, False)], axis=1
        )

    def _drawn(self, rng: np.random.Generator, trials: int, middles: tuple[float, ...], count: int) -> Floats:
        """Return `count` points of each cluster, float64 [trials, clusters * count]."""
        return np.concatenate([rng.normal(middle, self.spread, (trials, count)) for middle in middles], axis=1)


def two_means(points: Floats) -> Floats:
    """Return the two centres of least summed squared distance, float64 [trials, 2], of points [trials, n >= 2].

    On a line the best clusters are the points on the left and on the right of some gap, so all gaps are tried.
    """
    ordered = np.sort(points, axis=1)
    n = ordered.shape[1]
    left, total = ordered.cumsum(axis=1)[:, :-1], ordered.sum(axis=1, keepdims=True)
    counts = np.arange(1, n)
    # least squared distance = largest sum of (sum of a cluster)^2 / size
    best = (left**2 / counts + (total - left) ** 2 / (n - counts)).argmax(axis=1)
    rows = np.arange(len(ordered))
    return np.stack(
        [left[rows, best] / counts[best], (total[:, 0] - left[rows, best]) / (n - counts[best])],
        axis=1,
    )


def lloyd(points: Floats, centres: Floats) -> Floats:
    """Return the final centres, float64 [trials, 2], of Lloyd's algorithm on points [trials, n] from centres.

    Raises:
        InputError: a cluster lost all its points, or the algorithm did not end.
    """
    for _ in range(MOST_STEPS):
        is_left = points < centres.mean(axis=1, keepdims=True)
        counts = is_left.sum(axis=1)
        if not (counts.min() > 0 and counts.max() < points.shape[1]):
            raise InputError("k-means: a cluster lost all its points; take a smaller spread")
        sums = np.where(is_left, points, 0.0).sum(axis=1)
        moved = np.stack([sums / counts, (points.sum(axis=1) - sums) / (points.shape[1] - counts)], axis=1)
        if np.array_equal(moved, centres):
            return moved
        centres = moved
    raise InputError(f"k-means: no convergence after {MOST_STEPS:,} steps; take fewer points")
