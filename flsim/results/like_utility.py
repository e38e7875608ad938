"""Comparison of two runs at like utility: where both models first predict equally well.

A model that was trained further predicts better, and has memorized more. So a difference at the end of training may be
one of utility, and is also measured at an equal perplexity: the lowest that both runs reached. There, a run's exposures
lie between the last evaluation before and the first one after; they are interpolated along the cross-entropy, the
logarithm of perplexity.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.base.statistics import ROUNDING, paired_t_p, t_interval
from flsim.measures.built_in import PRIMARY
from flsim.measures.quantity import Quantity
from flsim.measures.utility import PERPLEXITY
from flsim.results.store import RunResults
from flsim.results.worlds import mean_text, pairs_of_seeds


@dataclass(frozen=True)
class LikeUtility:
    """A number of canaries in setting a less that in setting b at equal perplexity, compared over seeds.

    Attributes:
        seeds: seeds with a run of both that reached a common perplexity, ascending.
        perplexities: the lowest perplexity that both runs of each seed reached.
        rounds: when a and b first reached it, for each seed; between two evaluations, a fraction of a round.
        differences: mean over the canaries that either run planted of a - b, for each seed, in the number's unit.
        mean_difference: mean over seeds.
        ci_low, ci_high: its 95% interval, from Student's t over seeds; NaN below two.
        p: two-sided p-value of the t test that it is zero; NaN below two seeds.
        quantity: the compared number.
        left_out: why the two runs of a seed cannot be compared, by seed; such a seed is in no other field.
    """

    seeds: tuple[int, ...]
    perplexities: tuple[float, ...]
    rounds: tuple[tuple[float, float], ...]
    differences: tuple[float, ...]
    mean_difference: float
    ci_low: float
    ci_high: float
    p: float
    quantity: Quantity = PRIMARY
    left_out: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text()

    def text(self, corrected: float = math.nan) -> str:
        """Return the comparison in words, with p as `corrected` by Holm too; NaN leaves that out."""
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"
        lost = f"; {left_out_text(self.left_out)}" if self.left_out else ""
        return f"{mean_text(self.differences, self.quantity, corrected)}, {seeds}{lost}"


def left_out_text(left_out: Mapping[int, str]) -> str:
    """Return words on seeds that are left out, with their reasons, e.g. ``"seed 3 left out: run a: ..."``."""
    seeds = f"seed{'s' * (len(left_out) != 1)} {', '.join(map(str, left_out))}"
    return f"{seeds} left out: {'; '.join(left_out.values())}"


def like_utility(a: Sequence[RunResults], b: Sequence[RunResults], quantity: Quantity = PRIMARY) -> LikeUtility:
    """Compare two series of runs seed by seed, each seed at the lowest perplexity that both of its runs reached.

    Seeds are the independent unit, as in `flsim.results.worlds.paired_over_seeds`. A seed whose runs have no common
    perplexity, such as one that is below it at its first evaluation, is left out with its reason.

    Args:
        a: runs of one series, one for each seed.
        b: runs of another series, over the same canaries seed by seed.
        quantity: the compared number.

    Raises:
        InputError: no seed has a run of both, or none is left: in each a run diverged or lacks evaluations, or was
            never above the perplexity that the other ended with.
    """
    compared, left_out = dict[int, PairAtLikeUtility](), dict[int, str]()
    for seed, run_a, run_b in pairs_of_seeds(a, b):
        try:
            compared[seed] = pair_at_like_utility(run_a, run_b, quantity)
        except InputError as error:
            left_out[seed] = str(error)
    if not compared:
        first, why = next(iter(left_out.items()))
        raise InputError(why if len(left_out) == 1 else f"no seed can be compared; seed {first}: {why}")
    rounded = np.round([float(pair.differences.mean()) for pair in compared.values()], ROUNDING)
    return LikeUtility(
        tuple(compared),
        tuple(pair.perplexity for pair in compared.values()),
        tuple(pair.rounds for pair in compared.values()),
        tuple(rounded.tolist()),
        float(rounded.mean()),
        *t_interval(rounded),
        paired_t_p(rounded),
        quantity,
        left_out,
    )


@dataclass(frozen=True, eq=False)
class PairAtLikeUtility:
    """A number of canaries in run a less that in run b at the lowest perplexity that both reached.

    Attributes:
        perplexity: that perplexity.
        rounds: when a and b first reached it; between two evaluations, a fraction of a round.
        differences: a - b of each canary that either run planted, by its id, in the number's unit.
        quantity: the compared number.
    """

    perplexity: float
    rounds: tuple[float, float]
    differences: "pd.Series[float]"
    quantity: Quantity = PRIMARY


def pair_at_like_utility(a: RunResults, b: RunResults, quantity: Quantity = PRIMARY) -> PairAtLikeUtility:
    """Compare two runs over the same canaries at the lowest perplexity that both reached.

    Raises:
        InputError: a run diverged or lacks evaluations, or was never above the perplexity that the other ended with.
    """
    perplexity = lowest_in_both(a, b, quantity)
    (round_a, of_a), (round_b, of_b) = (at_perplexity(run, perplexity, quantity) for run in (a, b))
    planted = sorted({*a.planted["canary"], *b.planted["canary"]})
    return PairAtLikeUtility(perplexity, (round_a, round_b), (of_a - of_b)[planted], quantity)


def lowest_in_both(a: RunResults, b: RunResults, quantity: Quantity = PRIMARY) -> float:
    """Return the lowest perplexity that both runs reached at an evaluation that also measured the quantity."""
    return max(float(np.exp(trajectory(run, quantity).index.to_numpy().min())) for run in (a, b))


def at_perplexity(run: RunResults, perplexity: float, quantity: Quantity = PRIMARY) -> "tuple[float, pd.Series[float]]":
    """Return when a run first reached a perplexity, in rounds, and a quantity of each canary there, by its id.

    Raises:
        InputError: the run never reached it, or its first evaluation is below it already.
    """
    measured = trajectory(run, quantity)
    entropies, target = measured.index.to_numpy(), math.log(perplexity)
    reached = np.flatnonzero(entropies <= target + 1e-12)
    if not len(reached):
        raise InputError(
            f"run {run.name}: never reached perplexity {perplexity:.4g}; its lowest is {math.exp(entropies.min()):.4g}"
        )
    last = int(reached[0])
    if math.isclose(entropies[last], target, abs_tol=1e-12):
        return float(measured["round"].iloc[last]), measured.iloc[last, 1:]
    if not last:
        raise InputError(
            f"run {run.name}: its first evaluation is below perplexity {perplexity:.4g} already, at "
            f"{math.exp(entropies[0]):.4g}; evaluate it earlier, with a smaller evaluation.every"
        )
    before, after = entropies[last - 1], entropies[last]
    share = (before - target) / (before - after)
    values = (1 - share) * measured.iloc[last - 1] + share * measured.iloc[last]
    return float(values["round"]), values.iloc[1:]


def trajectory(run: RunResults, quantity: Quantity = PRIMARY) -> pd.DataFrame:
    """Return a run's evaluations that measured both: the round, and the quantity of each canary, by cross-entropy.

    Returns:
        A row for each evaluation, in the order of rounds. The index is the cross-entropy on test text, nats; columns
        are "round" and the ids of the canaries.

    Raises:
        InputError: the run diverged, or no evaluation measured both.
    """
    if run.status == "diverged":
        raise InputError(f"run {run.name}: diverged, so there is nothing to compare; lower its learning rate")
    rows = []
    for round_ in run.evaluated:
        perplexity, values = run.of_model(PERPLEXITY.name, round_), run.of_canaries(quantity.name, round_)
        if values is not None and perplexity is not None and math.isfinite(perplexity) and perplexity > 0:
            rows.append(pd.Series({"round": float(round_), **values.to_dict()}, name=math.log(perplexity)))
    if not rows:
        raise InputError(f"run {run.name}: no evaluation has both perplexity and {quantity.name}; evaluate it again")
    return pd.DataFrame(rows)
