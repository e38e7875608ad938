"""Results of attacks on runs, their means over the seeds of a setting, and their text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from flsim.base.errors import InputError
from flsim.base.statistics import t_interval
from flsim.results.sweeps import are_of_one_length
from flsim.show.table import Table, json_rows, note


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """The measurements of an attack."""

    frame: pd.DataFrame  # the measured numbers, a row for each statement
    notes: tuple[str, ...] = ()  # sentences that explain the numbers, and on missing statements

    def to_json(self) -> dict[str, Any]:
        """Return the rows, with the columns of the frame, and the notes; unknown values are None."""
        return {"rows": json_rows(self.frame), "notes": list(self.notes)}


def over_seeds(frame: pd.DataFrame, by: Sequence[str], value: Mapping[str, str]) -> pd.DataFrame:
    """Return means of values over the rows of each group, with one seed each, in the order of the frame.

    `value` names columns, each with the prefix of its interval's columns ``low`` and ``high``, by Student's t.
    """
    rows = []
    for key, group in frame.groupby(list(by), sort=False, dropna=False):
        row = dict(zip(by, key, strict=True)) | {"seeds": len(group)}
        for name, ends in value.items():
            row |= dict(zip((name, f"{ends}low", f"{ends}high"), mean_interval(group[name]), strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def refuse_unlike(frame: pd.DataFrame, by: Sequence[str]) -> None:
    """Raise InputError if two runs of a group have one seed, as copies do, or their models differ in their rounds."""
    for _, group in frame.groupby(list(by), sort=False, dropna=False):
        setting, rounds, is_again = group["setting"].iloc[0], group["round"], group["seed"].duplicated()
        if is_again.any():
            seed = group.loc[is_again, "seed"].iloc[0]
            raise InputError(
                f"{setting}: two runs have seed {seed}, and means over seeds need one; exclude one of them"
            )
        if not are_of_one_length(rounds.tolist()):
            raise InputError(
                f"{setting}: models after rounds {rounds.min():,} and {rounds.max():,} cannot be averaged; name "
                "--round, or exclude runs that are not completed"
            )


def mean_interval(values: "pd.Series[float]") -> tuple[float, float, float]:
    """Return the mean of the known values with its 95% interval, Student's t; NaN without a value."""
    known = values.dropna().to_numpy("float64")
    return (float(known.mean()) if len(known) else np.nan, *t_interval(known))


def text_of(title: str, tables: Iterable[Table], notes: Iterable[str] = ()) -> str:
    """Return a title, tables and sentences below them."""
    return "\n".join([note(title), *(table.markdown() for table in tables), *map(note, notes)])
