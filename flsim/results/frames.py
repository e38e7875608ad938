"""Results as two data frames, for notebooks.

    from flsim.results.frames import frames
    runs, canaries = frames("runs/*")

`runs` has a row per run and evaluated round, with these columns and then those of `flsim.results.tables`:

    folder                   the run's folder, which distinguishes runs of equal names
    sweep, grid              the sweep of the run, and the block of its rows there; blank without a sweep
    partition                    "iid" or "non-iid"; blank if records are drawn at random, which makes both the same
    seed, series             seed of the run; a digest equal for runs that differ only in their seed
    is_final                 whether it is the last round of a completed run, which a table shows
    training.cohort, ...     a column per setting that a sweep varies

A run that is not evaluated yet, or that diverged, has one row without measurements.

`canaries` has a row per run, evaluated round and canary; runs that diverged have none:

    folder, run, partition, seed, is_final, round, epochs    as above
    canary, words            id and words of the canary
    p_u, p_e                 the probabilities by which it was planted; blank if a number of copies was set
    is_planted               whether it was planted; others are the null control, and in no count of the frame of runs
    sharers, insertions      number of users that hold it, and number of records that do
    first_round, last_round  rounds in which it is planted; blank for no bound
    log_perplexity           nats
    rank, exposure           rank among the references; bits
    rs, bs                   whether Random Sampling and Beam Search show it as memorized

Further columns have the quantities of canaries from `evaluation.also` or custom measures, by name. All columns are
typed, and missing cells were not measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Any

import pandas as pd

from flsim.base.errors import InputError
from flsim.canaries.roster import SCHEMA, is_drawn
from flsim.measures.built_in import QUANTITIES
from flsim.results.canary_table import KINDS
from flsim.results.canary_table import TYPES as CANARY_TABLE
from flsim.results.columns import described, quantities_of
from flsim.results.seeds import without_copies
from flsim.results.store import RunResults, read_run
from flsim.results.sweeps import PARTITION, is_sweep, read_sweep
from flsim.results.tables import memorization_table, types

RUN = {
    "folder": "string",
    "sweep": "string",
    "grid": "string",
    "partition": "string",
    "seed": "Int64",
    "series": "string",
    "is_final": "boolean",
}


CANARY = {
    "folder": "string",
    "run": "string",
    "partition": "string",
    "seed": "Int64",
    "is_final": "boolean",
    "round": "Int64",
    "epochs": "Float64",
    "canary": "string",
    "words": "string",
    "p_u": "Float64",
    "p_e": "Float64",
    "is_planted": "boolean",
    "sharers": "Int64",
    "insertions": "Int64",
    "first_round": "Int64",
    "last_round": "Int64",
    **{quantity.name: KINDS[quantity.kind] for quantity in QUANTITIES.values() if "canaries" in quantity.places},
}
# Columns in addition to those of measures, in any table or frame of results.
TAKEN = {
    *(*types("run"), *types("series"), *RUN, *CANARY, *CANARY_TABLE, *SCHEMA.names),
    *("participations", "rounds_since_use", "sharer_rounds"),  # columns of a trace
}


@dataclass(frozen=True)
class _ListedRun:
    """A run, with its entry in the sweep."""

    folder: Path
    results: RunResults
    sweep: str | None = None
    grid: str | None = None
    axes: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] | None = None

    @property
    def rounds(self) -> Sequence[int]:
        """Evaluated rounds; none for a diverged model, because its last finite evaluation is not a result."""
        return [] if self.results.status == "diverged" else self.results.evaluated

    def columns(self, round_: int | None) -> dict[str, Any]:
        """Return the cells of the columns of `RUN`."""
        results = self.results
        return {
            "folder": str(self.folder),
            "sweep": self.sweep,
            "grid": self.grid,
            "partition": results.partition,
            "seed": results.seed,
            "series": results.series,
            "is_final": results.status == "completed" and round_ == results.rounds,
        }


def frames(*paths: Path | str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return two data frames: a row per run and evaluated round, and a row per run, evaluated round and canary.

    The module `flsim.results.frames` describes the columns.

    Args:
        paths: run folders, folders of sweeps, or patterns such as ``"runs/*"``; other paths that match a pattern are
            skipped.

    Returns:
        The frames of runs and of canaries.

    Raises:
        InputError: a path is neither a run nor a sweep, there are no runs, a run is damaged, or copies of a run differ.

    Examples:
        >>> runs, canaries = flsim.frames("runs/*")                            # doctest: +SKIP
        >>> runs[runs.is_final].groupby("partition").mean_exposure.mean()          # doctest: +SKIP
    """
    runs = [run for path in paths for run in _read(str(path))]
    shown = without_copies([run.results for run in runs], [run.results for run in runs if run.sweep is not None])
    runs = [run for run in runs if run.results in shown]
    if not runs:
        raise InputError(
            f"{', '.join(map(str, paths)) or 'no paths'}: found no runs; name run folders, or create some with "
            "`flsim demo`"
        )
    return _runs(runs), _canaries(runs)


def _read(pattern: str) -> Iterator[_ListedRun]:
    named = Path(pattern).exists()
    for path in [Path(pattern)] if named else sorted(map(Path, glob(pattern))):  # noqa: PTH207 (the pattern may be absolute)
        if is_sweep(path):
            sweep = read_sweep(path)
            for run in sweep.runs:
                if run.results:
                    folder = path / "runs" / run.name
                    yield _ListedRun(folder, run.results, sweep.name, run.grid, run.axes, run.published)
        elif named or (path / "run.json").is_file():
            yield _ListedRun(path, read_run(path))


def _runs(listed: list[_ListedRun]) -> pd.DataFrame:
    """Return the frame of runs; each evaluation is a row, so it becomes a run with one evaluation."""
    described, evaluated, published = list[dict[str, Any]](), list[RunResults](), dict[RunResults, Mapping[str, Any]]()
    for run in listed:
        for round_ in run.rounds or (None,):
            results = run.results
            if round_ is not None:
                results = replace(results, rows=results.rows[results.rows["round"] == round_])
            described.append(run.columns(round_) | _cells(run.axes))
            evaluated.append(results)
            if run.published:
                published[results] = run.published
    before = pd.DataFrame(described).convert_dtypes().astype(RUN)
    table = memorization_table(evaluated, published=published)
    runs = pd.concat([before, table], axis=1)
    runs.attrs = table.attrs  # pandas drops attributes that only one of the tables has
    return runs


def _cells(axes: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the axes as values for grouping, without the partition, which has its own column."""
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in axes.items()
        if name != PARTITION
    }


def _canaries(listed: list[_ListedRun]) -> pd.DataFrame:
    measured_by_some = {name for run in listed for name in run.results.rows["metric"].unique()}
    quantities = [
        quantity
        for quantity in quantities_of(run.results for run in listed)
        if quantity.of_canaries and (quantity.name in CANARY or quantity.name in measured_by_some)
    ]
    types = CANARY | {quantity.name: KINDS[quantity.kind] for quantity in quantities}
    tables = [pd.DataFrame(columns=list(types))]
    for run in listed:
        roster = run.results.roster
        words = roster["words"].map(" ".join) if "words" in roster else None
        for round_ in run.rounds:
            values = {
                quantity.name: run.results.of_canaries(quantity.name, round_, quantity.is_partial)
                for quantity in quantities
            }
            measured = {name: None if value is None else value.to_numpy() for name, value in values.items()}
            at = {"run": run.results.name, "round": round_, "epochs": run.results.epochs_of(round_), "words": words}
            columns = run.columns(round_) | at | measured | {"is_planted": is_drawn(roster)}
            tables.append(roster.assign(**columns).reindex(columns=list(types)))
    return described(pd.concat([table.astype(types) for table in tables], ignore_index=True), quantities)
