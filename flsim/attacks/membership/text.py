"""Attacks on membership as text for people, and as objects for JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flsim.attacks.membership.attacked import NOTES
from flsim.attacks.membership.inference import CONFOUNDED
from flsim.attacks.membership.stored import CURVE, LEVELS, column
from flsim.show.table import Column, formatted, markdown, note

AREA = (
    "AUROC: the probability that a member scores above a non-member, with a 95% interval by resampling authors; 0.5 "
    "says nothing."
)
RATE = (
    "Members % at 0.1%, 1% and 10%: share of members that the attack names where so many non-members are false alarms, "
    "with a 95% interval that treats them as independent. Empty where there are too few non-members to see so low a "
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
        table: its rows, from `flsim.attacks.membership.inference.attack_run`.
    """
    first = table.iloc[0]
    columns = [
        Column("Attack", table["attack"].tolist(), is_number=False),
        *([Column("Unit", table["unit"].tolist(), is_number=False)] if set(table["unit"]) != {"record"} else []),
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
    units = " and ".join(f"{unit}s" for unit in dict.fromkeys(table["unit"]))
    title = f"{first['setting']} ({name}), after round {first['round']:,}: membership of {units}\n"
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
        dict(zip((name.removeprefix("curve_") for name in CURVE), map(_plain, point), strict=True))
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


SHADOWS = (
    "In and Out: pairs of a run and a target that its training read, or did not. Each run is attacked once, with the "
    "others as shadow models. Intervals resample runs. Coins decided who is in, so that only training tells the two "
    "apart."
)


def shadows_to_text(setting: str, table: pd.DataFrame, targets: pd.DataFrame) -> str:
    """Return what attacks by shadow models do, as a table with sentences below.

    Args:
        setting: name of the runs' setting.
        table: rows of `flsim.attacks.membership.shadows.success`.
        targets: rows of `flsim.attacks.membership.shadows.counterfactual`.
    """
    columns = [
        Column("Attack", table["attack"].tolist(), is_number=False),
        Column("In", formatted(table["n_in"], "{:,}"), note=SHADOWS),
        Column("Out", formatted(table["n_out"], "{:,}")),
    ]
    groups = [
        [
            Column("AUROC", formatted(table["auroc"], "{:.3f}")),
            Column("95%", _intervals(table["auroc_low"], table["auroc_high"], "{:.3f}")),
        ]
    ]
    for level in LEVELS:
        if column("tpr", level) in table:
            ends = table[column("tpr_low", level)], table[column("tpr_high", level)]
            rates = formatted(table[column("tpr", level)], "{:.1f}", 100)
            groups.append([Column(f"% at {100 * level:g}%", rates), Column("95%", _intervals(*ends, "{:.1f}", 100))])
    first = table.iloc[0]
    title = f"{setting}: membership of {first['unit']}s by {first['shadows']} shadow models\n"
    return "\n".join([title, markdown(columns, groups), note(_memorization(targets))])


def shadows_to_objects(setting: str, table: pd.DataFrame, targets: pd.DataFrame) -> dict[str, Any]:
    """Return the same as an object for JSON, with the counterfactual memorization of each target."""
    rows, of_targets = (
        [{str(name): _plain(value) for name, value in row.items()} for row in part.to_dict("records")]
        for part in (table, targets)
    )
    return {"setting": setting, "attacks": rows, "targets": of_targets}


def _memorization(targets: pd.DataFrame) -> str:
    known = targets[targets["standard_error"].notna()]
    above = int((known["memorization"] > 2 * known["standard_error"]).sum())
    return (
        f"Counterfactual memorization: on average {known['memorization'].mean():.4f} nats a token more by runs that "
        f"read a target than by runs that did not; {above} of {len(known)} targets are above two standard errors."
    )
