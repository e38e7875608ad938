"""Settings of a sweep as nested tables, and the parts of names that are made of them."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from flsim.base.errors import InputError

Values = dict[str, Any]
LONGEST_NAME = 200  # bytes of a run's name; file systems take 255, and logs and partial files say more
MOST_RUNS = 10_000  # of a sweep: each has a folder, a file of settings and an entry in sweep.json


@dataclass(frozen=True)
class Strict:
    """Base class of parts of a file, in which an unknown key is an error."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


def merge(into: Values, values: Mapping[str, Any]) -> None:
    """Merge sections, and replace all other values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            into[key] = into[key] if isinstance(into.get(key), dict) else {}
            merge(into[key], value)
        else:
            into[key] = deepcopy(value)


def nested(key: str, value: Any) -> Values:
    """Return the tables of a setting's key, such as ``local.learning_rate``, with its value."""
    *sections, name = key.split(".")
    tables: Values = {name: value}
    for section in reversed(sections):
        tables = {section: tables}
    return tables


def slug(key: str, value: Any) -> str:
    """Return a part of a folder's name: words unchanged, numbers after the setting's name."""
    text = re.sub(r"[^A-Za-z0-9.]+", "-", str(value)).strip("-")
    return text if isinstance(value, str) else f"{key.rpartition('.')[2]}{text}"


def flat(point: Iterable[tuple[str, Any]]) -> Values:
    """Return the values of axes, with those of a table under keys of their own."""
    values: Values = {}
    for axis, value in point:
        values |= (
            {f"{axis}.{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {axis: value}
        )
    return values


def refuse_what_runs_differ_in(overrides: Iterable[str], axes: Values, where: str) -> None:
    """Raise InputError for an override of a setting that runs differ in.

    The runs' names and published rows would no longer be true.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        option = {"seed": "--seeds", "data.corpus": "--corpus"}.get(key)
        if option:
            raise InputError(f"--set {key}: of a sweep that is for {option}")
        if key in axes:
            raise InputError(f"--set {key}: {where} varies it; take other grids with --only, or edit the file")


def refuse_missing(values: Mapping[str, Any], path: Path) -> None:
    """Raise InputError that names all required keys that a sweep file lacks."""
    missing = [key for key in ("title", "tiers") if key not in values]
    grids, tiers = values["grids"], values.get("tiers", {})
    for index, grid in enumerate(grids if isinstance(grids, list) else ()):
        missing += [f"grids.{index}.{key}" for key in ("name", "axes") if isinstance(grid, dict) and key not in grid]
    for name, tier in tiers.items() if isinstance(tiers, dict) else ():
        missing += [f"tiers.{name}.corpus"] if isinstance(tier, dict) and "corpus" not in tier else []
    if missing:
        raise InputError(f'{path}: has no {", ".join(missing)}; docs/sweeps.md, "Write your own sweep", lists all keys')


def refuse_number(axes: Mapping[str, Mapping[str, Sequence[Any]]], seeds: Sequence[int], source: str) -> None:
    """Raise InputError if there are no runs, or more than `MOST_RUNS`, before any of them is made.

    Args:
        axes: values of each axis, by grid.
        seeds: seeds of each combination of values.
        source: the sweep file, for messages.
    """
    for grid, values_of in axes.items():
        for axis, values in values_of.items():
            if not values:
                raise InputError(f"{source}: grids.{grid}: axis {axis} has no values; name one at least")
    if not seeds:
        raise InputError(f"{source}: seeds has no values; name one at least")
    runs = sum(math.prod(map(len, values_of.values())) for values_of in axes.values()) * len(seeds)
    if runs > MOST_RUNS:
        raise InputError(
            f"{source}: describes {runs:,} runs, and a sweep has at most {MOST_RUNS:,}; name fewer grids (--only), "
            f"seeds or values of axes"
        )


def refuse_names(names: Sequence[str], source: str) -> None:
    """Raise InputError if two runs would share a folder, or the name of a run cannot name one."""
    for name, count in Counter(names).items():
        if count > 1 or len(name.encode()) > LONGEST_NAME:
            why = "too long" if len(name.encode()) > LONGEST_NAME else "shared by two runs"
            raise InputError(f"{source}: name {name:.80} is {why}; use short, distinct values")
