"""Attacks on membership as text for people, and as objects for JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flsim.membership.inference import CONFOUNDED, NOTES
from flsim.membership.stored import CURVE, LEVELS, column
from flsim.results.formats import formatted, note
from flsim.results.layout import Column, markdown

AREA = (
    "AUROC: the probability that a member scores above a non-member, with a 95% interval by resampling authors; 0.5 "
    "says nothing."
)
RATE = (
    "Members % at 0.1%, 1% and 10%: share of members that the attack names where so many non-members are false alarms, "
    "with a 95% interval that treats records as independent. Empty where there are too few non-members to see so low a "
    "rate."
)
ALLOWED = "Allowed: the largest share that the run's own ledger leaves to any attacker."
CONTROLS = (
    "Controls: AUROC before training, and with permuted labels. Both should be near 0.5. Where the one before training "
    "is not, members differ from non-members in what they are."
)


def to_text(name: str, table: pd.DataFrame) -> str:
    """Return the rows of one run as a table with sentences below.

    Args:
        name: name of the run's folder.
        table: its rows, from `flsim.membership.inference.attack_run`.
    """
    first = table.iloc[0]
    columns = [
        Column("Attack", table["attack"].tolist(), is_number=False),
        Column("In", formatted(table["n_in"], "{:,}")),
        Column("Out", formatted(table["n_out"], "{:,}")),
    ]
    area = [
        Column("AUROC", formatted(table["auroc"], "{:.3f}"), note=AREA),
        Column("95%", _intervals(table["auroc_low"], table["auroc_high"], "{:.3f}")),
    ]
    controls = [
        Column("Untrained", formatted(table["untrained_auroc"], "{:.3f}"), is_late=True, note=CONTROLS),
        Column("Permuted", formatted(table["permuted_auroc"], "{:.3f}"), is_late=True),
    ]
    title = f"{first['setting']} ({name}), after round {first['round']:,}: membership of records\n"
    text = markdown(columns, [area, *(_rates(table, level) for level in LEVELS), controls])
    return "\n".join([title, text, *map(note, [*_about(first), *table.attrs.get(NOTES, [])])])


def to_objects(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return rows as objects for JSON, with a list of rates and the curve's points inside; unknown values are None."""
    return [_object(row) for row in table.to_dict("records")]


def _object(row: Mapping[Any, Any]) -> dict[str, Any]:
    parts = {column(name, level) for level in LEVELS for name in ("alarms", "tpr", "tpr_low", "tpr_high", "allowed")}
    plain = {str(name): _plain(value) for name, value in row.items() if name not in {*parts, *CURVE}}
    rates = [
        {
            "fpr": level,
            "alarms": _plain(row[column("alarms", level)], whole=True),
            "tpr": _plain(row[column("tpr", level)]),
            "low": _plain(row[column("tpr_low", level)]),
            "high": _plain(row[column("tpr_high", level)]),
            "allowed": _plain(row[column("allowed", level)]),
        }
        for level in LEVELS
    ]
    points = [
        dict(zip(("fpr", "tpr", "allowed"), map(_plain, point), strict=True))
        for point in zip(*(row[name] for name in CURVE), strict=True)
    ]
    return plain | {"rates": rates, "curve": points}


def _plain(value: Any, whole: bool = False) -> Any:
    if value is None or pd.isna(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return int(value) if whole else value


def _rates(table: pd.DataFrame, level: float) -> Sequence[Column]:
    heading = f"{100 * level:g}%"
    unit = [
        Column(f"% at {heading}", formatted(table[column("tpr", level)], "{:.1f}", 100), note=RATE),
        Column(
            "95%", _intervals(table[column("tpr_low", level)], table[column("tpr_high", level)], "{:.1f}", scale=100)
        ),
    ]
    if table[column("allowed", level)].notna().any():
        unit.append(Column("Allowed", formatted(table[column("allowed", level)], "{:.1f}", 100), note=ALLOWED))
    return unit


def _about(first: "pd.Series[Any]") -> list[str]:
    """Return sentences on the control, and on the claim."""
    control = float(first["control_auroc"])
    sentences = [
        f"Blind control: {control:.3f} by length and word frequency alone, which read no model. "
        + (
            f"It is above {CONFOUNDED:g}: the comparison is confounded, and no AUROC here shows that the model "
            "remembers."
            if first["is_confounded"]
            else "The comparison is not confounded by these two."
        )
    ]
    if not math.isnan(float("nan") if first["epsilon"] is None else first["epsilon"]):
        sentences.append(
            f"The ledger claims epsilon {first['epsilon']:.3g} at delta {first['delta']:.3g} for one "
            f"{first['protects']} ({first['neighbours']})."
        )
    return sentences


def _intervals(low: "pd.Series[Any]", high: "pd.Series[Any]", template: str, scale: float = 1) -> list[str]:
    ends = zip(formatted(low, template, scale), formatted(high, template, scale), strict=True)
    return [f"{one}-{other}" if one else "" for one, other in ends]
