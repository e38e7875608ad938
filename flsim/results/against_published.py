"""Comparison of tables with the papers, row by row, in size and in direction.

    METRIC_size     whether the published share of canaries is in our 95% interval: "same"; otherwise ours is "lower" or
                    "higher"
    METRIC_pairs    share of the pairs of this row with another row, among those whose published difference exceeds
                    chance, whose difference has the published sign
    METRIC_twin     whether IID minus Non-IID has the published sign: yes, no, or tie if our values are equal; blank
                    if the published difference does not exceed chance

*Size* is compared only if both shares answer the same question: with the same number of references, known words and
words of a canary (`flsim.results.published`). Otherwise METRIC_size is blank. Only shares of Thakkar et al. (2020) are
compared in size, because they count canaries in the same way. The secrets, spaces and models of Carlini et al. (2019)
are different, so bits and shares of extracted secrets are compared only in direction.

*Direction* compares published rows with the mean of all runs with this published row. Published counts such as 54 and
52 of 90 canaries differ by chance, so pairs are counted twice: those whose published difference exceeds chance
(`flsim.base.statistics.differ_by_more_than_chance`), and all that differ. The papers do not state how far chance moves
exposures and shares of extracted secrets, so all their pairs are counted. Intervals, tests over canaries, and seeds
show whether our difference exceeds chance.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy
from numpy.typing import NDArray

from flsim.base.statistics import differ_by_more_than_chance
from flsim.results.published import differences, is_alike

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
ROW = ["published_table", "published_data", "published_setting"]  # columns that name a published row
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


@dataclass(frozen=True)
class Order:
    """The agreement of rows with the published order."""

    pairs: int  # number of pairs of rows whose published values differ
    # number of those pairs whose difference has the same sign in our values; a tie in our values counts half
    agreeing: float
    clear_pairs: int  # clear_pairs, clear_agreeing: the same for the pairs whose published difference exceeds chance
    clear_agreeing: float
    of_rows: tuple[float, ...]  # for each row, the share of its clear pairs that agrees; NaN if it has none
    tau: float  # Kendall's tau-b between our and the published values; NaN if either has only one value


def order(ours: Sequence[float], published: Sequence[float], is_clear: NDArray[np.bool_] | None = None) -> Order:
    """Return the agreement of the orders of our and the published values, float [rows].

    `is_clear`, bool [rows, rows], symmetric, is whether published values differ by more than chance; without it, all
    pairs that differ are clear.
    """
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(published, dtype=np.float64)
    signs = [np.sign(values[:, None] - values[None, :]) for values in (a, b)]
    differ = signs[1] != 0
    agree = np.where(differ, (1 + signs[0] * signs[1]) / 2, 0.0)
    clear = differ if is_clear is None else differ & is_clear
    clearly = np.where(clear, agree, 0.0)
    of_rows = [
        float(sum_ / count) if count else math.nan
        for sum_, count in zip(clearly.sum(axis=1), clear.sum(axis=1), strict=True)
    ]
    tau = float(scipy.stats.kendalltau(a, b).statistic) if len(set(a)) > 1 and len(set(b)) > 1 else math.nan
    all_pairs, clear_pairs = (
        (int(which.sum()) // 2, float(scores.sum()) / 2) for which, scores in ((differ, agree), (clear, clearly))
    )
    return Order(*all_pairs, *clear_pairs, tuple(of_rows), tau)


@dataclass(frozen=True)
class Agreement:
    """The agreement of one published table's rows in one metric."""

    metric: str  # a key of `METRICS`
    table: str  # the published table
    order: Order  # the order of the rows with measured runs
    twins: dict[str, str]  # whether IID minus Non-IID has the published sign ("yes", "no" or "tie"), by setting
    clear_twins: frozenset[str]  # the settings whose published difference of partitions exceeds chance

    def __str__(self) -> str:
        order = self.order
        sentence = f"{METRICS[self.metric]}, Table {self.table}: "
        if not order.pairs:
            return sentence + "no two rows whose published values differ."
        tau = f" (tau-b {order.tau:.2f})" if math.isfinite(order.tau) else ""
        if self.metric not in COUNTED:
            sentence += f"{order.agreeing:g} of {order.pairs} pairs of rows {PUBLISHED_DIRECTION}{tau}"
        elif order.clear_pairs:
            sentence += f"{order.clear_agreeing:g} of {order.clear_pairs} pairs of rows {CLEARLY} "
            sentence += f"{PUBLISHED_DIRECTION}; {order.agreeing:g} of {order.pairs} of all pairs{tau}"
        else:
            sentence += f"no pairs of rows {CLEARLY}; {order.agreeing:g} of {order.pairs} of all pairs "
            sentence += f"{PUBLISHED_DIRECTION}{tau}"
        if self.twins:
            parts = [sign for setting, sign in self.twins.items() if setting in self.clear_twins]
            is_all = len(parts) == len(self.twins)
            scores = [f"{_signs(parts)} {'such ' * (self.metric in COUNTED)}twins"] if parts else []
            scores += [] if is_all else [f"{_signs(list(self.twins.values()))} of all twins"]
            sentence += f"; IID minus Non-IID has the published sign in {', '.join(scores)}"
        return sentence + "."


def _signs(signs: list[str]) -> str:
    ties = f" ({signs.count('tie')} tied)" if "tie" in signs else ""
    return f"{signs.count('yes')} of {len(signs)}{ties}"


def agreements(table: pd.DataFrame) -> list[Agreement]:
    """Return the agreement of each published table and metric for which a table of runs or over seeds has values."""
    return [agreement for metric in METRICS for agreement, _ in _judged(table, metric)]


def chance(judged: Sequence[Agreement]) -> list[str]:
    """Return the sentence on the definition of chance; empty if it is not used."""
    return [CHANCE] if any(agreement.metric in COUNTED and agreement.order.pairs for agreement in judged) else []


def against(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with those columns of `AGAINST` that have values."""
    more: dict[str, list[object]] = {}
    for metric in COUNTED:
        published = measured(table, metric)[1]
        intervals = zip(table[f"{metric}_share_low"], table[f"{metric}_share_high"], published, strict=True)
        more[f"{metric}_size"] = [
            size(*interval) if comparable and not pd.isna([*interval]).any() else None
            for comparable, interval in zip(is_alike(table), intervals, strict=True)
        ]
    for metric in METRICS:
        cells_of_rows = {key: cells for _, points in _judged(table, metric) for key, cells in points.items()}
        ours, published = measured(table, metric)
        keys = [key if has else None for key, has in zip(_keys(table), ours.notna() & published.notna(), strict=True)]
        more[f"{metric}_pairs"] = [None if key is None else cells_of_rows[key][0] for key in keys]
        more[f"{metric}_twin"] = [None if key is None else cells_of_rows[key][1] for key in keys]
    known = {name: cells for name, cells in more.items() if any(cell is not None for cell in cells)}
    marks = pd.DataFrame(known, index=table.index).astype({name: AGAINST[name] for name in known})
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

    def column(name: str) -> "pd.Series[float]":
        return table[name].astype("Float64") if name in table else pd.Series(pd.NA, table.index, "Float64")

    if metric == "exposure":
        published, ours = column("published_exposure"), column("mean_space_exposure")
        # Over the complete space, as in the paper, if all rows have it, because two kinds of exposure have no common
        # order.
        return (column("mean_exposure") if ours[published.notna()].isna().any() else ours), published
    if metric == "extracted":
        return column("bs") / column("canaries"), column("published_extracted")
    return column(metric) / column("canaries"), column(f"published_{metric}") / column("published_canaries")


Key = tuple[str, ...]  # cells of `ROW`
Points = dict[Key, tuple[float, float]]  # ours, the mean over runs, and theirs


def _judged(table: pd.DataFrame, metric: str) -> Iterator[tuple[Agreement, dict[Key, tuple[float | None, str | None]]]]:
    """Yield each published table's agreement of rows, with the cells of METRIC_pairs and METRIC_twin for each row."""
    values_of_rows: dict[Key, list[tuple[float, float]]] = {}
    for key, ours, published in zip(_keys(table), *measured(table, metric), strict=True):
        if not pd.isna(ours) and not pd.isna(published):
            values_of_rows.setdefault(key, []).append((ours, published))
    for name in dict.fromkeys(key[0] for key in values_of_rows):
        points: Points = {}
        for key, values in values_of_rows.items():
            if key[0] == name:
                points[key] = round(float(np.mean([ours for ours, _ in values])), ROUNDING), values[0][1]
        is_clear = _is_clear(table, metric, list(points))
        ours_of_rows, published_of_rows = zip(*points.values(), strict=True)
        rows = order(ours_of_rows, published_of_rows, is_clear)
        twins = _twins(points)
        of_setting = {
            setting: tuple(at for at, key in enumerate(points) if key[2] == setting and key[1] in PARTITIONS)
            for setting in twins
        }
        clear_twins = frozenset(one for one, at in of_setting.items() if is_clear is None or is_clear[at])
        cells = {
            key: (
                None if math.isnan(share) else share,
                twins[key[2]] if key[1] in PARTITIONS and key[2] in clear_twins else None,
            )
            for key, share in zip(points, rows.of_rows, strict=True)
        }
        yield Agreement(metric, name, rows, twins, clear_twins), cells


def _is_clear(table: pd.DataFrame, metric: str, keys: list[Key]) -> NDArray[np.bool_] | None:
    """Return whether published values of rows differ by more than chance, bool [rows, rows]; None without counts."""
    if metric not in COUNTED:
        return None
    columns = (table[f"published_{metric}"], table["published_canaries"])
    published = dict(zip(_keys(table), zip(*columns, strict=True), strict=True))
    counts = [tuple(map(int, published[key])) for key in keys]
    return np.array(
        [
            [differ_by_more_than_chance((one, other), (of_one, of_other)) for other, of_other in counts]
            for one, of_one in counts
        ]
    )


def _twins(points: Points) -> dict[str, str]:
    """Return METRIC_twin of the settings whose partitions differ in the paper."""
    signs = {}
    for name, _, setting in points:
        iid, non_iid = (points.get((name, partition, setting)) for partition in PARTITIONS)
        if iid and non_iid and iid[1] != non_iid[1]:
            ours, published = iid[0] - non_iid[0], iid[1] - non_iid[1]
            signs[setting] = "tie" if not ours else "yes" if (ours > 0) == (published > 0) else "no"
    return signs


def _keys(table: pd.DataFrame) -> list[Key]:
    columns = [table[name].fillna("") if name in table else [""] * len(table) for name in ROW]
    return list(zip(*columns, strict=True))
