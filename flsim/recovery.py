"""What a fault may leave in a run folder, and what becomes of it before a run goes on."""

from pathlib import Path

from flsim import checkpoint
from flsim.errors import InputError
from flsim.logs import log
from flsim.progress import say
from flsim.results.store import is_whole
from flsim.runs import Run


def recover(run: Run) -> None:
    """Make the newest checkpoint a valid one, from which training loses nothing.

    What is damaged is named and put aside. Where that was to be evaluated and has no rows, later checkpoints are
    removed too: training comes by again, and to the same bits. Nobody else may train the run meanwhile.
    """
    for partial in run.path.glob("**/.*.partial-*"):
        partial.unlink(missing_ok=True)  # of a process that was killed
    for rows in sorted((run.path / "rows").glob("*.parquet")):
        if not is_whole(rows):
            _put_aside(rows, "cannot be read")
    lost = False
    for path in checkpoint.all_in(run.path / "checkpoints"):
        if lost:
            path.unlink()
            continue
        try:
            checkpoint.load(path)
        except InputError as error:
            lost = run.lacks_rows(path)
            _put_aside(path, str(error))
    if lost:
        newest = checkpoint.latest(run.path / "checkpoints")
        round_ = checkpoint.round_of(newest) if newest else 0
        say(f"{run.name}: goes back to round {round_}: what is damaged was to be evaluated", round=round_)


def _put_aside(path: Path, why: str) -> None:
    """Out of the way, and there for who wants to look at it."""
    aside = path.with_name(f"{path.name}.damaged")
    path.replace(aside)
    log.warning("put aside", extra={"file": path.name, "reason": why})
    say(f"{path}: {why.removeprefix(f'{path}: ')}; it is passed over, and kept as {aside.name}")
