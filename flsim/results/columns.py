"""Columns that tables of runs and tables over seeds have in common: their types and the sources of their cells."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import pandas as pd

from flsim.base.errors import InputError
from flsim.base.statistics import share_interval
from flsim.measures import built_in
from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity, from_json, to_json
from flsim.results.published import PUBLISHED
from flsim.results.store import RunResults

PRIVACY = {
    "epsilon_paper": "Float64",
    "epsilon_sound": "Float64",
    "sound_convention": "string",
    "delta": "Float64",
}
POPULATION = {"whole_test_users": "Int64"}  # number of complete authors on which utility is measured
RECORD_PRIVACY = {
    "record_epsilon": "Float64",
    "record_convention": "string",
    "record_delta": "Float64",
}
FALSE_POSITIVE = "false_positive_rate"
By = Literal["run", "series"]  # what a row of a table is
OVER_SEEDS = ("seeds_low", "seeds_high", "canaries_low", "canaries_high")
DESCRIBED = "quantities"  # attribute of a table: descriptions of custom measures


def columns_of(quantity: Quantity, by: By = "run") -> dict[str, str]:
    """Return the columns that a table of runs, or over seeds, has for a quantity, with their types."""
    name, is_of_runs = quantity.name, by == "run"
    if quantity.is_flag:
        shares = dict.fromkeys((f"{name}_share_low", f"{name}_share_high"), "Float64")
        of_seeds = {name: "Float64", f"{name}_sd": "Float64", **shares}
        return {name: "Int64", **shares, f"{name}_lowest": "string"} if is_of_runs else of_seeds
    if not quantity.of_canaries:
        return dict.fromkeys((name,) if is_of_runs else (name, f"{name}_sd"), "Float64")
    # those of the primary number over seeds have no prefix
    ends = [f"{quantity.column}_low", f"{quantity.column}_high"] if is_of_runs else []
    ends = ends or [prefix_of(quantity) + end for end in OVER_SEEDS]
    return dict.fromkeys((mean_of(quantity), *ends), "Float64")


def columns_of_controls(flags: Iterable[Quantity]) -> dict[str, str]:
    """Return the types of the columns of canaries never planted: their number, flags, and how often RS marks one."""
    counts = {f"{flag.name}_controls": "Int64" for flag in flags}
    return {"controls": "Int64", **counts, FALSE_POSITIVE: "Float64"}


def mean_of(quantity: Quantity) -> str:
    """Return the column of a number's mean over canaries."""
    return f"mean_{quantity.name}"


def prefix_of(quantity: Quantity) -> str:
    """Return the prefix of the names of a number's columns; empty for the primary number."""
    return "" if quantity.is_primary else f"{quantity.column}_"


def names_of(quantity: Quantity) -> list[str]:
    """Return all names of a quantity in tables, its own name first."""
    columns = (*columns_of(quantity), *columns_of(quantity, "series"), f"{quantity.name}_controls")
    return list(dict.fromkeys((quantity.name, quantity.column, *columns)))


def quantities_of(runs: Iterable[RunResults]) -> list[Quantity]:
    """Return the quantities that runs may have: the built-in ones, then those of custom measures.

    For a built-in measure whose quantities depend on the canaries, these are the quantities that any run has.

    Raises:
        InputError: two runs have different descriptions for one name.
    """
    described: dict[str, tuple[Quantity, RunResults]] = {}
    known = dict(QUANTITIES)
    for run in runs:
        known |= _built_in(run.rows["metric"].unique())
        for name, quantity in run.own.items():
            other, first = described.setdefault(name, (quantity, run))
            if not other.is_like(quantity):
                raise InputError(
                    f"runs {first.name} and {run.name}: {name} differs between the runs (kind, unit, direction "
                    "or subject); show the runs separately, or rename one of the measures"
                )
    return [*known.values(), *(quantity for quantity, _ in described.values())]


def quantities_in(table: pd.DataFrame) -> list[Quantity]:
    """Return the quantities that a table can have columns of: built-in, then custom."""
    return [*(QUANTITIES | _built_in(table.columns)).values(), *map(from_json, table.attrs.get(DESCRIBED, ()))]


def _built_in(names: Iterable[str]) -> dict[str, Quantity]:
    """Return the quantities of built-in measures among the names, including those that depend on the canaries."""
    return {name: quantity for name in names if (quantity := built_in.described(name))}


def is_in(table: pd.DataFrame, quantity: Quantity) -> bool:
    """Return whether a table has columns of a quantity."""
    return quantity.name in table or mean_of(quantity) in table


def described(table: pd.DataFrame, quantities: Iterable[Quantity]) -> pd.DataFrame:
    """Return the table with the descriptions of custom measures, which are also stored in Parquet files."""
    custom = [to_json(quantity) for quantity in quantities if built_in.described(quantity.name) is None]
    if custom:
        table.attrs[DESCRIBED] = custom
    return table


def frame_with_types(
    rows: Sequence[Mapping[str, Any]], always: Mapping[str, str], groups: Iterable[Mapping[str, str]]
) -> pd.DataFrame:
    """Return rows as a table with columns of the given types."""
    columns = dict(always)
    for more in groups:
        if any(row.get(name) is not None for row in rows for name in more):
            columns |= more
    has = {name for row in rows for name in row if row[name] is not None}
    columns = {name: kind for name, kind in columns.items() if name not in PUBLISHED or name in has}
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def share_columns(metric: str, memorized: int, canaries: int) -> dict[str, float]:
    """Return the exact 95% interval of a share of canaries; see `flsim.base.statistics.share_interval`."""
    return dict(zip((f"{metric}_share_low", f"{metric}_share_high"), share_interval(memorized, canaries), strict=True))


def control_columns(runs: Sequence[tuple[RunResults, int]], flags: Iterable[Quantity]) -> dict[str, Any]:
    """Return the cells of `columns_of_controls` over runs at given rounds; empty if all canaries were planted.

    A phrase that was never planted is drawn like the references, so it has rank 1 with probability 1 / (|R| + 1) or
    less.
    """
    number = sum(len(run.controls) for run, _ in runs)
    if not number:
        return {}
    cells: dict[str, Any] = {"controls": number}
    for flag in flags:
        values = [run.of_controls(flag.name, at) for run, at in runs]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            cells[f"{flag.name}_controls"] = sum(int((value == 1).sum()) for value in known)
    references = {run.references(at) for run, at in runs}
    size = references.pop() if len(references) == 1 else None
    return cells | {FALSE_POSITIVE: None if size is None else 1 / (size + 1)}


def privacy_columns(run: RunResults, at: int) -> dict[str, Any]:
    """Return the columns of `PRIVACY`, or of `RECORD_PRIVACY`, of a run with noise."""
    metrics = run.rows.loc[(run.rows["round"] == at) & (run.rows["canary"] == ""), "metric"]
    cells: dict[str, Any] = {}
    for name in metrics:
        if name.startswith("epsilon "):
            convention = name.removeprefix("epsilon ")
            if convention == "paper":
                cells["epsilon_paper"] = run.of_model(name, at)
            else:
                cells |= {"epsilon_sound": run.of_model(name, at), "sound_convention": convention}
            cells["delta"] = run.of_model("delta", at)
        elif name.startswith("record epsilon "):
            cells |= {"record_epsilon": run.of_model(name, at), "record_delta": run.of_model("record delta", at)}
            cells["record_convention"] = name.removeprefix("record epsilon ")
    return cells
