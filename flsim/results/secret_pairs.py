"""Pairs of a model and a secret: what was measured of each planted canary at each evaluation, for scatter plots.

Figures 5 and 6 of Carlini et al. (2018), "The Secret Sharer", have a point for each pair.
"""

from collections.abc import Sequence

import pandas as pd

from flsim.base.errors import InputError
from flsim.measures import extrapolation, path, space
from flsim.measures.measure import Measure
from flsim.results.store import RunResults

# Columns, named as the metrics that they hold.
ESTIMATE, FIT_P = extrapolation.BITS.name, extrapolation.P.name
EXACT, NODES = space.RANK.name, space.NODES.name
PROVEN, READ = path.PROVEN.name, path.NODES.name
COLUMNS = [ESTIMATE, FIT_P, space.BITS.name, EXACT, NODES, PROVEN, READ]
PHRASES = "phrases"
# What each measure gives of every canary.
ALWAYS = {extrapolation.EXTRAPOLATION: ESTIMATE, space.SPACE: space.BITS.name, path.PATH: READ}


def secret_pairs(runs: Sequence[RunResults], measures: Sequence[Measure], figure: str) -> pd.DataFrame:
    """Return a row for each planted canary and evaluation that has all the measures.

    Args:
        runs: the results of each run.
        measures: the measures that a pair needs, `flsim.measures.space.SPACE` among them.
        figure: kind of the figure, for the error.

    Returns:
        Columns run, setting, round, canary, and those that this module names, NaN where a value is unknown: `ESTIMATE`,
        the estimated exposure, bits; `FIT_P`, the p-value of its fit; `EXACT`, the exact rank; `NODES`, those that a
        shortest-path search reads before it comes to the canary; `PROVEN`, 1 or 0, whether the canary is proven to be
        the likeliest continuation; `READ`, nodes that the search read; `PHRASES`, |R|, how many continuations there
        are.

    Raises:
        InputError: no evaluation has all the measures, or none has an exact rank.
    """
    tables = [_pairs_of(run) for run in runs]
    pairs = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=COLUMNS)
    for measure in measures:
        pairs = pairs[pairs[ALWAYS[measure]].notna()]
        if pairs.empty:
            raise InputError(_missing(runs, measures, measure, figure))
    if pairs[EXACT].isna().all():
        raise InputError(
            f"--kind {figure}: no evaluation has an exact rank: it is of an earlier version, or ran out of nodes; "
            f"measure again with more: {_command(runs, measures)} --nodes 1000000"
        )
    phrases = (pairs[EXACT] * 2 ** pairs[space.BITS.name]).round()
    return pairs.assign(**{PHRASES: phrases}).reset_index(drop=True)


def _pairs_of(run: RunResults) -> pd.DataFrame:
    planted = run.rows["canary"].isin(run.planted["canary"]) & run.rows["metric"].isin(COLUMNS)
    wide = run.rows[planted].pivot(index=["round", "canary"], columns="metric", values="value")
    return wide.reindex(columns=COLUMNS).reset_index().assign(run=run.name, setting=run.setting)


def _missing(runs: Sequence[RunResults], measures: Sequence[Measure], measure: Measure, figure: str) -> str:
    names = ", ".join(run.name for run in runs[:4]) + ", ..." * (len(runs) > 4) or "no runs"
    also = ", ".join(f'"{needed.name}"' for needed in measures)
    return (
        f"--kind {figure}: {names}: no evaluation has the measure {measure.name}; "
        f"train with evaluation.also = [{also}], or measure a checkpoint again: {_command(runs, measures)}"
    )


def _command(runs: Sequence[RunResults], measures: Sequence[Measure]) -> str:
    round_ = max((run.round for run in runs), default=0)
    also = " ".join(f"--also {measure.name}" for measure in measures)
    return f"flsim evaluate RUN/checkpoints/round-{round_:06d}.safetensors {also}"
