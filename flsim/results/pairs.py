"""The two runs of a pair: the values of the same canaries in both, at their ends and at equal perplexity."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from flsim.base.errors import InputError
from flsim.base.statistics import ROUNDING, paired_t_p, t_interval
from flsim.measures.built_in import PERPLEXITY, PRIMARY
from flsim.measures.quantity import Quantity, select_for
from flsim.results.columns import quantities_of
from flsim.results.store import RunResults, refuse_two_points

WINDOW = ("first_round", "last_round")


@dataclass(frozen=True, eq=False)
class PairedCanaries:
    """The values of the same canaries in two runs."""

    # a row per canary that was planted in either run, indexed by its id. Columns: p_u, p_e and copies (the planned
    # number, if p_u is not set); first_round and last_round if canaries have windows; NAME_a and NAME_b for each
    # measured quantity.
    canaries: pd.DataFrame
    never_planted: int  # number of canaries that were planted in neither run, and are excluded from all statistics
    quantities: Sequence[Quantity]  # the quantities that were measured in both runs, the primary quantity first
    references: float  # |R| of both


def paired_canaries(
    a: RunResults, b: RunResults, round: int | None = None, epoch: float | None = None
) -> PairedCanaries:
    """Return the values of the same canaries in two runs; InputError if they are not comparable at this point."""
    refuse_two_points(round, epoch)
    _refuse_other_canaries(a, b)
    round_a, round_b = round_of(a, round, epoch), round_of(b, round, epoch)
    references = a.references(round_a), b.references(round_b)
    if references[0] != references[1] or references[0] is None:
        sizes = " and ".join("unknown" if size is None else f"{size:.0f}" for size in references)
        raise InputError(
            f"runs {a.name} and {b.name}: ranked among different numbers of references ({sizes}), so their "
            "exposures are not comparable; evaluate both runs with the same evaluation.references"
        )
    roster = a.roster.set_index("canary")
    canaries = roster[["p_u", "p_e"]].astype("float64")
    if "planned_insertions" in roster:
        canaries["copies"] = roster["planned_insertions"].astype("Int64").where(canaries["p_u"].isna())
    for name in WINDOW:
        if name in _windowed(a, b).columns:
            canaries[name] = _windowed(a, b).set_index("canary")[name]
    compared = [quantity for quantity in compared_in([a, b]) if quantity.of_canaries]
    for name, run, at in (("a", a, round_a), ("b", b, round_b)):
        for quantity in compared:
            values = run.of_canaries(quantity.name, at)
            if values is not None:
                canaries[f"{quantity.name}_{name}"] = values
            elif quantity.is_primary:
                raise InputError(
                    f"run {run.name}, round {at}: {quantity.name} was not measured; evaluate this checkpoint again"
                )
    in_both = [quantity for quantity in compared if {f"{quantity.name}_a", f"{quantity.name}_b"} <= {*canaries}]
    planted = canaries.index.isin({*a.planted["canary"], *b.planted["canary"]})
    if planted.sum() < 2:
        raise InputError(
            f"runs {a.name} and {b.name}: {int(planted.sum())} of {len(canaries)} canaries were planted, but a "
            "comparison needs at least two; plant more, e.g. with a larger canaries.p_u"
        )
    return PairedCanaries(canaries[planted], int((~planted).sum()), in_both, references[0])


def _windowed(a: RunResults, b: RunResults) -> pd.DataFrame:
    """Return the roster of the run whose canaries have windows; of two, that which plants canaries in some round."""
    rosters = [run.roster for run in (a, b) if any(name in run.roster for name in WINDOW)]
    planting = [
        roster
        for roster in rosters
        if not {*WINDOW} <= {*roster} or not (roster["last_round"] < roster["first_round"]).fillna(False).all()
    ]
    return [*planting, *rosters, a.roster][0]


def compared_in(runs: Sequence[RunResults]) -> list[Quantity]:
    """Return the quantities to compare: the primary number, flags, other numbers, and numbers of the model."""
    compared = select_for(quantities_of(runs), "compare")
    return sorted(compared, key=lambda quantity: not quantity.is_primary)


def _refuse_other_canaries(a: RunResults, b: RunResults) -> None:
    phrases_a, phrases_b = (
        {canary: tuple(tokens) for canary, tokens in zip(run.roster["canary"], run.roster["tokens"], strict=True)}
        for run in (a, b)
    )
    differing = sorted(c for c in {*phrases_a, *phrases_b} if phrases_a.get(c) != phrases_b.get(c))
    if differing:
        raise InputError(
            f"runs {a.name} and {b.name}: planted different canaries, for example {differing[0]}; compare runs "
            "with the same corpus, seed and [canaries]"
        )
    if not phrases_a:
        raise InputError(f"runs {a.name} and {b.name}: have no canaries, so only utility can be compared")
    if len(phrases_a) < 2:
        raise InputError(f"runs {a.name} and {b.name}: have only one canary; plant at least two")


def round_of(run: RunResults, round: int | None, epoch: float | None) -> int:
    """Return the evaluated round of a run to compare; InputError if it diverged, or was not evaluated there."""
    if run.status == "diverged":
        raise InputError(f"run {run.name}: diverged and cannot be compared; lower its learning rate")
    return run.at(round, epoch)


def pairs_of_seeds(a: Sequence[RunResults], b: Sequence[RunResults]) -> list[tuple[int, RunResults, RunResults]]:
    """Return (seed, run of a, run of b) by ascending seed; InputError if none is common, or one is unknown or twice."""
    runs_a, runs_b = _of_seeds(a), _of_seeds(b)
    seeds = sorted({*runs_a} & {*runs_b})
    if not seeds:
        raise InputError(
            f"the seeds {sorted(runs_a)} and {sorted(runs_b)} have no seed in common; train both settings with the "
            "same seed"
        )
    return [(seed, runs_a[seed], runs_b[seed]) for seed in seeds]


def _of_seeds(runs: Sequence[RunResults]) -> dict[int, RunResults]:
    by_seed: dict[int, RunResults] = {}
    for run in runs:
        if run.seed is None:
            raise InputError(f"run {run.name}: an older run without a stored seed; compare this run separately")
        if run.seed in by_seed:
            raise InputError(
                f"runs {by_seed[run.seed].name} and {run.name}: both have seed {run.seed}; exclude one of them"
            )
        by_seed[run.seed] = run
    return by_seed


@dataclass(frozen=True)
class LikeUtility:
    """Two settings at equal perplexity, seed by seed."""

    pairs: "Mapping[int, PairAtLikeUtility]"  # the two runs of each seed that reached a common perplexity, ascending
    left_out: Mapping[int, str]  # by seed, the reason why its two runs cannot be compared

    @property
    def differences(self) -> list[float]:
        """Return the mean over canaries of a - b, for each seed, in the number's unit."""
        return [float(pair.differences.mean()) for pair in self.pairs.values()]


def of_mean(differences: ArrayLike) -> dict[str, Any]:
    """Return the mean of differences of independent units, its 95% interval and p by Student's t, and their number.

    Differences are rounded first, as scipy advises, because rounding error must not break ties. An unknown difference
    makes all except the number NaN.
    """
    rounded = np.round(np.asarray(differences, dtype="float64"), ROUNDING)
    low, high = t_interval(rounded)
    mean = float(rounded.mean()) if len(rounded) else math.nan
    return {"difference": mean, "low": low, "high": high, "p": paired_t_p(rounded), "n": len(rounded)}


def left_out_text(left_out: Mapping[int, str]) -> str:
    """Return a text on excluded seeds, with their reasons, e.g. ``"seed 3 excluded: run a: ..."``."""
    seeds = f"seed{'s' * (len(left_out) != 1)} {', '.join(map(str, left_out))}"
    return f"{seeds} excluded: {'; '.join(left_out.values())}"


def like_utility(a: Sequence[RunResults], b: Sequence[RunResults]) -> LikeUtility:
    """Compare two series of runs seed by seed, for each seed at the lowest perplexity that both runs reached.

    A model that was trained longer predicts better, and has memorized more. A difference at the end of training can
    therefore be a difference in utility. A seed without a comparison is excluded, with its
    reason; InputError if all are.
    """
    compared, left_out = dict[int, PairAtLikeUtility](), dict[int, str]()
    for seed, run_a, run_b in pairs_of_seeds(a, b):
        try:
            compared[seed] = pair_at_like_utility(run_a, run_b)
        except InputError as error:
            left_out[seed] = str(error)
    if not compared:
        first, why = next(iter(left_out.items()))
        raise InputError(why if len(left_out) == 1 else f"no seed can be compared; seed {first}: {why}")
    return LikeUtility(compared, left_out)


@dataclass(frozen=True, eq=False)
class PairAtLikeUtility:
    """A number of canaries in run a minus that in run b, at the lowest perplexity that both reached."""

    perplexity: float  # the perplexity
    rounds: tuple[float, float]  # the rounds at which a and b first reached it; fractions between two evaluations
    value_a: float  # value_a, value_b: means over canaries
    value_b: float
    differences: "pd.Series[float]"  # a - b of each canary that either run planted, by its id, in the number's unit


def pair_at_like_utility(a: RunResults, b: RunResults) -> PairAtLikeUtility:
    """Compare two runs at the lowest perplexity that both reached; InputError as `trajectory` and `at_perplexity`."""
    perplexity = lowest_in_both(a, b)
    (round_a, of_a), (round_b, of_b) = (at_perplexity(run, perplexity) for run in (a, b))
    planted = sorted({*a.planted["canary"], *b.planted["canary"]})
    means = float(of_a[planted].mean()), float(of_b[planted].mean())
    return PairAtLikeUtility(perplexity, (round_a, round_b), *means, (of_a - of_b)[planted])


def lowest_in_both(a: RunResults, b: RunResults) -> float:
    """Return the lowest perplexity that both runs reached at an evaluation that also measured exposure."""
    return max(float(np.exp(trajectory(run).index.to_numpy().min())) for run in (a, b))


def at_perplexity(run: RunResults, perplexity: float) -> "tuple[float, pd.Series[float]]":
    """Return the round at which a run first reached a perplexity, and the exposure of each canary, by id.

    Between two evaluations, both are interpolated along the cross-entropy, the logarithm of perplexity. Raises
    InputError if the run never reached it, or its first evaluation is already below it.
    """
    measured = trajectory(run)
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
            f"run {run.name}: its first evaluation is already below perplexity {perplexity:.4g}, at "
            f"{math.exp(entropies[0]):.4g}; evaluate it earlier, with a smaller evaluation.every"
        )
    before, after = entropies[last - 1], entropies[last]
    share = (before - target) / (before - after)
    values = (1 - share) * measured.iloc[last - 1] + share * measured.iloc[last]
    return float(values["round"]), values.iloc[1:]


def trajectory(run: RunResults) -> pd.DataFrame:
    """Return each evaluation's round and exposures, indexed by cross-entropy on test text (nats), or InputError."""
    if run.status == "diverged":
        raise InputError(f"run {run.name}: diverged and cannot be compared; lower its learning rate")
    rows = []
    for round_ in run.evaluated:
        perplexity, values = run.of_model(PERPLEXITY.name, round_), run.of_canaries(PRIMARY.name, round_)
        if values is not None and perplexity is not None and math.isfinite(perplexity) and perplexity > 0:
            rows.append(pd.Series({"round": float(round_), **values.to_dict()}, name=math.log(perplexity)))
    if not rows:
        raise InputError(f"run {run.name}: no evaluation has both perplexity and {PRIMARY.name}; evaluate it again")
    return pd.DataFrame(rows)


TOLERANCE = 1e-6  # tolerance in bits for rounding, below the ceiling
WHAT_TO_DO = "`flsim evaluate RUN --also space` measures beyond it."
MANY = 0.1  # smallest share of canaries at the ceiling that is reported


def is_at_ceiling(exposures: ArrayLike, references: float | None) -> NDArray[np.bool_]:
    """Return bool [n], whether each of float64 [n] exposures is the largest possible one; all False without |R|."""
    values: NDArray[Any] = np.asarray(exposures, dtype="float64")
    return values > (math.inf if references is None else math.log2(references + 1) - TOLERANCE)


def share_at_ceiling(runs: Iterable[tuple[RunResults, int]]) -> float:
    """Return the share of planted canaries with known exposure at the ceiling, at given rounds; 0 without any."""
    known = [(run.of_planted(PRIMARY.name, round_), run.references(round_)) for run, round_ in runs]
    flags = [is_at_ceiling(bits, number) for bits, number in known if bits is not None and number is not None]
    return float(np.concatenate(flags).mean()) if any(map(len, flags)) else 0.0
