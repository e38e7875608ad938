"""Forgetting as text for people, and as objects for JSON."""

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from flsim.attacks.forgetting.measure import Forgetting
from flsim.results.tables import user_share
from flsim.show.table import Column, formatted, markdown, note

LEVEL = 0.05  # of a log-rank test, corrected
SUMMARY = (
    "T({alpha:g}): the least k, in rounds since last use, from which on the one-sided 95% upper bound of the accuracy "
    "is at most {alpha:g}; > means that it was not reached by the last k. At best: the least alpha that so many "
    "canaries can show. Half by: rounds from the end of the window until half of the canaries have "
    "had an evaluated rank that does not reveal them (p > 0.05)."
)
ADVANTAGE = (
    "Nats: log-perplexity in arm OUT less that in arm IN, mean over canaries, when the window ends. Left %: its share "
    "at the end of training. 95%: Student's t over seeds."
)
K = (
    "k: rounds since last use; a row is of each canary's last evaluation up to k, after the row before. Bits: median "
    "exposure of arms IN and OUT, with a 95% interval over canaries."
)
ACCURACY = (
    "Acc.: accuracy of telling IN from OUT by a threshold that half of the canaries chose and the other half tested, "
    "with its upper bound. Prec.: precision at a false-positive rate of 10%. Heuristic eps.: ln(TPR / FPR) there, "
    "which bounds nothing."
)
INDEPENDENT = "Intervals and tests treat canaries as independent, and those of one model are not."


def window_text(row: Mapping[Any, Any]) -> str:
    """Return the rounds of a group's window, e.g. ``"1-50"``; ``"51"`` for one round, ``"all"`` without a bound."""
    first, last = (None if pd.isna(row[name]) else int(row[name]) for name in ("first_round", "last_round"))
    if first is None and last is None:
        return "all"
    if first == last:
        return f"{first}"
    return f"{first or 1}-{'' if last is None else last}"


def planted_text(row: Mapping[Any, Any]) -> str:
    """Return how a group's canaries were planted, e.g. ``"10 copies"``, ``"1/20, 50%"``, or ``"all"`` if pooled."""
    if pd.isna(row["p_u"]):
        return "all" if pd.isna(row["copies"]) else f"{row['copies']:,} cop{'y' if row['copies'] == 1 else 'ies'}"
    return f"{user_share(row['p_u'])}, {100 * row['p_e']:.6g}%"


def rounds_text(row: Mapping[Any, Any]) -> str:
    """Return a group's window in words, e.g. ``"rounds 1-50"``, ``"round 51"`` or ``"all rounds"``."""
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
    """Return a time in rounds, ``"> 50"`` where it is censored, and ``"-"`` where it is unknown."""
    if pd.isna(is_censored):
        return "-"
    return f"> {rounds:,}" if is_censored else f"{rounds:,}"


def to_text(measured: Forgetting) -> str:
    """Return the summary, a table for each group, the tests that find a difference, and notes; 80 characters wide."""
    times, alpha = measured.times, float(measured.times["alpha"].iloc[0])
    parts = [_summary(times, alpha) + note(SUMMARY.format(alpha=alpha))]
    if times["left"].notna().any():
        parts.append(_advantage(times) + note(ADVANTAGE) + _differences(measured))
    for about in times.to_dict("records"):
        setting = f"{about['setting']}: " if times["series"].nunique() > 1 else ""
        table = measured.success[measured.success["group"] == about["group"]]
        parts.append(f"{setting}{group_text(about)}\n\n" + (_table(table) if len(table) else "No canary was used.\n"))
    has_twin = measured.success["success"].notna().any()
    parts.append(note(K) + (note(ACCURACY) if has_twin else "") + note(INDEPENDENT))
    if len(measured.tests):
        parts.append(_tests(measured))
    return "\n".join([*parts, *map(note, [*_limits(times, alpha), *measured.notes])])


def _limits(times: pd.DataFrame, alpha: float) -> list[str]:
    """Return sentences on groups that are too small, and on canaries that no sharer used."""
    sentences, few = [], int((times["least_alpha"] > alpha).sum())
    if few:
        sentences.append(
            f"In {few} of {len(times)} groups canaries are too few to show an alpha of {alpha:g} at an accuracy of one "
            f"half: plant more, train more seeds, pool all numbers of copies, or name a larger alpha."
        )
    if never := int(times["never_used"].sum()):
        sentences.append(
            f"Never used, as no sharer took part: {never:,} of {int(times['canaries'].sum()):,} canaries, which are in "
            f"no row."
        )
    return sentences


def _summary(times: pd.DataFrame, alpha: float) -> str:
    rows = times.to_dict("records")
    used = times["canaries"] - times["never_used"]
    columns = [
        Column("Canaries", [f"{count:,}" for count in used]),
        Column("Seeds", [f"{count:,}" for count in times["seeds"]]),
        Column("Last k", formatted(times["k_max"], "{:,}")),
        Column(f"T({alpha:g})", [time_text(_first(row["time"], row["k_max"]), row["is_censored"]) for row in rows]),
        Column("At best", formatted(times["least_alpha"], "{:.2f}")),
        Column("Half by", [time_text(row["median_time"], row["median_is_censored"]) for row in rows]),
    ]
    return markdown(_labels(times), [columns])


def _labels(times: pd.DataFrame) -> list[Column]:
    """Return the columns that tell groups apart."""
    rows = times.to_dict("records")
    labels = [
        Column("Setting", times["setting"].tolist(), is_number=False),
        Column("Rounds", [window_text(row) for row in rows], is_number=False),
        Column("Planted", [planted_text(row) for row in rows], is_number=False),
        Column("Hardness", times["hardness"].fillna("").tolist(), is_number=False),
    ]
    return [label for label in labels if len(set(label.cells)) > 1] or labels[1:3]


def _advantage(times: pd.DataFrame) -> str:
    columns = [
        Column("Nats", formatted(times["advantage"], "{:.2f}")),
        Column("95%", _interval(times, "advantage", "{:.2f}")),
        Column("Left %", formatted(times["left"], "{:.0f}", 100)),
        Column("95%", _interval(times, "left", "{:.0f}", 100)),
    ]
    return markdown(_labels(times), [columns])


def _differences(measured: Forgetting) -> str:
    """Return a sentence on what is left in each setting less another, paired by seed; empty without an interval."""
    rows, lines = measured.times.set_index("group").to_dict("index"), []
    known = measured.tests[(measured.tests["differs"] == "setting") & measured.tests["left_difference_low"].notna()]
    for test in known.to_dict("records"):
        a, b = rows[test["group_a"]], rows[test["group_b"]]
        difference, *ends = (100 * test[f"left_difference{end}"] for end in ("", "_low", "_high"))
        lines.append(
            f"{group_text(a)}: {a['setting']} against {b['setting']}: {difference:+.0f} points of what is left "
            f"({ends[0]:+.0f} to {ends[1]:+.0f}), paired by seed."
        )
    return "".join(map(note, lines))


def _first(value: Any, other: Any) -> Any:
    return other if pd.isna(value) else value


def _table(table: pd.DataFrame) -> str:
    columns = [
        Column("n", [f"{count:,}" for count in table["canaries"]]),
        Column("Bits IN", formatted(table["bits_in"], "{:.1f}")),
        Column("95%", _interval(table, "bits_in", "{:.1f}")),
    ]
    if table["bits_out"].notna().any():
        columns.append(Column("OUT", formatted(table["bits_out"], "{:.1f}")))
    if table["success"].notna().any():
        columns += [
            Column("Acc. %", formatted(table["success"], "{:.0f}", 100)),
            Column("at most", formatted(table["success_upper"], "{:.0f}", 100)),
        ]
    if table["precision"].notna().any():
        columns += [
            Column("Prec. %", formatted(table["precision"], "{:.0f}", 100)),
            Column("Heuristic eps.", formatted(table["heuristic_epsilon"], "{:.1f}")),
        ]
    return markdown([Column("k", [f"{k:,}" for k in table["k"]])], [columns]).rstrip("\n") + "\n"


def _interval(table: pd.DataFrame, name: str, template: str, factor: float = 1) -> list[str]:
    ends = (formatted(table[f"{name}_{end}"], template, factor) for end in ("low", "high"))
    return [f"{low}-{high}" if low else "" for low, high in zip(*ends, strict=True)]


def _tests(measured: Forgetting) -> str:
    """Return sentences on the log-rank tests: which find a difference, and of how many."""
    tests, rows = measured.tests, measured.times.set_index("group").to_dict("index")
    tested, differing = tests[tests["p"].notna()], tests[tests["p_holm"] <= LEVEL]
    lines = [
        f"Log-rank tests of the rounds from the end of the window until a canary's rank does not reveal the canary: a "
        f"difference in {len(differing)} of {len(tested)} pairs of groups that differ in one thing (corrected by Holm)."
    ]
    if others := len(tests) - len(tested):
        lines.append(
            f"Pairs of groups that were not tested, because they have no ranks at equal numbers of rounds since the "
            f"end of the window: {others}."
        )
    for test in differing.to_dict("records"):
        a, b = (group_text(rows[test[f"group_{side}"]]) for side in "ab")
        lines.append(f"{a} against {b}: p = {test['p']:.2g}, corrected {test['p_holm']:.2g}.")
    return "".join(map(note, lines))


def to_object(measured: Forgetting) -> dict[str, Any]:
    """Return the measures for JSON: ``groups``, each with its rows ``by_k``; ``tests``; and ``notes``."""
    groups = _records(measured.times)
    keys = set(measured.times.columns) - {"canaries", "seeds"}
    for row in _records(measured.success):
        by_k = groups[row["group"]].setdefault("by_k", [])
        by_k.append({name: value for name, value in row.items() if name not in keys})
    return {"groups": groups, "tests": _records(measured.tests), "notes": list(measured.notes)}


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(table.to_json(orient="records", double_precision=15))
    return records
