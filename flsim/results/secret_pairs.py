"""Pairs of a model and a secret: what was measured of each planted canary at each evaluation, for scatter plots.

Figures 5 and 6 of Carlini et al. (2018), "The Secret Sharer", have a point for each pair.
"""

from collections.abc import Sequence

import pandas as pd

from flsim.base.errors import InputError
from flsim.results.store import RunResults

# Columns, and the metrics that they hold.
COLUMNS = {
    "exposure": "extrapolated_exposure",
    "fit_p": "extrapolation_p",
    "space_exposure": "space_exposure",
    "rank": "space_rank",
    "nodes": "space_nodes",
    "path": "path",
    "path_nodes": "path_nodes",
}
ALWAYS = {"extrapolation": "exposure", "space": "space_exposure", "path": "path_nodes"}  # what a measure always gives


def secret_pairs(runs: Sequence[RunResults], measures: Sequence[str], figure: str) -> pd.DataFrame:
    """Return a row for each planted canary and evaluation that has all the measures.

    Args:
        runs: the results of each run.
        measures: names of the measures that a pair needs, "space" among them.
        figure: name of the figure, for the error.

    Returns:
        Columns run, setting, round, canary, and those of `COLUMNS`, NaN where a value is unknown: exposure, estimated,
        bits; fit_p, the p-value of its fit; space_exposure, over the whole space, bits; rank, exact; nodes, those that
        a shortest-path search reads before it comes to the canary; path, 1 or 0, whether the canary is proven to be the
        likeliest continuation; path_nodes, those that the search read. And space, how many continuations there are.

    Raises:
        InputError: no evaluation has all the measures, or none has an exact rank.
    """
    tables = [_pairs_of(run) for run in runs]
    pairs = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["run", *COLUMNS])
    for measure in measures:
        pairs = pairs[pairs[ALWAYS[measure]].notna()]
        if pairs.empty:
            raise InputError(_missing(runs, measures, measure, figure))
    if pairs["rank"].isna().all():
        raise InputError(
            f"--kind {figure}: no evaluation has an exact rank: it is of an earlier version, or ran out of nodes; "
            f"measure again with more: {_command(runs, measures)} --nodes 1000000"
        )
    space = (pairs["rank"] * 2 ** pairs["space_exposure"]).round()
    return pairs.assign(space=space).reset_index(drop=True)


def _pairs_of(run: RunResults) -> pd.DataFrame:
    planted = run.rows["canary"].isin(run.planted["canary"]) & run.rows["metric"].isin(COLUMNS.values())
    wide = run.rows[planted].pivot(index=["round", "canary"], columns="metric", values="value")
    wide = wide.reindex(columns=list(COLUMNS.values())).set_axis(list(COLUMNS), axis=1)
    return wide.reset_index().assign(run=run.name, setting=run.setting)


def _missing(runs: Sequence[RunResults], measures: Sequence[str], measure: str, figure: str) -> str:
    names = ", ".join(run.name for run in runs[:4]) + ", ..." * (len(runs) > 4) or "no runs"
    also = ", ".join(f'"{name}"' for name in measures)
    return (
        f"--kind {figure}: {names}: no evaluation has the measure {measure}; train with evaluation.also = [{also}], or "
        f"measure a checkpoint again: {_command(runs, measures)}"
    )


def _command(runs: Sequence[RunResults], measures: Sequence[str]) -> str:
    round_ = max((run.round for run in runs), default=0)
    also = " ".join(f"--also {name}" for name in measures)
    return f"flsim evaluate RUN/checkpoints/round-{round_:06d}.safetensors {also}"
