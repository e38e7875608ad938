"""The roster of a population, roster.parquet: a row per canary, in the order in which an overlay numbers them.

    canary                                 the canary's id, such as "c07"
    tokens, words                          its phrase, as ids, and as text that is split at spaces
    p_u, p_e                               probabilities by which it is planted; missing for a number of copies
    planned_sharers, sharers               users that were drawn to hold it, and users that hold it
    planned_insertions, insertions         records that were drawn for it, and records that it replaced

The columns of `LATER` are only in rosters that need them. Without them all canaries are planted in every round:

    is_planted                             false for a control, which is drawn and measured like the others
    coin                                   the coin that decided whether it is planted; missing without a coin
    first_round, last_round                the rounds in which it is planted, from 1; missing for no bound
    pseudo_users                           pseudo-users who inject it in its first round; missing if users hold it
    template                               the template that the phrase fills; missing for none
    is_natural                             true for text of a held-out user or of the settings, not for random words
"""

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flsim.base.errors import InputError
from flsim.base.parquet import read_parquet
from flsim.canaries.planting import Planting
from flsim.canaries.secrets import Secrets
from flsim.canaries.spec import Canary
from flsim.data.vocabulary import Vocabulary

FILE = "roster.parquet"
COUNTS = ("planned_sharers", "sharers", "planned_insertions", "insertions")
LATER = ("is_planted", "coin", "first_round", "last_round", "pseudo_users", "template", "is_natural")
PANDAS = {pa.bool_(): "boolean", pa.int64(): "Int64", pa.string(): "string"}
SCHEMA = pa.schema(
    [
        pa.field("canary", pa.string(), nullable=False),
        pa.field("tokens", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False),
        pa.field("words", pa.list_(pa.field("item", pa.string(), nullable=False)), nullable=False),
        ("p_u", pa.float64()),
        ("p_e", pa.float64()),
        *(pa.field(name, pa.int64(), nullable=False) for name in COUNTS),
        pa.field("is_planted", pa.bool_(), nullable=False),
        ("coin", pa.bool_()),
        ("first_round", pa.int64()),
        ("last_round", pa.int64()),
        ("pseudo_users", pa.int64()),
        ("template", pa.string()),
        pa.field("is_natural", pa.bool_(), nullable=False),
    ]
)
OLDER_LACK = ("words", *COUNTS)  # columns that the oldest rosters do not have


def roster_of(planting: Planting, vocabulary: Vocabulary) -> pd.DataFrame:
    """Return the roster of planted canaries, with the columns of `LATER` that are needed."""
    canaries = planting.canaries
    columns = {
        "canary": [canary.id for canary in canaries],
        "tokens": [list(canary.tokens) for canary in canaries],
        "words": [vocabulary.text(canary.tokens).split(" ") for canary in canaries],
        "p_u": [canary.p_u for canary in canaries],
        "p_e": [canary.p_e for canary in canaries],
        **{name: getattr(planting, name) for name in COUNTS},
    }
    later = {name: [getattr(canary, name) for canary in canaries] for name in LATER}
    later["template"] = [canary.template and str(canary.template) for canary in canaries]
    used = {name: values for name, values in later.items() if any(value != getattr(Canary, name) for value in values)}
    if not canaries:  # pandas cannot infer the types of empty columns
        return cast(pd.DataFrame, _empty(columns).to_pandas())
    return pd.DataFrame(columns | used).astype({name: PANDAS[SCHEMA.field(name).type] for name in used})


def write_roster(folder: Path, planting: Planting, vocabulary: Vocabulary) -> None:
    roster = roster_of(planting, vocabulary)
    if roster.empty:
        pq.write_table(_empty(roster.columns), folder / FILE)
    else:
        roster.to_parquet(folder / FILE, index=False)


def _empty(columns: Iterable[str]) -> pa.Table:
    return pa.schema([SCHEMA.field(name) for name in columns]).empty_table()


def read_canaries(folder: Path, vocabulary: Vocabulary) -> tuple[Canary, ...]:
    """Return the canaries of a folder's roster; without probabilities they have the planned number of copies."""
    names = ["canary", "tokens", "p_u", "p_e", "planned_insertions"]
    with pq.ParquetFile(folder / FILE) as file:
        names += [name for name in LATER if name in file.schema_arrow.names]
        table = file.read(columns=names)
    schema = pa.schema([SCHEMA.field(name) for name in names])
    canaries, templates = [], cache(lambda text: Secrets.from_template(text, vocabulary))
    for row in table.select(names).cast(schema).to_pylist():
        p_u, p_e, copies = row["p_u"], row["p_e"], None
        if p_u is None:
            p_u, p_e, copies = math.nan, math.nan, row["planned_insertions"]
        later = {name: row[name] for name in names if name in LATER}
        if later.get("template") is not None:
            later["template"] = template = templates(later["template"])
            if not template.is_filling(row["tokens"]):
                raise ValueError(f"canary {row['canary']} does not fill its template")
        canaries.append(Canary(row["canary"], tuple(row["tokens"]), p_u, p_e, copies, **later))
    return tuple(canaries)


def read_counts(folder: Path) -> dict[str, NDArray[np.int64]]:
    """Return int64 [canaries] for each of `COUNTS` in a folder's roster; raise the errors of `read_canaries`."""
    counts = pq.read_table(folder / FILE, columns=list(COUNTS)).to_pydict()
    return {name: np.array(counts[name], np.int64) for name in COUNTS}


def is_drawn(roster: pd.DataFrame) -> "pd.Series[bool]":
    """Return whether each canary was planted: at least one record was drawn for it, and it is not a control.

    A canary whose copies a defence removed later counts as planted; otherwise, a share would hide the effect. In the
    oldest rosters, which do not store the number of drawn records, all canaries count as planted.
    """
    is_planted = pd.Series(data=True, index=roster.index)
    if "is_planted" in roster:
        is_planted &= roster["is_planted"].astype(bool)
    if "planned_insertions" in roster and roster["planned_insertions"].notna().all():
        is_planted &= roster["planned_insertions"] > 0
    return is_planted


def read_roster(path: Path) -> pd.DataFrame:
    """Return a roster, checked completely, with the columns of `SCHEMA` that the file has, and ``is_planted``."""
    if not path.is_file():
        raise InputError(
            f"{path}: no such file, so the canaries of this run are unknown; restore the file, or exclude the run"
        )
    roster = read_parquet(path, SCHEMA, (*OLDER_LACK, *LATER))
    if roster["canary"].duplicated().any() or not (roster["canary"].str.len() > 0).all():
        raise InputError(f"{path}: ids of canaries repeat; restore the file")
    if not all(((roster[name] > 0) & (roster[name] <= 1) | roster[name].isna()).all() for name in ("p_u", "p_e")):
        raise InputError(f"{path}: p_u and p_e must be probabilities above 0; restore the file")
    return roster if "is_planted" in roster else roster.assign(is_planted=True)
