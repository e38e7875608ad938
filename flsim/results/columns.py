"""What tables of runs and tables over seeds have in common, column by column: types, and where cells are from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from flsim.results.agreement import share_interval
from flsim.results.store import RunResults

PRIVACY = {
    "epsilon_paper": "Float64",
    "epsilon_sound": "Float64",
    "sound_convention": "string",
    "delta": "Float64",
}
RECORD_PRIVACY = {
    "record_epsilon": "Float64",
    "record_convention": "string",
    "record_delta": "Float64",
}
# The papers' column -> ours, and its type. What is neither here nor `table` or `data` says what was trained.
RESULTS = {
    "canaries": ("published_canaries", "Int64"),
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
PUBLISHED = {
    "published_table": "string",
    "published_data": "string",
    "published_setting": "string",
    **dict(RESULTS.values()),
}


def frame(
    rows: Sequence[Mapping[str, Any]], always: Mapping[str, str], groups: Iterable[Mapping[str, str]]
) -> pd.DataFrame:
    """Rows with columns of the given types: those of `always`, and those groups of which any row has anything."""
    columns = dict(always)
    for more in groups:
        if any(row.get(name) is not None for row in rows for name in more):
            columns |= more
    has = {name for row in rows for name in row if row[name] is not None}
    columns = {name: kind for name, kind in columns.items() if name not in PUBLISHED or name in has}
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def shares(metric: str, memorized: int, canaries: int) -> dict[str, float]:
    """The exact 95% interval of a share of canaries; see `flsim.results.agreement.share_interval`."""
    return dict(zip((f"{metric}_share_low", f"{metric}_share_high"), share_interval(memorized, canaries), strict=True))


def privacy(run: RunResults, at: int) -> dict[str, Any]:
    """The columns of `PRIVACY`, or of `RECORD_PRIVACY`, of a run with noise."""
    metrics = run.rows.loc[(run.rows["round"] == at) & (run.rows["canary"] == ""), "metric"]
    shown: dict[str, Any] = {}
    for name in metrics:
        if name.startswith("epsilon "):
            convention = name.removeprefix("epsilon ")
            if convention == "paper":
                shown["epsilon_paper"] = run.of_model(name, at)
            else:
                shown |= {"epsilon_sound": run.of_model(name, at), "sound_convention": convention}
            shown["delta"] = run.of_model("delta", at)
        elif name.startswith("record epsilon "):
            shown |= {"record_epsilon": run.of_model(name, at), "record_delta": run.of_model("record delta", at)}
            shown["record_convention"] = name.removeprefix("record epsilon ")
    return shown


def published(row: Mapping[str, Any] | None) -> dict[str, Any]:
    """The columns of `PUBLISHED` of a row of `flsim.results.published`; none without a row."""
    if not row:
        return {}
    trained = {name: row[name] for name in row if name not in RESULTS or name == "epsilon"}
    table, data = trained.pop("table", ""), trained.pop("data", None)
    words = [value if isinstance(value, str) else f"{name} {value:g}" for name, value in trained.items()]
    cells = {ours: row[name] for name, (ours, _) in RESULTS.items() if name in row}
    return {"published_table": table, "published_data": data, "published_setting": ", ".join(words), **cells}
