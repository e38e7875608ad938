"""Detection of copies of a run, such as a backup of its folder, so that each run is shown once."""

from collections.abc import Collection, Sequence

from flsim.base.errors import InputError
from flsim.base.progress import say
from flsim.results.rows import KEY
from flsim.results.store import RunResults


def without_copies(runs: Sequence[RunResults], needed: Collection[RunResults] = ()) -> list[RunResults]:
    """Return the runs without copies of other ones, and print a line about each copy.

    Copies have the same identity and the same number of rounds. The copy that was evaluated most often stays, and among
    equal ones the first.

    Args:
        runs: all runs, in the order of their display.
        needed: runs that stay in any case, because each is a row of its sweep.

    Raises:
        InputError: two copies hold different measurements of one model.
    """
    kept: dict[tuple[str | None, int], RunResults] = {}
    for run in sorted(runs, key=lambda run: (run not in needed, -len(run.evaluated))):
        other = None if run.identity is None else kept.setdefault((run.identity, run.rounds), run)
        if other is not None and other is not run:
            _refuse_different(other, run)
    remaining = [run for run in runs if run in needed or run.identity is None or run in kept.values()]
    for run in runs:
        if run not in remaining:
            say(f"run {run.name}: a copy of {kept[run.identity, run.rounds].name}, which is shown in its place")
    return remaining


def _refuse_different(run: RunResults, copy: RunResults) -> None:
    both = run.rows.merge(copy.rows, on=KEY, suffixes=("", "_of_copy"))
    differ = both[(both["value"] != both["value_of_copy"]) & both["value"].notna()]
    if not differ.empty:
        first = differ.iloc[0]
        raise InputError(
            f"runs {run.name} and {copy.name}: copies of one run, whose {first['metric']} of round {first['round']} "
            f"differ; leave one out"
        )
