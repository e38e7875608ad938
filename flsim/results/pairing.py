"""Two runs over the same canaries, side by side: what each canary's exposure, RS and BS are in either."""

from dataclasses import dataclass

import pandas as pd

from flsim.base.errors import InputError
from flsim.results.store import RunResults, refuse_two_points


@dataclass(frozen=True, eq=False)
class PairedCanaries:
    """What two runs found of the same canaries.

    Attributes:
        round_a, round_b: the evaluated rounds.
        canaries: a row per canary, indexed by its id: p_u, p_e and copies (planned, where p_u says nothing),
            exposure_a, exposure_b, and where they were measured rs_a, rs_b, bs_a, bs_b.
    """

    round_a: int
    round_b: int
    canaries: pd.DataFrame


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
    references = a.of_model("references", round_a), b.of_model("references", round_b)
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
    for name, run, at in (("a", a, round_a), ("b", b, round_b)):
        canaries[f"exposure_{name}"] = _exposure(run, at)
        for metric in ("rs", "bs"):
            values = run.of_canaries(metric, at)
            if values is not None:
                canaries[f"{metric}_{name}"] = values
    return PairedCanaries(round_a, round_b, canaries)


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


def _exposure(run: RunResults, round: int) -> "pd.Series[float]":
    exposure = run.of_canaries("exposure", round)
    if exposure is None:
        raise InputError(f"run {run.name}, round {round}: exposure was not measured; evaluate that checkpoint again")
    return exposure
