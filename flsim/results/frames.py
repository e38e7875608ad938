"""Results as two data frames, for notebooks.

    from flsim.results.frames import frames
    runs, canaries = frames("runs/*")

`runs` has a row per run and evaluated round, with these columns and then those of `flsim.results.tables`:

    folder                   the run's folder, which distinguishes runs of equal names
    sweep, grid              the sweep of the run, and the block of its rows there; blank without a sweep
    partition                "iid" or "non-iid"; blank if records are drawn at random, which makes both the same
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
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import pandas as pd

from flsim.base.errors import InputError
from flsim.canaries.population import SCHEMA, is_drawn
from flsim.measures.built_in import QUANTITIES
from flsim.results.rows import RunResults, read_run
from flsim.results.sweeps import PARTITION, SweepRun, expanded, is_sweep, read_sweep, without_copies
from flsim.results.tables import KINDS, canary_table, described, memorization_table, quantities_of, types
from flsim.results.tables import TYPES as CANARY_TABLE

RUN = {
    "folder": "string",
    "sweep": "string",
    "grid": "string",
    "partition": "string",
    "seed": "Int64",
    "series": "string",
    "is_final": "boolean",
}

OF_CANARY = (
    *("folder", "run", "partition", "seed", "is_final", "round", "epochs", "canary", "words", "p_u", "p_e"),
    *("is_planted", "sharers", "insertions", "first_round", "last_round"),
)
KNOWN = RUN | CANARY_TABLE | {"run": "string", "epochs": "Float64", "words": "string", "is_planted": "boolean"}
CANARY = {
    **{name: KNOWN[name] for name in OF_CANARY},
    **{quantity.name: KINDS[quantity.kind] for quantity in QUANTITIES.values() if "canaries" in quantity.places},
}
# Columns in addition to those of measures, in any table or frame of results.
TAKEN = {
    *(*types("run"), *types("series"), *RUN, *CANARY, *CANARY_TABLE, *SCHEMA.names),
    *("participations", "rounds_since_use", "sharer_rounds"),  # columns of a trace
}

Listed = tuple[dict[str, Any], RunResults, SweepRun | None]  # cells of folder, sweep and grid; run; entry of the sweep


def _rounds(run: RunResults) -> Sequence[int]:
    """Return the evaluated rounds; none for a diverged model, because its last finite evaluation is not a result."""
    return [] if run.status == "diverged" else run.evaluated


def _columns(cells: dict[str, Any], run: RunResults, round_: int | None) -> dict[str, Any]:
    is_final = run.status == "completed" and round_ == run.rounds
    return cells | {"partition": run.partition, "seed": run.seed, "series": run.series, "is_final": is_final}


def frames(*paths: Path | str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return two data frames: a row per run and evaluated round, and a row per run, evaluated round and canary.

    The module `flsim.results.frames` describes the columns.

    Args:
        paths: run folders, folders of sweeps, or folders that hold some, such as the folder of a demo; or patterns
            such as ``"runs/*"``; other paths that match a pattern are skipped.

    Returns:
        The frames of runs and of canaries.

    Raises:
        InputError: a path is neither a run nor a sweep, there are no runs, a run is damaged, or copies of a run differ.

    Examples:
        >>> runs, canaries = flsim.frames("runs/*")                            # doctest: +SKIP
        >>> runs[runs.is_final].groupby("partition").mean_exposure.mean()          # doctest: +SKIP
    """
    runs = [run for path in expanded(paths) for run in _read(str(path))]
    unique = without_copies([run for _, run, _ in runs], [run for _, run, planned in runs if planned])
    runs = [listed for listed in runs if listed[1] in unique]
    if not runs:
        raise InputError(
            f"{', '.join(map(str, paths)) or 'no paths'}: found no runs; name run folders, or create some with "
            "`flsim demo`"
        )
    return _runs(runs), _canaries(runs)


def _read(pattern: str) -> Iterator[Listed]:
    named = Path(pattern).exists()
    for path in [Path(pattern)] if named else sorted(map(Path, glob(pattern))):  # noqa: PTH207 (the pattern may be absolute)
        if is_sweep(path):
            sweep = read_sweep(path)
            for run in sweep.runs:
                if run.results:
                    cells = {"folder": str(path / "runs" / run.name), "sweep": sweep.name, "grid": run.grid}
                    yield cells, run.results, run
        elif named or (path / "run.json").is_file():
            yield {"folder": str(path), "sweep": None, "grid": None}, read_run(path), None


def _runs(listed: list[Listed]) -> pd.DataFrame:
    """Return the frame of runs; each evaluation is a row, so it becomes a run with one evaluation."""
    described, evaluated, published = list[dict[str, Any]](), list[RunResults](), dict[RunResults, Mapping[str, Any]]()
    for cells, run, planned in listed:
        axes = {
            name: value if isinstance(value, bool | int | float | str) else str(value)  # for grouping
            for name, value in (planned.axes if planned else {}).items()
            if name != PARTITION  # has its own column
        }
        for round_ in _rounds(run) or (None,):
            results = run if round_ is None else replace(run, rows=run.rows[run.rows["round"] == round_])
            described.append(_columns(cells, run, round_) | axes)
            evaluated.append(results)
            if planned and planned.published:
                published[results] = planned.published
    before = pd.DataFrame(described).convert_dtypes().astype(RUN)
    table = memorization_table(evaluated, published=published)
    runs = pd.concat([before, table], axis=1)
    runs.attrs = table.attrs  # pandas drops attributes that only one of the tables has
    return runs


def _canaries(listed: list[Listed]) -> pd.DataFrame:
    measured_by_some = {name for _, run, _ in listed for name in run.rows["metric"].unique()}
    quantities = [
        quantity
        for quantity in quantities_of(run for _, run, _ in listed)
        if quantity.of_canaries and (quantity.name in CANARY or quantity.name in measured_by_some)
    ]
    types = CANARY | {quantity.name: KINDS[quantity.kind] for quantity in quantities}
    tables = [pd.DataFrame(columns=list(types))]
    for cells, run, _ in listed:
        for round_ in _rounds(run) if len(run.roster) else ():
            columns = _columns(cells, run, round_) | {"run": run.name, "epochs": run.epochs_of(round_)}
            table = canary_table(run, round_).rename(columns={"phrase": "words"})
            tables.append(table.assign(**columns, is_planted=is_drawn(run.roster)).reindex(columns=list(types)))
    return described(pd.concat([table.astype(types) for table in tables], ignore_index=True), quantities)
