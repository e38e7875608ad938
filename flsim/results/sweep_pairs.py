"""Pairs of runs of sweeps to compare: the two worlds of a row, or runs of the same name."""

from dataclasses import dataclass
from typing import Any

from flsim.base.errors import InputError
from flsim.results.sweeps import WORLD, Sweep, SweepRun

IID, NON_IID = "iid", "non-iid"


@dataclass(frozen=True)
class Pair:
    """Two settings to compare, each with one run, or with one run per seed.

    Attributes:
        row: the common settings of the two.
        a, b: their runs, including those not begun.
    """

    row: str
    a: list[SweepRun]
    b: list[SweepRun]

    @property
    def label(self) -> str:
        """Return the common settings of both in the words of a table, or `row` if these are not known."""
        begun = [[run.results for run in runs if run.results] for runs in (self.a, self.b)]
        if not all(begun):
            return self.row
        a, b = (runs[0] for runs in begun)
        return a.setting if a.setting == b.setting else a.label if a.label == b.label else self.row


def twins(sweep: Sweep) -> list[Pair]:
    """Return IID (a) and non-IID (b) of each row of a sweep that has both.

    Raises:
        InputError: no row has both.
    """
    rows: dict[tuple[Any, ...], Pair] = {}
    for run in sweep.runs:
        pair = rows.setdefault(run.row, Pair(_label(run), [], []))
        if run.axes.get(WORLD) in (IID, NON_IID):
            (pair.a if run.axes[WORLD] == IID else pair.b).append(run)
    pairs = [pair for pair in rows.values() if pair.a and pair.b]
    if not pairs:
        raise InputError(f"{sweep.path}: no row of this sweep has both worlds; name a second sweep to compare it with")
    return pairs


def same_names(a: Sweep, b: Sweep) -> list[Pair]:
    """Return pairs of the runs of two sweeps with the same names; runs that differ only in their seed share a pair.

    Raises:
        InputError: no name is in both.
    """
    others = {run.name: run for run in b.runs}
    rows: dict[tuple[Any, ...], Pair] = {}
    for run in a.runs:
        if run.name in others:
            pair = rows.setdefault((*run.row, run.axes.get(WORLD)), Pair(_label(run, True), [], []))
            pair.a.append(run)
            pair.b.append(others[run.name])
    if not rows:
        raise InputError(f"{a.path} and {b.path}: no run has the same name in both; compare sweeps of one definition")
    return list(rows.values())


def _label(run: SweepRun, has_world: bool = False) -> str:
    axes = [f"{axis.split('.')[-1]}={value}" for axis, value in run.axes.items() if has_world or axis != WORLD]
    return " ".join([run.grid, *axes])
