"""Rows of measurements: one number per (run, round, metric, canary), stored in one Parquet file per round.

Files are atomic. The metadata describe the quantities of custom measures, so that results can be shown without their
code. `flsim.measures.built_in` describes those of built-in measures.
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from flsim.base.errors import Diverged, InputError
from flsim.base.files import from_json, new_file
from flsim.base.parquet import read_parquet
from flsim.canaries.population import is_drawn, read_roster
from flsim.measures.built_in import QUANTITIES
from flsim.measures.quantity import Quantity, select_for
from flsim.measures.quantity import from_json as described
from flsim.measures.quantity import to_json as description

SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("round", pa.int64()),
        ("metric", pa.string()),
        ("canary", pa.string()),
        ("value", pa.float64()),
    ]
)
KEY = ["run", "round", "metric", "canary"]
IDENTITY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
DIVERGED = "diverged"  # the only metric of a model that is not finite; always 1
REFERENCES = "references"  # |R|, of every evaluation
WHOLE_TEST_USERS = "whole_test_users"  # metric of evaluations with complete authors as test users
ROWS = pa.schema([field.with_nullable(field.name == "value") for field in SCHEMA])
NAME = re.compile(r"round-\d{6,}\.parquet", re.ASCII)
METADATA = b"flsim.quantities"  # key in the metadata of a file: a JSON list of descriptions


def identity_of(config: str, corpus: str) -> str:
    """Return the run's name in rows: 16 digits each of the digests of its settings (with the seed) and its corpus."""
    return f"{config[:16]}-{corpus[:16]}"


@dataclass(frozen=True)
class Row:
    """A single measurement."""

    run: str  # the run's identity, see `identity_of`; for a foreign model, its name
    round: int  # number of completed rounds of the evaluated model; in central training, of steps
    # the name of a `flsim.measures.Quantity`. The model also has ``references`` (|R|). If the test users are complete
    # authors, it has ``whole_test_users``, their number. If training added noise to users' updates, it has ``delta``
    # and, for each reported convention, ``epsilon NAME``; with noise on records' gradients, ``record delta`` and
    # ``record epsilon NAME``. A model that is not finite has ``diverged`` (1) and nothing else.
    metric: str
    canary: str  # id of the canary; empty for a metric of the model
    value: float  # the number


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Return rows as a table with the columns of `SCHEMA`."""
    return pd.DataFrame([asdict(row) for row in rows], columns=SCHEMA.names).astype(
        {"round": "int64", "value": "float64"}
    )


def write_rows(run_folder: Path, round: int, rows: Sequence[Row], own: Iterable[Quantity] = ()) -> None:
    """Store the measurements of one round in ``rows/round-000010.parquet``, replacing earlier rows of this round.

    Raises ValueError for no rows, those of another round or several runs, or a key twice; Diverged for a canary's value
    that is not finite. (A finite model can have infinite perplexity.)
    """
    wrong = sorted({row.round for row in rows} - {round})
    if wrong or len({row.run for row in rows}) != 1:
        raise ValueError(f"expected rows of one run and of round {round}, found {len(rows)} rows, of rounds {wrong}")
    for row in rows:
        if row.canary and not math.isfinite(row.value):
            raise Diverged(
                f"{run_folder}: {row.metric} {row.canary} of round {round} is {row.value}; rows are not stored"
            )
    table = frame(rows).sort_values(KEY)
    if table.duplicated(KEY).any():
        raise ValueError(f"{_first_duplicate(table)} is measured twice")
    path = run_folder / "rows" / f"round-{round:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    stored = pa.Table.from_pandas(table, SCHEMA, preserve_index=False)
    if descriptions := [description(quantity) for quantity in own]:
        stored = stored.replace_schema_metadata({**stored.schema.metadata, METADATA: json.dumps(descriptions)})
    with new_file(path) as partial:
        pq.write_table(stored, partial)


def copy_rows(path: Path, run_folder: Path, identity: str) -> None:
    """Store a file of rows as rows of another run with an equal model and equal canaries."""
    table = pq.read_table(path)
    named = table.set_column(0, SCHEMA.field("run"), pa.array([identity] * len(table), pa.string()))
    with new_file(run_folder / "rows" / path.name) as partial:
        pq.write_table(named, partial)


def read_rows(path: Path) -> tuple[pd.DataFrame, dict[str, Quantity]]:
    """Read a file of rows, and the quantities of custom measures by name; InputError if the file is damaged."""
    rows = read_parquet(path, ROWS)
    return rows, _described(path) if METADATA in (pq.read_schema(path).metadata or {}) else {}


def _described(path: Path) -> dict[str, Quantity]:
    try:
        quantities = [described(values) for values in from_json(pq.read_schema(path).metadata[METADATA].decode())]
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: its descriptions of measures are damaged; remove it and evaluate again") from error
    if any(quantity.name in QUANTITIES for quantity in quantities):
        raise InputError(f"{path}: the description of a built-in measure is wrong; remove the file and evaluate again")
    return {quantity.name: quantity for quantity in quantities}


def read_rows_of(path: Path, identity: str, canaries: Collection[str]) -> tuple[pd.DataFrame, dict[str, Quantity]]:
    """Read a file of a run's rows; InputError for rows of another run, round or canary, or impossible values."""
    rows, custom = read_rows(path)
    _refuse_foreign(path, rows, identity)
    if not rows["canary"].isin({"", *canaries}).all() or {f"round-{value:06d}" for value in rows["round"]} != {
        path.stem
    }:
        raise InputError(f"{path}: the file has rows of another round or canary; move it away and evaluate this round")
    if rows.duplicated(KEY).any():
        raise InputError(
            f"{path}: {_first_duplicate(rows)} occurs twice; remove the file and evaluate this round again"
        )
    if not rows.loc[rows["canary"] != "", "value"].map(math.isfinite).all():
        raise InputError(f"{path}: the file has values of canaries that are not finite; remove it and evaluate again")
    if not _can_be(rows["metric"], rows["value"], QUANTITIES | custom).all():
        raise InputError(
            f"{path}: the file has values that are invalid for their metrics; remove the file and evaluate again"
        )
    return rows, custom


def rows_in(run_folder: Path) -> list[Path]:
    """Return the files of a run's rows, by round, without files of other names."""
    return sorted(path for path in (run_folder / "rows").glob("*.parquet") if NAME.fullmatch(path.name))


def strange_rows_in(run_folder: Path) -> list[Path]:
    """Return files among the rows with other names, such as copies; flsim does not read them."""
    return sorted(path for path in (run_folder / "rows").glob("[!.]*.parquet") if not NAME.fullmatch(path.name))


def refuse_foreign_rows(run_folder: Path, identity: str) -> None:
    """Raise InputError if a run's folder has rows of another run; unreadable files are skipped."""
    for path in rows_in(run_folder):
        if is_whole(path):
            _refuse_foreign(path, read_parquet(path, ROWS), identity)


def _refuse_foreign(path: Path, rows: pd.DataFrame, identity: str) -> None:
    for other in rows.loc[rows["run"] != identity, "run"].unique():
        what = f"of another run, {other!r:.60}"
        if IDENTITY.fullmatch(identity) and IDENTITY.fullmatch(other):
            is_of_corpus = identity.split("-")[0] == other.split("-")[0]
            what = "measured on another corpus than that of the run" if is_of_corpus else "of a run with other settings"
        raise InputError(
            f"{path}: the file has rows {what}; move it away, and `flsim run --resume` evaluates this round again"
        )


def _can_be(
    metric: "pd.Series[str]", value: "pd.Series[float]", quantities: Mapping[str, Quantity]
) -> "pd.Series[bool]":
    """Return whether each value is possible for its metric."""
    known = quantities.values()
    is_flag, is_positive = (
        metric.isin([one.name for one in known if getattr(one, is_)]) for is_ in ("is_flag", "is_log")
    )
    is_count = metric.isin([REFERENCES, WHOLE_TEST_USERS, *(one.name for one in known if one.kind == "count")])
    return ~(is_flag & ~value.isin([0, 1]) | is_count & (value % 1 != 0) | is_positive & (value <= 0))


def is_whole(path: Path) -> bool:
    """Return whether a file of rows can be read."""
    try:
        read_parquet(path, ROWS)
    except InputError:
        return False
    return True


def _first_duplicate(rows: pd.DataFrame) -> str:
    first = rows[rows.duplicated(KEY)].iloc[0]
    return f"{first['metric']} {first['canary']}".strip()


ON_SCREEN = select_for(QUANTITIES.values(), "screen")


def in_short(measured: "Mapping[Quantity, pd.Series[float]]", between: str = " ") -> str:
    """Return counts of memorized canaries and means of numbers, such as ``"RS 28 BS 10 11.7 bits"``."""
    return between.join(_describe(quantity, values) for quantity, values in measured.items())


def round_in_short(run_folder: Path, round: int) -> str | None:
    """Return the results of an evaluated round and the number of planted canaries; None if they cannot be read."""
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
