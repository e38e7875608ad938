"""Published numbers to compare runs with, row by row, from the CSV files of experiments/.

A row has its table's cells under the file's column names: integers as int, other numbers as float, and all other cells
and the name of the table as text. Blank cells are omitted.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import resources
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy

from flsim.base.errors import InputError
from flsim.base.statistics import differ_by_more_than_chance
from flsim.results.rows import RunResults

Cell = int | float | str
# The question of Random Sampling and Beam Search: |R|, the number of known words of a canary, and of all words.
ROW_OF_QUESTION = ("references", "prefix", "length")
# Column of the papers -> our column, and its type. All other columns, except `table` and `data`, describe the training.
RESULTS = {
    "canaries": ("published_canaries", "Int64"),
    **{name: (f"published_{name}", "Int64") for name in ROW_OF_QUESTION},
    "rs": ("published_rs", "Int64"),
    "rs_lowest": ("published_rs_lowest", "string"),
    "bs": ("published_bs", "Int64"),
    "bs_lowest": ("published_bs_lowest", "string"),
    "extracted": ("published_extracted", "Float64"),
    "mean_exposure": ("published_exposure", "Float64"),
    "accuracy": ("published_accuracy", "Float64"),
    "perplexity": ("published_perplexity", "Float64"),
    "test_loss": ("published_test_loss", "Float64"),
    "epsilon_paper": ("published_epsilon", "Float64"),
    "delta": ("published_delta", "Float64"),
    "epsilon": ("published_record_epsilon", "Float64"),
}
PREFIX = "published_"
COUNTED_OF = ("rs", "bs", "canaries")  # memorized canaries, and number of canaries
PUBLISHED = {
    "published_table": "string",
    "published_data": "string",
    "published_setting": "string",
    **dict(RESULTS.values()),
}
# Columns of the question, which only some tables have.
ASKED = {name: "Int64" for name in ROW_OF_QUESTION if name != "references"}
WORDS = {
    "references": "|R| is {} here and {} in the paper",
    "prefix": "the length of the known prefix is {} here and {} in the paper",
    "length": "the length of canaries is {} here and {} in the paper",
}


def published_rows(file: str, table: str) -> list[dict[str, object]]:
    """Return the rows of a table, e.g. ``"1"`` of ``"thakkar2020.csv"``; InputError without this file or table."""
    files = _files()
    if file not in files:
        raise InputError(f"{file!s:.80}: there is no such file of published numbers; choose one of {', '.join(files)}")
    rows = [dict(row) for row in files[file] if row["table"] == str(table)]
    if not rows:
        tables = ", ".join(dict.fromkeys(str(row["table"]) for row in files[file]))
        raise InputError(f"{file}: there is no table {table}; choose one of {tables}")
    return rows


def with_question(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a published row with the columns of `ROW_OF_QUESTION`, which old sweeps did not store."""
    for rows in _files().values():
        for known in rows:
            if dict(row) == {name: cell for name, cell in known.items() if name not in ROW_OF_QUESTION}:
                return dict(known)
    return dict(row)


@cache
def _files() -> dict[str, list[dict[str, object]]]:
    """Return the rows of each file of experiments/, without blank cells."""
    paths = [path for path in resources.files("experiments").iterdir() if path.name.endswith(".csv")]
    return {
        path.name: [
            {name: cell if name == "table" else _parsed(cell) for name, cell in row.items() if cell != ""}
            for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines())
        ]
        for path in sorted(paths, key=lambda path: path.name)
    }


def matching(rows: Sequence[Mapping[str, object]], keys: Mapping[str, object]) -> dict[str, object] | None:
    """Return the row whose cells equal the keys (``""``: blank), by value, without case; InputError if several do."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in keys:
        if name not in columns:
            raise InputError(f"{name}: not a column of the published table; choose one of {', '.join(columns)}")
    matches = [row for row in rows if all(_comparable(row.get(name, "")) == _comparable(keys[name]) for name in keys)]
    if len(matches) > 1:
        names = ", ".join(f"{name} {value}" for name, value in keys.items())
        raise InputError(f"{len(matches)} rows of the published table have {names}; use more of {', '.join(columns)}")
    return dict(matches[0]) if matches else None


def _parsed(cell: str) -> Cell:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


def _comparable(value: object) -> Cell:
    parsed = _parsed(str(value))
    return parsed.casefold() if isinstance(parsed, str) else parsed


def cells_of(row: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the columns of `PUBLISHED` for a row of `published_rows`; empty if there is no row."""
    if not row:
        return {}
    trained = {name: row[name] for name in row if name not in RESULTS or name == "epsilon"}
    table, data = trained.pop("table", ""), trained.pop("data", None)
    words = [value if isinstance(value, str) else f"{name} {value:g}" for name, value in trained.items()]
    cells = {ours: row[name] for name, (ours, _) in RESULTS.items() if name in row}
    return {"published_table": table, "published_data": data, "published_setting": ", ".join(words), **cells}


def asked(run: RunResults, published: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the columns of `ASKED` for a run with a published row of counts; empty for other runs."""
    if not published or not {*ROW_OF_QUESTION} & {*published}:
        return {}
    return {"prefix": run.prefix, "length": run.length}


# A canary that ranks first among 20,000 references does not necessarily rank first among 2,000,000, and a shorter
# continuation ranks first more often. Therefore shares are compared in size only if they answer the same question.


def is_alike(table: pd.DataFrame) -> "pd.Series[bool]":
    """Return whether each row of a table answers the question of its published row; False if a part is unknown."""
    return ~pd.concat([_differs(table, name) for name in ROW_OF_QUESTION], axis=1).any(axis=1)


def differences(table: pd.DataFrame) -> str:
    """Return how the questions of rows and of their published rows differ: ``"|R| is 20 here and 30 in the paper"``."""
    parts = []
    for name, words in WORDS.items():
        if (differs := _differs(table, name)).any():
            both = (_column(table[differs], column, "Int64") for column in (name, PREFIX + name))
            parts.append(words.format(*map(_listed, both)))
    return ", ".join(parts)


def _differs(table: pd.DataFrame, name: str) -> "pd.Series[bool]":
    """Return whether a part of the question of each row differs from that of its published row, or is unknown."""
    ours, published = (_column(table, column, "Int64") for column in (name, PREFIX + name))
    return ~(ours == published).fillna(value=False).astype(bool)


def _column(table: pd.DataFrame, name: str, kind: Literal["Float64", "Int64"] = "Float64") -> "pd.Series[Any]":
    return table[name].astype(kind) if name in table else pd.Series(pd.NA, table.index, kind)


def _listed(values: "pd.Series[Any]") -> str:
    texts = ["unknown" if pd.isna(value) else f"{value:,}" for value in values]
    return " or ".join(dict.fromkeys(texts))


COUNTED = ("rs", "bs")
# Extracted secrets are compared with Beam Search, which searches for the most likely continuation, like their
# extraction.
METRICS = {"rs": "RS", "bs": "BS", "extracted": "BS against extracted", "exposure": "Exposure"}
AGAINST = {
    **{f"{metric}_size": "string" for metric in COUNTED},
    **{f"{metric}_pairs": "Float64" for metric in METRICS},
    **{f"{metric}_twin": "string" for metric in METRICS},
}
COMPARED = "compared"  # attribute of a table that `against` returned
ROW = TABLE, DATA, SETTING = ["published_table", "published_data", "published_setting"]  # they name a published row
PARTITIONS = ("IID", "Non-IID")
PUBLISHED_DIRECTION = "differ in the published direction"
CLEARLY = "whose published difference exceeds chance"
CHANCE = (
    "Chance: Fisher's exact test of two published counts at 5%, as if their canaries were independent. Both "
    "models have the same canaries, so the test is conservative. The test does not cover other seeds of the "
    "paper's models."
)
ROUNDING = 9  # decimals of a share or a bit, so that means that are mathematically equal are ties


def size(low: float, high: float, published: float) -> str:
    """Return "same" if the published share is in our interval, otherwise whether ours is "lower" or "higher"."""
    return "same" if low <= published <= high else "lower" if high < published else "higher"


@dataclass(frozen=True, eq=False)
class Agreement:
    """The agreement of one published table's rows in one metric.

    Attributes:
        metric: a key of `METRICS`.
        rows: a row for each published row with measured runs: the columns of `ROW`, `ours` and `published` (float64),
            and for counts, the published `count` and number of `canaries`.
    """

    metric: str
    rows: pd.DataFrame

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """A row for each row and each other row whose published value differs, so every pair is in both directions.

        agrees: 1 if our difference has the published sign, 0.5 if our values are equal, otherwise 0; is_clear: whether
        the published difference exceeds chance; is_twin: whether both are partitions of one setting.
        """
        pairs = self.rows.merge(self.rows, "cross", suffixes=("", "_other"))
        pairs = pairs[pairs["published"] != pairs["published_other"]]
        ours, published = (np.sign(pairs[name] - pairs[f"{name}_other"]) for name in ("ours", "published"))
        is_clear = np.ones(len(pairs), bool)
        if self.metric in COUNTED:
            counts = pairs[["count", "count_other", "canaries", "canaries_other"]].astype(int).to_numpy().tolist()
            clear = [differ_by_more_than_chance((a, b), (of_a, of_b)) for a, b, of_a, of_b in counts]
            is_clear = np.array(clear, bool)
        is_twin = pairs[[DATA, f"{DATA}_other"]].isin(PARTITIONS).all(axis=1)
        is_twin &= pairs[SETTING] == pairs[f"{SETTING}_other"]
        return pairs.assign(agrees=(1 + ours * published) / 2, is_clear=is_clear, is_twin=is_twin)

    @property
    def tau(self) -> float:
        """Kendall's tau-b between our and the published values; NaN if either has only one value."""
        if self.pairs.empty:
            return math.nan
        return float(scipy.stats.kendalltau(self.rows["ours"], self.rows["published"]).statistic)

    def __str__(self) -> str:
        sentence = f"{METRICS[self.metric]}, Table {self.rows[TABLE].iloc[0]}: "
        if self.pairs.empty:
            return sentence + "no two rows whose published values differ."
        clear, tau = self.pairs[self.pairs["is_clear"]], f" (tau-b {self.tau:.2f})" if math.isfinite(self.tau) else ""
        if self.metric not in COUNTED:
            sentence += f"{score(self.pairs)} pairs of rows {PUBLISHED_DIRECTION}{tau}"
        elif len(clear):
            sentence += f"{score(clear)} pairs of rows {CLEARLY} {PUBLISHED_DIRECTION}; "
            sentence += f"{score(self.pairs)} of all pairs{tau}"
        else:
            sentence += f"no pairs of rows {CLEARLY}; {score(self.pairs)} of all pairs {PUBLISHED_DIRECTION}{tau}"
        twins, clear_twins = (pairs[pairs["is_twin"]] for pairs in (self.pairs, clear))
        if len(twins):
            such = "such " * (self.metric in COUNTED)
            scores = [f"{_signs(clear_twins)} {such}twins"] * bool(len(clear_twins))
            scores += [f"{_signs(twins)} of all twins"] * (len(clear_twins) < len(twins))
            sentence += f"; IID minus Non-IID has the published sign in {', '.join(scores)}"
        return sentence + "."


def score(pairs: pd.DataFrame) -> str:
    """Return how many of `Agreement.pairs` have the published sign, such as ``"4.5 of 6"``; a tie counts half."""
    return f"{pairs['agrees'].sum() / 2:g} of {len(pairs) // 2}"


def _signs(twins: pd.DataFrame) -> str:
    yes, ties = (int((twins["agrees"] == value).sum()) // 2 for value in (1, 0.5))
    return f"{yes} of {len(twins) // 2}{f' ({ties} tied)' if ties else ''}"


def agreements(table: pd.DataFrame) -> list[Agreement]:
    """Return the agreement of each published table and metric for which a table of runs or over seeds has values."""
    return [agreement for metric in METRICS for agreement in _judged(table, metric)]


def chance(judged: Sequence[Agreement]) -> list[str]:
    """Return the sentence on the definition of chance; empty if it is not used."""
    return [CHANCE] if any(agreement.metric in COUNTED and len(agreement.pairs) for agreement in judged) else []


def against(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with those columns that compare it with the papers, row by row, and have values.

    METRIC_size is whether the published share of canaries is in our 95% interval: "same"; otherwise ours is "lower" or
    "higher". It is blank unless both shares answer the same question: with the same number of references, known words
    and words of a canary. Only shares of Thakkar et al. (2020) have a size, because they count canaries in the same
    way; the secrets, spaces and models of Carlini et al. (2019) are different.

    METRIC_pairs is the share of the pairs of this row with another row whose difference has the published sign, among
    those whose published difference exceeds chance; ours is the mean of all runs with this published row. METRIC_twin
    is whether IID minus Non-IID has the published sign: yes, no, or tie if our values are equal; blank if the published
    difference does not exceed chance. Published counts such as 54 and 52 of 90 canaries differ by chance (see
    `flsim.base.statistics.differ_by_more_than_chance`). The papers do not state how far chance moves exposures and
    shares of extracted secrets, so all their pairs are counted.
    """
    marks, alike = pd.DataFrame(index=table.index), is_alike(table)
    for metric in COUNTED:
        intervals = zip(
            table[f"{metric}_share_low"], table[f"{metric}_share_high"], measured(table, metric)[1], strict=True
        )
        marks[f"{metric}_size"] = [
            size(*interval) if comparable and not pd.isna([*interval]).any() else None
            for comparable, interval in zip(alike, intervals, strict=True)
        ]
    for metric in METRICS:
        if judged := _judged(table, metric):
            pairs = pd.concat([agreement.pairs for agreement in judged])
            clear = pairs[pairs["is_clear"]]
            twin = clear[clear["is_twin"]].set_index(ROW)["agrees"].map({1: "yes", 0.5: "tie", 0: "no"})
            rows = _keys(table).join(pd.DataFrame({"pairs": clear.groupby(ROW)["agrees"].mean(), "twin": twin}), on=ROW)
            ours, published = measured(table, metric)
            known = rows[["pairs", "twin"]].where(ours.notna() & published.notna())
            marks[[f"{metric}_pairs", f"{metric}_twin"]] = known
    marks = marks.astype({name: AGAINST[str(name)] for name in marks}).dropna(axis=1, how="all")
    marked = pd.concat([table, marks], axis=1)
    marked.attrs = table.attrs | {COMPARED: True}  # pandas drops attributes that only one of the tables has
    return marked


def sizes(table: pd.DataFrame) -> str:
    """Return a sentence on rows whose share is not compared in size, with the reason; empty if all are compared."""
    has_both = pd.Series(data=False, index=table.index)
    for metric in COUNTED:
        ours, published = measured(table, metric)
        has_both |= ours.notna() & published.notna()
    alike = is_alike(table)
    if not (has_both & ~alike).any():
        return ""
    among = " of some rows" if (has_both & alike).any() else ""
    why = differences(table[has_both & ~alike])
    return f"Sizes{among} are not compared: {why}. Directions are compared."


def has_shares(table: pd.DataFrame) -> bool:
    """Return whether rows have published shares of canaries."""
    return bool({"published_rs", "published_bs", "published_extracted"} & {*table})


def source_of(table: pd.DataFrame, metric: str) -> str:
    """Return the metric of the published shares that a flag is compared with."""
    return "extracted" if metric == "bs" and "published_bs" not in table else metric


def measured(table: pd.DataFrame, metric: str) -> "tuple[pd.Series[float], pd.Series[float]]":
    """Return our and the published value of each row, as shares of canaries or in bits; NA if missing."""
    column = partial(_column, table)
    if metric == "exposure":
        published, ours = column("published_exposure"), column("mean_space_exposure")
        # Over the complete space, as in the paper, if all rows have it, because two kinds of exposure have no common
        # order.
        return (column("mean_exposure") if ours[published.notna()].isna().any() else ours), published
    if metric == "extracted":
        return column("bs") / column("canaries"), column("published_extracted")
    return column(metric) / column("canaries"), column(f"published_{metric}") / column("published_canaries")


def _keys(table: pd.DataFrame) -> pd.DataFrame:
    """Return the columns that name a published row; text is empty if it is missing."""
    return table.reindex(columns=ROW).astype("object").fillna("")


def _judged(table: pd.DataFrame, metric: str) -> list[Agreement]:
    """Return the agreement of each published table in a metric; ours is the mean of all runs with a published row."""
    ours, published = measured(table, metric)
    points = _keys(table).assign(ours=ours, published=published)
    if metric in COUNTED:
        points = points.assign(count=table.get(f"published_{metric}"), canaries=table.get("published_canaries"))
    groups = points[ours.notna() & published.notna()].groupby(ROW, sort=False)
    points = groups.first().assign(ours=groups["ours"].mean().round(ROUNDING)).reset_index()
    points = points.astype({"ours": "float64", "published": "float64"})
    return [Agreement(metric, rows) for _, rows in points.groupby(TABLE, sort=False)]
