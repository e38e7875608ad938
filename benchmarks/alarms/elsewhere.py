"""Bounds of other projects, each reimplemented in a few lines, and bounds of flsim on the same simulations.

Each procedure is that of a repository at a commit. All but one get scores without information, so that each bound above
zero is a false alarm.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy.special import ndtri

from benchmarks.alarms.cases import Counts, Flags, judged, tossed
from benchmarks.alarms.ours import ALIKE, FEW, hits_among_shared_references
from flsim.attacks.audit import bounds
from flsim.base.rng import stream
from flsim.base.statistics import upper_bound

CANARIES = 1_000
DELTA = 1e-5
Both = tuple[Flags, Flags]
# (random numbers, simulations) -> whether their bound is above the truth, and whether that of flsim is, on the same
# data
Simulate = Callable[[np.random.Generator, int], Both]


@dataclass(frozen=True)
class Elsewhere:
    """A procedure of another project.

    Attributes:
        project: name of the project.
        source: repository, file and commit of the procedure.
        procedure: the procedure, in words.
        promised: probability of a bound above the truth that it states.
        simulate: see `Simulate`.
    """

    project: str
    source: str
    procedure: str
    promised: float
    simulate: Simulate

    def alarms(self, simulations: int, seed: int = 0) -> tuple[int, int]:
        """Return the number of simulations whose bound is above the truth, for their bound and that of flsim."""
        published, ours = self.simulate(stream(seed, "false alarms elsewhere", self.procedure), simulations)
        return int(published.sum()), int(ours.sum())


def half(rng: np.random.Generator, simulations: int, canaries: int) -> Flags:
    """Return exactly half of the canaries, [simulations, canaries]."""
    return rng.permuted(np.tile(np.arange(canaries) % 2 == 0, (simulations, 1)), axis=1)


def by_fixed_guesses(planted: Flags, significance: float = 0.05) -> Flags:
    """Return whether the bound of flsim is above zero; a tenth of canaries is guessed at each end by score."""
    tenth = planted.shape[1] // 10
    right = planted[:, -tenth:].sum(axis=1) + (~planted[:, :tenth]).sum(axis=1)
    made = 2 * tenth
    return judged(right, lambda count: bounds.epsilon_of_coins(planted.shape[1], made, count, DELTA, significance) > 0)


def grid_of_guesses(rng: np.random.Generator, simulations: int) -> Both:
    """Guess "out" for the k- lowest and "in" for the k+ highest scores, at delta 0, over a grid of step sqrt(m)."""
    planted, step = tossed(rng, simulations, CANARIES), int(np.sqrt(CANARIES))
    below = np.concatenate([np.zeros((simulations, 1), int), planted.cumsum(axis=1)], axis=1)  # planted among the first
    published = np.zeros(simulations, bool)
    for first in range(0, CANARIES, step):
        for last in range(0, first, step):
            right = (last - below[:, last]) + (below[:, -1] - below[:, first])
            published |= scipy.stats.binom.sf(right - 1, last + CANARIES - first, 0.5) < 0.05
    return published, by_fixed_guesses(planted)


def ten_numbers_of_guesses(rng: np.random.Generator, simulations: int) -> Both:
    """Guess "in" for the 10, 20, ..., 100 highest scores, each at 1%; exactly half of the canaries are planted."""
    planted = half(rng, simulations, CANARIES)
    right = planted.cumsum(axis=1)

    def alarms(made: int) -> Flags:
        return judged(right[:, made - 1], lambda count: bounds.p_value(0.0, DELTA, CANARIES, made, count) < 0.01)

    published = np.any([alarms(made) for made in range(10, 101, 10)], axis=0)
    return published, by_fixed_guesses(planted, 0.01)


def numbers_of_guesses_by_f_dp(largest_noise: float) -> Simulate:
    """Guess equally many at each end, for 50 numbers from 10 to m / 2; half of the canaries are planted.

    The result is the noise of a Gaussian mechanism, among noises up to the largest tested one. A result below the
    largest one is an alarm.
    """

    def simulate(rng: np.random.Generator, simulations: int) -> Both:
        planted, wrong = half(rng, simulations, CANARIES), bounds.of_one(bounds.gaussian(1 / largest_noise))
        inside, outside = planted[:, ::-1].cumsum(axis=1), (~planted).cumsum(axis=1)

        def alarms(number: int) -> Flags:
            right = inside[:, number - 1] + outside[:, number - 1]
            return judged(right, lambda count: bounds.is_refuted(wrong, CANARIES, 2 * number, count))

        numbers = np.logspace(1, np.log10(CANARIES // 2), num=50, dtype=int).tolist()
        published = np.any([alarms(number) for number in numbers], axis=0)
        return published, by_fixed_guesses(planted)

    return simulate


def best_threshold(rng: np.random.Generator, simulations: int) -> Both:
    """Take exact intervals at the threshold of the largest estimate of epsilon; 50 models with the canary, 50 without.

    Delta is 1 / 100 there. Thresholds without errors of both kinds have no estimate.
    """
    models, delta = 50, 0.01
    scores = rng.normal(size=(simulations, 2, models))  # with the canary, and without it
    has_canary = scores.reshape(simulations, -1).argsort(axis=1) < models  # from the lowest score to the highest
    missed = has_canary.cumsum(axis=1) - has_canary  # below the threshold of each score
    alarms = models - (~has_canary).cumsum(axis=1) + ~has_canary
    rates = np.where((missed > 0) & (alarms > 0), _odds(missed / models, alarms / models, delta), 0)
    best = rates.argmax(axis=1)[:, None]
    # Two-sided intervals at 95%, so that both upper ends together hold with 95%.
    highest = np.array([upper_bound(count, models, 0.025) for count in range(models + 1)])
    at_best = [highest[np.take_along_axis(counts, best, axis=1)[:, 0]] for counts in (missed, alarms)]
    above = (scores > 0).sum(axis=2).tolist()  # at a threshold that is fixed in advance
    is_above = [bounds.epsilon_of_threshold(hits, models, others, models, delta) > 0 for hits, others in above]
    return _odds(at_best[0], at_best[1], delta) > 1, np.array(is_above)


def _odds(fnr: NDArray[np.float64], fpr: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    """Return e^epsilon of a test; infinite without errors."""
    with np.errstate(divide="ignore"):
        return np.maximum((1 - delta - fpr) / fnr, (1 - delta - fnr) / fpr)


def vertices(planted: NDArray[np.bool_]) -> tuple[Counts, Counts]:
    """Return numbers of planted and other canaries above the threshold of each vertex of the concave hull of a ROC."""
    points = np.concatenate([np.zeros((1, 2), int), np.stack([planted, ~planted], axis=1).cumsum(axis=0)])
    while len(points) > 2:
        steps = np.diff(points, axis=0)
        is_vertex = steps[:-1, 1] * steps[1:, 0] > steps[1:, 1] * steps[:-1, 0]
        if is_vertex.all():
            break
        points = points[np.concatenate([[True], is_vertex, [True]])]
    below = points[::-1]
    return planted.sum() - below[:, 0], (~planted).sum() - below[:, 1]


def by_vertices(test: Callable[[Counts, Counts, float], bool]) -> Simulate:
    """Return the simulation of a test at all vertices of a ROC's hull, each at its part of 5%."""

    def simulate(rng: np.random.Generator, simulations: int) -> Both:
        planted = tossed(rng, simulations, CANARIES)
        corners = map(vertices, planted)
        published = np.array([test(hits, alarms, 0.05 / len(hits)) for hits, alarms in corners])
        return published, by_fixed_guesses(planted)

    return simulate


def _one_run(hits: Counts, alarms: Counts, part: float) -> bool:
    pairs = zip(hits.tolist(), (hits + alarms).tolist(), strict=True)
    return any(right and bounds.p_value(0.0, DELTA, CANARIES, made, right) < part for right, made in pairs)


def _one_run_by_f_dp(hits: Counts, alarms: Counts, part: float) -> bool:
    pairs = zip(hits.tolist(), (hits + alarms).tolist(), strict=True)
    nothing = bounds.of_one(lambda share: share)  # T of mu = 0
    return any(2 * right > made and bounds.is_refuted(nothing, CANARIES, made, right, part) for right, made in pairs)


def _absolute_mu(hits: Counts, alarms: Counts, part: float) -> bool:
    """Return whether |mu| at the upper ends is above zero: a forward bound below zero counts as a backward one."""
    members, others = int(hits.max()), int(alarms.max())
    rates = [
        (upper_bound(alarm, others, part / 2), upper_bound(members - hit, members, part / 2))
        for hit, alarm in zip(hits.tolist(), alarms.tolist(), strict=True)
    ]
    usable = [pair for pair in rates if max(pair) < 1 - DELTA]
    mu = max((abs(float(-ndtri(fpr) - ndtri(fnr))) for fpr, fnr in usable), default=0.0)
    return bool(mu) and bounds.epsilon_of_gaussian(mu, DELTA) > 0


def references_taken_for_own(rng: np.random.Generator, simulations: int) -> Both:
    """Take t / (R + 1) for the share of a set, though all canaries have the same references; epsilon is 3."""
    (references, threshold), users = FEW, ALIKE.tolist()
    hits = hits_among_shared_references(rng, simulations, 3.0, ALIKE)
    share = threshold / (references + 1)
    published = judged(hits, lambda count: bounds.epsilon_of_hits(count, share, users) > 3.0)
    return published, judged(hits, lambda count: bounds.epsilon_of_ranks(count, threshold, references, users) > 3.0)


PRIVACY_GUARD = "facebookresearch/PrivacyGuard, tutorial_notebooks/fdp_analysis_tutorial.ipynb, fb9c26c"
JAX_PRIVACY = "google-deepmind/jax_privacy, jax_privacy/auditing.py"
ELSEWHERE = (
    Elsewhere(
        "ml_privacy_meter",
        "privacytrustlab/ml_privacy_meter, audit.py, e384af8",
        "largest bound of 528 pairs (k-, k+)",
        0.05,
        grid_of_guesses,
    ),
    Elsewhere(
        "privacy-auditing-of-llms",
        "kiddyboots216/privacy-auditing-of-llms, audit_mia.py, 2c77cd7",
        "largest bound of 10 numbers of guesses",
        0.01,
        ten_numbers_of_guesses,
    ),
    Elsewhere(
        "PrivacyGuard",
        PRIVACY_GUARD,
        "largest bound of 50 numbers of guesses",
        0.05,
        numbers_of_guesses_by_f_dp(9.981),
    ),
    Elsewhere(
        "PrivacyGuard",
        PRIVACY_GUARD,
        "the same, larger noise allowed",
        0.05,
        numbers_of_guesses_by_f_dp(1e9),
    ),
    Elsewhere(
        "canife",
        "facebookresearch/canife, canife/canary_analyser.py, f029f20",
        "interval at the best of 100 thresholds",
        0.05,
        best_threshold,
    ),
    Elsewhere(
        "jax_privacy",
        f"{JAX_PRIVACY}, 8967688",
        "one run, 5% over the vertices of a hull",
        0.05,
        by_vertices(_one_run),
    ),
    Elsewhere("jax_privacy", f"{JAX_PRIVACY}, 8967688", "the same with f-DP", 0.05, by_vertices(_one_run_by_f_dp)),
    Elsewhere(
        "jax_privacy",
        f"{JAX_PRIVACY}, before pull request 270",
        "largest absolute mu of the vertices",
        0.05,
        by_vertices(_absolute_mu),
    ),
    Elsewhere(
        "(avoided here)",
        "the mistake that flsim.attacks.audit.bounds avoids",
        "shared references, treated as separate",
        0.05,
        references_taken_for_own,
    ),
)
