"""How often canaries occur: their configuration (p_u, p_e), or where nobody knows that, how many copies there are."""

import math
from dataclasses import dataclass

import pandas as pd

from flsim.results.tables import user_share


@dataclass(frozen=True, order=True)
class Configuration:
    """What canaries of a group have in common, in the order of expected copies.

    Attributes:
        order: by which configurations are sorted.
        p_u, p_e: probabilities; NaN where copies are said.
        copies: planned ones; None where probabilities are said, or where nobody knows.
    """

    order: tuple[float, ...]
    p_u: float
    p_e: float
    copies: int | None

    @property
    def label(self) -> str:
        if not math.isnan(self.p_u):
            return f"p_u {user_share(self.p_u)}, p_e {percent(self.p_e)}"
        return "all canaries" if self.copies is None else f"{self.copies:,} cop{'y' if self.copies == 1 else 'ies'}"


def by_configuration(rows: pd.DataFrame) -> dict[Configuration, pd.DataFrame]:
    """Rows with a roster's columns, by configuration, the least expected insertions first."""
    found: dict[Configuration, list[int]] = {}
    for place, row in enumerate(rows.to_dict("records")):
        p_u, p_e = float(row["p_u"]), float(row["p_e"])
        if math.isnan(p_u) or math.isnan(p_e):
            # NaN equals nothing, so that a key needs one NaN for all.
            copies = row.get("planned_insertions", row.get("insertions"))
            known = None if copies is None or pd.isna(copies) else int(copies)
            key = Configuration((known or 0.0,), math.nan, math.nan, known)
            key = next((other for other in found if other.order == key.order and math.isnan(other.p_u)), key)
        else:
            key = Configuration((float(f"{p_u * p_e:.12g}"), p_u), p_u, p_e, None)
        found.setdefault(key, []).append(place)
    return {key: rows.iloc[found[key]] for key in sorted(found, key=lambda each: each.order)}


def percent(share: float) -> str:
    return f"{100 * share:.6g}%"
