"""Comparison of two runs over the same canaries, canary by canary.

Both runs plant the same phrases, so each canary is its own control. Every statistic is about the differences.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.base.statistics import ROUNDING, discordant_interval, mcnemar_p
from flsim.base.statistics import paired_t_p as paired_t_p
from flsim.base.statistics import signed_rank_p as signed_rank_p
from flsim.base.statistics import t_interval as t_interval
from flsim.measures.built_in import PRIMARY
from flsim.measures.quantity import Quantity
from flsim.results.ceiling import is_at_ceiling
from flsim.results.columns import AT_CEILING
from flsim.results.pairing import paired_canaries
from flsim.results.store import RunResults


@dataclass(frozen=True)
class PairedNumbers:
    """The difference of a number of each canary between run a and run b; by default of exposure.

    Attributes:
        a, b: the runs' settings, each followed by the run's name.
        round_a, round_b: the evaluated rounds.
        n: number of canaries.
        mean_difference: mean of a - b over canaries, in the number's unit; positive if a's is higher.
        ci_low, ci_high: 95% confidence interval of the mean difference, from Student's t.
        p_wilcoxon: two-sided p-value of the Wilcoxon signed-rank test.
        p_t: two-sided p-value of the paired t test.
        quantity: the compared number.
    """

    a: str
    b: str
    round_a: int
    round_b: int
    n: int
    mean_difference: float
    ci_low: float
    ci_high: float
    p_wilcoxon: float
    p_t: float
    quantity: Quantity = PRIMARY

    def __str__(self) -> str:
        unit = f" {self.quantity.unit}" if self.quantity.unit else ""
        mean, low, high = (
            f"{value:{signed(self.quantity)}}" for value in (self.mean_difference, self.ci_low, self.ci_high)
        )
        return (
            f"{self.quantity.title} of {self.n} canaries, paired:\n"
            f"  a: {self.a}, round {self.round_a}\n"
            f"  b: {self.b}, round {self.round_b}\n"
            f"  mean of a - b: {mean}{unit} (95% CI {low} to {high})\n"
            f"  over the canaries of this one pair of models, not over seeds:\n"
            f"  p = {self.p_wilcoxon:.2g} (Wilcoxon signed-rank), p = {self.p_t:.2g} (paired t), two-sided"
        )


@dataclass(frozen=True)
class PairedCounts:
    """The numbers of the same canaries that were memorized in run a and in run b.

    Attributes:
        n: number of canaries.
        a, b: numbers of canaries memorized in each run.
        only_a, only_b: numbers of discordant canaries, which are memorized in that run and not in the other.
        p: two-sided p-value of McNemar's exact test.
        share: share of the discordant canaries that are memorized in run a; NaN if there are none.
        share_low, share_high: exact 95% interval of the share (Clopper and Pearson), given the number of discordant
        ones.
    """

    n: int
    a: int
    b: int
    only_a: int
    only_b: int
    p: float
    share: float
    share_low: float
    share_high: float


def paired_exposure(
    a: RunResults,
    b: RunResults,
    round: int | None = None,
    epoch: float | None = None,
    quantity: Quantity = PRIMARY,
) -> PairedNumbers:
    """Compare two runs' exposures, or another number, canary by canary.

    Zero differences are common if both runs reach the ceiling log2(|R|). They take part in the ranking and then drop
    out (Pratt, 1959; scipy's ``zero_method="pratt"``, its more conservative choice). Differences are first rounded to
    1e-9 bits, as scipy advises, so that rounding error breaks no tie. The t interval and both tests treat canaries as
    independent, and say nothing about other seeds of the training.

    Raises:
        InputError: as for `paired_canaries`, or one run lacks the number.
    """
    pair = paired_canaries(a, b, round, epoch)
    if quantity not in pair.quantities:
        raise InputError(f"runs {a.name} and {b.name}: {quantity.name} was not measured in both; evaluate them again")
    return PairedNumbers(
        a=f"{a.setting} ({a.name})",
        b=f"{b.setting} ({b.name})",
        round_a=pair.round_a,
        round_b=pair.round_b,
        **differences_of(pair.canaries, quantity),
        quantity=quantity,
    )


def differences_of(canaries: pd.DataFrame, quantity: Quantity = PRIMARY) -> dict[str, Any]:
    """Return the statistics of `PairedNumbers` for `PairedCanaries.canaries`, or for some of its rows."""
    a, b = (canaries[f"{quantity.name}_{run}"] for run in "ab")
    return statistics_of(a - b)


def statistics_of(differences: "pd.Series[float]") -> dict[str, Any]:
    """Return the statistics of `PairedNumbers` for the paired differences [n] of canaries."""
    rounded = np.round(differences.to_numpy(), ROUNDING)
    low, high = t_interval(rounded)
    return {
        "n": len(rounded),
        "mean_difference": float(rounded.mean()),
        "ci_low": low,
        "ci_high": high,
        "p_wilcoxon": signed_rank_p(rounded),
        "p_t": paired_t_p(rounded),
    }


def counted_at_ceiling(canaries: pd.DataFrame, references: float) -> dict[str, int]:
    """Return how many canaries have the largest possible exposure in run a and in run b.

    Args:
        canaries: all or some rows of `PairedCanaries.canaries`.
        references: |R| of both runs.
    """
    columns = {name: f"{PRIMARY.name}_{run}" for name, run in zip(AT_CEILING, "ab", strict=True)}
    return {name: int(is_at_ceiling(canaries[column], references).sum()) for name, column in columns.items()}


def signed(quantity: Quantity) -> str:
    """Return the format of a difference between two values: with its sign, and a decimal more than a value has."""
    return "+.2f" if quantity.is_standard else f"+{quantity.format[2:-1].lstrip('+')}"


def counts_of(canaries: pd.DataFrame, metric: str) -> PairedCounts | None:
    """Return the counts of a flag in all or some rows of `PairedCanaries.canaries`; None unless both runs have it.

    Like `paired_exposure`, the test treats canaries as independent, and says nothing about other seeds of the training.
    """
    if f"{metric}_a" not in canaries or f"{metric}_b" not in canaries:
        return None
    a, b = (canaries[f"{metric}_{run}"].to_numpy() == 1 for run in "ab")
    only_a, only_b = int((a & ~b).sum()), int((~a & b).sum())
    low, high = discordant_interval(only_a, only_b)
    return PairedCounts(
        n=len(a),
        a=int(a.sum()),
        b=int(b.sum()),
        only_a=only_a,
        only_b=only_b,
        p=mcnemar_p(only_a, only_b),
        share=only_a / (only_a + only_b) if only_a + only_b else math.nan,
        share_low=low,
        share_high=high,
    )
