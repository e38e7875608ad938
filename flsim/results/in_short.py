"""The results of an evaluation in a few words, for a line on a screen."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from flsim.base.errors import InputError
from flsim.canaries.roster import is_drawn, read_roster
from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity, select_for
from flsim.results.rows import read_rows

ON_SCREEN = select_for(QUANTITIES.values(), "screen")


def in_short(measured: "Mapping[Quantity, pd.Series[float]]", between: str = " ") -> str:
    """Return counts of memorized canaries and means of numbers, such as ``"RS 28 BS 10 11.7 bits"``.

    Args:
        measured: the values of the planted canaries for each measured quantity.
        between: the separator.
    """
    return between.join(_describe(quantity, values) for quantity, values in measured.items())


def round_in_short(run_folder: Path, round: int) -> str | None:
    """Return the results of an evaluated round and the number of planted canaries; None where they cannot be read."""
    try:
        rows, _ = read_rows(run_folder / "rows" / f"round-{round:06d}.parquet")
        roster = read_roster(run_folder / "planted" / "roster.parquet")
    except (InputError, OSError):
        return None
    of_canaries = rows[rows["canary"].isin(roster.loc[is_drawn(roster), "canary"])]
    measured = {
        quantity: values
        for quantity in ON_SCREEN
        if not (values := of_canaries.loc[of_canaries["metric"] == quantity.name, "value"]).empty
    }
    return f"{in_short(measured, ', ')} of {of_canaries['canary'].nunique()} canaries" if measured else None


def _describe(quantity: Quantity, values: "pd.Series[float]") -> str:
    if quantity.is_flag:
        return f"{quantity.heading} {(values == 1).sum()}"
    return f"{quantity.format.format(values.mean())} {quantity.unit}"
