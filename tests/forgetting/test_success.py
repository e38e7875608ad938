"""Success of the attack: halves of canaries, chance, thresholds of tied scores, and the paper's precision."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.attacks.forgetting.success import (
    accuracy,
    best_threshold,
    halves,
    heuristic_epsilon,
    precision_at,
)
from flsim.base.statistics import AtLevel


def every_second(canaries: int) -> NDArray[np.bool_]:
    return np.asarray(np.arange(canaries) % 2 == 0)


def test_a_canary_is_of_one_half_at_all_rounds() -> None:
    """Of used canaries in the order of seeds and names, every second one: b was never used, and c comes later."""
    rows = [(round_, canary) for round_ in (10, 20) for canary in "abcd"] + [(30, "c"), (30, "d")]
    observed = pd.DataFrame(rows, columns=["round", "canary"]).assign(seed=0, run="r")
    observed["last_use"] = observed["canary"].map({"a": 5, "c": 6, "d": 7})
    chooses = halves(observed)
    assert {canary: set(chooses[observed["canary"] == canary]) for canary in "acd"} == {
        "a": {True},
        "c": {False},
        "d": {True},
    }


def test_chance_is_one_half_whatever_the_threshold() -> None:
    """Chosen on the same canaries it would be above: 24 canaries a half, 2,000 times."""
    rng = np.random.default_rng(1)
    estimates = [accuracy(rng.normal(size=48), rng.normal(size=48), every_second(48))[0] for _ in range(2_000)]
    assert abs(np.mean(estimates) - 0.5) < 4 * 0.5 / math.sqrt(48 * 2_000)


def test_of_equally_good_thresholds_the_largest_is_taken() -> None:
    """Scores with many ties, and as many members as others or not: accuracies as exact fractions."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        members, others = (rng.integers(0, 6, rng.integers(1, 40)).astype(float) for _ in range(2))
        distinct = sorted({*members, *others})
        cuts = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(distinct)), math.inf]
        gains = {
            cut: Fraction(int((members > cut).sum()), len(members)) + Fraction(int((others <= cut).sum()), len(others))
            for cut in cuts
        }
        assert best_threshold(members, others) == max(cut for cut in cuts if gains[cut] == max(gains.values()))


def test_precision_of_the_paper() -> None:
    """65% at a false-positive rate of 10% is an epsilon of about 0.6 (section 4.2)."""
    at = AtLevel(0.1, 100, 186, 0.1857, 0.162, 0.211)
    estimate, low, high = precision_at(at, 1_000, 1_000)
    assert (round(estimate, 2), round(heuristic_epsilon(at, 1_000), 1)) == (0.65, 0.6)
    assert low < estimate < high
