"""Two runs over the same canaries, side by side: what was measured of each canary in either."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from flsim.base.errors import InputError
from flsim.measures.quantity import Quantity, select_for
from flsim.results.columns import quantities_of
from flsim.results.store import RunResults, refuse_two_points


@dataclass(frozen=True, eq=False)
class PairedCanaries:
    """What two runs found of the same canaries.

    Attributes:
        round_a, round_b: the evaluated rounds.
        canaries: a row per canary, indexed by its id: p_u, p_e and copies (planned, where p_u says nothing),
            and NAME_a, NAME_b of the quantities that are compared: the primary one, others where they were measured.
        quantities: those that were measured in both, the primary one first.
    """

    round_a: int
    round_b: int
    canaries: pd.DataFrame
    quantities: Sequence[Quantity]


def paired_canaries(
    a: RunResults, b: RunResults, round: int | None = None, epoch: float | None = None
) -> PairedCanaries:
    """What two runs found of the same canaries.

    Args:
        a: one run.
        b: another over the same canaries.
        round: the evaluated round of both; default each run's last, as in a table.
        epoch: instead of a round: after how many epochs.

    Raises:
        InputError: fewer than two canaries, other canaries, another |R|, a run that diverged, one not evaluated there,
            or both a round and an epoch.
    """
    refuse_two_points(round, epoch)
    _refuse_other_canaries(a, b)
    round_a, round_b = _round_of(a, round, epoch), _round_of(b, round, epoch)
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
    in_both = [each for each in compared if {f"{each.name}_a", f"{each.name}_b"} <= {*canaries}]
    return PairedCanaries(round_a, round_b, canaries, in_both)


def compared_in(runs: Sequence[RunResults]) -> list[Quantity]:
    """Return what comparisons of runs are about: the primary number, flags, other numbers, and numbers of the model."""
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
    if len(phrases_a) < 2:
        raise InputError(f"runs {a.name} and {b.name}: one canary has no spread; plant at least two")


def _round_of(run: RunResults, round: int | None, epoch: float | None) -> int:
    if run.status == "diverged":
        raise InputError(f"run {run.name}: diverged, so there is nothing to compare; lower its learning rate")
    return run.at(round, epoch)
