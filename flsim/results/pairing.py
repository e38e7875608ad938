"""Pairing of two runs over the same canaries: the values of each canary in both runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from flsim.base.errors import InputError
from flsim.measures.quantity import Quantity, select_for
from flsim.results.columns import quantities_of
from flsim.results.store import RunResults, refuse_two_points


@dataclass(frozen=True, eq=False)
class PairedCanaries:
    """The values of the same canaries in two runs.

    Attributes:
        round_a, round_b: the evaluated rounds.
        canaries: a row per canary that was planted in either run, indexed by its id, with p_u, p_e and copies (the
            planned number, if p_u is not set), first_round and last_round if canaries have windows, and NAME_a and
            NAME_b of each compared quantity that was measured.
        never_planted: number of canaries that were planted in neither run, and are in no statistic.
        quantities: the quantities that were measured in both runs, the primary one first.
        references: |R| of both.
    """

    round_a: int
    round_b: int
    canaries: pd.DataFrame
    never_planted: int
    quantities: Sequence[Quantity]
    references: float


def paired_canaries(
    a: RunResults, b: RunResults, round: int | None = None, epoch: float | None = None
) -> PairedCanaries:
    """Return the values of the same canaries in two runs.

    Args:
        a: one run.
        b: another run over the same canaries.
        round: the evaluated round of both; by default each run's last, as in a table.
        epoch: the number of epochs to compare at, in place of `round`.

    Raises:
        InputError: there are fewer than two planted canaries, the runs have other canaries or another |R|, one diverged
            or was not evaluated there, or both a round and an epoch are given.
    """
    refuse_two_points(round, epoch)
    _refuse_other_canaries(a, b)
    round_a, round_b = round_of(a, round, epoch), round_of(b, round, epoch)
    references = a.references(round_a), b.references(round_b)
    if references[0] != references[1] or references[0] is None:
        sizes = " and ".join("unknown" if size is None else f"{size:.0f}" for size in references)
        raise InputError(
            f"runs {a.name} and {b.name}: ranked among different numbers of references ({sizes}), so their exposures "
            f"do not compare; evaluate both with the same evaluation.references"
        )
    roster = a.roster.set_index("canary")
    canaries = roster[["p_u", "p_e"]].astype("float64")
    if "planned_insertions" in roster:
        canaries["copies"] = roster["planned_insertions"].astype("Int64").where(canaries["p_u"].isna())
    for name in ("first_round", "last_round"):
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
                    f"run {run.name}, round {at}: {quantity.name} was not measured; evaluate that checkpoint again"
                )
    in_both = [quantity for quantity in compared if {f"{quantity.name}_a", f"{quantity.name}_b"} <= {*canaries}]
    planted = canaries.index.isin({*a.planted["canary"], *b.planted["canary"]})
    if planted.sum() < 2:
        raise InputError(
            f"runs {a.name} and {b.name}: {int(planted.sum())} of {len(canaries)} canaries were planted, and fewer "
            f"than two have no spread; plant more, e.g. with a larger canaries.p_u"
        )
    return PairedCanaries(round_a, round_b, canaries[planted], int((~planted).sum()), in_both, references[0])


def _windowed(a: RunResults, b: RunResults) -> pd.DataFrame:
    """Return the roster of the run whose canaries have windows; of two, the one that plants canaries in some round."""
    rosters = [run.roster for run in (a, b) if "last_round" in run.roster or "first_round" in run.roster]
    planting = [
        roster
        for roster in rosters
        if not {"first_round", "last_round"} <= {*roster}
        or not (roster["last_round"] < roster["first_round"]).fillna(False).all()
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
            f"runs {a.name} and {b.name}: planted different canaries, the first {differing[0]}; compare runs with the "
            f"same corpus, seed and [canaries]"
        )
    if not phrases_a:
        raise InputError(f"runs {a.name} and {b.name}: have no canaries, so that only the utility of two runs compares")
    if len(phrases_a) < 2:
        raise InputError(f"runs {a.name} and {b.name}: one canary has no spread; plant at least two")


def round_of(run: RunResults, round: int | None, epoch: float | None) -> int:
    """Return the evaluated round of a run to compare.

    Raises:
        InputError: the run diverged, or was not evaluated there.
    """
    if run.status == "diverged":
        raise InputError(f"run {run.name}: diverged, so there is nothing to compare; lower its learning rate")
    return run.at(round, epoch)
