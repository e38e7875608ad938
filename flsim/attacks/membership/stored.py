"""Rows of attacks on membership in a run folder: ``membership/round-000200.parquet``, a row per unit and attack."""

import re
from contextlib import ExitStack, suppress
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from flsim.base.errors import InputError
from flsim.base.files import held, new_file
from flsim.base.parquet import read_parquet

FOLDER = "membership"
LOCK = ".attacking"  # lock file in the run folder, for reading and replacing rows
NAME = re.compile(r"round-(\d{6,})\.parquet", re.ASCII)
LEVELS = (0.001, 0.01, 0.1)  # false-positive rates
CURVE = ("curve_fpr", "curve_tpr", "curve_low", "curve_high", "curve_allowed")


def column(name: str, level: float) -> str:
    """Return the column of a value at a false-positive rate, such as ``tpr_at_0.001``."""
    return f"{name}_at_{level:g}"


SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string(), nullable=False) for name in ("run", "setting", "unit", "attack", "kind")),
        *(pa.field(name, pa.int64(), nullable=False) for name in ("round", "n_in", "n_out")),
        *(pa.field(name, pa.float64(), nullable=False) for name in ("auroc", "auroc_low", "auroc_high", "confidence")),
        *((name, pa.float64()) for name in ("control_auroc", "untrained_auroc", "permuted_auroc")),
        ("is_confounded", pa.bool_()),
        *((name, pa.float64()) for name in ("epsilon", "delta")),
        *((name, pa.string()) for name in ("protects", "neighbours")),
        *(
            field
            for level in LEVELS
            for field in (
                (column("alarms", level), pa.int64()),
                *((column(name, level), pa.float64()) for name in ("tpr", "tpr_low", "tpr_high", "allowed")),
            )
        ),
        *((name, pa.list_(pa.float64())) for name in CURVE),
    ]
)


def write_rows(run_folder: Path, round_: int, table: pd.DataFrame) -> None:
    """Store rows of one run atomically, replacing rows of the same unit and attack; other rows of the round remain."""
    path = run_folder / FOLDER / f"round-{round_:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    lock = run_folder / LOCK
    lock.touch()
    with ExitStack() as stack:
        with suppress(OSError):  # a filesystem without locks
            # Without a lock, two commands could read the same rows, and the second would drop those of the first.
            stack.enter_context(held(lock, wait=True))
        if path.exists():
            earlier = read_rows(path, table["run"].iloc[0])
            asked = pd.MultiIndex.from_frame(table[["unit", "attack"]])
            others = earlier[~pd.MultiIndex.from_frame(earlier[["unit", "attack"]]).isin(asked)]
            table = pd.DataFrame([*others.to_dict("records"), *table.to_dict("records")])
        with new_file(path) as partial:
            stored = pa.Table.from_pandas(table, SCHEMA, preserve_index=False).replace_schema_metadata()
            pq.write_table(stored, partial)


def read_rows(path: Path, identity: str) -> pd.DataFrame:
    """Read a file of rows. Raises InputError if it is damaged, or has rows of another run."""
    rows = read_parquet(path, SCHEMA)
    if not (rows["run"] == identity).all():
        raise InputError(f"{path}: the file has rows of another run; move it away and attack again")
    return rows


def newest_rows(run_folder: Path, identity: str | None) -> pd.DataFrame:
    """Return the rows of the last round that was attacked; empty if there is none, or the run has no identity."""
    paths = [path for path in (run_folder / FOLDER).glob("*.parquet") if NAME.fullmatch(path.name)]
    newest = max(paths, key=lambda path: int(path.stem.removeprefix("round-")), default=None)
    return SCHEMA.empty_table().to_pandas() if newest is None or identity is None else read_rows(newest, identity)
