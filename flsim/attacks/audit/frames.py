"""Audits of the Python API: of run folders, and of trainings in the calling process."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flsim.attacks.audit.audit import audit as rows_of
from flsim.attacks.audit.subject import Audited, subject_of
from flsim.base.errors import InputError
from flsim.canaries.planting import counts_of
from flsim.canaries.spec import ABOUT_INJECTIONS
from flsim.models.hparams import ModelHParams
from flsim.results.rows import SCHEMA
from flsim.results.store import RunResults, refuse_two_points
from flsim.results.sweeps import over_runs
from flsim.simulation import Central, FedAvg, Planted, refuse_not_planted
from flsim.training.state import State


def audit(
    *runs: Path | str,
    round: int | None = None,
    epoch: float | None = None,
    threshold: int | None = None,
    delta: float | None = None,
) -> pd.DataFrame:
    """Say what the canaries of runs prove about their privacy, as `flsim audit` does.

    Args:
        runs: run folders and folders of sweeps; or folders that hold some, such as the folder of a demo.
        round: the evaluated round to audit; by default the last one of each run.
        epoch: the number of passes over all records to audit at, in place of `round`.
        threshold: largest rank at which a canary counts as named, fixed before ranks are looked at; by default a
            thousandth of the references, and 100 from 100,000 references on.
        delta: delta of the claim; that of each run if not given.

    Returns:
        Rows with the columns of `flsim.attacks.audit.audit.COLUMNS`. A run that has nothing to be audited by has no
        row.

    Raises:
        InputError: there is no such run or evaluation, or there are fewer references than the threshold.

    Examples:
        >>> rows = flsim.audit("runs/demo")                                    # doctest: +SKIP
        >>> rows[rows["kind"] == "bound"][["setting", "method", "low", "delta"]]               # doctest: +SKIP
    """
    refuse_two_points(round, epoch)
    subjects = over_runs(runs, lambda path: subject_of(path, round, epoch, delta))
    return pd.concat([rows_of(subject, threshold) for subject in subjects.values()], ignore_index=True)


def audit_simulation(
    state: State,
    planted: Planted,
    model: ModelHParams,
    algorithm: FedAvg | Central,
    rows: pd.DataFrame | None = None,
    *,
    seed: int = 0,
    start: State | None = None,
    threshold: int | None = None,
    delta: float | None = None,
) -> pd.DataFrame:
    """Say what the canaries of a simulation prove about its privacy, as `audit` does for run folders.

    Args:
        state: a state of `flsim.simulate`.
        planted, model, algorithm, seed, start: the arguments of that simulation.
        rows: rows of `flsim.evaluate` of that state, for the ranks of canaries; None to audit canary users alone.
        threshold: as for `audit`.
        delta: delta of the claim; by default that of a run with these settings.

    Returns:
        Rows with the columns of `flsim.attacks.audit.audit.COLUMNS`, for the run "simulation".

    Raises:
        InputError: `rows` are of another round or name other canaries, the roster of `planted` is not of its canaries
            and users, the settings do not fit each other, or there are fewer references than the threshold.

    Examples:
        >>> rows = flsim.evaluate(state, users, model, references=20_000)      # doctest: +SKIP
        >>> flsim.audit_simulation(state, users, model, algorithm, rows)       # doctest: +SKIP
    """
    refuse_not_planted(planted)
    _refuse_other_roster(planted)
    measured = SCHEMA.empty_table().to_pandas() if rows is None else rows
    if rows is not None and not (rows["round"] == state.round).all():
        raise InputError(f"rows: some are not of round {state.round}, after which the state is; evaluate that state")
    _refuse_other_canaries(measured, planted)
    results = RunResults(
        name="simulation",
        label=type(algorithm).__name__,
        status="completed",
        reason=None,
        round=state.round,
        rounds=state.round,
        rows=measured,
        roster=planted.roster,
        seed=seed,
        world=planted.world,
    )
    users = planted.users
    injected = np.unique(users.extra.rounds[users.extra.rounds >= 0]) + 1
    rounds = max(1, state.round)
    config = algorithm.config(planted, model, rounds, seed)
    training = config.training_of(users, rounds, "cpu")
    audited = Audited(
        config.unit,
        config.sampler,
        config.privacy,
        len(users) if config.unit == "user" else int(users.user_offsets[-1]),
        config.canary_users,
        seed,
        planted.canaries,
        lambda: users,
        lambda: (start or training.first_state()).params,
        ABOUT_INJECTIONS.format(f"in rounds {', '.join(map(str, injected))}") if len(injected) else "",
        executes_code=True,
    )
    return rows_of(audited.subject(results, state.round, state, delta), threshold)


def _refuse_other_roster(planted: Planted) -> None:
    """Raise InputError unless the roster, the canaries and the users are of one planting.

    Bounds are about the canaries that training saw: their coins, and how many users share each of them.
    """
    roster, users, canaries = planted.roster, planted.users, planted.canaries
    sharers, insertions = counts_of(users.overlay, users.user_offsets, len(users.phrases))
    planting = {
        "canary": [canary.id for canary in canaries],
        "tokens": [list(canary.tokens) for canary in canaries],
        "is_planted": [canary.is_planted for canary in canaries],
        "coin": [canary.coin for canary in canaries],
    }
    stated = {name: _values(roster[name]) if name in roster else [None] * len(roster) for name in planting}
    wrong = [name for name, values in planting.items() if stated[name] != values]
    if [phrase.tolist() for phrase in users.phrases] != planting["tokens"]:
        wrong.append("users")
    if not wrong:
        held = [index for index, canary in enumerate(canaries) if canary.pseudo_users is None]
        counts = {"insertions": insertions} | ({"sharers": sharers} if users.twin is None else {})
        wrong = [name for name, values in counts.items() if (roster[name].to_numpy()[held] != values[held]).any()]
    if wrong:
        raise InputError(
            f"planted: roster, canaries and users are of different plantings "
            f"({', '.join(wrong)}); name the result of flsim.plant that flsim.simulate trained"
        )


def _values(column: "pd.Series[Any]") -> list[object]:
    """Return the values of a column of a roster, as a canary has them."""
    return [list(value) if np.ndim(value) else None if pd.isna(value) else value for value in column]


def _refuse_other_canaries(rows: pd.DataFrame, planted: Planted) -> None:
    named, known = set(rows["canary"]) - {""}, {canary.id for canary in planted.canaries}
    if named and named != known:
        names = ", ".join(sorted(named ^ known)[:3])
        raise InputError(f"rows: their canaries are not those of `planted`, such as {names}; evaluate with `planted`")
