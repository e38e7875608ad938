"""Recovery of a run folder after a fault, locks on run folders, and the start from a checkpoint of the other arm."""

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from flsim.algorithms import checkpoint, micro_cohorts
from flsim.base.errors import InputError, RunFailed
from flsim.base.files import held, naming, new_file, read_lines, remove_abandoned, sync
from flsim.base.logs import log
from flsim.base.progress import say
from flsim.results.rows import (
    EVALUATIONS,
    copy_rows,
    is_whole,
    log_evaluation,
    read_evaluations,
    rows_in,
    strange_rows_in,
)
from flsim.runs import roundlog
from flsim.runs.config.base import settings_of_both
from flsim.runs.folder import Run


def recover(run: Run, retrain_lost: bool = False) -> None:
    """Ensure that training can continue from a valid newest checkpoint, and complete the log of rounds.

    Damaged files, and checkpoints of other runs, are named and renamed. If such a checkpoint is due for evaluation and
    has no rows, later ones are also renamed, and training repeats that round with the same bits. InputError, before any
    file is renamed, if there is only a complete checkpoint of another run.
    """
    folder = run.path / "checkpoints"
    remove_abandoned(run.path)
    for stranger in (*checkpoint.strangers_in(folder), *strange_rows_in(run.path)):
        say(f"{stranger}: flsim does not write files with this name; the file is ignored", file=stranger.name)
    for rows in rows_in(run.path):
        if not is_whole(rows):
            _put_aside(rows, "cannot be read")
    _settle_checkpoints(run)
    _settle_log(run, retrain_lost)


def _settle_checkpoints(run: Run) -> None:
    """Rename the checkpoints that `Run.load` refuses; if one of them is due for evaluation, also the later ones."""
    refused: dict[Path, InputError] = {}
    paths = checkpoint.all_in(run.path / "checkpoints")
    for path in paths:
        try:
            run.load(path)
        except InputError as error:
            refused[path] = error
    foreign = [error for error in refused.values() if isinstance(error, checkpoint.ForeignCheckpointError)]
    if foreign and len(refused) == len(paths):  # in this case, the folder, its settings or its corpus were exchanged
        raise foreign[-1]
    back_to = next((path for path in refused if run.lacks_rows(path)), None)
    if back_to is not None:
        why = "an unusable checkpoint had not been evaluated"
        _go_back(run, checkpoint.round_of(back_to) - 1, why, refused)
    for path, refusal in refused.items():
        if os.path.lexists(path):  # also a symbolic link to nothing
            _put_aside(path, str(refusal), "foreign" if refusal in foreign else "damaged")
    last = run.last_round
    if paths and not checkpoint.all_in(run.path / "checkpoints"):
        say(f"{run.name}: no readable checkpoint remains; training restarts from the beginning")
    elif not paths and last:
        say(f"{run.name}: no checkpoint of its {last:,} rounds remains; training restarts from the beginning")


def _settle_log(run: Run, retrain_lost: bool) -> None:
    newest, by_round = checkpoint.latest(run.path / "checkpoints"), run.config.has_a_line_per_round
    missing = roundlog.settle(run.path, checkpoint.round_of(newest) if newest else 0, by_round)
    if missing:
        log.warning("rounds lost from the log", extra={"rounds": roundlog.in_words(missing)})
        say(f"{run.path / roundlog.FILE}: rounds {roundlog.in_words(missing)} are missing; flsim marks them as lost")
    lost = roundlog.lost(run.path)
    if lost and retrain_lost:
        _go_back(run, lost[0].start - 1, "the log has lost the next round", ())
        newest = checkpoint.latest(run.path / "checkpoints")
        roundlog.copy(run.path, run.path, checkpoint.round_of(newest) if newest else 0)


def _go_back(run: Run, round_: int, why: str, refused: Collection[Path]) -> None:
    """Rename the readable checkpoints of later rounds, the last first, so that the next call can complete the rest."""
    later = [path for path in checkpoint.all_in(run.path / "checkpoints") if checkpoint.round_of(path) > round_]
    for path in reversed(later):
        if path not in refused:
            _put_aside(path, "training reaches this round again", "superseded")
    newest = [path for path in checkpoint.all_in(run.path / "checkpoints") if path not in refused]
    start = checkpoint.round_of(newest[-1]) if newest else 0
    say(f"{run.name}: training restarts from round {start:,}: {why}", round=start)


def _put_aside(path: Path, why: str, kind: str = "damaged") -> None:
    """Rename a file so that flsim ignores it, but users can still inspect it."""
    aside = path.with_name(f"{path.name}.{kind}")
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.{kind}-{number}")
    path.replace(aside)
    sync(path.parent)  # the order matters if several files are renamed
    log.warning("put aside", extra={"file": path.name, "reason": why})
    say(f"{path}: {why.removeprefix(f'{path}: ')}; flsim ignores the file and renames it to {aside.name}")


# Locks on a run folder: one process trains a run at a time, and no other process removes its folder.

TRAINED = ".training"  # file in the run folder with the node and the process that train the run
DRIVEN = ".driving"  # file of a central run with the process that supervises training
PATIENCE = 2.0  # seconds until flsim prints that such a process exists
LOCK_DEADLINE = 60.0  # seconds that flsim waits for the end of a previous training process


@contextmanager
def hold_lock(run: Run, lock: str = TRAINED) -> Iterator[None]:
    """Hold a lock of the run in the block, after the end of a process whose driver died; RunFailed after a deadline."""
    path = run.path / lock
    path.touch()
    with ExitStack() as stack:
        until, is_said = time.monotonic() + LOCK_DEADLINE, False
        while True:
            try:
                stack.enter_context(held(path))
            except BlockingIOError:
                holder = path.read_text()
                if time.monotonic() > until:
                    raise RunFailed(f"{run.path}: {holder} trains this run; end that process first") from None
                if not is_said and time.monotonic() > until - LOCK_DEADLINE + PATIENCE:
                    is_said = True
                    say(f"{run.name}: waiting for the end of {holder}, which trains this run")
                time.sleep(0.1)
                continue
            except OSError:
                pass  # a filesystem without locks
            break
        with naming(path):
            path.write_text(f"{socket.gethostname()}/{os.getpid()}")
        yield


def discard(run: Run) -> None:
    """Remove the folder of a run that this process has just made, unless a process trained or trains the run."""
    with ExitStack() as stack:
        try:
            for lock in (TRAINED, DRIVEN):
                (run.path / lock).touch()
                stack.enter_context(held(run.path / lock))
        except OSError:  # another process trains the run, or the folder no longer exists
            return
        of_value = [run.path / name for name in (roundlog.FILE, EVALUATIONS)]
        of_value += [path for name in ("checkpoints", "rows") for path in (run.path / name).glob("*")]
        if not any(path.exists() for path in of_value) and not run.path.is_symlink():
            removed = Path(tempfile.mkdtemp(prefix=f".{run.name}.partial-", dir=run.path.parent))
            run.path.rename(removed)
            shutil.rmtree(removed)


# The start of a run from the checkpoints of the other arm before the first window, until which both arms are equal.


def begin_from(run: Run, twin: Run) -> Run:
    """Copy the common checkpoints, rounds and rows of the other arm to a new run.

    If the twin has not trained all common rounds, or lacks a checkpoint that this run evaluates, only the earlier
    rounds are copied. InputError if the run has started, the other differs in more than `canaries.arm` and the use of
    machines, or its files are damaged.
    """
    _refuse_other_runs(run, twin)
    run = replace(run, config=run.config.resuming(twin.config))
    with hold_lock(run):
        _refuse_other_runs(run, twin)  # another process may have trained the run in the meantime
        run.record()
        _take_over(run, twin)
    return run


def _take_over(run: Run, twin: Run) -> None:
    stored = {checkpoint.round_of(path): path for path in checkpoint.all_in(twin.path / "checkpoints")}
    due = (round_ for round_ in range(1, run.parting + 1) if run.is_evaluated_at(round_))
    end = next((round_ for round_ in due if round_ not in stored), run.parting + 1)
    files = [path for round_, path in stored.items() if round_ < end]
    if not files:
        say(f"{run.name}: starts from the beginning, because {twin.name} has no checkpoint up to round {run.parting:,}")
        return
    reached = checkpoint.round_of(files[-1])
    roundlog.copy(twin.path, run.path, reached)
    sizes = [line for line in read_lines(twin.path / micro_cohorts.FILE) if micro_cohorts.is_line(line)]
    if common := [line for line in sizes if line.get("round", 0) < reached]:
        with new_file(run.path / micro_cohorts.FILE) as partial:
            partial.write_text("".join(json.dumps(line) + "\n" for line in common), encoding="utf-8")
    names = {path.name for path in files if run.is_evaluated_at(checkpoint.round_of(path))}
    for attempt in read_evaluations(twin.path):
        if attempt.checkpoint in names:
            log_evaluation(run.path, attempt)
    for path in rows_in(twin.path):
        if f"{path.stem}{checkpoint.SUFFIX}" in names:
            copy_rows(path, run.path, run.identity)
    for path in files:  # the newest is copied last, because training continues from it and needs all other files
        if path == files[-1] or run.is_kept_at(checkpoint.round_of(path)):
            run.save(twin.load(path))
    run.mark("running")
    say(f"{run.name}: starts with the first {reached:,} of {run.rounds:,} rounds of {twin.name}", round=reached)
    log.info("started from the other arm", extra={"run": twin.name, "rounds": reached})


def _refuse_other_runs(run: Run, twin: Run) -> None:
    if run.last_round or checkpoint.latest(run.path / "checkpoints"):
        raise InputError(f"{run.path}: this run has already started without another run; remove --begin-from")
    if run.config.canaries.arm == twin.config.canaries.arm:
        raise InputError(
            f"{twin.path}: is of arm {twin.config.canaries.arm.upper()} and so is this run; name a run of the other arm"
        )
    if settings_of_both(run.config) != settings_of_both(twin.config):
        raise InputError(
            f"{twin.path}: differs from this run in more settings than canaries.arm; name a run that differs only "
            "in canaries.arm"
        )
    if run.rounds != twin.rounds:  # schedules of learning rates and windows in fractions depend on it
        raise InputError(
            f"{twin.path}: trains {twin.rounds:,} rounds, and this run {run.rounds:,}; name a run with the "
            "same number of rounds"
        )
    if run.corpus.digest != twin.corpus.digest:
        raise InputError(f"{twin.path}: was trained on another corpus; name a run on the corpus of this run")
