"""The question that Random Sampling and Beam Search ask of a model: |R|, the known words, and the canaries' length.

A canary that ranks first among 20,000 references need not do so among 2,000,000, and a shorter continuation is likelier
to be first. So a share of memorized canaries is held in size only against a share that answers the same question.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from flsim.results.published import PREFIX, ROW_OF_QUESTION
from flsim.results.store import RunResults

REFERENCES = "references"
ASKED = {name: "Int64" for name in ROW_OF_QUESTION if name != REFERENCES}  # columns beside those of every table
WORDS = {
    "references": "|R| is {} here and {} in the paper",
    "prefix": "the length of the known prefix is {} here and {} in the paper",
    "length": "the length of canaries is {} here and {} in the paper",
}


def asked(run: RunResults, published: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the columns of `ASKED` for a run that stands for a published row with counts; empty for other runs."""
    if not published or not {*ROW_OF_QUESTION} & {*published}:
        return {}
    return {"prefix": run.prefix, "length": run.length}


def is_alike(table: pd.DataFrame) -> "pd.Series[bool]":
    """Return whether each row of a table answers the question of its published row; False if a part is unknown."""
    alike = pd.Series(data=True, index=table.index)
    for name in ROW_OF_QUESTION:
        alike &= (_column(table, name) == _column(table, PREFIX + name)).fillna(value=False).astype(bool)
    return alike


def differences(table: pd.DataFrame) -> str:
    """Return in words what rows ask otherwise than their published rows.

    An example is ``"|R| is 20,000 here and 2,000,000 in the paper"``.

    Args:
        table: rows that are not `is_alike`.
    """
    parts = []
    for name, words in WORDS.items():
        ours, theirs = _column(table, name), _column(table, PREFIX + name)
        differ = ~(ours == theirs).fillna(value=False).astype(bool)
        if differ.any():
            parts.append(words.format(_listed(ours[differ]), _listed(theirs[differ])))
    return ", ".join(parts)


def _column(table: pd.DataFrame, name: str) -> "pd.Series[Any]":
    return table[name].astype("Int64") if name in table else pd.Series(pd.NA, table.index, "Int64")


def _listed(values: "pd.Series[Any]") -> str:
    texts = ["unknown" if pd.isna(value) else f"{value:,}" for value in values]
    return " or ".join(dict.fromkeys(texts))
