"""Pairs of runs: arm IN, which plants canaries, and arm OUT, its twin of the same seed, which never does."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flsim.base.errors import InputError
from flsim.results.store import RunResults
from flsim.results.sweeps import read_shown
from flsim.runs.config.arms import settings_of_both
from flsim.runs.folder import Run


@dataclass(frozen=True, eq=False)
class Arms:
    """The arms of one configuration and seed.

    Attributes:
        run: the run of arm IN.
        results: its results.
        twin: the results of arm OUT; None where no such run was named.
    """

    run: Run
    results: RunResults
    twin: RunResults | None


def arms_of(paths: Sequence[Path]) -> tuple[list[Arms], list[str]]:
    """Return the pairs among runs, in the order of their runs of arm IN, and sentences on what is left out.

    A twin has the settings of its run but for the arm. Runs that diverged or were not evaluated are left out.

    Args:
        paths: run folders and folders of sweeps.

    Raises:
        InputError: a path is no run, or there is no evaluated run of arm IN.
    """
    members: dict[str, tuple[Run, RunResults]] = {}
    others: dict[str, RunResults] = {}
    notes = []
    for folder, results in read_shown(paths).items():
        run = Run.open(folder)
        if results.status == "diverged" or not results.evaluated:
            why = "diverged" if results.status == "diverged" else "was not evaluated yet"
            notes.append(f"Run {results.name} {why} and is left out.")
        elif run.config.canaries.arm == "out":
            others[_key(run)] = results
        else:
            members[_key(run)] = run, results
    notes += [
        f"Run {run.name} is of arm OUT, and its arm IN was not named."
        for key, run in others.items()
        if key not in members
    ]
    if not members:
        names = ", ".join(map(str, paths))
        raise InputError(f'{names}: no evaluated run with canaries.arm = "in"; name one, and its twin with "out"')
    return [Arms(run, results, others.get(key)) for key, (run, results) in members.items()], notes


def _key(run: Run) -> str:
    """Return a digest that both arms of a seed share."""
    return settings_of_both(run.config) + run.corpus.digest
