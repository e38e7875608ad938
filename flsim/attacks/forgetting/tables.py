"""Forgetting as tables: times of groups, the success of attacks by rounds since last use, and tests of differences."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flsim.attacks.forgetting.measure import Forgetting
from flsim.attacks.result import text_of
from flsim.results.tables import user_share
from flsim.show.table import Field, Table, table_of

LEVEL = 0.05  # level of a corrected log-rank test
SUMMARY = (
    "T({alpha:g}): the smallest k, in rounds since last use, from which on the one-sided 95% upper bound of "
    "the accuracy is at most {alpha:g}; > means that it was not reached by the last k. At best: the smallest "
    "alpha that this number of canaries can show. Half by: rounds from the end of the window until half of "
    "the canaries have had an evaluated rank that does not reveal them (p > 0.05). Nats: log-perplexity in "
    "arm OUT minus log-perplexity in arm IN, as a mean over canaries, when the window ends. Left %: the share "
    "of this difference that remains at the end of training. 95%: Student's t over seeds."
)
K = (
    "k: rounds since last use; a row uses the last evaluation of each canary up to k, after the previous row. "
    "Bits: median exposure of arms IN and OUT, with a 95% interval over canaries. Acc.: accuracy of "
    "distinguishing IN from OUT with a threshold that half of the canaries chose and the other half tested, "
    "with its upper bound. Prec.: precision at a false-positive rate of 10%. Heuristic eps.: ln(TPR / FPR) at "
    "this false-positive rate, which is no bound. Intervals and tests treat canaries as independent, but "
    "canaries of one model are not independent."
)
LABELS = (
    Field("Setting", "setting"),
    Field("Rounds", "window"),
    Field("Planted", "planted"),
    Field("Hardness", "hardness"),
)
SINCE = Field("k", "k", "{:,}")
BY_K = (
    Field("n", "canaries", "{:,}"),
    Field("Bits IN", "bits_in", "{:.1f}", ends=("bits_in_low", "bits_in_high")),
    Field("OUT", "bits_out", "{:.1f}"),
    Field("Acc. %", "success", "{:.0f}", 100),
    Field("at most", "success_upper", "{:.0f}", 100),
    Field("Prec. %", "precision", "{:.0f}", 100),
    Field("Heuristic eps.", "heuristic_epsilon", "{:.1f}"),
)
ADVANTAGE = (
    Field("Nats", "advantage", "{:.2f}", ends=("advantage_low", "advantage_high"), is_late=True),
    Field("Left %", "left", "{:.0f}", 100, ends=("left_low", "left_high")),
)
TESTS = (
    Field("p", "p", "{:.2g}"),
    Field("Holm", "p_holm", "{:.2g}"),
    Field("Left, points", "left_difference", "{:+.0f}", 100, ends=("left_difference_low", "left_difference_high")),
)


def window_text(row: Mapping[Any, Any]) -> str:
    """Return the rounds of a group's window, e.g. ``"1-50"``; ``"51"`` for one round, ``"all"`` without a bound."""
    first, last = ("" if pd.isna(row[name]) else str(int(row[name])) for name in ("first_round", "last_round"))
    return (first or "all") if first == last else f"{first or 1}-{last}"


def planted_text(row: Mapping[Any, Any]) -> str:
    """Return the configuration of a group, e.g. ``"10 copies"``, ``"1/20, 50%"``, or ``"all"`` if pooled."""
    if pd.isna(row["p_u"]):
        return "all" if pd.isna(row["copies"]) else f"{row['copies']:,} cop{'y' if row['copies'] == 1 else 'ies'}"
    return f"{user_share(row['p_u'])}, {100 * row['p_e']:.6g}%"


def rounds_text(row: Mapping[Any, Any]) -> str:
    """Return the window of a group as text, e.g. ``"rounds 1-50"``, ``"round 51"`` or ``"all rounds"``."""
    window = window_text(row)
    return "all rounds" if window == "all" else f"round{'s' * (not window.isdecimal())} {window}"


def name_text(row: Mapping[Any, Any], pooled: str = "all canaries") -> str:
    """Return a group's name among those of its window, e.g. ``"10 copies, hard"``; `pooled` for all numbers."""
    planted = planted_text(row)
    hardness = "" if pd.isna(row["hardness"]) else f", {row['hardness']}"
    return f"{pooled if planted == 'all' else planted}{hardness}"


def group_text(row: Mapping[Any, Any]) -> str:
    """Return a group's name within its setting, e.g. ``"rounds 1-50, 10 copies, hard"``."""
    return f"{rounds_text(row)}, {name_text(row)}"


def time_text(rounds: Any, is_censored: Any) -> str:
    """Return a time in rounds, ``"> 50"`` if it is censored, and ``"-"`` if it is unknown."""
    if pd.isna(is_censored):
        return "-"
    return f"> {rounds:,}" if is_censored else f"{rounds:,}"


def to_text(measured: Forgetting) -> str:
    """Return the times of groups, a table for each group, the significant tests, and notes."""
    parts = [text_of("How fast canaries are forgotten", [times_table(measured)])]
    for row in measured.times.to_dict("records"):
        setting = f"{row['setting']}: " if measured.times["series"].nunique() > 1 else ""
        table = measured.success[measured.success["group"] == row["group"]]
        tables = [table_of(table, [SINCE], [BY_K])] if len(table) else []
        parts.append(text_of(f"{setting}{group_text(row)}", tables, [] if tables else ["No canary was used."]))
    if len(measured.tests):
        parts.append(_tests(measured))
    return "\n".join([*parts, text_of(summary_of(measured), [], [K, *measured.notes])])


def summary_of(measured: Forgetting) -> str:
    """Return the explanation of the table of times."""
    return SUMMARY.format(alpha=float(measured.times["alpha"].iloc[0]))


def times_table(measured: Forgetting) -> Table:
    """Return the table of forgetting times, a row for each group."""
    times, rows = measured.times, measured.times.to_dict("records")
    named = _named(times).assign(
        used=times["canaries"] - times["never_used"],
        forgotten_by=[
            time_text(row["k_max"] if pd.isna(row["time"]) else row["time"], row["is_censored"]) for row in rows
        ],
        half_by=[time_text(row["median_time"], row["median_is_censored"]) for row in rows],
    )
    summary = (
        Field("Canaries", "used", "{:,}"),
        Field("Seeds", "seeds", "{:,}"),
        Field("Last k", "k_max", "{:,}"),
        Field(f"T({float(times['alpha'].iloc[0]):g})", "forgotten_by"),
        Field("At best", "least_alpha", "{:.2f}"),
        Field("Half by", "half_by"),
    )
    return table_of(named, _labels(named), [summary, ADVANTAGE])


def success_table(measured: Forgetting) -> Table:
    """Return one table of the success of attacks, a row for each group and k."""
    named = _named(measured.success)
    return table_of(named, [*_labels(named), SINCE], [BY_K], [K])


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of groups with their windows and configurations in words."""
    records = rows.to_dict("records")
    return rows.assign(window=[*map(window_text, records)], planted=[*map(planted_text, records)])


def _labels(named: pd.DataFrame) -> Sequence[Field]:
    return [label for label in LABELS if named[label.name].nunique(dropna=False) > 1] or LABELS[1:3]


def _tests(measured: Forgetting) -> str:
    """Return the pairs of groups with significant differences, and the number of tests."""
    tests, rows = measured.tests, measured.times.set_index("group").to_dict("index")
    for side in "ab":
        names = [f"{row['setting']}: {group_text(row)}" for row in (rows[group] for group in tests[f"group_{side}"])]
        tests = tests.assign(**{side: names})
    printed = tests[
        (tests["p_holm"] <= LEVEL) | ((tests["differs"] == "setting") & tests["left_difference_low"].notna())
    ]
    tested, differing = int(tests["p"].notna().sum()), int((tests["p_holm"] <= LEVEL).sum())
    note = (
        "p: log-rank tests of the rounds from the end of the window until a canary's rank does not reveal it, "
        f"between groups that differ in one thing; {differing} of {tested} pairs differ after the correction "
        f"by Holm; {len(tests) - tested} pairs have no ranks at equal numbers of rounds. Left: the remaining "
        "share in the first group minus the remaining share in the second group, paired by seed."
    )
    tables = [table_of(printed, [Field("Group", "a"), Field("against", "b")], [TESTS])] if len(printed) else []
    return text_of("Differences between groups", tables, [note])
