"""Observations of canaries: a row per planted canary and evaluated round, with both arms side by side.

The columns are:

    run, setting, series, seed           the run of arm IN; its series is that of all seeds
    canary                               the canary's id
    p_u, p_e, copies                     how it was planted; copies is a number that was set
    first_round, last_round              its window, from 1; missing for no bound
    round                                number of completed rounds of the evaluated model
    last_use, uses                       last round in which a sharer took part, and how often sharers did
    since                                rounds since last use; missing before it, and where there was none
    clean, clean_round                   log-perplexity in arm OUT at the window's end, and the round of that evaluation
    nats_in, nats_out                    log-perplexities in both arms
    score_in, score_out                  calibrated scores: clean less log-perplexity, larger for a member
    bits_in, bits_out                    exposure in bits
    p_in, p_out                          exact p-values of the ranks; missing for text of held-out users
"""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flsim.audits.ranks import p_values
from flsim.forgetting.success import scores
from flsim.measures.random_sampling import LOG_PERPLEXITY, RANK
from flsim.results.store import RunResults

CONFIGURATION = {
    "p_u": "Float64",
    "p_e": "Float64",
    "copies": "Int64",
    "first_round": "Int64",
    "last_round": "Int64",
}
GROUP = {"setting": "string", "series": "string", **CONFIGURATION}
TYPES = {
    "run": "string",
    **GROUP,
    "seed": "Int64",
    "canary": "string",
    "round": "int64",
    "last_use": "Int64",
    "uses": "int64",
    "since": "float64",
    "clean": "float64",
    "clean_round": "Int64",
    **{f"{name}_{arm}": "float64" for name in ("nats", "score", "bits", "p") for arm in ("in", "out")},
}


def observations(results: RunResults, twin: RunResults | None, took_part: pd.DataFrame) -> pd.DataFrame:
    """Return the observations of a run of arm IN, and of its twin of arm OUT.

    Args:
        results: the run of arm IN.
        twin: the run of arm OUT of the same seed; None where there is none, whose columns are then NaN.
        took_part: the rounds in which sharers took part, with columns ``round`` and ``canary``; see
            `flsim.runs.participation`.

    Returns:
        A table with the columns of `TYPES`.
    """
    planted = _configured(results)
    used = took_part.groupby("canary")["round"]
    planted["last_use"] = used.max().reindex(planted["canary"]).to_numpy(dtype="float64", na_value=np.nan)
    planted["uses"] = used.size().reindex(planted["canary"]).fillna(0).to_numpy("int64")
    planted["clean"], planted["clean_round"] = _clean(planted, results, twin)
    tables = [_at(planted, round_, results, twin) for round_ in results.evaluated]
    table = pd.concat(tables, ignore_index=True) if tables else planted.assign(round=0).iloc[:0]
    return table.reindex(columns=list(TYPES)).astype(TYPES)


def _configured(results: RunResults) -> pd.DataFrame:
    """Return a row for each planted canary, with how it was planted."""
    roster = results.planted.reset_index(drop=True)
    planted = roster.reindex(columns=["canary", "p_u", "p_e", "first_round", "last_round"])
    planned = roster.get("planned_insertions")
    planted["copies"] = None if planned is None else planned.astype("Int64").where(planted["p_u"].isna())
    planted["is_natural"] = roster["is_natural"].astype(bool) if "is_natural" in roster else False
    return planted.assign(run=results.name, setting=results.setting, series=results.series, seed=results.seed)


def _clean(
    planted: pd.DataFrame, results: RunResults, twin: RunResults | None
) -> "tuple[pd.Series[float] | float, pd.Series[int] | None]":
    """Return each canary's log-perplexity in arm OUT at the evaluation nearest to its window's end, and that round.

    Any model of arm OUT is clean. Section 4.1 calibrates by the checkpoint before the injection, which arm OUT extends.
    """
    if twin is None:
        return np.nan, None
    by_round = {round_: twin.of_canaries(LOG_PERPLEXITY.name, round_) for round_ in twin.evaluated}
    measured = {round_: values for round_, values in by_round.items() if values is not None}
    if not measured:
        return np.nan, None
    ends = planted["last_round"].fillna(results.rounds).astype("int64")
    nearest = ends.map(lambda end: min(measured, key=lambda round_: (abs(round_ - end), round_)))
    values = [measured[round_][canary] for round_, canary in zip(nearest, planted["canary"], strict=True)]
    return pd.Series(values, dtype="float64"), nearest


def _at(planted: pd.DataFrame, round_: int, results: RunResults, twin: RunResults | None) -> pd.DataFrame:
    """Return the rows of one evaluated round."""
    since = round_ - planted["last_use"]
    table = planted.assign(round=round_, since=since.where(since >= 0))
    for arm, run in (("in", results), ("out", twin)):
        ranks, nats = (_measured(run, quantity.name, round_, planted) for quantity in (RANK, LOG_PERPLEXITY))
        references = None if run is None else run.references(round_)
        p = p_values(ranks, int(references)) if references else np.full(len(planted), np.nan)
        table[f"p_{arm}"] = np.where(planted["is_natural"], np.nan, p)  # natural text is likelier than random words
        table[f"bits_{arm}"], table[f"nats_{arm}"] = -np.log2(p), nats
        table[f"score_{arm}"] = scores(nats, table["clean"].to_numpy("float64"))
    return table


def _measured(run: RunResults | None, name: str, round_: int, planted: pd.DataFrame) -> NDArray[np.float64]:
    """Return a measure of the planted canaries, float64 [n]; NaN where it was not measured."""
    values = None if run is None else run.of_canaries(name, round_)
    if values is None:
        return np.full(len(planted), np.nan)
    return np.asarray(values.loc[planted["canary"]], dtype=np.float64)
